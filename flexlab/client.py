"""The control client: http.client over the daemon's unix socket. `flexlab.daemons` finds one.

Nothing here is heavy: every command imports this module, httpx alone would cost each 160 ms.
Errors are FlexLabErrors; what the daemon refuses keeps its code, hint and exit code.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Generator, Iterator, Mapping
from typing import TypeVar
from urllib.parse import urlencode

import msgspec

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
from flexlab.spec.lab import Event, History, Snapshot, UpStep
from flexlab.spec.plan import Keep, Wishes

QUICK_TIMEOUT_S = 5.0
"""Of /status and /snapshot, which a daemon that works answers at once."""
CONNECT_TIMEOUT_S = 5.0
STUCK = "daemon_stuck"
"""Code of the error when a daemon lives and says nothing."""

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

    def history(self, seconds: int) -> History:
        """Series of GPUs and models, and which instance ran when, of the last `seconds`."""
        path = f"/history?{urlencode({'seconds': seconds})}"
        return self._call("GET", path, History, timeout_s=QUICK_TIMEOUT_S)

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


def _decode(body: bytes, answer_type: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=answer_type)
    except msgspec.MsgspecError as error:
        raise DaemonUnreachable(
            f"the daemon's answer is not understood: {error}",
            "another version runs: flexlab down --daemon, then try again",
        ) from error
