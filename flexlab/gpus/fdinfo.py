"""What DRM says of a process's use of a GPU: /proc/<pid>/fdinfo (kernel, drm-usage-stats.rst)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flexlab.gpus.bus import plain_slot
from flexlab.gpus.files import count, list_names, read_text

_UNITS = {"": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "ns": 1}
_PRECISE_FIRST = ("drm-resident-", "drm-memory-", "drm-total-")
"""Of one region the first that is told: what is really there, the older name of it, what the
process asked for."""
_VRAM = re.compile(r"vram\d*|local\d*")
_SHARED = re.compile(r"gtt|system\d*|stolen-system\d*")
_NODE = "/dev/dri/"
_KEEPERS = frozenset({"systemd-logind", "elogind", "elogind-daemon", "seatd"})
"""Open a card for a desktop, hand it over, and keep a copy to take it back with."""


class Client(NamedTuple):
    """One open file of a card; threads and forked children share it."""

    slot: str
    id: int
    vram_bytes: int | None
    gtt_bytes: int | None
    """Host memory that the GPU maps: all there is on an APU (Syllo/nvtop#492)."""
    busy_ns: dict[str, int]
    """Engine -> time that it worked for this client, divided by how many such engines there are."""
    cycles: dict[str, tuple[int, int]]
    """Engine -> cycles of this client, and all cycles of the same span (xe)."""


class Walk(NamedTuple):
    """All clients that could be seen, each with the process it is counted for."""

    clients: dict[tuple[str, int], tuple[int, Client]]
    """(slot, client id) -> (pid, client)."""
    unreadable: int
    """Processes whose files may not be looked at: those of others, and the kernel's threads."""
    complete: bool
    """False: time ran out before the last process."""


def walk(root: Path, budget_s: float = 1.0) -> Walk:
    """Every process that has a GPU open.

    A file that several processes share (a parent and its forked workers) is counted once, so that
    no sum has it twice: for the lowest pid, which is nearly always the one that opened it, unless
    that one opens cards for others only.
    """
    clients: dict[tuple[str, int], tuple[int, Client]] = {}
    unreadable = 0
    end = time.monotonic() + budget_s
    for pid in sorted(pid for name in list_names(root / "proc") if (pid := count(name))):
        if time.monotonic() > end:
            return Walk(clients, unreadable, False)
        folder = os.path.join(root, "proc", str(pid))
        try:
            numbers = os.listdir(folder + "/fd")
        except PermissionError:
            unreadable += 1
            continue
        except OSError:
            continue  # it ended meanwhile
        for number in _gpu_files(folder, numbers):
            client = parse(read_text(Path(folder, "fdinfo", number)) or "")
            if client is not None:
                key = client.slot, client.id
                known = clients.get(key)
                if known is None or (known[0] != pid and _keeps_for_others(root, known[0])):
                    clients[key] = pid, client
    return Walk(clients, unreadable, True)


def _keeps_for_others(root: Path, pid: int) -> bool:
    return (read_text(root / "proc" / str(pid) / "comm") or "").strip() in _KEEPERS


def _gpu_files(folder: str, numbers: list[str]) -> Iterator[str]:
    for number in numbers:
        try:
            target = os.readlink(f"{folder}/fd/{number}")
        except OSError:
            continue
        if target.startswith(_NODE):
            yield number


def parse(text: str) -> Client | None:
    """One fdinfo file; None where it is not a DRM client's with a PCI address."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.partition(":")
        if separator and key.startswith("drm-"):
            values.setdefault(key, value.strip())
    slot, number = plain_slot(values.get("drm-pdev")), count(values.get("drm-client-id"))
    if slot is None or number is None:
        return None
    regions = _regions(values)
    return Client(
        slot=slot,
        id=number,
        vram_bytes=_sum(regions, _VRAM),
        gtt_bytes=_sum(regions, _SHARED),
        busy_ns=_engines(values),
        cycles=_cycles(values),
    )


def _regions(values: dict[str, str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for prefix in _PRECISE_FIRST:
        for key, value in values.items():
            amount = _amount(value) if key.startswith(prefix) else None
            # drm-total-cycles-rcs is a clock, no memory.
            if amount is not None and not key.startswith("drm-total-cycles-"):
                found.setdefault(key[len(prefix) :], amount)
    return found


def _sum(regions: dict[str, int], names: re.Pattern[str]) -> int | None:
    sizes = [size for name, size in regions.items() if names.fullmatch(name)]
    return sum(sizes) if sizes else None


def _engines(values: dict[str, str]) -> dict[str, int]:
    found = {}
    for key, value in values.items():
        name = key.removeprefix("drm-engine-")
        amount = _amount(value)
        if name != key and not name.startswith("capacity-") and amount is not None:
            capacity = count(values.get(f"drm-engine-capacity-{name}")) or 1
            found[name] = amount // capacity
    return found


def _cycles(values: dict[str, str]) -> dict[str, tuple[int, int]]:
    found = {}
    for key, value in values.items():
        name = key.removeprefix("drm-cycles-")
        mine, whole = count(value), count(values.get(f"drm-total-cycles-{name}"))
        if name != key and mine is not None and whole is not None:
            found[name] = (mine, whole)
    return found


def _amount(text: str) -> int | None:
    """`12 KiB`, `12 MiB`, `12 ns`, `12` (bytes)."""
    number, _, unit = text.partition(" ")
    value, factor = count(number), _UNITS.get(unit.strip())
    return None if value is None or factor is None else value * factor
