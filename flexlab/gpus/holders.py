"""Who holds a GPU's memory: by DRM's fdinfo, KFD's list of processes, and NVIDIA's driver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from flexlab.core.text import clean_line
from flexlab.gpus import fdinfo, kfd
from flexlab.gpus.files import count, list_names, read_count, read_text
from flexlab.spec.machine import Gpu, Holder

_NS = 1_000_000_000
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The host's (PROC_PID_INIT_INO in Linux include/linux/proc_ns.h)."""

_log = logging.getLogger(__name__)


class Scan(NamedTuple):
    """Everybody who holds memory of some GPU, as far as this user may see."""

    holders: tuple[Holder, ...]
    at: float
    """Monotonic clock."""
    clients: dict[tuple[str, int], tuple[int, fdinfo.Client]]
    """Counters for the next scan. A client's number is never given twice, so no pid can be
    mistaken for another."""
    unreadable: int
    """Processes that this user may not look at: there may be more holders."""
    complete: bool
    """False: time ran out before the last process, or a driver did not give its list."""


def scan(
    root: Path,
    gpus: Sequence[Gpu],
    *,
    previous: Scan | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scan:
    """Look at all processes. With the previous scan, how busy each kept its GPU since."""
    now = clock()
    # NVIDIA's driver tells nothing in fdinfo.
    drm = [gpu for gpu in gpus if gpu.pci_slot and gpu.vendor != "nvidia"]
    walked = fdinfo.walk(root) if drm else fdinfo.Walk({}, 0, True)
    found: dict[tuple[str, int], Holder] = {}
    _add_drm(found, drm, walked, previous, now)
    _add_kfd(found, root, gpus)
    told = _ask_nvidia(root, gpus)
    named = [_named(root, holder) for holder in (*found.values(), *(told or ()))]
    complete = walked.complete and told is not None
    return Scan(tuple(named), now, walked.clients, walked.unreadable, complete)


def _ask_nvidia(root: Path, gpus: Sequence[Gpu]) -> list[Holder] | None:
    """The driver's list; several processes of other containers are all pid 0. None: it failed."""
    if not any(gpu.vendor == "nvidia" for gpu in gpus):
        return []  # the driver's library is slow to load
    try:
        from flexlab.gpus import nvidia

        return nvidia.holders(root, gpus)
    except Exception:  # a detection source: what is wrong with one vendor hides no other's holders
        _log.debug("NVIDIA's driver did not list its processes", exc_info=True)
        return None


def _add_drm(
    found: dict[tuple[str, int], Holder],
    gpus: Sequence[Gpu],
    walked: fdinfo.Walk,
    previous: Scan | None,
    now: float,
) -> None:
    # Partitions share their card's address; their users are counted for the first of them.
    by_slot: dict[str | None, str] = {}
    for gpu in gpus:
        by_slot.setdefault(gpu.pci_slot, gpu.id)
    busy: dict[tuple[str, int], dict[str, float]] = {}
    for key, (pid, client) in walked.clients.items():
        gpu_id = by_slot.get(client.slot)
        if gpu_id is None:
            continue
        place = (gpu_id, pid)
        holder = found.get(place) or Holder(gpu=gpu_id, pid=pid)
        found[place] = replace(
            holder,
            vram_bytes=_plus(holder.vram_bytes, client.vram_bytes),
            gtt_bytes=_plus(holder.gtt_bytes, client.gtt_bytes),
        )
        before = previous.clients.get(key) if previous else None
        if previous and before:
            loads = busy.setdefault(place, {})
            for engine, load in _loads(before[1], client, now - previous.at).items():
                loads[engine] = loads.get(engine, 0.0) + load
    for place, loads in busy.items():
        if loads:
            percent = min(100.0, round(max(loads.values()), 1))
            found[place] = replace(found[place], busy_percent=percent)


def _loads(before: fdinfo.Client, after: fdinfo.Client, seconds: float) -> dict[str, float]:
    """Engine -> percent of the time since; one whose counter went backwards is left out."""
    loads = {}
    for engine, ns in after.busy_ns.items():
        # amdgpu lists an engine from its first work on, so one that is new was idle.
        worked = ns - before.busy_ns.get(engine, 0)
        if seconds > 0 and worked >= 0:
            loads[engine] = 100.0 * worked / (seconds * _NS)
    for engine, (mine, whole) in after.cycles.items():
        old_mine, old_whole = before.cycles.get(engine, (mine, whole))
        if whole > old_whole and mine >= old_mine:
            loads[engine] = 100.0 * (mine - old_mine) / (whole - old_whole)
    return loads


def _add_kfd(found: dict[tuple[str, int], Holder], root: Path, gpus: Sequence[Gpu]) -> None:
    """Compute memory that older kernels do not count in fdinfo. The pid is the host's."""
    folder = root / "sys/class/kfd/kfd/proc"
    pids = [pid for name in list_names(folder) if (pid := count(name))]
    if not pids or not _sees_the_hosts_pids(root):
        return
    by_node = {gpu.kfd_node: gpu.id for gpu in gpus if gpu.kfd_node is not None}
    ids = {node.gpu_id: by_node.get(node.number) for node in kfd.read_nodes(root)}
    for pid in pids:
        for number, gpu_id in ids.items():
            vram = read_count(folder / str(pid) / f"vram_{number}") if number else None
            if gpu_id is None or not vram:
                continue
            holder = found.get((gpu_id, pid)) or Holder(gpu=gpu_id, pid=pid)
            # Newer kernels count the same memory in both places.
            both = max(vram, holder.vram_bytes or 0)
            found[gpu_id, pid] = replace(holder, vram_bytes=both)


def _sees_the_hosts_pids(root: Path) -> bool:
    """False in a container, where the same number is another process."""
    try:
        return os.readlink(root / "proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return True


def _plus(first: int | None, second: int | None) -> int | None:
    return second if first is None else first + (second or 0)


def _named(root: Path, holder: Holder) -> Holder:
    if holder.pid <= 0:
        return holder
    folder = root / "proc" / str(holder.pid)
    name = clean_line(read_text(folder / "comm") or "") or holder.name
    return replace(holder, name=name or None, cgroup=holder.cgroup or _cgroup(folder))


def _cgroup(folder: Path) -> str | None:
    """The unified hierarchy's path, else the longest of the old ones: containers have their id
    in it."""
    paths = [line.split(":", 2) for line in (read_text(folder / "cgroup") or "").splitlines()]
    unified = [parts[2] for parts in paths if len(parts) == 3 and parts[1] == ""]
    others = [parts[2] for parts in paths if len(parts) == 3 and parts[1]]
    best = unified[0] if unified and unified[0] != "/" else max(others, key=len, default="")
    return clean_line(best or (unified[0] if unified else "")) or None
