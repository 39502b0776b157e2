"""Wherever the network cuts a request or an answer in two, the other side gets the same bytes.

The transports are doubles here: only so is every single split point reached, and in no time.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Iterator

import pytest
from gateway_lab import FakeLab, Listening, chat, request
from hypothesis import given, settings
from hypothesis import strategies as st

from flexlab.gateway.downstream import Client
from flexlab.gateway.proxy import Gateway
from flexlab.gateway.routes import Router
from flexlab.gateway.upstream import Upstream
from flexlab.spec.instance import Endpoint
from flexlab.spec.lab import ModelView

ENDPOINT = Endpoint(port=9)


class Pipe:
    """A transport that keeps what was written."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    abort = close

    def get_extra_info(self, name: str) -> None:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def set_write_buffer_limits(self, high: int) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Bench:
    """A client's and an engine's connection around a gateway, without sockets."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lab = FakeLab()
        self.lab.behaviour["m1"] = ENDPOINT
        self.gateway = Gateway(Router(self.lab, Listening()), loop=loop)
        self.gateway._id_prefix = b"id"
        self.client = Client(self.gateway)
        self.asking = Pipe()
        self.client.connection_made(self.asking)
        self.upstream = Upstream(self.gateway.pool, self.gateway.pool.destination(ENDPOINT))
        self.engine = Pipe()
        self.upstream.connection_made(self.engine)
        self.gateway.pool.put(self.upstream)

    def run(self, asked: list[bytes], answered: list[bytes]) -> tuple[bytes, bytes]:
        """What the engine got and what the client got."""
        for piece in asked:
            self.client.data_received(piece)
        for piece in answered:
            if not self.engine.closed:
                self.upstream.data_received(piece)
        assert self.lab.held == 0
        return self.engine.written, self.asking.written


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def split(data: bytes, *points: int) -> list[bytes]:
    edges = [0, *sorted(points), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges) if a < b]


BODY = chat().partition(b"\r\n\r\n")[2]
CHUNKED = b"\r\n".join(
    [b"POST /v1/chat/completions HTTP/1.1", b"Host: localhost", b"Transfer-Encoding: chunked",
     b"", b"5", BODY[:5], b"%x;a=b" % len(BODY[5:]), BODY[5:], b"0", b"T: x", b"", b""]
)  # fmt: skip
COUNTED_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-A: b\r\n\r\nhello world"
STREAM = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"d\r\ndata: {\"a\"}\n\n\r\n7;x=y\r\ndata: \n\r\n0\r\nX-Sum: 42\r\n\r\n"
)  # fmt: skip
EVENTS = b'data: {"a"}\n\ndata: \n'
ANSWERS = {
    "counted": COUNTED_ANSWER,
    "stream": STREAM,
    "interim": b"HTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n" + COUNTED_ANSWER,
    "continue": b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM,
    "204": b"HTTP/1.1 204 No Content\r\nX-A: b\r\n\r\n",
    "304": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 99\r\n\r\n",
    "empty": b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n",
}
REQUESTS = {
    "counted": chat(),
    "chunked": CHUNKED,
    "upgrade": chat("", "Connection: Upgrade", "Upgrade: h2c"),
    "get": request("/upstream/m1/echo"),
    "old": chat(version="1.0"),
}


def without_id(data: bytes) -> bytes:
    return re.sub(rb"x-request-id: [^\r]*\r\n", b"", data)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_may_be_split_anywhere(loop: asyncio.AbstractEventLoop, name: str) -> None:
    data = REQUESTS[name]
    whole = Bench(loop)
    known_model(whole)
    wanted = [without_id(got) for got in whole.run([data], [COUNTED_ANSWER])]
    assert b"hello world" in wanted[1]
    for at in range(1, len(data)):
        bench = Bench(loop)
        known_model(bench)
        assert [without_id(got) for got in bench.run(split(data, at), [COUNTED_ANSWER])] == wanted
    bench = Bench(loop)
    known_model(bench)
    pieces = split(data, *range(1, len(data)))
    assert [without_id(got) for got in bench.run(pieces, [COUNTED_ANSWER])] == wanted


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_may_be_split_anywhere(
    loop: asyncio.AbstractEventLoop, name: str, version: str
) -> None:
    data, ask = ANSWERS[name], chat(version=version)
    wanted = Bench(loop).run([ask], [data])[1]
    body = {"counted": b"hello world", "interim": b"hello world"}.get(name, b"")
    if b"event-stream" in data:
        body = STREAM.partition(b"\r\n\r\n")[2] if version == "1.1" else EVENTS
    assert wanted.endswith(b"\r\n\r\n" + body)
    for at in range(1, len(data)):
        assert Bench(loop).run([ask], split(data, at))[1] == wanted
    assert Bench(loop).run([ask], split(data, *range(1, len(data))))[1] == wanted


def known_model(bench: Bench) -> None:
    bench.lab.views = [ModelView(name="m1", word="ready", since=0.0, why="", installed=True)]


@pytest.mark.parametrize("surplus", [b"x", b"\r\nHTTP/1.1 200 OK\r\n\r\n", COUNTED_ANSWER])
@pytest.mark.parametrize("name", ["counted", "stream", "204"])
def test_what_an_engine_sends_after_its_answer_never_reaches_a_client(
    loop: asyncio.AbstractEventLoop, name: str, surplus: bytes
) -> None:
    """It would be taken for the answer to the next request."""
    wanted = without_id(Bench(loop).run([chat()], [ANSWERS[name]])[1])
    for pieces in ([ANSWERS[name] + surplus], [ANSWERS[name], surplus]):
        bench = Bench(loop)
        got = without_id(bench.run([chat()], pieces)[1])
        assert got == wanted or b" 502 " in got
        assert bench.engine.closed
        assert bench.gateway.pool.take(bench.upstream.destination) is None


@given(
    st.sampled_from(sorted(ANSWERS)),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    st.lists(st.integers(1, 200), max_size=3),
)
@settings(max_examples=300, deadline=None)
def test_a_garbled_answer_never_crashes_or_leaks(
    name: str, changes: list[tuple[int, int]], points: list[int]
) -> None:
    loop = asyncio.new_event_loop()
    try:
        data = bytearray(ANSWERS[name])
        for at, value in changes:
            data[at % len(data)] = value
        bench = Bench(loop)
        bench.client.data_received(chat())
        for piece in split(bytes(data), *(point for point in points if point < len(data))):
            if not bench.engine.closed:
                bench.upstream.data_received(piece)
        if not bench.engine.closed:
            bench.upstream.connection_lost(None)
        assert bench.lab.held == 0
        assert bench.asking.written
    finally:
        loop.close()


@given(
    st.sampled_from(sorted(REQUESTS)),
    st.lists(st.tuples(st.integers(0, 400), st.binary(max_size=3)), max_size=5),
    st.lists(st.integers(1, 400), max_size=3),
)
@settings(max_examples=400, deadline=None)
def test_a_garbled_request_never_crashes_hangs_or_leaks(
    name: str, changes: list[tuple[int, bytes]], points: list[int]
) -> None:
    """Each byte may become any others; what the engine gets is always one sound request."""
    loop = asyncio.new_event_loop()
    try:
        data = REQUESTS[name]
        for at, new in changes:
            at %= len(data)
            data = data[:at] + new + data[at + 1 :]
        bench = Bench(loop)
        known_model(bench)
        for piece in split(data, *(point for point in points if point < len(data))):
            if not bench.asking.closed:
                bench.client.data_received(piece)
        assert_sound(bench.engine.written)
        bench.client.connection_lost(None)
        assert bench.lab.held == 0
        assert bench.gateway.observer.in_flight == 0
        assert b"internal_error" not in bench.asking.written
    finally:
        loop.close()


def assert_sound(sent: bytes) -> None:
    if not sent:
        return
    head, _, body = sent.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    assert re.fullmatch(rb"[A-Z-]+ /[^ ]* HTTP/1\.1", first)
    names = [line.partition(b":")[0].lower() for line in lines]
    assert names.count(b"host") == 1
    assert b"transfer-encoding" not in names
    lengths = [line for line in lines if line.lower().startswith(b"content-length:")]
    assert len(lengths) <= 1
    assert len(body) == (int(lengths[0].partition(b":")[2]) if lengths else 0)
