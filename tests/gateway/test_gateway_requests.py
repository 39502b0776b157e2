"""Requests as people see them, and what happens to one that they cancel."""

from __future__ import annotations

import json
import time

import pytest
from gateway_lab import Rig, chat, request

from flexlab.core.errors import UsageError
from flexlab.gateway.requests import cancel_one, observed


async def test_in_flight_ones_come_first_then_the_last_that_ended(rig: Rig) -> None:
    before = time.time()
    rig.lab.behaviour["later"] = "later"
    for name in ("a", "b", "c"):
        await rig.ask(chat("events=3 every=0.01", f"X-Request-ID: {name}"))
    running, queued = await rig.connect(), await rig.connect()
    running.send(chat("events=1000 every=0.01", "X-Request-ID: streams"))
    await running.reader.readuntil(b"t2")
    queued.send(chat("", "X-Request-ID: waits", model="later"))
    await rig.lab.until(lambda: len(rig.lab.waiting) == 1)
    seen = observed(rig.gateway, 2)
    assert [(one.id, one.state) for one in seen] == [
        ("streams", "running"),
        ("waits", "queued"),
        ("c", "done"),
        ("b", "done"),
    ]
    streams, waits, done, _ = seen
    assert (streams.model, streams.status, streams.client) == ("m1", 200, "127.0.0.1")
    assert streams.tokens_out is not None
    assert streams.tokens_out >= 3
    assert streams.tokens_per_s is not None
    assert waits.model == "later", "what it waits for"
    assert waits.status is None
    assert waits.waited_s == waits.duration_s
    assert (done.how, done.status, done.tokens_in, done.tokens_out) == ("done", 200, 7, 3)
    assert done.ttft_s is not None
    assert done.duration_s is not None
    assert before - 1 < done.started_at < time.time()
    assert len(observed(rig.gateway, 0)) == 2


async def test_a_refused_one_still_names_what_it_asked_for(rig: Rig) -> None:
    await rig.ask(chat(model="nobody"))
    (seen,) = observed(rig.gateway, 5)
    assert (seen.model, seen.status, seen.how) == ("nobody", 404, "local")
    assert None in rig.gateway.observer.models, "in the metrics it is nobody's: names are endless"
    assert "nobody" not in rig.gateway.observer.models


async def test_a_whole_answer_tells_no_speed(rig: Rig) -> None:
    await rig.ask(chat())
    (seen,) = observed(rig.gateway, 1)
    assert seen.tokens_out == 3
    assert seen.tokens_per_s is None


async def test_a_queued_one_that_is_cancelled_leaves_the_queue(rig: Rig) -> None:
    rig.lab.behaviour["later"] = "later"
    wire = await rig.connect()
    wire.send(chat(model="later") + chat())
    await rig.lab.until(lambda: len(rig.lab.waiting) == 1)
    (going,) = observed(rig.gateway, 0)
    shown = cancel_one(rig.gateway, going.id)
    assert (shown.id, shown.state, shown.how) == (going.id, "done", "cancelled")
    assert rig.lab.waiting[0].cancelled()
    got = await wire.answer()
    assert (got.status, got.error["code"]) == (503, "cancelled")
    assert got.names["x-should-retry"] == "false", "else OpenAI's clients would send it again"
    assert (await wire.answer()).status == 200, "and its connection goes on"


async def test_one_without_an_answer_yet_gets_an_error_and_its_engine_stops(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("delay=60", "X-Request-ID: mine"))
    await rig.upstream.until(lambda: len(rig.upstream.seen) == 1)
    cancel_one(rig.gateway, "mine")
    assert (await wire.answer()).error["code"] == "cancelled"
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 1)
    assert rig.lab.held == 0


async def test_a_stream_that_is_cancelled_says_so_and_is_cut(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("events=100 every=0.02", "X-Request-ID: mine"))
    await wire.reader.readuntil(b"t2")
    await wire.reader.readuntil(b"\n\n\r\n")
    cancel_one(rig.gateway, "mine")
    rest = await wire.until_end()
    event = rest.split(b"\r\n", 1)[1]
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "cancelled"
    assert not rest.endswith(b"0\r\n\r\n"), "never as if it were whole"
    await rig.upstream.until(lambda: len(rig.upstream.hangups) == 1)
    assert rig.lab.held == 0
    assert rig.gateway.observer.ends["cancelled"] == 1


async def test_a_beginning_is_enough_where_only_one_id_has_it(rig: Rig) -> None:
    rig.lab.behaviour["later"] = "later"
    for count, name in enumerate(("job-1", "job-12", "other"), 1):
        wire = await rig.connect()
        wire.send(chat("", f"X-Request-ID: {name}", model="later"))
        await rig.lab.until(lambda count=count: len(rig.lab.waiting) == count)
    with pytest.raises(UsageError) as told:
        cancel_one(rig.gateway, "jo")
    assert "job-1, job-12" in told.value.message
    assert "other" not in told.value.message
    assert cancel_one(rig.gateway, "job-1").id == "job-1", "a whole id is itself, first of all"
    assert cancel_one(rig.gateway, "jo").id == "job-12"
    for wrong in ("", "zzz", "è"):
        with pytest.raises(UsageError, match="in flight"):
            cancel_one(rig.gateway, wrong)
    with pytest.raises(UsageError, match="ended already"):
        cancel_one(rig.gateway, "job-1")
    assert len(observed(rig.gateway, 0)) == 1


async def test_of_several_with_the_same_id_the_oldest_is_meant(rig: Rig) -> None:
    rig.lab.behaviour["later"] = "later"
    for count in (1, 2):
        wire = await rig.connect()
        wire.send(chat("", "X-Request-ID: same", model="later"))
        await rig.lab.until(lambda count=count: len(rig.lab.waiting) == count)
    cancel_one(rig.gateway, "same")
    assert [future.cancelled() for future in rig.lab.waiting] == [True, False]


async def test_a_tunnel_is_no_request_any_more(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(request("/upstream/m1/ws", None, "Connection: Upgrade", "Upgrade: websocket"))
    assert (await wire.head()).status == 101
    (seen,) = observed(rig.gateway, 5)
    assert (seen.state, seen.how) == ("done", "upgraded")
