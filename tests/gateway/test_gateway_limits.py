"""Requests that are refused before they could do harm: malformed, oversized, smuggled."""

from __future__ import annotations

import pytest
from gateway_lab import CHAT, Rig, chat, request

UP = "/upstream/m1"


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: +5",
        "Content-Length: 5, 5",
        "Content-Length: 0x5",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: identity",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding:\x0bchunked",
        "X: a\r\n folded: b",
        "X: a\nY: b",
        "X\x00: a",
        "Host: other",
    ],
)
async def test_what_could_smuggle_a_request_is_refused(rig: Rig, head: str) -> None:
    evil = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\n{head}\r\n\r\n0\r\n\r\n"
    wire = await rig.connect()
    wire.send(evil.encode() + request(UP + "/smuggled"))
    got = await wire.answer()
    assert got.status in (400, 501)
    assert got.error["code"]
    assert await wire.until_end() == b""
    assert rig.upstream.seen == []


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),  # TLS spoken to a plain port
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: localhost\r\n\r\n", 505),
        (b"GET /health\r\n\r\n", 505),
        (b"GET http://\r\n\r\n", 505),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"CONNECT localhost:22 HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n", 404),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n\r\n", 200),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),
    ],
)
async def test_odd_first_lines(rig: Rig, data: bytes, status: int) -> None:
    got = await rig.ask(data)
    assert got.status == status


async def test_a_huge_head_is_refused_wherever_it_grows(rig: Rig) -> None:
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "
    ended = start + b"a" * 66_000 + b"\r\n\r\n"
    for data in (start + b"a" * 70_000, ended, b"GET /" + b"a" * 70_000):
        got = await rig.ask(data)
        assert got.status == 431
        assert got.error["code"] == "head_too_large"
    chunked = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire = await rig.connect()
    wire.send(chunked.encode() + b"1;" + b"x" * 300_000)
    assert (await wire.answer()).status == 431


async def test_a_body_over_the_limit_is_a_413_that_names_the_setting() -> None:
    async with Rig(max_body_bytes=1000) as rig:
        assert (await rig.ask(chat())).status == 200
        counted = request(CHAT, b"x" * 1001)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        chunked = head.encode() + b"3e8\r\n" + b"x" * 1000 + b"\r\n1\r\nx\r\n0\r\n\r\n"
        for data in (counted, chunked):
            got = await rig.ask(data)
            assert got.status == 413
            assert got.error["code"] == "request_too_large"
            assert "max_body_bytes" in got.error["message"]
        assert len(rig.upstream.seen) == 1


async def test_a_refused_upload_is_heard_by_a_client_that_sends_before_it_reads(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20000000\r\n\r\n")
    for _ in range(20):
        wire.send(b"x" * 100_000)
        await wire.writer.drain()
    assert (await wire.answer()).status == 404
