"""The control client: http.client over the daemon's unix socket, and how a daemon is found.

The lock file (`paths.lock_file()`) names the socket of the daemon that holds it. Nothing here is
heavy: every command imports this module, httpx alone would cost each of them 160 ms.
Errors are FlexLabErrors; what the daemon refuses keeps its code, hint and exit code.
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import socket
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

from flexlab import __version__, spawn
from flexlab.core import paths
from flexlab.core.errors import DaemonUnreachable, FlexLabError
from flexlab.spawn import DaemonSaid
from flexlab.spec.control import (
    Cancelled,
    Held,
    Removed,
    Requests,
    Status,
    Stopped,
    Why,
    WireProblem,
)
from flexlab.spec.lab import Event, Snapshot, UpStep
from flexlab.spec.plan import Keep, Wishes

QUICK_TIMEOUT_S = 5.0
"""Of /status and /snapshot, which a daemon that works answers at once."""
CONNECT_TIMEOUT_S = 5.0
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 90.0
"""Of requests that wait for engines to be drained and stopped."""
LEAVING_S = 2.0
"""From the release of the lock to the end of the process; tenths of a second as a rule."""
POLL_S = 0.05
STUCK = "daemon_stuck"
"""Code of the error when a daemon lives and says nothing."""

Say = Callable[[str], None]
T = TypeVar("T")


class DaemonInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the lock file says of the daemon that holds it."""

    pid: int
    socket: str
    version: str
    address: str = ""
    foreground: bool = False
    """It runs in somebody's terminal or unit, with its own options."""


class _Failure(msgspec.Struct):
    error: WireProblem


class _Connection(http.client.HTTPConnection):
    def __init__(self, socket_path: str, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=CONNECT_TIMEOUT_S)
        self._socket_path = socket_path
        self._answer_timeout_s = timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.sock.settimeout(CONNECT_TIMEOUT_S)
            self.sock.connect(self._socket_path)
            self.sock.settimeout(self._answer_timeout_s)
        except BaseException:
            self.sock.close()
            raise


class Client:
    """Speaks the control API of one daemon. `started_here`: this process started that daemon."""

    def __init__(self, info: DaemonInfo, *, started_here: bool = False) -> None:
        self.info = info
        self.started_here = started_here

    def status(self) -> Status:
        """Who answers, and how much it holds."""
        return self._call("GET", "/status", Status, timeout_s=QUICK_TIMEOUT_S)

    def snapshot(self, timeout_s: float | None = None) -> Snapshot:
        """The whole lab at this moment."""
        return self._call("GET", "/snapshot", Snapshot, timeout_s=timeout_s or QUICK_TIMEOUT_S)

    def up(
        self, model: str, wishes: Wishes, *, keep: Keep | None = None, pin: bool | None = None
    ) -> Generator[UpStep, None, None]:
        """Steps until `ready` or `refused`. Closing the iterator withdraws the wish."""
        body = {"model": model, "wishes": wishes, "keep": keep, "pin": pin}
        yield from self._steps("/up", model, body)

    def restart(self, model: str) -> Generator[UpStep, None, None]:
        """Drained and started anew: steps as of `up`."""
        yield from self._steps("/restart", model, {"model": model})

    def _steps(
        self, path: str, model: str, body: Mapping[str, object]
    ) -> Generator[UpStep, None, None]:
        with contextlib.closing(self._lines("POST", path, body)) as lines:
            for line in lines:
                step = _decode(line, UpStep)
                yield step
                if step.kind in ("ready", "refused"):
                    return
        raise self._lost(f"the daemon ended before {model} was ready")

    def hold(
        self,
        models: tuple[str, ...],
        *,
        keep: Keep | None = None,
        pin: bool | None = None,
        enabled: bool | None = None,
    ) -> Held:
        """What a user decides about models; None leaves it."""
        body = {"models": models, "keep": keep, "pin": pin, "enabled": enabled}
        return self._call("POST", "/hold", Held, body)

    def why(self, model: str) -> Why:
        """Why a model is in its state."""
        path = f"/why?{urlencode({'model': model})}"
        return self._call("GET", path, Why, timeout_s=QUICK_TIMEOUT_S)

    def requests(self, last: int) -> Requests:
        """Requests in flight, and the last that ended."""
        path = f"/requests?{urlencode({'last': last})}"
        return self._call("GET", path, Requests, timeout_s=QUICK_TIMEOUT_S)

    def cancel(self, request: str) -> Cancelled:
        """End a request by its id."""
        return self._call("POST", "/cancel", Cancelled, {"id": request}, QUICK_TIMEOUT_S)

    def down(
        self, models: tuple[str, ...] = (), *, everything: bool = False, force: bool = False
    ) -> Stopped:
        """Stops models and waits until they are gone."""
        body = {"models": models, "all": everything, "force": force}
        return self._call("POST", "/down", Stopped, body)

    def shutdown(self, *, stop_models: bool, only_if_idle: bool = False, why: str = "") -> bool:
        """Whether the daemon is going to end. It answers first and ends after that."""
        body = {"stop_models": stop_models, "only_if_idle": only_if_idle, "why": why}
        answer = self._call("POST", "/shutdown", dict[str, bool], body)
        return answer.get("stopping", False)

    def rm(self, model: str) -> Removed:
        """Removes the model's weights; refused while it runs."""
        return self._call("POST", "/rm", Removed, {"model": model})

    def logs(self, model: str, *, tail: int, follow: bool) -> Generator[str, None, None]:
        """Lines of the engine's log, oldest first, without their line ends."""
        query = urlencode({"model": model, "tail": tail, "follow": int(follow)})
        for line in self._lines("GET", f"/logs?{query}"):
            yield line.decode(errors="replace").rstrip("\r\n")

    def events(self, *, after: int = 0, follow: bool = False) -> Generator[Event, None, None]:
        """What happened since event `after`, and with `follow` what happens from now on."""
        query = urlencode({"after": after, "follow": int(follow)})
        for line in self._lines("GET", f"/events?{query}"):
            yield _decode(line, Event)

    def is_alive(self) -> bool:
        """Whether something accepts connections on the socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            try:
                probe.connect(self.info.socket)
            except OSError:
                return False
        return True

    def _call(
        self,
        method: str,
        path: str,
        answer_type: type[T],
        body: Mapping[str, object] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        if timeout_s is None:
            self.status()  # what may take long is asked only of a daemon that answers at all
        with self._request(method, path, body, timeout_s) as response:
            return _decode(response.read(), answer_type)

    def _lines(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> Generator[bytes, None, None]:
        self.status()
        with self._request(method, path, body, None) as response:
            while line := response.readline():
                if line.strip():
                    yield line

    @contextlib.contextmanager
    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None, timeout_s: float | None
    ) -> Iterator[http.client.HTTPResponse]:
        """One request on a connection of its own, which is closed on every path."""
        connection = _Connection(self.info.socket, timeout_s)
        payload = None if body is None else msgspec.json.encode(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(method, path, payload, headers)
            response = connection.getresponse()
            if response.status >= 400:
                raise error_from_wire(response.read())
            yield response
        except TimeoutError as error:
            waited_s = timeout_s or CONNECT_TIMEOUT_S
            raise DaemonUnreachable(
                f"the daemon (pid {self.info.pid}) does not answer ({waited_s:.0f} s)",
                f"kill -9 {self.info.pid}; models go on, and the next flexlab up takes them over",
                code=STUCK,
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(f"the daemon (pid {self.info.pid}) does not answer", error) from error
        finally:
            connection.close()

    def _lost(self, message: str, cause: Exception | None = None) -> DaemonUnreachable:
        why = f": {cause}" if cause and str(cause) else ""
        return DaemonUnreachable(message + why, f"its log: {paths.logs_dir() / 'daemon.log'}")


def error_from_wire(body: bytes) -> FlexLabError:
    """The daemon's `{"error": {...}}` as an exception with its own code, hint and exit code."""
    try:
        problem = msgspec.json.decode(body, type=_Failure).error
    except msgspec.MsgspecError:
        problem = WireProblem(message=f"the daemon answered {body[:200]!r}")
    return DaemonSaid(problem)


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


def _decode(body: bytes, answer_type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=answer_type)
    except msgspec.MsgspecError as error:
        raise DaemonUnreachable(
            f"the daemon's answer is not understood: {error}",
            "another version runs: flexlab down --daemon, then try again",
        ) from error
