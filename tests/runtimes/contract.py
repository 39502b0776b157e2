"""What every runtime must do, whatever it runs on.

`RuntimeContract` holds for all of them; `LifeContract` for those that start and end what they run.
A test module subclasses one of them and supplies the fixtures.
"""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Literal, TypeVar

import pytest
from waiting import until

from flexlab.core.errors import LaunchError
from flexlab.runtimes.base import Runtime
from flexlab.spec.instance import Endpoint, Launch, RunState, RuntimeRef, Started
from flexlab.spec.plan import LaunchPlan

Quirk = Literal["good", "loads_forever", "ignores_term", "silent", "fails"]
PlanFor = Callable[[Quirk], LaunchPlan]
T = TypeVar("T")
DEADLINE_S = 20.0


def ask(endpoint: Endpoint, path: str, *, with_key: bool = True, timeout_s: float = 5.0) -> int:
    """The status of a GET, 0 when there is no answer."""
    connection = HTTPConnection(endpoint.host, endpoint.port, timeout=timeout_s)
    try:
        headers = dict(endpoint.headers) if with_key else {}
        connection.request("GET", endpoint.path_prefix + path, headers=headers)
        return connection.getresponse().status
    except OSError:
        return 0
    finally:
        connection.close()


class Callbacks:
    """Counts how often a watch called back, and with what."""

    def __init__(self) -> None:
        self.states: list[RunState] = []
        self.first = threading.Event()

    def __call__(self, state: RunState) -> None:
        self.states.append(state)
        self.first.set()


class RuntimeContract:
    """Fixtures to override: `runtime`, `another`, `plan_for`."""

    @pytest.fixture
    def runtime(self) -> Iterator[Runtime]:
        raise NotImplementedError

    @pytest.fixture
    def another(self) -> Callable[[], Runtime]:
        """Makes a further runtime object that looks at the same things, as a new daemon would."""
        raise NotImplementedError

    @pytest.fixture
    def plan_for(self) -> PlanFor:
        raise NotImplementedError

    @pytest.fixture
    def installation(self) -> str:
        return f"ours-{uuid.uuid4().hex}"

    @pytest.fixture
    def launch(self, installation: str, tmp_path: Path) -> Launch:
        return self.new_launch(installation, tmp_path)

    @staticmethod
    def new_launch(installation: str, folder: Path) -> Launch:
        name = uuid.uuid4().hex[:12]
        return Launch(
            instance=name,
            installation=installation,
            api_key=f"key-{uuid.uuid4().hex}",
            log_path=str(folder / f"{name}.log"),
        )

    def test_facts_speak_of_this_runtime(self, runtime: Runtime) -> None:
        assert runtime.facts().name == runtime.name

    def test_a_start_answers_on_its_endpoint(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        assert until(lambda: ask(started.endpoint, "/health")) == 200
        assert runtime.state(started.ref).alive is True

    def test_a_second_start_returns_the_running_one(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        first = runtime.start(plan_for("good"), launch)
        assert runtime.start(plan_for("good"), launch) == first

    def test_stopping_twice_is_harmless(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        assert runtime.stop(started.ref, 5.0) is True
        assert runtime.stop(started.ref, 5.0) is True

    def test_a_new_runtime_finds_it_by_its_reference(
        self,
        runtime: Runtime,
        another: Callable[[], Runtime],
        plan_for: PlanFor,
        launch: Launch,
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        runtime.close()
        assert another().state(started.ref).alive is True
        assert until(lambda: ask(started.endpoint, "/health")) == 200

    def test_no_answer_is_not_gone(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("silent"), launch)
        assert ask(started.endpoint, "/health", timeout_s=0.2) == 0
        assert runtime.state(started.ref).alive is not False

    def test_what_another_installation_started_is_never_ours(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch, tmp_path: Path
    ) -> None:
        theirs = self.new_launch(f"theirs-{uuid.uuid4().hex}", tmp_path)
        started = runtime.start(plan_for("good"), theirs)
        try:
            assert runtime.owned(launch.installation) == []
        finally:
            runtime.stop(started.ref, 1.0)

    def test_logs_end_and_can_be_closed(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        lines = runtime.logs(started.ref, launch.log_path, tail=5, follow=False)
        assert len(list(lines)) <= 5
        lines.close()  # type: ignore[attr-defined]
        assert list(lines) == []

    def test_a_closed_watch_may_be_closed_again(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        watch = runtime.watch(runtime.start(plan_for("good"), launch).ref, Callbacks())
        watch.close()
        watch.close()

    def test_closing_twice_is_harmless(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        runtime.watch(runtime.start(plan_for("good"), launch).ref, Callbacks())
        runtime.close()
        runtime.close()


class LifeContract(RuntimeContract):
    """For runtimes that own what they run; fixtures besides: `runtime_on_port`.

    `kill` ends an instance behind the runtime's back; `readable_by_others` is what anyone on the
    machine may see of it.
    """

    @pytest.fixture
    def runtime_on_port(self) -> Callable[[int], Runtime]:
        """Makes a runtime whose next instance gets this port."""
        raise NotImplementedError

    def kill(self, started: Started) -> None:
        raise NotImplementedError

    def readable_by_others(self, started: Started, launch: Launch) -> bytes:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, another: Callable[[], Runtime], installation: str) -> Iterator[None]:
        yield
        runtime = another()
        for found in runtime.owned(installation):
            runtime.stop(found.ref, 0.0)

    def gone(self, runtime: Runtime, ref: RuntimeRef) -> RunState:
        until(lambda: runtime.state(ref).alive is False)
        return runtime.state(ref)

    def test_two_starts_at_once_make_one(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        barrier = threading.Barrier(2)
        results: list[Started] = []

        def start() -> None:
            barrier.wait()
            results.append(runtime.start(plan_for("good"), launch))

        threads = [threading.Thread(target=start) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1]
        assert len(runtime.owned(launch.installation)) == 1

    def test_a_stopped_one_is_gone_and_may_be_started_again(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        first = runtime.start(plan_for("good"), launch)
        assert runtime.stop(first.ref, 5.0)
        assert runtime.state(first.ref).alive is False
        assert runtime.find(launch.instance) is None
        again = runtime.start(plan_for("good"), launch)
        assert again.ref != first.ref
        assert until(lambda: ask(again.endpoint, "/health")) == 200

    def test_stop_while_starting(self, runtime: Runtime, plan_for: PlanFor, launch: Launch) -> None:
        started = runtime.start(plan_for("good"), launch)
        assert runtime.stop(started.ref, 5.0)
        assert runtime.owned(launch.installation) == []

    def test_stop_while_loading(self, runtime: Runtime, plan_for: PlanFor, launch: Launch) -> None:
        started = runtime.start(plan_for("loads_forever"), launch)
        assert until(lambda: ask(started.endpoint, "/health")) == 503
        assert runtime.stop(started.ref, 5.0)
        assert ask(started.endpoint, "/health") == 0

    def test_one_that_ignores_the_request_to_end_is_killed(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("ignores_term"), launch)
        until(lambda: ask(started.endpoint, "/health"))
        begun = time.monotonic()
        assert runtime.stop(started.ref, 0.3)
        assert 0.3 <= time.monotonic() - begun < 2.3
        assert self.gone(runtime, started.ref).exit_code == 137

    def test_one_with_an_open_connection_is_stopped_all_the_same(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("silent"), launch)
        until(lambda: runtime.state(started.ref).alive)
        until(lambda: _listens(started.endpoint))
        with socket.create_connection((started.endpoint.host, started.endpoint.port)) as client:
            client.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
            assert runtime.stop(started.ref, 3.0)

    def test_a_new_runtime_adopts_it(
        self,
        runtime: Runtime,
        another: Callable[[], Runtime],
        plan_for: PlanFor,
        launch: Launch,
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        runtime.close()
        adopter = another()
        assert adopter.find(launch.instance) == started.ref
        (found,) = adopter.owned(launch.installation)
        assert (found.instance, found.ref) == (launch.instance, started.ref)
        assert found.installation == launch.installation
        assert adopter.start(plan_for("good"), launch) == started
        callbacks = Callbacks()
        adopter.watch(started.ref, callbacks)
        assert adopter.stop(started.ref, 5.0)
        assert callbacks.first.wait(DEADLINE_S)

    def test_gone_under_our_feet(self, runtime: Runtime, plan_for: PlanFor, launch: Launch) -> None:
        started = runtime.start(plan_for("good"), launch)
        until(lambda: ask(started.endpoint, "/health"))
        callbacks = Callbacks()
        runtime.watch(started.ref, callbacks)
        self.kill(started)
        assert callbacks.first.wait(DEADLINE_S)
        state = self.gone(runtime, started.ref)
        assert callbacks.states == [state]
        assert state.exit_code == 137
        assert state.why is not None
        assert "SIGKILL" in state.why
        assert runtime.owned(launch.installation) == []

    def test_a_watch_on_what_is_gone_calls_back(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        runtime.stop(started.ref, 5.0)
        callbacks = Callbacks()
        runtime.watch(started.ref, callbacks)
        assert callbacks.first.wait(DEADLINE_S)
        assert callbacks.states[0].alive is False

    def test_a_closed_watch_stays_silent(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        closed, before, after = Callbacks(), Callbacks(), Callbacks()
        runtime.watch(started.ref, before)
        runtime.watch(started.ref, closed).close()
        runtime.watch(started.ref, after)
        self.kill(started)
        assert before.first.wait(DEADLINE_S)
        assert after.first.wait(DEADLINE_S)
        runtime.close()
        assert closed.states == []

    def test_a_port_that_is_taken_is_said_and_nothing_is_left(
        self, runtime_on_port: Callable[[int], Runtime], plan_for: PlanFor, launch: Launch
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as owner:
            runtime = runtime_on_port(owner.getsockname()[1])
            with pytest.raises(LaunchError) as caught:
                runtime.start(plan_for("good"), launch)
        assert caught.value.code == "port_taken"
        assert caught.value.hint
        assert runtime.find(launch.instance) is None

    def test_one_that_fails_says_how(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("fails"), launch)
        state = self.gone(runtime, started.ref)
        assert state.exit_code == 1
        assert state.why
        log = list(runtime.logs(started.ref, launch.log_path, tail=20, follow=False))
        assert any(b"not to my taste" in line for line in log)

    def test_the_key_opens_the_engine_and_is_seen_nowhere(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        until(lambda: ask(started.endpoint, "/health"))
        assert ask(started.endpoint, "/v1/models") == 200
        assert ask(started.endpoint, "/v1/models", with_key=False) == 401
        assert launch.api_key.encode() not in self.readable_by_others(started, launch)

    def test_one_id_under_two_installations_is_two_instances(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch, tmp_path: Path
    ) -> None:
        theirs = Launch(
            instance=launch.instance,
            installation=f"theirs-{uuid.uuid4().hex}",
            api_key="their-key",
            log_path=str(tmp_path / "theirs.log"),
        )
        first = runtime.start(plan_for("good"), theirs)
        try:
            assert runtime.start(plan_for("good"), launch).ref != first.ref
        finally:
            runtime.stop(first.ref, 1.0)
        assert len(runtime.owned(launch.installation)) == 1

    def test_memory_is_known_while_it_runs_and_unknown_afterwards(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        until(lambda: ask(started.endpoint, "/health"))
        held = runtime.memory(started.ref)
        assert held is not None
        assert held.resident_bytes > 1024**2
        assert held.own_bytes <= held.resident_bytes
        runtime.stop(started.ref, 5.0)
        assert runtime.memory(started.ref) is None

    def test_logs_are_followed_until_closed(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        lines = runtime.logs(started.ref, launch.log_path, tail=100, follow=True)
        assert any(b"listening" in line for line in lines)
        ended = threading.Event()

        def drain() -> None:
            for _ in lines:
                pass
            ended.set()

        threading.Thread(target=drain, daemon=True).start()
        lines.close()  # type: ignore[attr-defined]
        assert ended.wait(DEADLINE_S)


def _listens(endpoint: Endpoint) -> bool:
    try:
        socket.create_connection((endpoint.host, endpoint.port), 1.0).close()
    except OSError:
        return False
    return True
