"""The demo runtime, and what its fake engine says on the wire."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
from contract import LifeContract, PlanFor, Quirk, ask, until

from flexlab.core.errors import LaunchError
from flexlab.demo.engine import Behaviour
from flexlab.demo.runtime import DemoRuntime
from flexlab.demo.world import DemoWorld
from flexlab.runtimes.base import Runtime
from flexlab.spec.instance import Launch, Started
from flexlab.spec.plan import API_KEY_FILE, LaunchPlan, Probe

BEHAVIOURS: dict[str, Behaviour] = {
    "good": Behaviour(),
    "loads_forever": Behaviour(load_s=None),
    "ignores_term": Behaviour(ignores_term=True),
    "silent": Behaviour(silent=True),
    "fails": Behaviour(fail_load="the model is not to my taste"),
    "unstoppable": Behaviour(unstoppable=True),
    "fails_to_start": Behaviour(fail_start="no such program"),
}


def plan(model: str) -> LaunchPlan:
    return LaunchPlan(
        model=model,
        variant="demo",
        backend="demo",
        runtime="demo",
        arch="cpu",
        served_name=model,
        args=("--api-key-file", API_KEY_FILE),
        ready=Probe(path="/health"),
    )


@pytest.fixture
def world() -> Iterator[DemoWorld]:
    world = DemoWorld(BEHAVIOURS)
    yield world
    world.close()


class TestDemoRuntime(LifeContract):
    @pytest.fixture(autouse=True)
    def use(self, world: DemoWorld) -> None:
        self.world = world

    @pytest.fixture
    def runtime(self, world: DemoWorld) -> Runtime:
        return DemoRuntime(world)

    @pytest.fixture
    def another(self, world: DemoWorld) -> Callable[[], Runtime]:
        return lambda: DemoRuntime(world)

    @pytest.fixture
    def runtime_on_port(self, world: DemoWorld) -> Callable[[int], Runtime]:
        return lambda port: DemoRuntime(world, choose_port=lambda: port)

    @pytest.fixture
    def plan_for(self) -> PlanFor:
        def build(quirk: Quirk) -> LaunchPlan:
            return plan(quirk)

        return build

    def kill(self, started: Started) -> None:
        next(one for one in self.world.alive() if one.ref == started.ref).end()

    def readable_by_others(self, started: Started, launch: Launch) -> bytes:
        return b"\n".join(self.world.logs[launch.log_path].lines)


@pytest.fixture
def launch() -> Launch:
    return Launch(instance="one", installation="ours", api_key="sesame", log_path="one.log")


def post(started: Started, path: str, body: object) -> tuple[int, bytes]:
    connection = HTTPConnection("127.0.0.1", started.endpoint.port, timeout=5)
    try:
        connection.request("POST", path, json.dumps(body), dict(started.endpoint.headers))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "good", "messages": [{"role": "user", "content": "count"}], **more}


def test_one_that_cannot_be_started_leaves_nothing(world: DemoWorld, launch: Launch) -> None:
    with pytest.raises(LaunchError, match="no such program"):
        DemoRuntime(world).start(plan("fails_to_start"), launch)
    assert world.alive() == []


def test_an_unstoppable_one_is_not_confirmed_gone(world: DemoWorld, launch: Launch) -> None:
    runtime = DemoRuntime(world)
    started = runtime.start(plan("unstoppable"), launch)
    assert runtime.stop(started.ref, 0.0) is False
    assert runtime.state(started.ref).alive is True


def test_loading_ends_when_told(world: DemoWorld, launch: Launch) -> None:
    started = DemoRuntime(world).start(plan("loads_forever"), launch)
    assert ask(started.endpoint, "/health") == 503
    instance = world.instance("one")
    assert instance is not None
    instance.finish_loading()
    assert ask(started.endpoint, "/health") == 200


def test_an_answer_has_as_many_tokens_as_it_says(world: DemoWorld, launch: Launch) -> None:
    started = DemoRuntime(world).start(plan("good"), launch)
    status, body = post(started, "/v1/chat/completions", chat(max_tokens=5))
    answer = json.loads(body)
    assert status == 200
    assert len(answer["choices"][0]["message"]["content"].split()) == 5
    assert answer["usage"]["completion_tokens"] == 5


def test_a_stream_ends_with_reason_usage_and_done(world: DemoWorld, launch: Launch) -> None:
    started = DemoRuntime(world).start(plan("good"), launch)
    body = chat(stream=True, max_tokens=3, stream_options={"include_usage": True})
    status, raw = post(started, "/v1/chat/completions", body)
    events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    chunks = [json.loads(event) for event in events[:-1]]
    assert status == 200
    assert events[-1] == b"[DONE]"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, None, "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3


def test_a_client_that_leaves_ends_its_answer(world: DemoWorld, launch: Launch) -> None:
    world.behaviours["good"] = Behaviour(token_s=0.002)
    started = DemoRuntime(world).start(plan("good"), launch)
    connection = HTTPConnection("127.0.0.1", started.endpoint.port, timeout=5)
    body = json.dumps(chat(stream=True, max_tokens=100_000))
    connection.request("POST", "/v1/chat/completions", body, dict(started.endpoint.headers))
    response = connection.getresponse()
    response.read(10)
    response.close()
    connection.close()
    instance = world.instance("one")
    assert instance is not None
    until(lambda: instance.engine.abandoned == 1)


def test_a_wrong_body_is_refused_as_a_server_does(world: DemoWorld, launch: Launch) -> None:
    started = DemoRuntime(world).start(plan("good"), launch)
    status, body = post(started, "/v1/chat/completions", {"messages": "nonsense"})
    assert status == 400
    assert json.loads(body)["error"]["message"]
