"""Requests whose model is preempted under them, and requests that a user ends: a whole daemon."""

from __future__ import annotations

import asyncio
import json
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import Lab, Start, write_recipe

from flexlab import daemons
from flexlab.core.errors import FlexLabError
from flexlab.core.units import MIB
from flexlab.demo.engine import Behaviour
from flexlab.demo.world import DemoWorld
from flexlab.spec.control import RequestView

QUICK = Behaviour()
SLOW = Behaviour(token_s=0.05)
LONG_ANSWER = 10_000
ROOM_BYTES = 120 * MIB
"""One of these models takes 80 MB."""


async def two_models(home: Path, start: Start, world: DemoWorld) -> Lab:
    """`low` is slow and `high` takes its place whenever it is asked: one of them has room."""
    for name, priority in (("low", 100), ("high", 200)):
        recipe = write_recipe(home, name)
        recipe.write_text(recipe.read_text() + f"priority: {priority}\n")
    world.behaviours["low"] = SLOW
    lab: Lab = await start(drain_timeout_s=0.05, linger_s=0.05, min_residency_s=0.05)
    ram = lab.service.scheduler.pools["ram"]
    ram.reserve_bytes = ram.total_bytes - (ram.used_bytes or 0) - ROOM_BYTES
    return lab


def seen(lab: Lab) -> list[RequestView]:
    return list(lab.service.lab.observed(20))


async def works_on(lab: Lab, model: str) -> None:
    """Until an engine has a request for it."""
    await lab.until(
        lambda: (
            any(one.model == model and one.state == "running" for one in seen(lab))
            and lab.running() == [model]
        )
    )


async def queued(lab: Lab, model: str) -> None:
    await lab.until(lambda: any(one.model == model and one.state == "queued" for one in seen(lab)))


async def ask(
    lab: Lab, model: str, **more: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose client can hang up."""
    address = lab.service.gateway.address
    reader, writer = await asyncio.open_connection(address.host, address.port)
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": model, "messages": messages, **more}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    return reader, writer


async def test_one_that_waits_for_its_first_byte_is_answered_after_the_other(
    home: Path, start: Start, world: DemoWorld
) -> None:
    lab = await two_models(home, start, world)
    low = asyncio.create_task(lab.chat("low", max_tokens=LONG_ANSWER))
    await works_on(lab, "low")
    world.behaviours["low"] = QUICK
    status, _ = await lab.chat("high")
    assert status == 200
    status, answer = await low
    assert status == 200
    assert answer["usage"]["completion_tokens"] == LONG_ANSWER, "asked again as it came"
    (told,) = [one for one in seen(lab) if one.model == "low"]
    assert told.how == "done"
    assert told.waited_s is not None


async def test_one_that_streams_hears_who_preempted_it_and_when_to_retry(
    home: Path, start: Start, world: DemoWorld
) -> None:
    lab = await two_models(home, start, world)
    low = asyncio.create_task(lab.stream("low", max_tokens=LONG_ANSWER))
    await lab.until(lambda: any(one.model == "low" and one.ttft_s for one in seen(lab)))
    assert (await lab.chat("high"))[0] == 200
    with pytest.raises(IncompleteRead) as cut:  # never as if it were whole
        await low
    events = [line for line in cut.value.partial.split(b"\n") if line.startswith(b"data: ")]
    error = json.loads(events[-1].removeprefix(b"data: "))["error"]
    assert error["code"] == "preempted"
    assert "preempted by high" in error["message"]
    assert "retry in 30 s" in error["message"]
    assert not lab.service.scheduler.models["low"].waiters, "what was begun is not asked again"


async def test_one_that_is_preempted_twice_is_told_when_to_come_back(
    home: Path, start: Start, world: DemoWorld
) -> None:
    lab = await two_models(home, start, world)
    reader, writer = await ask(lab, "low", max_tokens=LONG_ANSWER)
    for _ in range(2):
        await works_on(lab, "low")
        assert (await lab.chat("high"))[0] == 200
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 30\r\n" in head
    assert b"preempted by high" in await reader.readuntil(b"}}")
    writer.close()


async def test_a_client_that_leaves_while_it_is_queued_again_is_withdrawn(
    home: Path, start: Start, world: DemoWorld
) -> None:
    lab = await two_models(home, start, world)
    _, writer = await ask(lab, "low", max_tokens=LONG_ANSWER)
    await works_on(lab, "low")
    world.behaviours["high"] = SLOW
    _, high = await ask(lab, "high", max_tokens=LONG_ANSWER)
    await works_on(lab, "high")
    await queued(lab, "low")
    writer.transport.abort()
    await lab.until(lambda: not lab.service.scheduler.models["low"].waiters)
    high.transport.abort()
    await lab.until(lambda: not any(one.state != "done" for one in seen(lab)))
    assert lab.service.scheduler.models["low"].starts == 1, "nobody waits for it any more"


async def test_requests_can_be_seen_and_ended_over_the_control_socket(
    home: Path, start: Start, world: DemoWorld
) -> None:
    lab = await two_models(home, start, world)
    connected = daemons.connect(start=False)
    low = asyncio.create_task(lab.chat("low-alias", max_tokens=LONG_ANSWER))
    await works_on(lab, "low")
    shown = await asyncio.to_thread(connected.requests, 5)
    (going,) = shown.requests
    assert (going.state, going.model, going.route) == ("running", "low", "/v1/chat/completions")
    ended = (await asyncio.to_thread(connected.cancel, going.id[:-1])).request
    assert (ended.id, ended.how) == (going.id, "cancelled")
    status, answer = await low
    assert (status, answer["error"]["code"]) == (503, "cancelled")
    assert not any(i.leases for i in lab.service.scheduler.instances.values())
    with pytest.raises(FlexLabError, match="ended already") as told:
        await asyncio.to_thread(connected.cancel, going.id)
    assert told.value.exit_code == 2


async def test_a_queued_one_that_is_cancelled_leaves_the_models_queue(
    home: Path, start: Start, world: DemoWorld
) -> None:
    lab = await two_models(home, start, world)
    world.behaviours["low"] = Behaviour(load_s=None)
    low = asyncio.create_task(lab.chat("low"))
    await queued(lab, "low")
    (going,) = seen(lab)
    await asyncio.to_thread(daemons.connect(start=False).cancel, going.id)
    assert (await low)[0] == 503
    assert not lab.service.scheduler.models["low"].waiters
    await lab.until(lambda: not lab.running())
