"""The host's RAM as a pool: what this process may have, and how much of it is taken."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from flexlab.core.units import MIB
from flexlab.gpus import cgroup
from flexlab.gpus.files import count, fields, read_text
from flexlab.spec.machine import RAM_POOL, Pool

RESERVE_MIN_BYTES = 512 * MIB
RESERVE_SHARE = 0.05


_UNLIMITED = 2**60


class _Names(NamedTuple):
    """What the interface files of one cgroup version are called."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1 = _Names(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Names(("memory.max", "memory.high"), "memory.current", ("active_file", "inactive_file"))


class _Room(NamedTuple):
    """One limit: its size, and what is left of it (None: unknown)."""

    total_bytes: int
    free_bytes: int | None


def sample_ram(
    root: Path = Path("/"), *, reserve_bytes: int | None = None, budget_bytes: int | None = None
) -> Pool:
    """The pool `ram` now: the machine's memory, lowered by the limits of our control groups.

    Used is total minus what could be had without swapping, so page cache counts as free. Without
    `reserve_bytes` the reserve is 5 % of the total, at least 512 MiB.
    """
    machine = _machine_room(root)
    limits = [room for room in map(_group_room, cgroup.groups(root, "memory")) if room is not None]
    if machine is not None:
        # A limit above the machine's memory binds nothing.
        limits = [machine, *(room for room in limits if room.total_bytes < machine.total_bytes)]
    total = min((room.total_bytes for room in limits), default=None)
    return Pool(
        id=RAM_POOL,
        kind="ram",
        total_bytes=total,
        used_bytes=None if total is None else _used(total, limits),
        reserve_bytes=default_reserve(total) if reserve_bytes is None else reserve_bytes,
        sampled_at=time.time(),
        budget_bytes=budget_bytes,
    )


def default_reserve(total_bytes: int | None) -> int:
    """Kept for the system, in bytes: 5 % of the memory, at least 512 MiB."""
    return max(RESERVE_MIN_BYTES, int((total_bytes or 0) * RESERVE_SHARE))


def _used(total: int, limits: list[_Room]) -> int | None:
    """What is left is what the tightest limit leaves; unknown as soon as one of them is."""
    free = [room.free_bytes for room in limits]
    known = [value for value in free if value is not None]
    return max(0, total - min(known)) if len(known) == len(free) else None


def _machine_room(root: Path) -> _Room | None:
    found = fields(read_text(root / "proc/meminfo"))
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    if not total:
        return None
    return _Room(total * 1024, None if available is None else available * 1024)


def _group_room(group: cgroup.Group) -> _Room | None:
    names = _V2 if group.version == 2 else _V1
    limits = [count(read_text(group.folder / name)) for name in names.limits]
    # "max" is no number; v1 says no limit with one near 2**63.
    limit = min((value for value in limits if value and value < _UNLIMITED), default=None)
    if limit is None:
        return None
    usage = count(read_text(group.folder / names.usage))
    if usage is None:
        return _Room(limit, None)
    stat = fields(read_text(group.folder / "memory.stat"))
    # The kernel gives file pages back before it lets the group run out of memory.
    cache = sum(stat.get(name, 0) for name in names.cache)
    return _Room(limit, max(0, limit - max(0, usage - cache)))
