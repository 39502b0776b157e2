"""How the running daemon is found, started, replaced and ended.

The lock file (`paths.lock_file()`) names the socket of the daemon that holds it.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from flexlab import __version__, spawn
from flexlab.client import CONNECT_TIMEOUT_S, STUCK, Client, DaemonInfo
from flexlab.core import paths
from flexlab.core.errors import DaemonUnreachable, FlexLabError
from flexlab.spec.lab import Snapshot

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 90.0
"""Of an older daemon: it drains its engines and stops them."""
LEAVING_S = 2.0
"""From the release of the lock to the end of the process; tenths of a second as a rule."""
POLL_S = 0.05

Say = Callable[[str], None]


def read_lock_file() -> DaemonInfo | None:
    """What the lock file says; None without one. Says nothing of whether that daemon lives."""
    try:
        return msgspec.json.decode(paths.lock_file().read_bytes(), type=DaemonInfo)
    except (OSError, msgspec.MsgspecError):
        return None


def lock_is_held() -> bool:
    """Whether some daemon lives, listening yet or not.

    The test takes the lock for a moment, and a daemon that starts just then finds it taken.
    So it is asked only when nobody answers, and a start that lost the race is tried again.
    """
    try:
        with paths.lock_file().open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def find(*, wait_s: float = CONNECT_TIMEOUT_S) -> Client | None:
    """The running daemon, or None. One that is still starting is waited for.

    Raises DaemonUnreachable when a daemon holds the lock but does not answer within `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        info = read_lock_file()
        client = Client(info) if info else None
        if client and client.is_alive():
            return client
        if not lock_is_held():
            return None
        if time.monotonic() > deadline:
            pid = f" (pid {info.pid})" if info else ""
            raise DaemonUnreachable(
                f"a daemon{pid} holds {paths.lock_file()} but does not answer",
                f"see {paths.logs_dir() / 'daemon.log'}; ending that process frees the lock, "
                "models keep running",
            )
        time.sleep(POLL_S)


def left_running() -> list[str]:
    """Instances that a daemon recorded and no daemon watches now: engines may run of them."""
    return sorted(path.stem for path in paths.instances_dir().glob("*.json"))


def find_or_adopt(say: Say = lambda _text: None) -> Client | None:
    """As `find`, but where an earlier daemon left something running, one is started to take it
    over: whoever stops or deletes models must know of it. `end_if_unused` ends it again."""
    running = find()
    if running is None and left_running():
        return connect(start=True, say=say)
    return running


def running_version() -> str | None:
    """The version of the daemon that runs; None when none does."""
    info = read_lock_file()
    return info.version if info and Client(info).is_alive() else None


def connect(start: bool, say: Say = lambda _text: None) -> Client:
    """The daemon; with `start` one is started where none runs, and an older one is replaced.

    `say` is told about every change worth a line. Raises DaemonUnreachable, or whatever the new
    daemon said of why it cannot start.
    """
    client = find(wait_s=STOP_TIMEOUT_S if start else CONNECT_TIMEOUT_S)
    if client is None and not start:
        raise DaemonUnreachable(
            "the daemon is not running", "flexlab up MODEL starts it", code="not_running"
        )
    if client is not None:
        order = compare_versions(__version__, client.info.version)
        if order < 0:
            say(f"note: the daemon is FlexLab {client.info.version}, this is {__version__}")
        if order > 0 and start and client.info.foreground:
            say(
                f"note: the daemon (pid {client.info.pid}) is FlexLab {client.info.version} and "
                f"runs in the foreground; end it to use {__version__}"
            )
        elif order > 0 and start:
            _replace(client, say)
            return _start(say)
        return client
    return _start(say)


def _replace(client: Client, say: Say) -> None:
    old = client.info
    say(f"replacing the daemon of FlexLab {old.version} by {__version__}; models keep running")
    try:
        client.shutdown(stop_models=False, why=f"replaced by {__version__}")
    except DaemonUnreachable as error:
        if error.code == STUCK:
            raise
    if not wait_until_ended(old, STOP_TIMEOUT_S):
        raise DaemonUnreachable(
            f"the daemon of FlexLab {old.version} (pid {old.pid}) does not end",
            f"kill {old.pid}; models keep running and are taken over",
        )


def _start(say: Say) -> Client:
    """Starts daemons until one answers: of several that start at once, one gets the lock."""
    deadline = time.monotonic() + START_TIMEOUT_S
    say("starting the daemon")
    while time.monotonic() < deadline:
        is_ours = spawn.start_daemon(deadline)
        client = find(wait_s=max(0.0, deadline - time.monotonic()))
        if client is not None:
            client.started_here = is_ours
            return client
        time.sleep(POLL_S)
    raise DaemonUnreachable(
        f"the daemon did not start within {START_TIMEOUT_S:.0f} s",
        f"its log: {paths.logs_dir() / 'daemon.log'}",
    )


def wait_until_ended(info: DaemonInfo, timeout_s: float) -> bool:
    """Whether this daemon let go of its lock in time; one that took it over does not count.

    Its process takes a moment longer to go, and is waited for a little: whoever reads that the
    daemon has ended may look for it.
    """
    deadline = time.monotonic() + timeout_s
    while lock_is_held() and read_lock_file() in (info, None):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    last_look = time.monotonic() + LEAVING_S
    while _is_running(info.pid) and time.monotonic() < last_look:
        time.sleep(POLL_S)
    return True


def _is_running(pid: int) -> bool:
    """Not: gone, or ended and only waiting for its parent to collect it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] not in (["Z"], ["X"])


def end_if_unused(client: Client, patience_s: float = 5.0) -> bool:
    """After a withdrawn wish: ends the daemon that this process started, if it holds nothing.

    The load that was withdrawn takes a moment to end, so it is asked again while what it holds is
    on its way out; as soon as somebody else uses it, it is left alone.
    """
    deadline = time.monotonic() + patience_s
    while client.started_here and time.monotonic() < deadline:
        try:
            if client.shutdown(stop_models=False, only_if_idle=True, why="nothing left to do"):
                return True
            if _somebody_uses(client.snapshot()):
                return False
        except FlexLabError:
            return False
        time.sleep(POLL_S)
    return False


def _somebody_uses(snapshot: Snapshot) -> bool:
    if any(model.waiting or model.in_flight for model in snapshot.models):
        return True
    return any(instance.state == "ready" for instance in snapshot.instances)


def compare_versions(ours: str, theirs: str) -> int:
    """1 when `ours` is the newer release, -1 when older, 0 when alike or not comparable."""
    mine, other = _release(ours), _release(theirs)
    return (mine > other) - (mine < other) if mine and other else 0


def _release(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
