"""What users decide about models, against a whole daemon: hold, restart, why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import Lab, Start, write_recipe

from flexlab import daemons
from flexlab.cli.event_files import recorded
from flexlab.client import Client
from flexlab.core.errors import FlexLabError, UnknownModel, UsageError
from flexlab.demo.world import DemoWorld
from flexlab.spec.lab import ModelView, UpStep
from flexlab.spec.lease import Lease
from flexlab.spec.plan import Wishes


def connected() -> Client:
    return daemons.connect(start=False)


async def up(model: str) -> None:
    steps = await asyncio.to_thread(lambda: list(connected().up(model, Wishes())))
    assert steps[-1].kind == "ready", steps[-1]


async def restart(model: str) -> list[UpStep]:
    return await asyncio.to_thread(lambda: list(connected().restart(model)))


async def hold(*models: str, **decided: Any) -> tuple[ModelView, ...]:
    return (await asyncio.to_thread(connected().hold, models, **decided)).models


async def why(model: str) -> str:
    return "\n".join((await asyncio.to_thread(connected().why, model)).sentences)


def request_to(lab: Lab, model: str) -> Lease:
    """A request that a ready model works on, until it is released."""
    lease = lab.service.lab.acquire(model, client="test")
    assert not isinstance(lease, asyncio.Future)
    return lease


def view(lab: Lab, name: str) -> ModelView:
    return next(model for model in lab.service.lab.models() if model.name == name)


async def test_what_was_decided_survives_the_daemon(home: Path, start: Start) -> None:
    write_recipe(home, "one")
    write_recipe(home, "two")
    lab = await start()
    await hold("one", keep="warm", pin=True)
    await hold("two", enabled=False)
    await start.end(lab)  # type: ignore[attr-defined]
    lab = await start()
    assert (view(lab, "one").keep, view(lab, "one").pinned) == ("warm", True)
    assert (await lab.chat("two"))[0] == 503
    await hold("one", keep="cold", pin=False)
    await hold("two", enabled=True)
    await start.end(lab)  # type: ignore[attr-defined]
    lab = await start()
    assert (view(lab, "one").keep, view(lab, "one").pinned) == ("cold", False)
    assert (await lab.chat("two"))[0] == 200


async def test_a_name_that_is_none_changes_nothing_of_the_others(home: Path, start: Start) -> None:
    write_recipe(home, "one")
    lab = await start()
    with pytest.raises(FlexLabError) as told:
        await hold("one", "oen", pin=True)
    assert told.value.exit_code == UnknownModel.exit_code
    assert "did you mean one" in str(told.value)
    assert not view(lab, "one").pinned


async def test_a_disabled_model_answers_what_it_has_and_refuses_what_comes(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    lab = await start()
    await up("small")
    working = request_to(lab, "small")
    cuts: list[object] = []
    working.on_cut(cuts.append)
    (then,) = await hold("small-alias", enabled=False)
    assert (then.name, then.enabled, then.in_flight) == ("small", False, 1)
    status, refused = await lab.chat("small")
    assert status == 503
    assert "flexlab enable small" in refused["error"]["message"]
    assert "disabled by its user" in await why("small")
    assert (cuts, lab.running()) == ([], ["small"]), "what it works on is not cut"
    working.release()
    await lab.until(lambda: not lab.running())
    assert "flexlab enable" in await why("small")
    assert (await restart("small"))[-1].kind == "refused"
    await hold("small", enabled=True)
    assert (await lab.chat("small"))[0] == 200


async def test_a_restart_drains_and_whoever_asks_meanwhile_gets_the_new_one(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    lab = await start()
    await up("small")
    (old,) = world.alive()
    working = request_to(lab, "small")
    restarted = asyncio.create_task(restart("small"))
    await lab.until(lambda: view(lab, "small").word == "draining")
    meanwhile = asyncio.create_task(lab.chat("small"))
    await lab.until(lambda: view(lab, "small").waiting == 2)
    assert "restarted by its user" in await why("small")
    assert world.alive() == [old], "nothing is stopped under a request"
    working.release()
    assert (await meanwhile)[0] == 200
    steps = await restarted
    assert steps[-1].kind == "ready"
    story = "\n".join(step.text for step in steps)
    assert "draining" in story, "told from its beginning"
    (new,) = world.alive()
    assert new is not old


async def test_a_restart_of_what_does_not_run_starts_it(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    assert (await restart("small"))[-1].kind == "ready"
    assert lab.running() == ["small"]


async def test_why_names_who_holds_the_memory_that_is_waited_for(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "holder")
    write_recipe(home, "other")
    lab = await start(ram_gib=1.62)
    await up("holder")
    working = request_to(lab, "holder")
    waiting = asyncio.create_task(lab.chat("other"))
    await lab.until(lambda: "holder holds" in "\n".join(_sentences(lab, "other")))
    assert "of ram" in await why("other")
    assert "1 request waits" in await why("other")
    assert "it works on 1 request" in await why("holder")
    assert "other (priority 100) waits for it to finish" in await why("holder")
    await hold("holder", pin=True)
    status, _ = await waiting
    assert status == 503, "a pinned model never yields, so nobody waits for that"
    assert "pinned: never made to yield" in await why("holder")
    working.release()


def _sentences(lab: Lab, name: str) -> tuple[str, ...]:
    return lab.service.lab.why(name).sentences


async def test_a_decision_is_an_event_and_events_outlive_the_daemon(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    await hold("small", pin=True, keep="warm")
    await hold("small", pin=True)
    await hold("small", pin=False, keep="cold", enabled=False)
    await start.end(lab)  # type: ignore[attr-defined]
    told = [event.text for event in recorded() if event.model == "small"]
    assert [text for text in told if "pinned" in text] == ["small is pinned", "small is not pinned"]
    assert "small is kept" in told
    assert "small is not kept" in told
    assert "small is disabled" in told


async def test_a_server_that_runs_elsewhere_is_neither_kept_nor_restarted(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start(externals={"far": "http://127.0.0.1:9"})
    for models, decided in ((("far",), {"keep": "warm"}), (("small", "far"), {"pin": True})):
        with pytest.raises(FlexLabError) as told:
            await hold(*models, **decided)
        assert told.value.exit_code == UsageError.exit_code
        assert "runs elsewhere" in str(told.value)
    with pytest.raises(FlexLabError) as told:
        await restart("far")
    assert "runs elsewhere" in str(told.value)
    (far,) = await hold("far", enabled=False)
    assert not far.enabled
    assert (await lab.chat("far"))[0] == 503
