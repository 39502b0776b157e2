"""The client's side of the data plane: one connection, its requests in, their answers out in order.

Requests are read whole (the router needs the body's `model`), one at a time per connection; bodies
are in memory for now, bounded by `max_body_bytes` each. What happens to a request from there on is
in exchange.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from httptools import (
    HttpParserCallbackError,
    HttpParserError,
    HttpParserUpgrade,
    HttpRequestParser,
)

from flexlab.gateway import sockets
from flexlab.gateway.exchange import Exchange
from flexlab.gateway.http import (
    HEAD_LIMIT_BYTES,
    Answer,
    Head,
    Headers,
    body_too_large,
    error_answer,
    head_too_large,
)
from flexlab.gateway.upstream import Upstream

if TYPE_CHECKING:
    from flexlab.gateway.proxy import Gateway

log = logging.getLogger(__name__)

HIGH_WATER_BYTES = 256 * 1024
"""Of an answer that the client has not read yet; above it the engine's connection is not read."""
PIPELINED_MAX = 8
LINGER_S = 5.0
"""After a refusal before the body was read: closing at once would reset it away (RFC 9112, 9.6)."""
_UNSOUND = frozenset({400, 431, 501, 505})
"""After such a head, what follows on the connection may not be what it seems."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Client(asyncio.Protocol):
    """One connection of a client: reads requests, and writes answers in their order."""

    __slots__ = (
        "_after_upgrade", "_body_bytes", "_current", "_deaf", "_got_on", "_headers", "_idle_bytes",
        "_incoming", "_lingers", "_owes_continue", "_parser", "_peer", "_pieces", "_queue",
        "_read_bytes", "_starting", "_tunnel", "_url", "gateway", "heard_at", "transport",
        "write_paused",
    )  # fmt: skip

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.transport: asyncio.Transport | None = None
        self.heard_at = monotonic()
        self.write_paused = False
        self._peer = ""
        self._parser = HttpRequestParser(self)
        self._current: Exchange | None = None
        self._queue: deque[Exchange] = deque()
        self._starting = False
        self._deaf = False
        """Nothing more is read as HTTP: the connection closes after the current answer."""
        self._lingers = False
        self._tunnel: Upstream | None = None
        self._after_upgrade: bytes | None = None
        self._got_on = False
        """The last read held a whole head, some body or the end of a message."""
        self._idle_bytes = self._read_bytes = 0
        self._incoming: Exchange | None = None
        self._headers: Headers
        self._owes_continue = False
        self._forget_message()

    # -- transport

    def connection_made(  # type: ignore[override]  # uvloop's transports are no subclasses
        self, transport: asyncio.Transport
    ) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(HIGH_WATER_BYTES)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) else "local"
        sockets.watch_for_dead_peer(transport)
        self.gateway.clients.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self.gateway.left(self)
        self._queue.clear()
        current, self._current = self._current, None
        if current is not None:
            current.client_left()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._current is not None and self._current.upstream is not None:
            self._current.upstream.pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._current is not None and self._current.upstream is not None:
            self._current.upstream.resume()

    def data_received(self, data: bytes) -> None:
        self.heard_at = monotonic()
        if self._tunnel is not None:
            self._tunnel.transport.write(data)
        elif self._after_upgrade is not None:
            self._hold(data)
        elif not self._deaf:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        self._got_on = False
        self._read_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as stop:
            self._leave_parser(data[stop.args[0] :])
            return
        except HttpParserCallbackError as error:
            log.error("reading a request failed", exc_info=error.__context__ or error)
            self._misread(error_answer(500, "internal_error", "the gateway failed; see its log"))
            return
        except HttpParserError as error:
            self._misread(error_answer(400, "bad_request", f"this is not HTTP/1.1: {error}"))
            return
        # Heads, chunk extensions and trailers: bounded together, since all are kept by the parser.
        if self._got_on:
            self._idle_bytes = 0
        else:
            self._idle_bytes += len(data)
            if self._idle_bytes > HEAD_LIMIT_BYTES:
                self._misread(head_too_large())

    # -- parser callbacks

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._got_on = True
        if self._deaf or self._incoming is not None:
            return
        parser, gateway = self._parser, self.gateway
        head = Head(
            parser.get_method(), self._url, self._headers, parser.get_http_version(), self._peer
        )
        self._headers = []  # what comes there from now on are trailers: not this request's headers
        fields = head.fields
        head.request_id = gateway.request_id(fields.get(b"x-request-id"))
        head.keep = parser.should_keep_alive() and not gateway.stopping
        head.upgrade = parser.should_upgrade()
        self._incoming = exchange = Exchange(gateway, self, head)
        refusal = self._judge(head)
        if refusal is not None:
            exchange.early = refusal
            if head.body_expected or refusal.status in _UNSOUND:
                self._refuse(exchange)
        elif b"expect" in fields and _wants_continue(head):
            if self._current is None:
                self.write(_CONTINUE)
            else:
                self._owes_continue = True

    def on_body(self, data: bytes) -> None:
        self._got_on = True
        if self._deaf:
            return
        self._body_bytes += len(data)
        if self._body_bytes > self.gateway.max_body_bytes:
            assert self._incoming is not None
            self._incoming.early = body_too_large(self.gateway.max_body_bytes)
            self._refuse(self._incoming)
            return
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._got_on = True
        exchange, pieces = self._incoming, self._pieces
        if self._deaf or exchange is None:
            return
        head = exchange.head
        if head.upgrade and not head.tunnel:
            return  # the parser skips the body then: see _decline_upgrade
        if pieces:
            exchange.body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._forget_message()
        self._deaf = not head.keep and not head.upgrade
        if self._current is None and not self._starting:
            self._current = exchange
            exchange.start()
        else:
            self._submit(exchange)

    def _forget_message(self) -> None:
        self._url = b""
        self._headers = []
        self._pieces: list[bytes] = []
        self._incoming = None
        self._body_bytes = 0

    def _judge(self, head: Head) -> Answer | None:
        if self._idle_bytes + self._read_bytes > HEAD_LIMIT_BYTES and (
            sum(len(name) + len(value) + 4 for name, value in head.headers) + len(head.target)
            > HEAD_LIMIT_BYTES
        ):
            return head_too_large()
        if head.version not in ("1.1", "1.0"):
            return error_answer(505, "http_version", "this gateway speaks HTTP/1.1 and HTTP/1.0")
        fields = head.fields
        coding = fields.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or head.version == "1.0"):
            return error_answer(501, "transfer_coding", "the only transfer coding here is chunked")
        refusal = self.gateway.routes.judge(head)
        length = fields.get(b"content-length")
        if refusal is None and length is not None and int(length) > self.gateway.max_body_bytes:
            return body_too_large(self.gateway.max_body_bytes)
        return refusal

    # -- refusals that end the connection

    def _refuse(self, exchange: Exchange) -> None:
        """Answer without reading the body; what still comes of it is thrown away."""
        exchange.head.keep = False
        self._forget_message()
        self._deaf = self._lingers = True
        self._submit(exchange)

    def _misread(self, answer: Answer) -> None:
        """What came cannot be read on; said after the answers that are due before it."""
        if self._deaf:
            return
        exchange = self._incoming
        if exchange is None:
            head = Head(b"GET", self._url or b"/", [], client=self._peer)
            head.request_id = self.gateway.request_id(None)
            exchange = Exchange(self.gateway, self, head)
        exchange.head.route = exchange.head.route or "unreadable"
        exchange.early = answer
        self._refuse(exchange)

    # -- order of answers

    def _submit(self, exchange: Exchange) -> None:
        self._queue.append(exchange)
        if self._current is None:
            self._start_next()
        elif len(self._queue) >= PIPELINED_MAX and self.transport is not None:
            self.transport.pause_reading()

    def _start_next(self) -> None:
        if self._starting:  # an answer of our own ended at once: the loop below goes on
            return
        self._starting = True
        while self._queue and self._current is None and self.transport is not None:
            self._current = exchange = self._queue.popleft()
            exchange.start()
        self._starting = False
        if self._current is None and self._owes_continue:
            self._owes_continue = False
            if self._incoming is not None:
                self.write(_CONTINUE)

    @property
    def writer(self) -> Callable[[bytes], object]:
        """The shortest way to the client, for the bytes of one answer."""
        assert self.transport is not None
        return self.transport.write

    def write(self, data: bytes) -> None:
        """To the client; nowhere once it has left."""
        if self.transport is not None:
            self.transport.write(data)

    def answer_ended(self, keep: bool) -> None:
        """The current answer is written."""
        self._current = None
        transport = self.transport
        if transport is None:
            return
        if not keep or self.gateway.stopping:
            self._queue.clear()
            self._close(transport)
            return
        if self._after_upgrade is not None and not self._queue:
            self._resume_http(self._after_upgrade)
        if self._queue:
            if len(self._queue) <= PIPELINED_MAX:
                transport.resume_reading()
            self._start_next()
        elif self._owes_continue:
            self._start_next()

    def cut(self, *, reset: bool) -> None:
        """End the connection under an answer that is not whole; what was written still goes."""
        self._current = None
        self._queue.clear()
        self._deaf = True
        transport = self.transport
        if transport is None:
            return
        if reset:
            sockets.reset(transport)
        else:
            transport.close()

    def _close(self, transport: asyncio.Transport) -> None:
        if self._lingers and transport.can_write_eof():
            transport.write_eof()
            self.gateway.loop.call_later(LINGER_S, transport.abort)
        else:
            transport.close()

    def close_if_idle(self) -> None:
        """Close a connection on which no answer is due."""
        if self._current is None and not self._queue and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Close at once, whatever is going on."""
        if self.transport is not None:
            self.transport.abort()

    # -- upgrades

    def _leave_parser(self, rest: bytes) -> None:
        """The parser stops after a head that asks for another protocol. Where that is allowed,
        the answer decides; what comes meanwhile belongs to either protocol."""
        if self._deaf:
            return
        if self._incoming is not None:
            self._decline_upgrade(self._incoming.head, rest)
        elif self._current is None:  # answered by the gateway itself
            self._resume_http(rest)
        else:
            self._after_upgrade = b""
            self._hold(rest)

    def _decline_upgrade(self, head: Head, rest: bytes) -> None:
        """Go on as if it had not asked (RFC 9110, 7.8), body and all: a new parser is told of the
        body by a head that says nothing else."""
        head.upgrade = False
        length = head.fields.get(b"content-length", b"0")
        framing = b"content-length: " + length
        if b"transfer-encoding" in head.fields:
            framing = b"transfer-encoding: chunked"
        self._parser = HttpRequestParser(self)
        self._parse(b"POST / HTTP/1.1\r\n%s\r\n\r\n%s" % (framing, rest))

    def _hold(self, data: bytes) -> None:
        assert self._after_upgrade is not None
        self._after_upgrade += data
        if len(self._after_upgrade) > HEAD_LIMIT_BYTES and self.transport is not None:
            self.transport.pause_reading()

    def _resume_http(self, rest: bytes) -> None:
        """It was not granted: the connection goes on as HTTP/1.1."""
        self._after_upgrade = None
        self._parser = HttpRequestParser(self)
        if self.transport is not None:
            self.transport.resume_reading()
        if rest:
            self._parse(rest)

    def open_tunnel(self, upstream: Upstream) -> None:
        """It was granted: bytes go both ways from now on."""
        self._tunnel = upstream
        rest, self._after_upgrade = self._after_upgrade, None
        if rest:
            upstream.transport.write(rest)
        if self.transport is not None:
            self.transport.resume_reading()

    def pause_reading(self, paused: bool) -> None:
        """Back-pressure from the other side of a tunnel."""
        if self.transport is None:
            return
        if paused:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()


def _wants_continue(head: Head) -> bool:
    return head.version == "1.1" and head.fields[b"expect"].lower() == b"100-continue"
