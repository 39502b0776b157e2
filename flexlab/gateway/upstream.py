"""The engine's side of the data plane: one connection, and the pool of idle ones.

A head is parsed and rendered again; a body passes as the bytes that arrived, chunk framing and
trailers included, so that a streamed token costs one read, one short scan and one write. The
parser only watches for the end of a chunked body.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from time import monotonic
from typing import Protocol

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from flexlab.core.text import clean_line
from flexlab.gateway.http import HEAD_LIMIT_BYTES, Head, Headers
from flexlab.gateway.observe import EVENT_MARK, USAGE_TAIL_BYTES, Record
from flexlab.gateway.pool import Destination, Pool
from flexlab.gateway.relay import AnswerHead, Malformed, interim_head, switching_head

# What the bytes that arrive now are.
HEAD = 0
COUNTED = 1
CHUNKED = 2
UNTIL_CLOSE = 3
UNCHUNKED = 4  # chunked from the engine, until close to a client that speaks HTTP/1.0
TUNNEL = 5

_CHUNKED_MODES = (CHUNKED, UNCHUNKED)
_INTERIM_MAX = 16


class Asker(Protocol):
    """Whom an upstream connection works for: one exchange at a time."""

    head: Head
    record: Record

    def answer_begins(self, status: int) -> None: ...
    def upgraded(self) -> None: ...
    def completed(self) -> None: ...
    def upstream_lost(self, cause: str) -> None: ...
    def upstream_failed(self, cause: str) -> None: ...
    def tunnel_closed(self) -> None: ...
    def pause_client(self, paused: bool) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection to an engine. It works for `asker`, or is idle in the pool."""

    __slots__ = (
        "_done", "_headers", "_interim", "_left", "_open_chunk", "_parser", "_pieces",
        "_pool", "_reusable", "_sse", "_surplus", "asker", "before", "buffer", "destination",
        "head_sent", "heard_at", "last", "mode", "paused", "record", "reused", "timed", "transport",
        "write",
    )  # fmt: skip

    def __init__(self, pool: Pool, destination: Destination) -> None:
        self._pool = pool
        self.destination = destination
        self.asker: Asker | None = None
        self.reused = False
        self.paused = False
        self.transport: asyncio.Transport

    # -- what an exchange calls

    def begin(
        self, asker: Asker, write: Callable[[bytes], object], request: bytes, body: bytes
    ) -> None:
        """Ask; the answer's bytes go to `write`."""
        self.asker = asker
        self.record = asker.record
        self.write = write
        self._parser = HttpResponseParser(self)
        self._headers: Headers = []
        self._pieces: list[bytes] = []
        self.buffer = self.before = self.last = b""
        self.mode = HEAD
        self._interim = self._left = 0
        self.head_sent = self._done = self._surplus = self._open_chunk = self._sse = False
        self._reusable = False
        self.timed = False
        self.heard_at = 0.0
        if len(body) < HEAD_LIMIT_BYTES:
            self.transport.write(request + body)
        else:
            self.transport.write(request)
            self.transport.write(body)

    def drop(self) -> None:
        """Nobody wants the rest."""
        self.asker = None
        self.transport.abort()

    def drain_into_nothing(self) -> None:
        """The client has left, but the engine must be read to the end."""
        self.write = _discard
        self.resume()

    def pause(self) -> None:
        """The client does not keep up."""
        if not self.paused:
            self.paused = True
            self.transport.pause_reading()

    def resume(self) -> None:
        """The client reads again."""
        if self.paused:
            self.paused = False
            self.heard_at = monotonic()
            self.transport.resume_reading()

    @property
    def untouched(self) -> bool:
        """Not one byte of an answer has come."""
        return self.mode == HEAD and not self.buffer and not self._interim

    def frame_event(self, event: bytes) -> bytes | None:
        """`event` as it may stand next in the stream; None when the stream is not SSE or is in
        the middle of an event, where nothing can be said any more."""
        if not self._sse or not self.head_sent:
            return None
        tail = (self.before[-8:] + self.last[-8:])[-8:]
        if self.mode == CHUNKED:
            ended = not tail or tail.endswith((b"\n\n\r\n", b"\r\n\r\n\r\n"))
            return b"%x\r\n%s\r\n" % (len(event), event) if ended and not self._open_chunk else None
        ended = not tail or tail.endswith((b"\n\n", b"\r\n\r\n"))
        return event if ended and self.mode in (UNTIL_CLOSE, UNCHUNKED) else None

    # -- transport

    def connection_made(  # type: ignore[override]  # uvloop's transports are no subclasses
        self, transport: asyncio.Transport
    ) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        asker = self.asker
        if asker is None:
            self._pool.forget(self)
        elif self.mode == TUNNEL:
            self.asker = None
            asker.tunnel_closed()
        elif self.mode == UNTIL_CLOSE and exc is None:
            self._finish()
        else:
            asker.upstream_lost(_cause(exc))

    def pause_writing(self) -> None:
        if self.asker is not None and self.mode == TUNNEL:
            self.asker.pause_client(True)

    def resume_writing(self) -> None:
        if self.asker is not None and self.mode == TUNNEL:
            self.asker.pause_client(False)

    def data_received(self, data: bytes) -> None:
        if self.asker is None:  # an idle connection has nothing to say
            self.transport.abort()
        elif self.mode == HEAD:
            self._take_head(data)
        elif self.mode == TUNNEL:
            self.record.bytes_out += len(data)
            self.write(data)
        else:
            self._take_body(data)

    # -- parser callbacks: heads, and the end of a chunked body

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.mode == HEAD:  # later ones are trailers, which pass as they are
            self._headers.append((name.lower(), value))

    def on_message_begin(self) -> None:
        self._surplus = self._done and self.mode != HEAD

    def on_chunk_header(self) -> None:
        self._open_chunk = True

    def on_chunk_complete(self) -> None:
        self._open_chunk = False

    def on_body(self, data: bytes) -> None:
        if self.mode == UNCHUNKED:
            self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._done = True

    # -- body

    def _take_body(self, data: bytes, head: bytes = b"") -> None:
        mode = self.mode
        if mode in _CHUNKED_MODES:
            try:
                self._parser.feed_data(data)
            except HttpParserError as error:
                self._fail(f"it sent malformed chunks: {error}")
                return
            if self._surplus:
                # Passed on, the surplus would be taken for the answer to the client's next request.
                self._fail("it sent more than one answer")
                return
            if mode == UNCHUNKED:
                data = b"".join(self._pieces)
                self._pieces.clear()
        elif mode == COUNTED:
            if len(data) > self._left:
                data = data[: self._left]
                self._reusable = False
            self._left -= len(data)
            self._done = self._left == 0
        record = self.record
        record.bytes_out += len(data)
        if self._sse:
            record.events += data.count(EVENT_MARK)
        if record.first_body_at is None and data:
            record.first_body_at = monotonic()
        if self.timed:
            self.heard_at = monotonic()
        self.before, self.last = self.last, data
        if head:
            self.head_sent = True
            data = head + data
        self.write(data)
        if self._done:
            self._finish()

    def _finish(self) -> None:
        asker, self.asker = self.asker, None
        if asker is None:
            return
        record = self.record
        if record.status == 200:
            record.tail = self.before[-USAGE_TAIL_BYTES:] + self.last[-USAGE_TAIL_BYTES:]
        self.before = self.last = b""
        self.write = _discard
        transport = self.transport
        if (
            self._reusable
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # answered before it had read the request
        ):
            if self.paused:
                self.resume()
            self._pool.put(self)
        else:
            transport.abort()
        asker.completed()

    def _fail(self, cause: str) -> None:
        if self.asker is not None:
            self.asker.upstream_failed(cause)

    # -- head

    def _take_head(self, data: bytes) -> None:
        if self.buffer:
            data = self.buffer + data
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > HEAD_LIMIT_BYTES:
                self.buffer = data
                if len(data) > HEAD_LIMIT_BYTES:
                    self._fail("the head of its answer is larger than 64 KiB")
                return
            try:
                self._parser.feed_data(data[:end])
            except HttpParserUpgrade:
                pass
            except HttpParserError as error:
                self._fail(f"it does not speak HTTP: {error}")
                return
            status = self._parser.get_status_code()
            if status >= 200 or status == 101:
                break
            if not self._pass_interim(status, data[:end]):
                return
            data = data[end:]
        self.buffer = b""
        if status == 101:
            self._switch(data, end)
        else:
            self._pass_head(status, data, end)

    def _pass_interim(self, status: int, lines: bytes) -> bool:
        """1xx before the answer: 100 was for us (Expect never gets here), others are passed."""
        self._interim += 1
        if self._interim > _INTERIM_MAX:
            self._fail("it sends no end of interim answers")
            return False
        assert self.asker is not None
        if status != 100 and self.asker.head.version != "1.0":
            self.write(interim_head(_status_line(lines), self._headers))
        self._parser = HttpResponseParser(self)
        self._headers = []
        self._done = False
        return True

    def _pass_head(self, status: int, data: bytes, end: int) -> None:
        asker = self.asker
        assert asker is not None
        head = asker.head
        try:
            answer = AnswerHead(_status_line(data), self._headers)
        except Malformed as error:
            self._fail(str(error))
            return
        self._sse = answer.sse
        bodiless = head.method == b"HEAD" or status in (204, 304)
        self._choose_mode(head, answer, bodiless=bodiless)
        rendered = answer.render(head, framed=status not in (204, 304))
        asker.answer_begins(status)
        if bodiless:
            self._reusable = self._reusable and len(data) == end
            self.write(rendered)
            self._finish()
            return
        # With what came of the body in one write; until it is written, a failure is a clean 502.
        self._take_body(data[end:], rendered)

    def _choose_mode(self, head: Head, answer: AnswerHead, *, bodiless: bool) -> None:
        parser = self._parser
        if head.method == b"HEAD":  # the parser would wait for the body that the length speaks of
            self._reusable = parser.get_http_version() == "1.1" and not answer.closing
        else:
            self._reusable = parser.should_keep_alive()
        if answer.chunked:
            self.mode = UNCHUNKED if head.version == "1.0" else CHUNKED
        elif answer.length is not None:
            self.mode = COUNTED
            self._left = answer.length
        else:
            self.mode = UNTIL_CLOSE
        # The parser may have said so of the head alone; the end of a body is still to come.
        self._done = False
        if self.mode >= UNTIL_CLOSE and not bodiless:
            head.keep = False

    def _switch(self, data: bytes, end: int) -> None:
        asker = self.asker
        assert asker is not None
        if not asker.head.tunnel:
            self._fail("it switched protocols without being asked")
            return
        self.mode = TUNNEL
        self.head_sent = True
        self.write(switching_head(_status_line(data), self._headers, asker.head) + data[end:])
        asker.upgraded()


async def connect(pool: Pool, destination: Destination) -> Upstream:
    """A new connection to an engine. Raises OSError, or TimeoutError after `connect_s`."""
    endpoint = destination.endpoint
    async with asyncio.timeout(endpoint.connect_s):
        if endpoint.unix_path is not None:
            _, upstream = await pool.loop.create_unix_connection(
                lambda: Upstream(pool, destination), endpoint.unix_path
            )
        else:
            _, upstream = await pool.loop.create_connection(
                lambda: Upstream(pool, destination),
                endpoint.host,
                endpoint.port,
                ssl=True if endpoint.scheme == "https" else None,
            )
    return upstream


def _status_line(head: bytes) -> bytes:
    """Without its eight bytes of version, with its line end."""
    return head[8 : head.find(b"\r\n") + 2]


def _discard(data: bytes) -> None:
    """Where the rest of an answer goes whose client has left."""


def _cause(exc: Exception | None) -> str:
    return "it closed the connection" if exc is None else f"the connection broke: {in_words(exc)}"


def in_words(exc: Exception) -> str:
    """An error of a connection; asyncio and uvloop put different texts into the same error."""
    if isinstance(exc, OSError) and exc.errno is not None and exc.errno > 0:
        return os.strerror(exc.errno)
    return clean_line(str(exc)) or type(exc).__name__
