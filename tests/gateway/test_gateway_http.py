"""What an HTTP client and an HTTP server may rely on with the gateway between them."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest
from gateway_lab import CHAT, Got, Rig, chat, request

UP = "/upstream/m1"


def events(got: Got) -> list[bytes]:
    return [event for event in got.body.split(b"\n\n") if event]


async def test_a_json_answer_passes_as_it_is(rig: Rig) -> None:
    got = await rig.ask(chat())
    assert got.status == 200
    assert json.loads(got.body)["choices"][0]["message"]["content"] == "three small words"
    assert got.names["content-type"] == "application/json"


async def test_a_stream_passes_event_by_event(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("events=5 every=0.01"))
    got = await wire.answer()
    assert got.whole
    assert len(events(got)) == 7  # five tokens, usage, [DONE]
    assert events(got)[-1] == b"data: [DONE]"


async def test_tokens_are_not_held_back(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("events=2 every=0.15"))
    await wire.head()
    first = await wire.reader.readuntil(b"\n\n")
    assert b"t0" in first
    assert b"t1" not in first
    assert rig.upstream.completed == 0


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_streams_tell_proxies_before_us_not_to_buffer(rig: Rig, path: str) -> None:
    body = b'{"model":"m1","prompt":"demo events=1"}'
    got = await rig.ask(request(path, body))
    assert got.names["x-accel-buffering"] == "no"
    assert got.names["cache-control"] == "no-cache"


async def test_a_chunked_request_reaches_the_engine_whole(rig: Rig) -> None:
    body = chat().partition(b"\r\n\r\n")[2]
    pieces = [body[at : at + 30] for at in range(0, len(body), 30)]
    framed = b"".join(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    # What looks like a header in the trailers must not become one.
    got = await rig.ask(head.encode() + framed + b"0\r\nX-Api-Key: evil\r\nX-T: 1\r\n\r\n")
    assert got.status == 200
    (seen,) = rig.upstream.seen
    assert seen.body == body
    assert seen.header("content-length") == str(len(body))
    assert seen.header("transfer-encoding") is None
    assert seen.header("x-t") is None


async def test_a_client_that_waits_for_100_continue_gets_it(rig: Rig) -> None:
    head, _, body = chat("", "Expect: 100-continue").partition(b"\r\n\r\n")
    wire = await rig.connect()
    wire.send(head + b"\r\n\r\n")
    assert (await wire.answer()).status == 100
    wire.send(body)
    assert (await wire.answer()).status == 200
    assert rig.upstream.seen[0].header("expect") is None


async def test_100_continue_waits_for_its_turn_in_a_pipeline(rig: Rig) -> None:
    head, _, body = chat("", "Expect: 100-continue").partition(b"\r\n\r\n")
    wire = await rig.connect()
    wire.send(chat("delay=0.05") + head + b"\r\n\r\n")
    assert (await wire.answer()).status == 200
    assert (await wire.answer()).status == 100
    wire.send(body)
    assert (await wire.answer()).status == 200


async def test_a_refusal_comes_before_the_body_is_sent(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
              b"Content-Length: 1000000\r\n\r\n")  # fmt: skip
    got = await wire.answer()
    assert got.status == 404
    assert got.names["connection"] == "close"


@pytest.mark.parametrize("path", ["/v1/models", UP + "/v1/models"])
async def test_head_has_the_headers_and_no_body(rig: Rig, path: str) -> None:
    wire = await rig.connect()
    wire.send(request(path, method="HEAD"))
    got = await wire.answer(head_only=True)
    assert got.status == 200
    assert int(got.names["content-length"]) > 0
    wire.send(request("/health"))  # had a body come, this answer would not be readable
    assert (await wire.answer()).status == 200


async def test_one_connection_serves_many_requests(rig: Rig) -> None:
    wire = await rig.connect()
    for _ in range(3):
        wire.send(chat("events=2"))
        assert (await wire.answer()).whole
    assert rig.upstream.connections == 1


async def test_pipelined_requests_are_answered_in_order(rig: Rig) -> None:
    wire = await rig.connect()
    count = 40
    echoes = b"".join(request(f"{UP}/echo?n={n}") for n in range(count))
    wire.send(chat("delay=0.05") + echoes + request("/health"))
    assert b"three small words" in (await wire.answer()).body
    for number in range(count):
        assert f"n={number}\n".encode() in (await wire.answer()).body
    assert b'"ok"' in (await wire.answer()).body


async def test_thousands_of_pipelined_local_requests_do_not_pile_up(rig: Rig) -> None:
    wire = await rig.connect()
    count = 3000
    wire.send(chat("delay=0.05") + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * count)
    for _ in range(count + 1):
        assert (await wire.answer()).status == 200


async def test_hop_by_hop_headers_stay_on_their_side(rig: Rig) -> None:
    hop = ("Connection: keep-alive, X-Secret", "X-Secret: 1", "Keep-Alive: 5", "X-Keep: 2")
    await rig.ask(request(UP + "/echo", None, *hop, "Proxy-Authorization: x"))
    (seen,) = rig.upstream.seen
    assert seen.header("x-keep") == "2"
    for name in ("x-secret", "keep-alive", "proxy-authorization", "connection"):
        assert seen.header(name) is None
    got = await rig.ask(request(UP + "/hop"))
    assert got.names["x-end"] == "2"
    assert "x-hop" not in got.names
    assert "keep-alive" not in got.names
    assert got.all("set-cookie") == ["a=1", "b=2"]


async def test_the_engine_gets_its_own_key_and_never_the_clients(rig: Rig) -> None:
    rig.serve("strict", strip=("cookie",), headers=(("X-Api-Key", "engine"),))
    keys = ("Authorization: Bearer secret", "X-Api-Key: secret", "Cookie: a=b")
    await rig.ask(request(UP + "/echo", None, *keys))
    await rig.ask(request("/upstream/strict/echo", None, *keys))
    first, second = rig.upstream.seen
    assert first.header("authorization") == "Bearer engine-key"
    assert first.header("x-api-key") is None
    assert first.header("cookie") == "a=b"
    assert second.header("authorization") is None
    assert second.header("x-api-key") == "engine"
    assert second.header("cookie") is None


async def test_the_engine_is_asked_by_its_own_name(rig: Rig) -> None:
    await rig.ask(request(UP + "/echo"))
    assert rig.upstream.seen[0].header("host") == f"127.0.0.1:{rig.upstream.port}"


async def test_compressed_bodies_are_not_touched(rig: Rig) -> None:
    got = await rig.ask(request(UP + "/gzip", None, "Accept-Encoding: gzip"))
    assert got.names["content-encoding"] == "gzip"
    assert gzip.decompress(got.body) == b"hello " * 100


async def test_trailers_arrive(rig: Rig) -> None:
    got = await rig.ask(request(UP + "/trailers", None, "TE: trailers"))
    assert got.body == b"hello"
    assert got.trailers.lower() == b"x-sum: 42\r\n"
    assert rig.upstream.seen[0].header("te") == "trailers"


async def test_no_content_has_no_body_and_no_framing(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(request(UP + "/204") + request("/health"))
    got = await wire.answer()
    assert got.status == 204
    assert "transfer-encoding" not in got.names
    assert (await wire.answer()).status == 200


async def test_a_body_that_ends_with_the_connection(rig: Rig) -> None:
    got = await rig.ask(request(UP + "/close"))
    assert got.body == b"until close"
    assert got.names["connection"] == "close"


async def test_a_body_without_framing_that_breaks_off_is_not_ended_as_if_complete(
    rig: Rig,
) -> None:
    wire = await rig.connect()
    wire.send(request(UP + "/reset"))
    await wire.head()
    with pytest.raises(ConnectionResetError):
        await wire.until_end()


async def test_errors_of_the_engine_pass_as_they_are(rig: Rig) -> None:
    got = await rig.ask(request(UP + "/503"))
    assert got.status == 503
    assert got.names["retry-after"] == "3"
    assert got.body == b"loading"


async def test_an_engine_that_hangs_up_is_a_502_with_the_cause(rig: Rig) -> None:
    got = await rig.ask(request(UP + "/drop"))
    assert got.status == 502
    assert got.error["code"] == "backend_failed"
    assert "closed the connection" in got.error["message"]


async def test_an_engine_that_does_not_listen_is_a_502_with_the_cause(rig: Rig) -> None:
    rig.serve("gone", port=1)
    got = await rig.ask(chat(model="gone"))
    assert got.status == 502
    assert got.error["code"] == "backend_unreachable"
    assert "refused" in got.error["message"].lower()


async def test_path_and_query_arrive_as_they_came(rig: Rig) -> None:
    target = "/echo?a=1&b=%20&c=/upstream/x%2Fy"
    got = await rig.ask(request(UP + target))
    assert got.body.startswith(b"GET " + target.encode() + b"\n")


async def test_a_cut_stream_says_so_and_has_no_end(rig: Rig) -> None:
    got = await rig.ask(chat("events=10 every=0.01 cut=5"))
    assert not got.whole
    *tokens, last = events(got)
    assert len(tokens) == 5
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "backend_failed"
    assert error["type"] == "server_error"
    assert not got.raw_body.endswith(b"0\r\n\r\n")


async def test_an_http_1_0_client_gets_no_chunks(rig: Rig) -> None:
    got = await rig.ask(chat("events=3", version="1.0"))
    assert "transfer-encoding" not in got.names
    assert len(events(got)) == 5
    assert got.names["connection"] == "close"


async def test_an_http_1_0_client_may_keep_its_connection(rig: Rig) -> None:
    wire = await rig.connect()
    for _ in range(2):
        wire.send(chat("", "Connection: keep-alive", version="1.0"))
        got = await wire.answer()
        assert got.names["connection"] == "keep-alive"
    assert rig.gateway.observer.requests_total == 2


async def test_connection_close_is_obeyed(rig: Rig) -> None:
    for data in (chat("", "Connection: close"), request("/health", None, "Connection: close")):
        wire = await rig.connect()
        wire.send(data)
        got = await wire.answer()
        assert got.names["connection"] == "close"
        assert await wire.until_end() == b""


async def test_a_websocket_goes_through_the_raw_route(rig: Rig) -> None:
    wire = await rig.connect()
    upgrade = ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
    wire.send(request(UP + "/ws", None, *upgrade) + b"early")
    got = await wire.answer()
    assert got.status == 101
    assert got.names["upgrade"] == "websocket"
    assert await wire.reader.readexactly(5) == b"early"
    wire.send(b"\x81\x05hello")
    assert await wire.reader.readexactly(7) == b"\x81\x05hello"
    assert rig.lab.held == 0  # an open websocket keeps no model
    wire.abort()
    await rig.upstream.until(lambda: not rig.upstream.open)


async def test_a_websocket_ends_with_the_engine(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(request(UP + "/ws", None, "Connection: Upgrade", "Upgrade: websocket"))
    await wire.answer()
    rig.upstream.cut_all()
    assert await wire.until_end() == b""


async def test_a_refused_upgrade_leaves_a_usable_connection(rig: Rig) -> None:
    """Some clients offer h2c with every first request (Java's HttpClient does)."""
    offer = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAA")
    wire = await rig.connect()
    wire.send(chat("", *offer) + chat() + request(UP + "/echo", None, *offer) + chat())
    for _ in range(4):
        assert (await wire.answer()).status == 200
    first, *_ = rig.upstream.seen
    assert first.header("upgrade") is None
    assert first.header("http2-settings") is None


async def test_an_engine_that_switches_unasked_is_not_trusted(rig: Rig) -> None:
    async def switch(_: object):
        yield b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"

    rig.upstream.script = switch
    assert (await rig.ask(chat())).status == 502


async def test_interim_answers_pass_but_for_100(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(request(UP + "/early"))
    hints = await wire.answer()
    assert hints.status == 103
    assert hints.names == {"link": "</style.css>"}
    assert (await wire.answer()).body == b"after hints"
    old = await rig.ask(request(UP + "/early", version="1.0"))
    assert old.status == 200


async def test_a_big_prompt_and_a_big_answer(rig: Rig) -> None:
    prompt = b'{"model":"m1","x":"' + b"y" * 12_000_000 + b'"}'
    assert (await rig.ask(request(CHAT, prompt))).status == 200
    assert rig.upstream.seen[0].body == prompt
    got = await rig.ask(request(UP + "/big?bytes=8000000"))
    assert len(got.body) == 8_000_000


async def test_request_ids_are_the_clients_or_ours(rig: Rig) -> None:
    given = await rig.ask(chat("", "X-Request-ID: abc-1"))
    assert given.names["x-request-id"] == "abc-1"
    assert rig.upstream.seen[-1].header("x-request-id") == "abc-1"
    ours = {(await rig.ask(chat("", "X-Request-ID: " + "a" * 200))).names["x-request-id"]}
    ours |= {(await rig.ask(request(path))).names["x-request-id"] for path in ("/health", "/no")}
    assert len(ours) == 3
    assert rig.upstream.seen[-1].header("x-request-id") in ours


async def test_the_model_is_renamed_for_an_engine_that_knows_it_by_another_name(rig: Rig) -> None:
    rig.serve("alias", upstream_name='org/"real"')
    body = b'{ "model" : "alias", "messages": [{"model": "alias"}],  "n": 1 }'
    await rig.ask(request(CHAT, body))
    assert rig.upstream.seen[0].body == body.replace(b'"alias"', b'"org/\\"real\\""', 1)


async def test_an_engine_behind_a_path_and_on_a_unix_socket(rig: Rig, tmp_path: Path) -> None:
    rig.serve("prefixed", path_prefix="/base/")
    await rig.ask(chat(model="prefixed"))
    assert rig.upstream.seen[0].target == "/base" + CHAT
    path = str(tmp_path / "engine.sock")
    server = await asyncio.get_running_loop().create_unix_server(rig.upstream.connection, path)
    rig.serve("unix", unix_path=path)
    assert (await rig.ask(chat(model="unix"))).status == 200
    assert rig.upstream.seen[1].header("host") == "localhost"
    server.close()
