"""What a daemon finds that an earlier one left running."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
from daemon_lab import Lab, Start, gguf, write_recipe

from flexlab import daemons
from flexlab.core import paths
from flexlab.daemon.files import Records
from flexlab.demo.engine import Behaviour
from flexlab.demo.world import DemoWorld
from flexlab.spec.plan import Wishes


async def up(model: str, wishes: Wishes | None = None, **more: Any) -> None:
    def call() -> None:
        list(daemons.connect(start=False).up(model, wishes or Wishes(), **more))

    await asyncio.to_thread(call)


async def killed(start: Start, lab: Lab) -> None:
    """As far as what runs is concerned, an orderly end and kill -9 are the same: it goes on."""
    await start.end(lab)  # type: ignore[attr-defined]


async def test_a_running_model_is_adopted_and_answers(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    (engine,) = first.world.alive()
    await killed(start, first)
    second = await start()
    assert second.world.alive() == [engine]
    status, _ = await second.chat("small")
    assert status == 200
    assert second.world.alive() == [engine]
    (view,) = second.service.lab.snapshot().instances
    assert view.conditions == ()


async def test_an_adopted_engine_that_dies_is_noticed(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    await killed(start, first)
    second = await start()
    second.world.alive()[0].end()
    await second.until(lambda: not second.service.scheduler.instances)


async def test_one_whose_recipe_changed_is_stale_and_replaced_when_idle(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small", context=1024)
    first = await start()
    await up("small")
    await killed(start, first)
    write_recipe(home, "small", context=2048)
    second = await start(linger_s=0.2)
    (view,) = second.service.lab.snapshot().instances
    assert [condition.kind for condition in view.conditions] == ["stale"]
    await second.until(lambda: not second.running())


async def test_one_that_never_became_ready_is_ended(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    world.behaviours["small"] = Behaviour(load_s=None)
    first = await start()
    asking = asyncio.create_task(up("small"))
    await first.until(first.running)
    await first.service.close()  # without an orderly end, which would have waited
    first.lock.close()
    await asyncio.gather(asking, return_exceptions=True)
    second = await start()
    assert second.running() == []
    assert Records(paths.instances_dir()).all() == []


async def test_one_whose_model_is_gone_is_ended(home: Path, start: Start) -> None:
    recipe = write_recipe(home, "small")
    first = await start()
    await up("small")
    await killed(start, first)
    recipe.unlink()
    second = await start()
    assert second.running() == []


async def test_what_another_installation_started_is_never_touched(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    await killed(start, first)
    (paths.state_dir() / "installation").write_text("somebody-else")
    second = await start()
    assert second.running() == ["small"], "it runs, and is not ours"
    assert second.service.scheduler.instances == {}


async def test_a_start_that_was_cut_before_its_second_record_is_found_and_ended(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    records = Records(paths.instances_dir())
    await killed(start, first)
    (record,) = records.all()
    records.write(msgspec.structs.replace(record, ref=None, endpoint=None, ready_at=None))
    second = await start()
    assert second.running() == []


async def test_one_of_ours_without_any_record_is_ended(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small")
    await killed(start, first)
    for file in paths.instances_dir().glob("*.json"):
        file.unlink()
    second = await start()
    assert second.running() == []


async def test_a_record_of_a_newer_flexlab_is_left_alone(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await killed(start, first)
    foreign = paths.private_dir(paths.instances_dir()) / "x.json"
    foreign.write_text('{"schema": 99, "whatever": true}')
    await start()
    assert foreign.exists()


async def test_a_derived_model_is_known_again(home: Path, start: Start) -> None:
    weights = home / "Mine.Q4.gguf"
    weights.write_bytes(gguf())
    first = await start()
    await up(f"file://{weights}")
    (name,) = first.running()
    await killed(start, first)
    second = await start()
    status, _ = await second.chat(name)
    assert status == 200
    assert second.running() == [name]


async def test_keep_and_pin_outlive_the_daemon(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small", keep="warm", pin=True)
    await killed(start, first)
    second = await start()
    (view,) = [m for m in second.service.lab.snapshot().models if m.name == "small"]
    assert (view.keep, view.pinned) == ("warm", True)


async def test_a_model_that_its_user_stopped_stays_down(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    await up("small", keep="warm")
    await asyncio.to_thread(daemons.connect(start=False).down, ("small",))
    await killed(start, first)
    second = await start()
    assert second.running() == []
    assert second.service.scheduler.models["small"].preparing is None


async def test_event_ids_go_on_after_a_restart(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    first = await start()
    last = first.service.events.last_id
    await killed(start, first)
    second = await start()
    assert second.service.events.last_id > last


async def test_records_are_private_and_hold_the_key(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    await start()
    await up("small")
    (file,) = paths.instances_dir().glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    assert Records(paths.instances_dir()).all()[0].api_key
