"""The control API: what the command line and the screens ask of the daemon.

Starlette on a unix socket, JSON by msgspec, streams as JSON lines. The folder of the socket is 0700
and every peer's uid is checked, so there are no keys here. `flexlab/client.py` speaks this.

    GET  /status    GET /snapshot    GET /events?after=&follow=    GET /logs?model=&tail=&follow=
    GET  /why?model=                 GET /requests?last=           GET /history?seconds=
    POST /up        POST /down       POST /restart                 POST /hold
    POST /cancel    POST /rm         POST /shutdown
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from flexlab import __version__
from flexlab.core import paths
from flexlab.core.errors import FlexLabError, UnknownModel, UsageError
from flexlab.spec.control import (
    Cancelled,
    CancelRequest,
    DownRequest,
    Held,
    HoldRequest,
    Removed,
    Requests,
    RestartRequest,
    RmRequest,
    ShutdownRequest,
    Status,
    Stopped,
    UpRequest,
    Why,
    WireProblem,
)
from flexlab.spec.lab import Event, History, Snapshot, UpStep

log = logging.getLogger(__name__)
T = TypeVar("T")
LAST_REQUESTS = 50
HISTORY_S = 300
_HEADERS = {"x-flexlab-version": __version__}
_UCRED = struct.Struct("3i")


class ControlLab(Protocol):
    """What the daemon offers here. Raises FlexLabError."""

    def status(self) -> Status: ...
    def snapshot(self) -> Snapshot: ...
    async def up(self, request: UpRequest) -> AsyncIterator[UpStep]: ...
    async def down(self, request: DownRequest) -> Stopped: ...
    async def rm(self, model: str) -> Removed: ...
    def shutdown(self, request: ShutdownRequest) -> bool: ...
    async def logs(self, model: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]: ...
    def events(self, after: int, *, follow: bool) -> AsyncIterator[Event]: ...
    async def hold(self, request: HoldRequest) -> Held: ...
    async def restart(self, request: RestartRequest) -> AsyncIterator[UpStep]: ...
    def why(self, model: str) -> Why: ...
    def requests(self, *, last: int) -> Requests: ...
    def cancel(self, request: CancelRequest) -> Cancelled: ...
    async def history(self, seconds: float) -> History: ...


def application(lab: ControlLab, ending: asyncio.Event) -> Starlette:
    """The control API over this lab; streams end once `ending` is set."""

    async def status(request: Request) -> Response:
        return _json(lab.status())

    async def snapshot(request: Request) -> Response:
        return _json(lab.snapshot())

    async def up(request: Request) -> Response:
        steps = await lab.up(await _body(request, UpRequest))
        return _Lines(_encoded(steps), ending)

    async def down(request: Request) -> Response:
        return _json(await lab.down(await _body(request, DownRequest)))

    async def hold(request: Request) -> Response:
        return _json(await lab.hold(await _body(request, HoldRequest)))

    async def restart(request: Request) -> Response:
        steps = await lab.restart(await _body(request, RestartRequest))
        return _Lines(_encoded(steps), ending)

    async def why(request: Request) -> Response:
        return _json(lab.why(request.query_params.get("model", "")))

    async def requests(request: Request) -> Response:
        return _json(lab.requests(last=_number(request, "last", LAST_REQUESTS)))

    async def history(request: Request) -> Response:
        return _json(await lab.history(_number(request, "seconds", HISTORY_S)))

    async def cancel(request: Request) -> Response:
        return _json(lab.cancel(await _body(request, CancelRequest)))

    async def rm(request: Request) -> Response:
        return _json(await lab.rm((await _body(request, RmRequest)).model))

    async def shutdown(request: Request) -> Response:
        return _json({"stopping": lab.shutdown(await _body(request, ShutdownRequest))})

    async def events(request: Request) -> Response:
        after, follow = _number(request, "after", 0), _number(request, "follow", 0)
        return _Lines(_encoded(lab.events(after, follow=bool(follow))), ending)

    async def logs(request: Request) -> Response:
        tail, follow = _number(request, "tail", 200), _number(request, "follow", 0)
        name = request.query_params.get("model", "")
        lines = await lab.logs(name, tail=tail, follow=bool(follow))
        return _Lines(lines, ending, "text/plain; charset=utf-8")

    routes: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("GET", "/status", status),
        ("GET", "/snapshot", snapshot),
        ("GET", "/events", events),
        ("GET", "/logs", logs),
        ("POST", "/up", up),
        ("POST", "/down", down),
        ("POST", "/hold", hold),
        ("POST", "/restart", restart),
        ("GET", "/why", why),
        ("GET", "/requests", requests),
        ("GET", "/history", history),
        ("POST", "/cancel", cancel),
        ("POST", "/rm", rm),
        ("POST", "/shutdown", shutdown),
    ]
    return Starlette(
        routes=[Route(path, call, methods=[method]) for method, path, call in routes],
        exception_handlers={FlexLabError: _problem},
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json", headers=_HEADERS)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, FlexLabError)
    problem = WireProblem.of(error)
    status = 404 if isinstance(error, UnknownModel) else 400
    return Response(
        msgspec.json.encode({"error": problem}),
        status,
        media_type="application/json",
        headers=_HEADERS,
    )


async def _body(request: Request, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await request.body(), type=kind)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"the daemon does not understand this request: {error}",
            "are flexlab and its daemon of the same version? flexlab version",
        ) from error


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text} is not a number")
    return int(text)


async def _encoded(items: AsyncIterator[object]) -> AsyncIterator[bytes]:
    async with aclosing(items) as closing:  # type: ignore[type-var]
        async for item in closing:
            yield msgspec.json.encode(item) + b"\n"


class _Lines(Response):
    """Streams what `lines` gives, and ends it at once when the client leaves.

    That is what withdraws a wish. Starlette's StreamingResponse notices a client that left only
    with the next line it sends, or cancels the generator in a scope where it cannot clean up.
    """

    def __init__(
        self,
        lines: AsyncIterator[bytes],
        ending: asyncio.Event,
        media_type: str = "application/x-ndjson",
    ) -> None:
        super().__init__(media_type=media_type, headers=_HEADERS)
        del self.headers["content-length"]
        self._lines = lines
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        left = asyncio.ensure_future(_left(receive))
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            while (line := await _next_unless(self._lines, {left, ending})) is not None:
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            ending.cancel()
            await self._lines.aclose()  # type: ignore[attr-defined]


async def _next_unless(lines: AsyncIterator[bytes], ends: set[asyncio.Future[Any]]) -> bytes | None:
    """The next line; None at the end, or as soon as one of `ends` has come."""
    upcoming: asyncio.Future[bytes | None] = asyncio.ensure_future(_next(lines))
    try:
        await asyncio.wait({upcoming, *ends}, return_when=asyncio.FIRST_COMPLETED)
        return upcoming.result() if upcoming.done() else None
    finally:
        if not upcoming.done():
            upcoming.cancel()
            await asyncio.wait({upcoming})


async def _next(lines: AsyncIterator[bytes]) -> bytes | None:
    return await anext(lines, None)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _OwnUserOnly(HttpToolsProtocol):
    """Drops connections of other users; root may, since root may read everything anyway."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        peer = transport.get_extra_info("socket")
        if peer is not None and hasattr(socket, "SO_PEERCRED"):
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            if _UCRED.unpack(raw)[1] not in (os.getuid(), 0):
                transport.abort()
                return
        super().connection_made(transport)


class ControlServer:
    """The control API on its socket, in the daemon's own loop."""

    def __init__(self, lab: ControlLab) -> None:
        self._lab = lab
        self._ending = asyncio.Event()
        self._path: Path | None = None
        self._serving: list[tuple[_Quiet, asyncio.Task[None]]] = []

    @property
    def is_reachable(self) -> bool:
        """Whether the socket is where clients look for it: a logout may have taken it away."""
        return self._path is not None and self._path.is_socket()

    async def listen(self, path: Path) -> None:
        """Listen there (too: what came over an earlier socket goes on). Raises OSError."""
        listener = _bind(path)
        self._path = path
        config = uvicorn.Config(
            application(self._lab, self._ending),
            http=_OwnUserOnly,
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        server = _Quiet(config)
        serving = asyncio.get_running_loop().create_task(
            server.serve([listener]), name="control API"
        )
        self._serving.append((server, serving))
        listening = asyncio.ensure_future(server.listening.wait())
        await asyncio.wait({listening, serving}, return_when=asyncio.FIRST_COMPLETED)
        listening.cancel()

    async def close(self) -> None:
        """End; streams end with their next line."""
        self._ending.set()
        for server, serving in self._serving:
            server.should_exit = True
            await serving
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _bind(path: Path) -> socket.socket:
    paths.private_dir(path.parent)
    path.unlink(missing_ok=True)  # the lock is ours: whoever bound it is gone
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(128)
    listener.setblocking(False)
    return listener


class _Quiet(uvicorn.Server):
    """A server that says when it listens, and leaves signals to the daemon."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()
