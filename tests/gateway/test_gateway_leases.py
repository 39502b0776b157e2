"""A lease is released exactly once, however a request ends; nothing works for a client that left.

Each rig asserts on its way out that no lease is held and none was released twice.
"""

from __future__ import annotations

import asyncio
import json
import random
from socket import socket

import pytest
from gateway_lab import CHAT, Rig, chat, request, until
from waiting import for_ever, moment

from flexlab.demo.upstream import Cut
from flexlab.gateway.observe import How
from flexlab.spec.lease import Refused
from flexlab.spec.plan import Refusal

UP = "/upstream/m1"
PREEMPTED = Refusal(
    code="preempted", message="m1 made room for m2", hint="ask again", retry_after_s=7.2
)

STOPPED = Refusal(code="stopped", message="m1 was stopped", retry_after_s=7.2)


def how_ended(rig: Rig) -> list[How | None]:
    return [record.how for record in rig.gateway.observer.recent]


@pytest.mark.parametrize("knobs", ["", "events=3", "events=6 every=0.01 cut=2"])
async def test_a_lease_lasts_as_long_as_its_answer(rig: Rig, knobs: str) -> None:
    wire = await rig.connect()
    wire.send(chat(knobs))
    await wire.answer()
    await rig.lab.until(lambda: bool(rig.lab.leases) and rig.lab.held == 0)
    assert len(rig.lab.leases) == 1


async def test_a_client_that_leaves_mid_stream_ends_the_engines_work(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("events=1000 every=0.01"))
    await wire.reader.readuntil(b"t2")
    wire.abort()
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 1)
    await rig.lab.until(lambda: rig.lab.held == 0)
    assert how_ended(rig) == ["client_gone"]


@pytest.mark.parametrize("path", [CHAT, UP + "/hang"])
async def test_a_client_that_leaves_before_the_head_ends_the_engines_work(
    rig: Rig, path: str
) -> None:
    wire = await rig.connect()
    wire.send(chat("delay=60") if path == CHAT else request(path))
    await rig.upstream.until(lambda: len(rig.upstream.seen) == 1)
    wire.reset()
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 1)
    await rig.lab.until(lambda: rig.lab.held == 0)


async def test_a_client_that_leaves_while_it_waits_withdraws_its_wish(rig: Rig) -> None:
    rig.lab.behaviour["later"] = "later"
    wire = await rig.connect()
    wire.send(chat(model="later"))
    await rig.lab.until(lambda: len(rig.lab.waiting) == 1)
    wire.abort()
    await rig.lab.until(lambda: rig.lab.waiting[0].cancelled())
    assert how_ended(rig) == ["client_gone"]


async def test_a_lease_that_comes_as_the_client_leaves_is_given_back(rig: Rig) -> None:
    ready = rig.serve("ready")
    rig.lab.behaviour["later"] = "later"
    wire = await rig.connect()
    wire.send(chat(model="later"))
    await rig.lab.until(lambda: len(rig.lab.waiting) == 1)
    (client,) = rig.gateway.clients
    lease = rig.lab.grant(ready)
    client.connection_lost(None)  # before the loop has told the request of its lease
    await rig.lab.until(lambda: lease.releases == 1)
    assert rig.upstream.seen == []


async def test_a_wait_ends_with_a_lease_or_a_refusal(rig: Rig) -> None:
    ready = rig.serve("ready")
    rig.lab.behaviour["later"] = "later"
    granted, refused, withdrawn = [await rig.connect() for _ in range(3)]
    for count, wire in enumerate((granted, refused, withdrawn), 1):
        wire.send(chat(model="later"))
        await rig.lab.until(lambda count=count: len(rig.lab.waiting) == count)
    rig.lab.grant(ready)
    assert (await granted.answer()).status == 200
    no = Refusal(code="queue_timeout", message="waited 600 s", status=504)
    rig.lab.waiting.pop(0).set_exception(Refused(no))
    got = await refused.answer()
    assert (got.status, got.error["code"]) == (504, "queue_timeout")
    rig.lab.waiting.pop(0).cancel()
    assert (await withdrawn.answer()).status == 503
    granted.send(chat())
    assert (await granted.answer()).status == 200


async def test_a_refusal_becomes_an_answer_and_the_connection_goes_on(rig: Rig) -> None:
    rig.lab.behaviour["full"] = Refusal(
        code="queue_full", message="256 wait", hint="later", status=429, retry_after_s=2.1
    )
    wire = await rig.connect()
    wire.send(chat(model="full") + chat())
    got = await wire.answer()
    assert got.status == 429
    assert got.names["retry-after"] == "3"
    assert got.error["message"] == "256 wait (later)"
    assert got.error["type"] == "rate_limit_error"
    assert (await wire.answer()).status == 200


async def test_a_cut_before_the_answer_is_a_503_that_says_when_to_come_back(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("delay=60"))
    await rig.upstream.until(lambda: len(rig.upstream.seen) == 1)
    rig.lab.leases[0].cut(STOPPED)
    got = await wire.answer()
    assert got.status == 503
    assert got.error["code"] == "stopped"
    assert got.names["retry-after"] == "8"
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 1)
    assert rig.lab.held == 0
    wire.send(request("/health"))
    assert (await wire.answer()).status == 200


async def test_a_cut_stream_is_told_why_and_never_ended_cleanly(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("events=100 every=0.02"))
    got = await wire.head()
    got.body = await wire.reader.readuntil(b"t2")
    await wire.reader.readuntil(b"\n\n\r\n")
    rig.lab.leases[0].cut(PREEMPTED)
    rest = await wire.until_end()
    size, event = rest.split(b"\r\n", 1)
    assert int(size, 16) == len(event) - 2
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == "preempted"
    assert error["message"] == "m1 made room for m2 (ask again; retry in 8 s)"
    assert rig.lab.held == 0
    assert how_ended(rig) == ["cut"]


async def test_a_cut_answer_that_is_no_stream_ends_short(rig: Rig) -> None:
    async def half(_: object):
        yield b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 500
        await for_ever()

    rig.upstream.script = half
    wire = await rig.connect()
    wire.send(chat())
    await wire.head()
    await wire.reader.readexactly(500)
    rig.lab.leases[0].cut(PREEMPTED)
    assert await wire.until_end() == b""


@pytest.mark.parametrize("tail", [b"data: {", b"5\r\ndata", b"8\r\ndata: x\n\r\n"])
async def test_nothing_is_put_into_the_middle_of_an_event(rig: Rig, tail: bytes) -> None:
    async def half(_: object):
        chunked = b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: y\n\n\r\n"
        yield b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        yield b"\r\n" if tail.startswith(b"data") else chunked
        yield tail
        await for_ever()

    rig.upstream.script = half
    wire = await rig.connect()
    wire.send(chat())
    await wire.head()
    await wire.reader.readuntil(tail)
    rig.lab.leases[0].cut(PREEMPTED)
    try:
        assert await wire.until_end() == b""
    except ConnectionResetError:
        assert tail == b"data: {"  # without framing only a reset tells


async def test_a_drained_engine_is_read_to_the_end_for_nobody(rig: Rig) -> None:
    rig.serve("drained", on_disconnect="drain")
    wire = await rig.connect()
    wire.send(chat("events=20 every=0.01", model="drained"))
    await wire.reader.readuntil(b"t1")
    wire.abort()
    await rig.upstream.until(lambda: rig.upstream.completed == 1)
    await rig.lab.until(lambda: rig.lab.held == 0)
    assert rig.upstream.hangups == []
    assert how_ended(rig) == ["drained"]
    await rig.ask(chat(model="drained"))
    assert rig.upstream.connections == 1  # its connection was as good as any other


async def test_a_drained_engine_may_still_be_cut_or_break(rig: Rig) -> None:
    rig.serve("drained", on_disconnect="drain")
    for end in ("cut", "break"):
        wire = await rig.connect()
        wire.send(chat("events=1000 every=0.01", model="drained"))
        await wire.reader.readuntil(b"t1")
        wire.abort()
        await until(lambda: not rig.gateway.clients)
        assert rig.lab.held == 1
        if end == "cut":
            rig.lab.leases[-1].cut(PREEMPTED)
        else:
            rig.upstream.cut_all()
        await rig.lab.until(lambda: rig.lab.held == 0)


async def test_random_hang_ups_leave_nothing_behind(rig: Rig) -> None:
    chance = random.Random(11)
    ready = rig.serve("ready")
    rig.lab.behaviour["later"] = "later"
    rig.serve("drained", on_disconnect="drain")

    async def one() -> None:
        wire = await rig.connect()
        model = chance.choice(["m1", "m1", "m1", "drained", "later"])
        knobs = chance.choice(["", "events=20 every=0.002", "delay=0.05", "events=4 cut=2"])
        wire.send(chat(knobs, model=model)[: chance.choice([10, 100, 9999, 9999, 9999])])
        await moment(chance.random() * 0.05)
        if rig.lab.waiting and chance.random() < 0.5:
            future = rig.lab.waiting.pop(0)
            if not future.done():
                rig.lab.waiting.insert(0, future)
                rig.lab.grant(ready)
        if chance.random() < 0.5:
            wire.abort()
        else:
            wire.reset()

    for _ in range(6):
        await asyncio.gather(*(one() for _ in range(50)))
    await rig.lab.until(lambda: rig.lab.held == 0)
    await until(lambda: not rig.gateway.observer.in_flight and not rig.gateway.clients)
    assert len(rig.upstream.open) == rig.gateway.pool.idle_count
    assert (await rig.ask(chat("events=2"))).whole


async def test_a_stale_kept_connection_is_replaced_once(rig: Rig) -> None:
    """The engine closes an idle connection in the moment in which a request is sent on it."""
    await rig.ask(chat())
    rig.upstream.tires = True
    assert (await rig.ask(chat())).status == 200
    assert rig.upstream.connections == 2
    assert len(rig.lab.leases) == 2


async def test_a_request_is_not_sent_twice_once_an_answer_began(rig: Rig) -> None:
    await rig.ask(chat())

    async def begin(_: object):
        yield b"HTTP/1.1 200"
        raise Cut

    rig.upstream.script = begin
    assert (await rig.ask(chat())).status == 502
    assert len(rig.upstream.seen) == 2


async def test_a_fresh_connection_that_breaks_is_not_tried_again(rig: Rig) -> None:
    assert (await rig.ask(request(UP + "/drop"))).status == 502
    assert len(rig.upstream.seen) == 1


async def test_time_limits_of_an_endpoint(rig: Rig) -> None:
    rig.serve("hasty", header_s=0.3, idle_s=0.3)
    late = await rig.ask(chat("delay=60", model="hasty"))
    assert late.status == 504
    assert late.error["code"] == "backend_timeout"
    slow = await rig.ask(chat("events=4 every=0.1", model="hasty"))
    assert slow.whole  # longer than both limits together, but never silent
    silent = await rig.ask(chat("events=4 every=60", model="hasty"))
    assert not silent.whole
    assert b"silent for 0.3 s" in silent.body
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 2)


async def test_a_connection_that_does_not_come_is_a_504(rig: Rig) -> None:
    """A listener with a full backlog drops SYNs: nothing answers."""
    with socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        rig.serve("full", port=full.getsockname()[1], connect_s=0.1)
        with socket() as first, socket() as second:
            for filler in (first, second):
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            got = await rig.ask(chat(model="full"))
    assert got.status == 504
    assert got.error["code"] == "backend_timeout"


async def test_a_client_that_reads_nothing_stops_the_engine_not_the_gateway(rig: Rig) -> None:
    size = 64 << 20
    rig.serve("patient", idle_s=0.3)  # which must not run while it is our client that is slow
    wire = await rig.connect(receive_buffer_bytes=4096)
    wire.writer.transport.pause_reading()
    wire.send(request(f"/upstream/patient/big?bytes={size}"))
    await rig.upstream.until(lambda: len(rig.upstream.seen) == 1)
    (client,) = rig.gateway.clients
    await until(lambda: client.write_paused)
    (exchange,) = rig.gateway._active
    timer = exchange._timer
    await until(lambda: exchange._timer is not timer)  # the limit came, and was set anew
    assert client.transport.get_write_buffer_size() < 2 << 20
    assert rig.upstream.completed == 0
    wire.writer.transport.resume_reading()
    assert len((await wire.answer()).body) == size


async def test_shutdown_waits_for_streams_and_takes_nothing_new(rig: Rig) -> None:
    wire, idle = await rig.connect(), await rig.connect()
    idle.send(request("/health"))
    await idle.answer()
    wire.send(chat("events=10 every=0.02"))
    await wire.head()
    draining = asyncio.ensure_future(rig.gateway.drain(5))
    assert await idle.until_end() == b""
    with pytest.raises(ConnectionRefusedError):
        await rig.connect()
    assert await draining
    assert (await wire.reader.read(100_000)).endswith(b"0\r\n\r\n")
    assert await wire.until_end() == b""


async def test_shutdown_does_not_wait_for_ever(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("events=1000 every=0.01"))
    await wire.head()
    assert not await rig.gateway.drain(0.05)
    await rig.gateway.close()
    assert rig.lab.held == 0
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 1)


async def test_a_silent_client_is_let_go(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, busy = await rig.connect(), await rig.connect()
    silent.send(b"POST / HT")
    busy.send(chat("events=5 every=0.03"))
    await busy.head()
    await until(lambda: all(client.heard_at for client in rig.gateway.clients))
    monkeypatch.setattr("flexlab.gateway.proxy.CLIENT_IDLE_S", -1.0)
    rig.gateway._sweep()
    assert await silent.until_end() == b""
    assert (await busy.reader.readuntil(b"\r\n0\r\n\r\n")).count(b'"content"') == 5
