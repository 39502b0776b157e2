"""Requests and commands against a whole daemon."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import Start, gguf, write_recipe

from flexlab import daemons
from flexlab.core.errors import FlexLabError, ProxyError
from flexlab.demo.engine import Behaviour
from flexlab.demo.world import DemoWorld
from flexlab.gateway.proxy import Gateway
from flexlab.spec.lab import UpStep
from flexlab.spec.plan import Wishes


def up(model: str, wishes: Wishes | None = None, **more: Any) -> list[UpStep]:
    return list(daemons.connect(start=False).up(model, wishes or Wishes(), **more))


async def in_thread(call: Any, *args: Any, **more: Any) -> Any:
    return await asyncio.to_thread(call, *args, **more)


async def test_a_request_loads_an_installed_model_and_is_answered(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    status, answer = await lab.chat("small")
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    assert lab.running() == ["small"]


async def test_an_alias_reaches_the_same_model(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    assert (await lab.chat("small"))[0] == 200
    assert (await lab.chat("small-alias"))[0] == 200
    assert lab.running() == ["small"]


async def test_a_model_that_is_not_installed_is_a_404_with_the_command(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small", installed=False)
    lab = await start()
    status, answer = await lab.chat("small")
    assert status == 404
    assert answer["error"]["code"] == "model_not_installed"
    assert "flexlab up small" in answer["error"]["message"]
    assert lab.running() == []


async def test_an_unknown_model_is_a_404_that_names_near_ones(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    status, answer = await lab.chat("smal")
    assert status == 404
    assert answer["error"]["code"] == "model_not_found"
    assert "small" in answer["error"]["message"]


async def test_what_a_model_cannot_do_is_a_400_that_says_what_it_can(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    status, answer = await lab.post("/v1/embeddings", {"model": "small", "input": "hi"})
    assert status == 400
    assert answer["error"]["code"] == "not_supported"
    assert "chat" in answer["error"]["message"]
    assert lab.running() == [], "and it is not loaded for that"


async def test_a_path_is_a_name_for_as_long_as_its_model_runs(home: Path, start: Start) -> None:
    weights = home / "my model.gguf"
    weights.write_bytes(gguf())
    source = weights.as_uri()
    lab = await start()
    await in_thread(up, source)
    stopped = await in_thread(daemons.connect(start=False).down, (source,))
    assert len(stopped.stopped) == 1
    await in_thread(daemons.connect(start=False).rm, source)
    assert weights.exists(), "a file of the user's own stays"
    with pytest.raises(FlexLabError):
        await in_thread(daemons.connect(start=False).down, (source,))
    assert lab.running() == []


async def test_a_file_that_was_cut_short_is_refused_before_any_engine_starts(
    home: Path, start: Start
) -> None:
    weights = home / "cut.gguf"
    weights.write_bytes(gguf()[:40])
    lab = await start()
    (step,) = await in_thread(up, weights.as_uri())
    assert step.kind == "refused"
    assert "cut.gguf" in step.text
    assert lab.service.events.after(0)[-1].kind == "daemon", "nothing was tried"


async def test_a_path_that_never_ran_is_no_model_of_the_lab(
    home: Path, start: Start, world: DemoWorld
) -> None:
    weights = home / "broken.gguf"
    weights.write_bytes(gguf())
    world.behaviours["broken"] = Behaviour(fail_load="not a model at all")
    lab = await start()
    assert (await in_thread(up, weights.as_uri()))[-1].kind == "refused"
    _, answer = await lab.get("/v1/models")
    assert answer["data"] == []


async def test_the_speed_of_the_last_streamed_answer_is_in_the_snapshot(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    world.behaviours["small"] = Behaviour(token_s=0.01)
    lab = await start()
    await lab.stream("small", max_tokens=8)
    (view,) = [model for model in lab.service.lab.models() if model.name == "small"]
    assert view.tokens_per_s is not None
    assert 5 < view.tokens_per_s < 200, "a word every 10 ms, roughly"
    assert view.ttft_s is not None


async def test_only_installed_models_are_listed(home: Path, start: Start) -> None:
    write_recipe(home, "here")
    write_recipe(home, "absent", installed=False)
    lab = await start()
    _, answer = await lab.get("/v1/models")
    assert [model["id"] for model in answer["data"]] == ["here"]


async def test_up_tells_what_was_found_and_chosen_and_ends_ready(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    await start()
    steps = await in_thread(up, "small")
    text = "\n".join(step.text for step in steps)
    assert "RAM" in text
    assert "variant only" in text
    assert steps[-1].kind == "ready"
    assert steps[-1].model is not None
    assert steps[-1].model.word == "ready"


async def test_a_second_up_of_a_running_model_is_one_step(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    await start()
    await in_thread(up, "small")
    again = await in_thread(up, "small")
    assert [step.kind for step in again] == ["ready"]


async def test_up_of_an_unknown_name_is_refused_before_the_stream(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    await start()
    with pytest.raises(FlexLabError) as told:
        await in_thread(up, "smal")
    assert told.value.exit_code == 2
    assert "small" in str(told.value)


async def test_up_with_a_wrong_setting_is_refused_with_the_right_one(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    lab = await start()
    steps = await in_thread(up, "small", Wishes(settings={"contxt_size": "2048"}))
    assert steps[-1].refusal is not None
    assert steps[-1].refusal.status == 400
    assert "context_size" in steps[-1].refusal.message
    assert lab.running() == []


async def test_a_wrong_wish_leaves_what_runs_alone(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    await in_thread(up, "small")
    before = lab.world.alive()
    steps = await in_thread(up, "small", Wishes(settings={"contxt_size": "2048"}))
    assert [step.kind for step in steps] == ["refused"]
    assert lab.world.alive() == before
    assert (await lab.chat("small"))[0] == 200


async def test_other_settings_replace_what_runs_and_equal_ones_do_not(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small", context=1024)
    lab = await start()
    await in_thread(up, "small")
    (first,) = lab.world.alive()
    await in_thread(up, "small", Wishes(settings={"context_size": "1024"}))
    assert lab.world.alive() == [first], "the same plan in other words"
    await in_thread(up, "small", Wishes(settings={"context_size": "2048"}))
    (second,) = lab.world.alive()
    assert second is not first


async def test_an_up_that_hangs_up_while_loading_leaves_nothing(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    world.behaviours["small"] = Behaviour(load_s=None)
    lab = await start()

    def start_and_leave() -> None:
        steps = daemons.connect(start=False).up("small", Wishes())
        for step in steps:
            if "loading" in step.text:
                break
        steps.close()

    await in_thread(start_and_leave)
    await lab.until(lambda: not lab.running() and not lab.service.scheduler.instances)


async def test_a_second_up_is_not_disturbed_when_the_first_hangs_up(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    world.behaviours["small"] = Behaviour(load_s=None)
    lab = await start()
    scheduler = lab.service.scheduler
    first = daemons.connect(start=False).up("small", Wishes())
    await in_thread(next, first)
    second = asyncio.create_task(in_thread(up, "small"))
    await lab.until(lambda: len(scheduler.models["small"].waiters) == 2 and lab.running())
    await in_thread(first.close)
    await lab.until(lambda: len(scheduler.models["small"].waiters) == 1)
    world.alive()[0].finish_loading()
    steps = await second
    assert steps[-1].kind == "ready"


async def test_down_stops_and_says_what_was_not_running(home: Path, start: Start) -> None:
    write_recipe(home, "one")
    write_recipe(home, "two")
    lab = await start()
    await in_thread(up, "one")
    stopped = await in_thread(daemons.connect(start=False).down, ("one", "two"))
    assert [each.model for each in stopped.stopped] == ["one"]
    assert stopped.not_running == ("two",)
    assert lab.running() == []


async def test_a_failed_load_tells_the_cause_and_leaves_nothing(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    world.behaviours["small"] = Behaviour(fail_load="the file is cut off")
    lab = await start()
    steps = await in_thread(up, "small")
    assert steps[-1].kind == "refused"
    assert "the file is cut off" in steps[-1].text
    await lab.until(lambda: not lab.service.scheduler.instances)
    assert lab.running() == []


async def test_a_crashed_engine_is_started_again_by_the_next_request(
    home: Path, start: Start, world: DemoWorld
) -> None:
    write_recipe(home, "small")
    lab = await start()
    await lab.chat("small")
    world.alive()[0].end()
    await lab.until(lambda: not lab.service.scheduler.instances)
    status, _ = await lab.chat("small")
    assert status == 200


async def test_weights_of_a_running_model_are_not_removed(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    await start()
    await in_thread(up, "small")
    with pytest.raises(FlexLabError) as told:
        await in_thread(daemons.connect(start=False).rm, "small")
    assert "running" in told.value.message
    assert told.value.hint == "flexlab down small"


async def test_the_log_of_a_model_can_be_read_while_it_runs(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    await start()
    await in_thread(up, "small")

    def read() -> list[str]:
        return list(daemons.connect(start=False).logs("small", tail=10, follow=False))

    assert any("model loaded" in line for line in await in_thread(read))


async def test_events_follow_and_end_when_their_reader_leaves(home: Path, start: Start) -> None:
    write_recipe(home, "small")
    lab = await start()
    followed = daemons.connect(start=False).events(after=0, follow=True)
    first = await in_thread(next, followed)
    await lab.chat("small")
    second = await in_thread(next, followed)
    assert second.id == first.id + 1
    await in_thread(followed.close)


async def test_a_busy_daemon_does_not_end_when_only_an_idle_one_should(
    home: Path, start: Start
) -> None:
    write_recipe(home, "small")
    await start()
    connected = daemons.connect(start=False)
    await in_thread(up, "small")
    ended = await in_thread(connected.shutdown, stop_models=False, only_if_idle=True)
    assert ended is False


async def test_a_port_that_is_taken_names_the_next_free_one(start: Start) -> None:
    lab = await start()
    taken = lab.service.gateway.address.port
    second = Gateway(lab.service.gateway.routes)
    with pytest.raises(ProxyError) as told:
        await second.start("127.0.0.1", taken)
    assert str(taken) in told.value.message
    assert "--port" in (told.value.hint or "")
