"""Processes as /proc tells of them, with an identity that survives the reuse of a pid.

A pid alone names whoever has it now. A `ProcessRef` also holds the start time and the boot, and a
signal goes through a pidfd that was opened first and compared afterwards, so that it reaches this
process or nobody.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec

from flexlab.spec.instance import MemoryUse, ProcessRef

INSTANCE_VARIABLE = "FLEXLAB_INSTANCE"
OWNER_VARIABLE = "FLEXLAB_OWNER"
ENDPOINT_VARIABLE = "FLEXLAB_ENDPOINT"
"""`host:port`, so that a running instance tells where it listens. (FLEXLAB_PORT is a setting.)"""

_PROC = Path("/proc")
_DEAD = frozenset("ZX")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Stat(msgspec.Struct, frozen=True, kw_only=True):
    """What of /proc/PID/stat matters here; proc(5) numbers the fields."""

    pid: int
    state: str
    session: int
    start_ticks: int

    @property
    def alive(self) -> bool:
        """A zombie has ended: it holds nothing but its exit status."""
        return self.state not in _DEAD


class Bearer(msgspec.Struct, frozen=True, kw_only=True):
    """A process whose environment says that it is an instance of FlexLab."""

    ref: ProcessRef
    instance: str
    owner: str
    endpoint: str
    leads_session: bool


def boot_id() -> str:
    """This boot of the kernel; pids and start times mean nothing after it."""
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return "unknown"


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the name in parentheses, which may itself hold spaces and parentheses.
    fields = text.rpartition(")")[2].split()
    return Stat(pid=pid, state=fields[0], session=int(fields[3]), start_ticks=int(fields[19]))


def identify(pid: int) -> ProcessRef | None:
    """The identity of whoever has this pid now."""
    stat = read_stat(pid)
    return None if stat is None else _ref(stat, boot_id())


def current_stat(ref: ProcessRef) -> Stat | None:
    """The stat of exactly this process (perhaps a zombie); None once its pid is free or reused."""
    stat = read_stat(ref.pid)
    if stat is None or stat.start_ticks != ref.start_ticks or ref.boot_id != boot_id():
        return None
    return stat


def is_alive(ref: ProcessRef) -> bool:
    """Whether exactly this process still runs; a zombie does not."""
    stat = current_stat(ref)
    return stat is not None and stat.alive


def open_pidfd(ref: ProcessRef) -> int | None:
    """A pidfd of exactly this process, the caller's to close; None when it is gone."""
    try:
        descriptor = os.pidfd_open(ref.pid)
    except OSError:
        return None
    # Compared after opening: from here on the descriptor cannot come to mean another process.
    if current_stat(ref) is None:
        os.close(descriptor)
        return None
    return descriptor


def send_signal(ref: ProcessRef, number: signal.Signals) -> None:
    """Signal exactly this process; harmless when it has ended or is not ours to signal."""
    descriptor = open_pidfd(ref)
    if descriptor is None:
        return
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def living_members(ref: ProcessRef) -> list[ProcessRef]:
    """`ref` (first) and what it started in its session, without zombies.

    Where `ref` does not lead that session, or has ended, only those count that bear
    FLEXLAB_INSTANCE: the session may be a terminal's, or its number may have been reused.
    """
    if ref.boot_id != boot_id():
        return []
    leader = read_stat(ref.pid)
    if leader is not None and leader.start_ticks != ref.start_ticks:
        return []
    session = ref.pid if leader is None else leader.session
    leads = leader is not None and session == ref.pid
    found = [
        stat
        for stat in all_stats()
        if stat.alive
        and (stat.pid == ref.pid or (stat.session == session and (leads or is_marked(stat.pid))))
    ]
    found.sort(key=lambda stat: stat.pid != ref.pid)
    return [_ref(stat, ref.boot_id) for stat in found]


def is_marked(pid: int) -> bool:
    """Whether its environment can be read and bears FLEXLAB_INSTANCE."""
    return INSTANCE_VARIABLE in _environment(pid)


def all_stats() -> Iterator[Stat]:
    """Every process that can be seen from here."""
    for pid in _all_pids():
        if (stat := read_stat(pid)) is not None:
            yield stat


def bearers() -> list[Bearer]:
    """This user's other processes that bear FLEXLAB_INSTANCE, one per instance.

    Children inherit the environment: the leader of the session stands for all of them, else the
    oldest.
    """
    boot = boot_id()
    best: dict[tuple[str, str], Bearer] = {}
    for pid in _all_pids():
        bearer = _bearer(pid, boot)
        if bearer is None or pid == os.getpid():
            continue
        key = (bearer.owner, bearer.instance)
        if key not in best or _precedence(bearer) < _precedence(best[key]):
            best[key] = bearer
    return list(best.values())


def memory(members: list[ProcessRef]) -> MemoryUse | None:
    """Host memory of these processes together; None when none of it can be read.

    Several share pages, hence the proportional size (PSS); one alone is asked for its resident
    size, which the kernel has at hand.
    """
    read = _resident_bytes if len(members) == 1 else _proportional_bytes
    sizes = [size for member in members if (size := read(member.pid)) is not None]
    own = [size for member in members if (size := _own_bytes(member.pid)) is not None]
    return MemoryUse(resident_bytes=sum(sizes), own_bytes=sum(own)) if sizes and own else None


def _ref(stat: Stat, boot: str) -> ProcessRef:
    return ProcessRef(pid=stat.pid, start_ticks=stat.start_ticks, boot_id=boot)


def _all_pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    except OSError:
        return []


def _bearer(pid: int, boot: str) -> Bearer | None:
    try:
        # Another user's process is not ours, even where root could read its environment.
        if (_PROC / str(pid)).stat().st_uid != os.getuid():
            return None
    except OSError:
        return None
    environment = _environment(pid)
    instance = environment.get(INSTANCE_VARIABLE)
    # After the environment: a pid that was reused in between would pair two processes.
    stat = read_stat(pid) if instance else None
    if not instance or stat is None or not stat.alive:
        return None
    return Bearer(
        ref=_ref(stat, boot),
        instance=instance,
        owner=environment.get(OWNER_VARIABLE, ""),
        endpoint=environment.get(ENDPOINT_VARIABLE, ""),
        leads_session=stat.session == pid,
    )


def _precedence(bearer: Bearer) -> tuple[bool, int, int]:
    return not bearer.leads_session, bearer.ref.start_ticks, bearer.ref.pid


def _environment(pid: int) -> dict[str, str]:
    """The FLEXLAB_* variables that it was started with; none where it may not be read."""
    try:
        block = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return {}
    return {
        name.decode(): value.decode(errors="replace")
        for name, _, value in (entry.partition(b"=") for entry in block.split(b"\0"))
        if name.startswith(b"FLEXLAB_") and name.isascii()
    }


def _resident_bytes(pid: int) -> int | None:
    fields = _fields(pid, "status")
    return None if fields is None else fields.get("VmRSS", 0)


def _proportional_bytes(pid: int) -> int | None:
    fields = _fields(pid, "smaps_rollup")
    return _resident_bytes(pid) if fields is None else fields.get("Pss", 0)


def _own_bytes(pid: int) -> int | None:
    """Anonymous and shared memory: weights that are mapped from a file are not in it."""
    fields = _fields(pid, "status")
    return None if fields is None else fields.get("RssAnon", 0) + fields.get("RssShmem", 0)


def _fields(pid: int, file: str) -> dict[str, int] | None:
    """The sizes in a file such as /proc/PID/status, in bytes."""
    try:
        lines = (_PROC / str(pid) / file).read_text(errors="replace").splitlines()
    except OSError:
        return None
    found = {}
    for line in lines:
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            found[name] = int(value.removesuffix(" kB")) * 1024
    return found
