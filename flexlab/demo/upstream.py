"""A fake OpenAI server on real TCP that misbehaves on demand, and remembers what it saw.

For tests of the gateway, and (`python -m flexlab.demo.upstream --port N`) for benchmarks. What a
chat or completion does is asked for inside its prompt, which survives any proxy:

    demo events=5 every=0.05 delay=1 cut=3 pad=100

`events` SSE events (0: a JSON answer), a pause before each, a delay before the head, the connection
cut after so many events, padding in each. The other paths each show one thing that HTTP allows.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import re
import struct
import time
from collections.abc import AsyncIterator, Callable
from socket import SO_LINGER, SOL_SOCKET

import msgspec

Reply = AsyncIterator[bytes]
_KNOB = re.compile(rb"\b(events|every|delay|cut|pad)=([\d.]+)")
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
HANG_S = 3600.0


class Seen(msgspec.Struct):
    """One request as it arrived."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    connection: int

    def header(self, name: str) -> str | None:
        """The only value of this header; None if there is none. ValueError if there are more."""
        values = [value for key, value in self.headers if key.lower() == name]
        if len(values) > 1:
            raise ValueError(f"{name} came {len(values)} times")
        return values[0] if values else None

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition("?")[0]


class Hangup(msgspec.Struct):
    """A peer that left before its answer was complete."""

    target: str
    sent_bytes: int
    at: float
    """time.monotonic()."""


class Cut(Exception):
    """Raised by a reply: close the connection here; `reset` sends RST."""

    def __init__(self, *, reset: bool = False) -> None:
        super().__init__()
        self.reset = reset


class FakeUpstream:
    """Listens on a port of its own. Everything it saw is in `seen` and `hangups`."""

    def __init__(self) -> None:
        self.port = 0
        self.seen: list[Seen] = []
        self.hangups: list[Hangup] = []
        self.completed = 0
        self.connections = 0
        self.open: set[_Connection] = set()
        self.script: Callable[[Seen], Reply] | None = None
        """The reply to any request, instead of what its path means."""
        self.tires = False
        """Closes a kept connection in the very moment in which the next request arrives on it."""
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self.connection, host, port, backlog=1024)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self.port

    def connection(self) -> asyncio.Protocol:
        """A new connection; for listening elsewhere (a unix socket) too."""
        return _Connection(self)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is not None:
            self._server.close()
        self.cut_all()
        await self.until(lambda: not self.open)

    def cut_all(self) -> None:
        """Close every connection, idle ones too."""
        for connection in list(self.open):
            connection.transport.abort()

    async def until(self, true: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until this holds; looked at whenever something happens here. TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    def note(self) -> None:
        """Something happened."""
        self._changed.set()


class _Connection(asyncio.Protocol):
    """One connection: a task that answers its requests one after the other."""

    def __init__(self, upstream: FakeUpstream) -> None:
        self.upstream = upstream
        self.transport: asyncio.Transport
        self._buffer = b""
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._tunnel = False
        self._answered = False

    def connection_made(  # type: ignore[override]  # uvloop's transports are no subclasses
        self, transport: asyncio.Transport
    ) -> None:
        self.transport = transport
        self.upstream.connections += 1
        self.number = self.upstream.connections
        self.upstream.open.add(self)
        self._task = asyncio.get_running_loop().create_task(self._serve())
        self.upstream.note()

    def connection_lost(self, exc: Exception | None) -> None:
        self._task.cancel()
        self.upstream.open.discard(self)
        self.upstream.note()

    def data_received(self, data: bytes) -> None:
        if self._tunnel:
            self.transport.write(data)
            return
        if self.upstream.tires and self._answered:
            self.transport.abort()
            return
        self._buffer += data
        self._arrived.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def _serve(self) -> None:
        while True:
            seen = await self._read()
            self.upstream.seen.append(seen)
            self.upstream.note()
            if self.upstream.script is None and seen.path.endswith("/ws"):
                self._open_tunnel()
                return
            try:
                await self._send(seen)
            except Cut as cut:
                self._cut(reset=cut.reset)
                return
            self._answered = True
            self.upstream.completed += 1
            self.upstream.note()
            if (seen.header("connection") or "").lower() == "close":
                self.transport.close()
                return

    async def _send(self, seen: Seen) -> None:
        sent_bytes = 0
        try:
            async for piece in self._reply(seen):
                await self._writable.wait()
                self.transport.write(piece)
                sent_bytes += len(piece)
        except asyncio.CancelledError:
            self.upstream.hangups.append(Hangup(seen.target, sent_bytes, time.monotonic()))
            raise

    def _reply(self, seen: Seen) -> Reply:
        if self.upstream.script is not None:
            return self.upstream.script(seen)
        return _REPLIES.get(seen.path.rpartition("/")[2], _models)(seen)

    async def _read(self) -> Seen:
        head = await self._take_until(b"\r\n\r\n")
        first, *lines = head.decode("latin-1")[:-4].split("\r\n")
        method, target, _ = first.split(" ", 2)
        headers = [(name, value.strip()) for name, _, value in (x.partition(":") for x in lines)]
        seen = Seen(method, target, headers, b"", self.number)
        seen.body = await self._take(int(seen.header("content-length") or 0))
        return seen

    async def _take_until(self, mark: bytes) -> bytes:
        while (at := self._buffer.find(mark)) < 0:
            await self._more()
        return await self._take(at + len(mark))

    async def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            await self._more()
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    async def _more(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def _open_tunnel(self) -> None:
        self._tunnel = True
        self.transport.write(
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
            + self._buffer
        )

    def _cut(self, *, reset: bool) -> None:
        if not reset:
            self.transport.close()
            return
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(SOL_SOCKET, SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()


# -- replies


def plain(body: bytes, *headers: str, status: str = "200 OK", kind: str = "text/plain") -> bytes:
    """A counted answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}"]
    return "\r\n".join((*lines, *headers, "", "")).encode() + body


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(payload: object) -> bytes:
    """One SSE event."""
    return b"data: %s\n\n" % msgspec.json.encode(payload)


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


async def _chat(seen: Seen) -> Reply:
    knobs = {name.decode(): float(value) for name, value in _KNOB.findall(seen.body)}
    events = int(knobs.get("events", 0))
    if delay_s := knobs.get("delay"):
        await asyncio.sleep(delay_s)
    usage = {"prompt_tokens": 7, "completion_tokens": events or 3, "total_tokens": 10}
    if not events:
        text = "three small words"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}}
        answer = {"object": "chat.completion", "choices": [choice], "usage": usage}
        yield plain(msgspec.json.encode(answer), kind="application/json")
        return
    yield STREAM_HEAD
    padding = "x" * int(knobs.get("pad", 0))
    for number in range(events):
        if every_s := knobs.get("every"):
            await asyncio.sleep(every_s)
        if number == knobs.get("cut"):
            raise Cut
        delta = {"content": f"t{number}{padding}"}
        piece = {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": delta}]}
        yield chunk(event(piece))
    yield chunk(event({"choices": [], "usage": usage}))
    yield chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


async def _embeddings(seen: Seen) -> Reply:
    entry = {"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}
    usage = {"prompt_tokens": 2, "total_tokens": 2}
    body = {"object": "list", "data": [entry], "usage": usage}
    yield plain(msgspec.json.encode(body), kind="application/json")


async def _models(seen: Seen) -> Reply:
    body = b'{"object":"list","data":[{"id":"fake","object":"model"}]}'
    answer = plain(body, kind="application/json")
    yield answer[: -len(body)] if seen.method == "HEAD" else answer


async def _echo(seen: Seen) -> Reply:
    lines = [f"{seen.method} {seen.target}", *(f"{name}: {value}" for name, value in seen.headers)]
    yield plain("\n".join(lines).encode() + b"\n\n" + seen.body)


async def _hop(seen: Seen) -> Reply:
    yield plain(
        b"hop",
        "Keep-Alive: timeout=7", "Connection: keep-alive, X-Hop", "X-Hop: 1", "X-End: 2",
        "Set-Cookie: a=1", "Set-Cookie: b=2", "Access-Control-Allow-Origin: *",
    )  # fmt: skip


async def _gzip(seen: Seen) -> Reply:
    yield plain(gzip.compress(b"hello " * 100), "Content-Encoding: gzip")


async def _trailers(seen: Seen) -> Reply:
    yield b"HTTP/1.1 200 OK\r\nTrailer: X-Sum\r\nTransfer-Encoding: chunked\r\n\r\n"
    yield b"5\r\nhello\r\n0\r\nX-Sum: 42\r\n\r\n"


async def _no_content(seen: Seen) -> Reply:
    yield b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n"


async def _until_close(seen: Seen) -> Reply:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\nuntil "
    yield b"close"
    raise Cut


async def _reset(seen: Seen) -> Reply:
    yield b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nhalf of"
    await asyncio.sleep(0.05)  # else the reset overtakes what was written
    raise Cut(reset=True)


async def _unavailable(seen: Seen) -> Reply:
    yield plain(b"loading", "Retry-After: 3", status="503 Service Unavailable")


async def _drop(seen: Seen) -> Reply:
    raise Cut
    yield b""  # a generator all the same


async def _hang(seen: Seen) -> Reply:
    await asyncio.sleep(HANG_S)
    yield b""


async def _early(seen: Seen) -> Reply:
    yield b"HTTP/1.1 100 Continue\r\n\r\n"
    yield b"HTTP/1.1 103 Early Hints\r\nLink: </style.css>\r\n\r\n"
    yield plain(b"after hints")


async def _big(seen: Seen) -> Reply:
    size = int(seen.target.partition("bytes=")[2] or 0)
    yield b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size
    block = b"x" * 65536
    for at in range(0, size, len(block)):
        yield block[: size - at]


_REPLIES: dict[str, Callable[[Seen], Reply]] = {
    "completions": _chat, "embeddings": _embeddings, "models": _models, "echo": _echo,
    "hop": _hop, "gzip": _gzip, "trailers": _trailers, "204": _no_content, "close": _until_close,
    "reset": _reset, "503": _unavailable, "drop": _drop, "hang": _hang, "early": _early,
    "big": _big,
}  # fmt: skip


async def _main(port: int) -> None:
    upstream = FakeUpstream()
    print(f"http://127.0.0.1:{await upstream.start(port=port)}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description="A fake OpenAI server.")
    options.add_argument("--port", type=int, default=0)
    asyncio.run(_main(options.parse_args().port))
