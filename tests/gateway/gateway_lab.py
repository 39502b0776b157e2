"""A lab of fakes around a real gateway: leases that are counted, real sockets on both sides."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import SO_LINGER, SO_RCVBUF, SOL_SOCKET, socket
from types import TracebackType
from typing import Any, Self

from waiting import soon

from flexlab.demo.upstream import FakeUpstream
from flexlab.gateway.proxy import Gateway
from flexlab.gateway.routes import Router
from flexlab.spec.instance import Endpoint
from flexlab.spec.lab import ModelView, Snapshot
from flexlab.spec.lease import Refused
from flexlab.spec.plan import Refusal

CHAT = "/v1/chat/completions"
PATIENCE_S = 5.0


async def until(true: Callable[[], bool]) -> None:
    """Wait until this holds, whatever makes it so. TimeoutError."""
    await soon(true, PATIENCE_S)


class FakeLease:
    """Counts its releases; `cut` is what the scheduler does to it."""

    def __init__(self, lab: FakeLab, model: str, endpoint: Endpoint) -> None:
        self.model = model
        self.instance = f"{model}-1"
        self.endpoint = endpoint
        self.releases = 0
        self._lab = lab
        self._on_cut: Callable[[Refusal], None] | None = None
        lab.leases.append(self)

    def release(self) -> None:
        self.releases += 1
        self._lab.changed.set()

    def on_cut(self, callback: Callable[[Refusal], None]) -> None:
        self._on_cut = callback

    def cut(self, refusal: Refusal) -> None:
        assert self._on_cut is not None
        self._on_cut(refusal)


class FakeLab:
    """Models by name: an endpoint (ready), a refusal, or "later" (the test grants it)."""

    started_at = 1_700_000_000.0

    def __init__(self) -> None:
        self.behaviour: dict[str, Endpoint | Refusal | str] = {}
        self.views: list[ModelView] = []
        self.leases: list[FakeLease] = []
        self.waiting: list[asyncio.Future[FakeLease]] = []
        self.asked: list[str] = []
        self.sinces: list[float | None] = []
        """Of each that was asked: the time of its first coming, where it was cut."""
        self.changed = asyncio.Event()

    def acquire(
        self,
        name: str,
        *,
        client: str,
        capability: str | None = None,
        since: float | None = None,
    ) -> FakeLease | asyncio.Future[FakeLease]:
        self.asked.append(name)
        self.sinces.append(since)
        self.changed.set()
        behaviour = self.behaviour.get(name)
        if isinstance(behaviour, Endpoint):
            return FakeLease(self, name, behaviour)
        if behaviour == "later":
            future = asyncio.get_running_loop().create_future()
            future.add_done_callback(lambda _: self.changed.set())
            self.waiting.append(future)
            return future
        if isinstance(behaviour, Refusal):
            raise Refused(behaviour)
        raise Refused(Refusal(code="model_not_found", message=f"no {name}", status=404))

    def models(self) -> list[ModelView]:
        return self.views

    def snapshot(self) -> Snapshot:
        raise NotImplementedError

    @property
    def held(self) -> int:
        """Leases that are out; AssertionError if one was released twice."""
        assert all(lease.releases <= 1 for lease in self.leases)
        return sum(lease.releases == 0 for lease in self.leases)

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until this holds of the lab. TimeoutError."""
        async with asyncio.timeout(PATIENCE_S):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    def grant(self, endpoint: Endpoint, name: str = "later") -> FakeLease:
        """Give the oldest waiter its lease."""
        lease = FakeLease(self, name, endpoint)
        self.waiting.pop(0).set_result(lease)
        return lease


@dataclass
class Listening:
    """The settings that the router reads."""

    host: str = "127.0.0.1"
    allow_origins: tuple[str, ...] = ()


class Rig:
    """Gateway, lab and upstream; `connect()` gives a client's side of a socket."""

    def __init__(self, listening: Listening | None = None, max_body_bytes: int = 1 << 24) -> None:
        self.upstream = FakeUpstream()
        self.lab = FakeLab()
        self.router = Router(self.lab, listening or Listening())
        self.gateway: Gateway
        self._max_body_bytes = max_body_bytes
        self._wires: list[Wire] = []

    async def __aenter__(self) -> Self:
        self.gateway = Gateway(self.router, max_body_bytes=self._max_body_bytes)
        await self.upstream.start()
        self.serve("m1")
        await self.gateway.start("127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for wire in self._wires:
            wire.abort()
        await self.gateway.close()
        await self.upstream.close()
        if kind is None:
            assert self.lab.held == 0
            assert self.gateway.observer.in_flight == 0

    def serve(self, name: str, **endpoint: Any) -> Endpoint:
        """A ready model of this name at the upstream; returns its endpoint."""
        endpoint.setdefault("headers", (("Authorization", "Bearer engine-key"),))
        endpoint.setdefault("port", self.upstream.port)
        ready = Endpoint(**endpoint)
        self.lab.behaviour[name] = ready
        self.lab.views.append(
            ModelView(name=name, word="ready", since=0.0, why="", installed=True, context=4096)
        )
        return ready

    async def connect(self, receive_buffer_bytes: int | None = None) -> Wire:
        """A connection to the gateway."""
        raw = socket()
        if receive_buffer_bytes is not None:
            raw.setsockopt(SOL_SOCKET, SO_RCVBUF, receive_buffer_bytes)
        raw.setblocking(False)
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(raw, ("127.0.0.1", self.gateway.address.port))
        except OSError:
            raw.close()
            raise
        wire = Wire(*await asyncio.open_connection(sock=raw))
        self._wires.append(wire)
        return wire

    async def ask(self, data: bytes) -> Got:
        """One request on a connection of its own."""
        wire = await self.connect()
        wire.send(data)
        return await wire.answer(head_only=data.startswith(b"HEAD"))


@dataclass
class Got:
    """One answer. `whole` False: the connection ended before the answer did."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    raw_body: bytes = b""
    trailers: bytes = b""
    whole: bool = True
    names: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = dict(self.headers)

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]

    @property
    def error(self) -> dict[str, Any]:
        """The error, which must be of OpenAI's shape."""
        found = json.loads(self.body)["error"]
        assert set(found) == {"message", "type", "code", "param"}
        assert self.names["x-request-id"]
        return found


class Wire:
    """The client's side of a connection to the gateway."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self, *, head_only: bool = False) -> Got:
        """The next answer, interim ones included."""
        async with asyncio.timeout(PATIENCE_S):
            got = await self.head()
            if head_only or got.status in (204, 304) or got.status < 200:
                return got
            try:
                await self._body(got)
            except (asyncio.IncompleteReadError, ConnectionError) as error:
                got.whole = False
                got.raw_body += getattr(error, "partial", b"")
        return got

    async def head(self) -> Got:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head[:-4].split("\r\n")
        assert first.startswith("HTTP/1.1 ")
        pairs = [line.split(": ", 1) for line in lines]
        return Got(int(first.split()[1]), [(name.lower(), value) for name, value in pairs])

    async def _body(self, got: Got) -> None:
        if got.names.get("transfer-encoding") == "chunked":
            await self._chunks(got)
        elif "content-length" in got.names:
            length = int(got.names["content-length"])
            got.body = got.raw_body = await self.reader.readexactly(length)
        else:
            while data := await self.reader.read(65536):
                got.body += data
            got.raw_body = got.body

    async def _chunks(self, got: Got) -> None:
        while True:
            line = await self.reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0], 16)
            got.raw_body += line
            if size == 0:
                break
            data = await self.reader.readexactly(size + 2)
            got.raw_body += data
            got.body += data[:-2]
        while (line := await self.reader.readuntil(b"\r\n")) != b"\r\n":
            got.trailers += line

    async def until_end(self) -> bytes:
        """All that still comes; a reset is raised."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.reader.read()

    def abort(self) -> None:
        self.writer.transport.abort()

    def reset(self) -> None:
        """Leave by RST, as a killed program does with unread data."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.abort()


def request(
    path: str = CHAT,
    body: bytes | str | None = None,
    *headers: str,
    method: str | None = None,
    version: str = "1.1",
) -> bytes:
    """A request; with a body it is a POST of JSON."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"{method or ('GET' if data is None else 'POST')} {path} HTTP/{version}"]
    lines += ["Host: 127.0.0.1", *headers]
    if data is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join((*lines, "", "")).encode() + (data or b"")


def chat(knobs: str = "", *headers: str, model: str = "m1", version: str = "1.1") -> bytes:
    """A chat whose prompt tells the fake upstream what to do."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": f"demo {knobs}"}],
        "stream": "events" in knobs,
    }
    return request(CHAT, json.dumps(body), *headers, version=version)
