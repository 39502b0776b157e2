"""What goes wrong around a daemon: files that change, sockets that vanish, stops that hang."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from daemon_lab import Start, gguf, write_recipe

from flexlab import daemons
from flexlab.core import paths
from flexlab.core.errors import FlexLabError
from flexlab.daemon import adopt, enginelogs
from flexlab.daemon.events import EventLog
from flexlab.daemon.files import installation_id
from flexlab.demo.engine import Behaviour
from flexlab.demo.world import DemoWorld
from flexlab.scheduler.state import new_id
from flexlab.spec.lab import UpStep
from flexlab.spec.plan import Wishes


async def up(model: str, **more: Any) -> list[UpStep]:
    def call() -> list[UpStep]:
        return list(daemons.connect(start=False).up(model, Wishes(), **more))

    return await asyncio.to_thread(call)


async def test_a_recipe_that_came_later_is_known(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    write_recipe(home, "later")
    await up("small")
    assert (await lab.chat("later"))[0] == 200


async def test_the_last_good_recipe_serves_on_when_its_file_breaks(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    recipe = write_recipe(home, "other")
    lab = await start()
    await up("other")
    recipe.write_text("name: [broken")
    await up("small")
    assert (await lab.chat("other"))[0] == 200


async def test_a_running_model_whose_recipe_went_away_can_be_stopped(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    recipe = write_recipe(home, "other")
    lab = await start()
    await up("other")
    recipe.unlink()
    await up("small")
    assert "other" in {model.name for model in lab.service.lab.snapshot().models}
    await asyncio.to_thread(daemons.connect(start=False).down, ("other",))
    assert lab.running() == ["small"]


async def test_an_adopted_model_goes_by_its_new_name(home: Path, start: Start) -> None:
    recipe = write_recipe(home, "old")
    first = await start()
    await up("old")
    await start.end(first)  # type: ignore[attr-defined]
    text = recipe.read_text().replace("name: old\n", "name: new\n").replace("old-alias", "old")
    recipe.unlink()
    recipe.with_name("new.yaml").write_text(text)
    second = await start()
    assert {i.model for i in second.service.scheduler.instances.values()} == {"new"}


async def test_a_derived_model_is_adopted_without_the_file_of_decisions(
    home: Path, start: Start
) -> None:
    weights = home / "mine.gguf"
    weights.write_bytes(gguf())
    first = await start()
    await up(f"file://{weights}")
    await start.end(first)  # type: ignore[attr-defined]
    (paths.state_dir() / "models.json").unlink()
    second = await start()
    assert len(second.service.scheduler.instances) == 1


async def test_an_engine_with_a_record_of_a_newer_flexlab_goes_on(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    await start.end(first)  # type: ignore[attr-defined]
    (record,) = paths.instances_dir().glob("*.json")
    content = msgspec.json.decode(record.read_bytes())
    record.write_bytes(msgspec.json.encode(content | {"schema": 99}))
    second = await start()
    assert second.running() == ["small"]


async def test_what_cannot_be_ended_at_adoption_keeps_its_record(
    home: Path, start: Start, world: DemoWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    await start.end(first)  # type: ignore[attr-defined]
    (paths.user_recipes_dir() / "models" / "small.yaml").unlink()
    monkeypatch.setattr(adopt, "REAP_TIMEOUT_S", 0.1)
    (engine,) = world.alive()
    unstoppable = msgspec.structs.replace(engine.engine.behaviour, unstoppable=True)
    engine.engine.behaviour = unstoppable
    await start()
    assert list(paths.instances_dir().glob("*.json"))


async def test_a_daemon_whose_socket_was_taken_away_makes_it_anew(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexlab.daemon.service.SOCKET_S", 0.1)
    await start()
    paths.socket_path().unlink()
    found = await asyncio.to_thread(daemons.find, wait_s=5.0)
    assert found is not None
    assert (await asyncio.to_thread(found.status)).holds == 0


async def test_a_wait_that_is_given_up_at_once_leaves_nothing_behind(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    scheduler = lab.service.scheduler
    scheduler.acquire("small")
    scheduler.down("small")
    await lab.until(lambda: scheduler.models["small"].preparing is None)
    assert (await lab.chat("small"))[0] == 200


async def test_keep_and_pin_are_not_decided_by_an_up_that_failed(home: Path, start: Start) -> None:
    write_recipe(home, "absent", installed=False)
    lab = await start()
    steps = await up("absent", keep="warm", pin=True)
    assert steps[-1].kind == "refused"
    model = lab.service.scheduler.models["absent"]
    assert (model.keep, model.pinned) == ("cold", False)


async def test_keep_and_pin_can_be_undone(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    await up("small", keep="warm", pin=True)
    await up("small", keep="cold", pin=False)
    model = lab.service.scheduler.models["small"]
    assert (model.keep, model.pinned) == ("cold", False)


async def test_weights_that_another_running_model_uses_are_not_removed(
    home: Path, start: Start
) -> None:
    first = write_recipe(home, "one")
    twin = first.read_text().replace("name: one\n", "name: two\n").replace("one-alias", "two-b")
    first.with_name("two.yaml").write_text(twin)
    await start()
    await up("one")
    with pytest.raises(FlexLabError) as told:
        await asyncio.to_thread(daemons.connect(start=False).rm, "two")
    assert told.value.hint == "flexlab down one"


async def test_weights_that_vanished_are_a_404_and_not_a_failed_start(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    assert (await lab.chat("small"))[0] == 200
    await asyncio.to_thread(daemons.connect(start=False).down, ("small",))
    (home / "small.gguf").unlink()
    assert (await lab.chat("small"))[0] == 404


async def test_an_engine_that_answers_is_not_ended_because_the_disk_is_full(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    records = lab.service.records
    write, count = records.write, [0]

    def full_the_third_time(record: Any) -> None:
        count[0] += 1
        if count[0] == 3:
            raise OSError(28, "No space left on device")
        write(record)

    records.write = full_the_third_time
    assert (await up("small"))[-1].kind == "ready"


async def test_a_load_is_not_left_half_done_by_the_end_of_the_daemon(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    world.behaviours["small"] = Behaviour(load_s=None)
    lab = await start()
    asking = asyncio.create_task(up("small"))
    await lab.until(lab.running)
    await start.end(lab)  # type: ignore[attr-defined]
    assert (await asking)[-1].refusal.code == "daemon_ending"
    assert lab.running() == []


async def test_a_busy_up_keeps_the_daemon_that_another_would_end(
    home: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(home, "small")
    lab = await start()
    lab.service.lab._ups += 1  # as while a name is looked up and planned
    ended = daemons.connect(start=False).shutdown
    assert await asyncio.to_thread(ended, stop_models=False, only_if_idle=True) is False


def test_logs_of_a_model_of_almost_the_same_name_are_not_pruned(home: Path) -> None:
    long = "an-organisation-with-a-long-name-model-3.2-1b-instruct"
    live = enginelogs.new_log(new_id(f"{long}-q4"))
    live.write_text("in use")
    for _ in range(enginelogs.KEPT_PER_MODEL + 1):
        enginelogs.new_log(new_id(f"{long}-q8")).write_text("old")
    enginelogs.prune(f"{long}-q8")
    assert live.exists()
    assert len(enginelogs.logs_of(f"{long}-q8")) == enginelogs.KEPT_PER_MODEL


async def test_the_half_line_of_a_killed_daemon_swallows_no_event() -> None:
    path = paths.private_dir(paths.state_dir()) / "events.jsonl"
    EventLog(path).add("daemon", "before")
    with path.open("ab") as file:
        file.write(b'{"id":2,"at"')
    EventLog(path).add("daemon", "after")
    assert [event.text for event in EventLog(path).after(1)] == ["after"]


def test_an_installation_that_cannot_be_read_now_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = paths.private_dir(paths.state_dir())
    word = installation_id(folder)

    def stale(self: Path, *args: Any, **more: Any) -> str:
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_text", stale)
        with pytest.raises(OSError, match="Stale"):
            installation_id(folder)
    assert installation_id(folder) == word


async def test_a_plain_up_does_not_override_the_wishes_of_one_on_its_way(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    launcher = lab.service.launcher
    gate, plan = asyncio.Event(), launcher._plan

    async def later(*words: Any) -> Any:
        await gate.wait()
        return await plan(*words)

    launcher._plan = later  # type: ignore[method-assign]
    scheduler = lab.service.scheduler

    def wishing() -> list[UpStep]:
        wishes = Wishes(settings={"context_size": "512"})
        return list(daemons.connect(start=False).up("small", wishes))

    first = asyncio.create_task(asyncio.to_thread(wishing))
    await lab.until(lambda: len(scheduler.models["small"].waiters) == 1)
    second = asyncio.create_task(up("small"))
    await lab.until(lambda: len(scheduler.models["small"].waiters) == 2)
    gate.set()
    await asyncio.gather(first, second)
    assert [i.candidate.context for i in scheduler.instances.values()] == [512]


async def test_decisions_written_by_a_newer_flexlab_are_not_overwritten(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    file = paths.private_dir(paths.state_dir()) / "models.json"
    newer = '{"schema": 99, "models": {"small": {"keep": "warm", "new": 1}}}'
    file.write_text(newer)
    await start()
    await up("small", pin=True)
    assert file.read_text() == newer


async def test_nothing_is_decided_before_all_that_runs_is_adopted(
    home: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(home, "first")
    write_recipe(home, "second")
    lab = await start()
    await up("first", keep="warm")
    await up("second", keep="warm")
    engines = {one.launch.instance for one in lab.world.alive()}
    await start.end(lab)  # type: ignore[attr-defined]
    judge = adopt.Adoption._judge

    async def with_a_death_between(self: adopt.Adoption, record: Any) -> None:
        if record.model == "second":
            for one in lab.world.alive():
                if one.launch.instance.startswith("first-"):
                    one.end()
            await asyncio.to_thread(lambda: None)
        await judge(self, record)

    monkeypatch.setattr(adopt.Adoption, "_judge", with_a_death_between)
    again = await start()
    survivor = next(name for name in engines if name.startswith("second-"))
    assert survivor in again.service.scheduler.instances
