"""A request that is preempted before its answer began is queued again, once, at the head."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from socket import socket

import pytest
from gateway_lab import Rig, chat, request, until
from waiting import for_ever

from flexlab.demo.upstream import Seen, plain
from flexlab.spec.plan import Refusal

PREEMPTED = Refusal(
    code="preempted", message="m1 made room for m2", hint="ask again", retry_after_s=7.2
)


@pytest.fixture
def slow(rig: Rig) -> Rig:
    """An engine that says nothing to the first who asks, and answers the others."""

    async def reply(_: Seen) -> AsyncIterator[bytes]:
        if len(rig.upstream.seen) == 1:
            await for_ever()
        yield plain(b"at last")

    rig.upstream.script = reply
    return rig


async def asked(rig: Rig, count: int) -> None:
    """Until the engine has got so many requests."""
    await rig.upstream.until(lambda: len(rig.upstream.seen) == count)


async def test_it_is_asked_again_as_it_came_and_answered(slow: Rig) -> None:
    wire = await slow.connect()
    wire.send(chat("once more"))
    await asked(slow, 1)
    slow.lab.leases[0].cut(PREEMPTED)
    got = await wire.answer()
    assert (got.status, got.body) == (200, b"at last")
    first, second = slow.upstream.seen
    assert first.body == second.body
    assert "once more" in second.body.decode()
    await slow.upstream.until(lambda: len(slow.upstream.hangups) == 1)
    assert [lease.releases for lease in slow.lab.leases] == [1, 1]
    wire.send(request("/health"))
    assert (await wire.answer()).status == 200, "its connection goes on"


async def test_the_second_engine_is_asked_by_its_own_name_for_the_model(slow: Rig) -> None:
    slow.serve("m1", upstream_name="first.gguf")
    wire = await slow.connect()
    wire.send(chat())
    await asked(slow, 1)
    slow.serve("m1")
    slow.lab.leases[0].cut(PREEMPTED)
    assert (await wire.answer()).status == 200
    names = [json.loads(seen.body)["model"] for seen in slow.upstream.seen]
    assert names == ["first.gguf", "m1"]


async def test_it_keeps_its_place_in_the_queue_and_both_waits_are_counted(slow: Rig) -> None:
    ready = slow.serve("ready")
    slow.lab.behaviour["later"] = "later"
    wire = await slow.connect()
    wire.send(chat(model="later"))
    await slow.lab.until(lambda: len(slow.lab.waiting) == 1)
    (exchange,) = slow.gateway.in_progress()
    record = exchange.record
    record.started -= 30.0  # half a minute in the queue
    first = slow.lab.grant(ready)
    await asked(slow, 1)
    assert record.granted_at is not None
    record.granted_at -= 10.0  # of which ten seconds were the engine's
    before = asyncio.get_running_loop().time()
    first.cut(PREEMPTED)
    assert slow.lab.sinces[0] is None
    since = slow.lab.sinces[1]
    assert since is not None
    assert before - 35.0 < since < before - 29.0, "the time of its first coming"
    slow.lab.grant(ready)
    assert (await wire.answer()).status == 200
    assert record.duration_s is not None
    waited_s = record.waited_s(record.started + record.duration_s)
    assert waited_s is not None
    assert 19.0 < waited_s < 25.0, "thirty seconds less the ten with an engine"


async def test_a_second_preemption_is_a_503_that_says_when_to_come_back(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("delay=60"))
    for number in (1, 2):
        await asked(rig, number)
        rig.lab.leases[-1].cut(PREEMPTED)
    got = await wire.answer()
    assert (got.status, got.error["code"]) == (503, "preempted")
    assert got.names["retry-after"] == "8"
    assert rig.lab.held == 0
    assert len(rig.lab.leases) == 2
    assert rig.gateway.observer.recent[-1].how == "cut"


async def test_a_client_that_leaves_while_it_waits_again_is_withdrawn(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("delay=60"))
    await asked(rig, 1)
    rig.lab.behaviour["m1"] = "later"
    rig.lab.leases[0].cut(PREEMPTED)
    assert len(rig.lab.waiting) == 1
    wire.abort()
    await rig.lab.until(lambda: rig.lab.waiting[0].cancelled())
    assert rig.lab.held == 0


async def test_what_cannot_be_queued_again_hears_why(rig: Rig) -> None:
    wire = await rig.connect()
    wire.send(chat("delay=60"))
    await asked(rig, 1)
    rig.lab.behaviour["m1"] = Refusal(code="queue_full", message="256 wait", status=429)
    rig.lab.leases[0].cut(PREEMPTED)
    got = await wire.answer()
    assert (got.status, got.error["code"]) == (429, "queue_full")


async def test_the_limit_for_an_answer_begins_anew_with_the_second_engine(rig: Rig) -> None:
    rig.serve("m1", header_s=0.2)
    wire = await rig.connect()
    wire.send(chat("delay=60"))
    await asked(rig, 1)
    rig.lab.behaviour["m1"] = "later"
    rig.lab.leases[0].cut(PREEMPTED)
    (exchange,) = rig.gateway.in_progress()
    assert exchange._timer is None, "no engine is late while there is none"
    rig.lab.grant(rig.serve("m1", header_s=0.2), "m1")
    got = await wire.answer()
    assert got.error["code"] == "backend_timeout"


async def test_one_whose_connection_was_still_being_made_is_queued_again_too(rig: Rig) -> None:
    with socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with socket() as first, socket() as second:
            for filler in (first, second):
                filler.setblocking(False)
                filler.connect_ex(full.getsockname())
            rig.serve("m1", port=full.getsockname()[1])
            wire = await rig.connect()
            wire.send(chat())
            await rig.lab.until(lambda: len(rig.lab.leases) == 1)
            rig.serve("m1")
            rig.lab.leases[0].cut(PREEMPTED)
            assert (await wire.answer()).status == 200


async def test_one_that_is_read_to_the_end_for_nobody_is_not_asked_again(rig: Rig) -> None:
    rig.serve("m1", on_disconnect="drain")
    wire = await rig.connect()
    wire.send(chat("delay=60"))
    await asked(rig, 1)
    wire.abort()
    await until(lambda: not rig.gateway.clients)
    rig.lab.leases[0].cut(PREEMPTED)
    assert rig.lab.held == 0
    assert len(rig.lab.leases) == 1
