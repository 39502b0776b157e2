"""The real engine as the process runtime starts it: real weights, real HTTP, no daemon."""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec import structs
from waiting import until

from flexlab.backends.base import Site
from flexlab.backends.llamacpp import LlamaCpp, LlamaCppSettings
from flexlab.core.errors import FlexLabError, WeightsError
from flexlab.core.paths import shipped_dir
from flexlab.runtimes.process import ProcessRuntime
from flexlab.spec.engine import sentence_in
from flexlab.spec.instance import Endpoint, Launch, Started
from flexlab.spec.plan import LaunchPlan, Probe, Weight
from flexlab.weights.fetch import fetch
from flexlab.weights.gguf import check_whole
from flexlab.weights.store import Store

pytestmark = pytest.mark.e2e
NAME = "smollm2-135m"
CONTEXT = 1024
PROMPT = [{"role": "user", "content": "Count from one to ten."}]


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, from $FLEXLAB_TEST_MODEL or fetched as FlexLab itself does it."""
    if given := os.environ.get("FLEXLAB_TEST_MODEL"):
        return Path(given)
    recipe = yaml.safe_load((shipped_dir("recipes") / "models" / f"{NAME}.yaml").read_text())
    words = recipe["variants"][0]["weights"][0]
    weight = Weight(
        source=words["source"],
        sha256=words["sha256"],
        archive_sha256=words["archive_sha256"],
        size_bytes=words["size"],
        archive_bytes=words["archive_size"],
    )
    try:
        return fetch(weight, Store(tmp_path_factory.mktemp("models")), lambda _: None)
    except FlexLabError as error:
        pytest.skip(f"the default model cannot be had here: {error}")


@pytest.fixture(scope="module")
def runtime() -> Iterator[ProcessRuntime]:
    runtime = ProcessRuntime()
    facts = runtime.facts()
    if not facts.available:
        pytest.skip("; ".join(problem.message for problem in facts.problems))
    yield runtime
    runtime.close()


def plan(model: Path, env: dict[str, str] | None = None, **more: Any) -> LaunchPlan:
    wanted = {"context_size": CONTEXT, "parallel": 2, "n_gpu_layers": 0, "cache_ram_mib": 0, **more}
    settings = LlamaCppSettings.model_validate(wanted)
    args = LlamaCpp().argv(settings, Site(model_path=str(model), served_name=NAME, threads=2))
    return LaunchPlan(
        model=NAME,
        variant="q4-1",
        backend="llamacpp",
        runtime="process",
        arch="cpu",
        served_name=NAME,
        args=args,
        env=env or {},
        ready=Probe(path="/health"),
    )


def new_launch(folder: Path) -> Launch:
    name = uuid.uuid4().hex
    return Launch(
        instance=name,
        installation=f"test-{name}",
        api_key=f"key-{name}",
        log_path=str(folder / f"{name}.log"),
    )


def open_request(
    endpoint: Endpoint, path: str, body: object = None, *, with_key: bool = True
) -> tuple[HTTPConnection, HTTPResponse]:
    connection = HTTPConnection(endpoint.host, endpoint.port, timeout=120)
    headers = {"Content-Type": "application/json", **(dict(endpoint.headers) if with_key else {})}
    data = None if body is None else json.dumps(body)
    connection.request("GET" if body is None else "POST", path, data, headers)
    return connection, connection.getresponse()


def ask(endpoint: Endpoint, path: str, body: object = None, **more: bool) -> tuple[int, bytes]:
    try:
        connection, response = open_request(endpoint, path, body, **more)
        with closing(connection):
            return response.status, response.read()
    except OSError:
        return 0, b""


def chat(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": PROMPT, "temperature": 0, **more}


def ready(started: Started) -> bool:
    return ask(started.endpoint, "/health")[0] == 200


class TestReadyEngine:
    @pytest.fixture(scope="class")
    def launch(self, tmp_path_factory: pytest.TempPathFactory) -> Launch:
        return new_launch(tmp_path_factory.mktemp("logs"))

    @pytest.fixture(scope="class")
    def engine(
        self,
        runtime: ProcessRuntime,
        model_path: Path,
        launch: Launch,
        tmp_path_factory: pytest.TempPathFactory,
    ) -> Iterator[Started]:
        """With a home that cannot be written to, and without a locale."""
        home = tmp_path_factory.mktemp("home")
        home.chmod(stat.S_IRUSR | stat.S_IXUSR)
        started = runtime.start(plan(model_path, {"HOME": str(home), "LC_ALL": "C"}), launch)
        until(lambda: ready(started), 60)
        yield started
        assert runtime.stop(started.ref, 10)
        assert runtime.state(started.ref).exit_code == 0

    def test_an_answer_has_its_parts(self, engine: Started) -> None:
        status, body = ask(engine.endpoint, "/v1/chat/completions", chat(max_tokens=8))
        answer = json.loads(body)
        assert status == 200
        (choice,) = answer["choices"]
        assert choice["finish_reason"] in ("length", "stop")
        assert choice["message"]["role"] == "assistant"
        assert 0 < answer["usage"]["completion_tokens"] <= 8
        assert answer["usage"]["prompt_tokens"] > 0
        assert answer["model"] == NAME

    def test_a_stream_has_its_order(self, engine: Started) -> None:
        body = chat(max_tokens=8, stream=True, stream_options={"include_usage": True})
        status, raw = ask(engine.endpoint, "/v1/chat/completions", body)
        events = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: ")]
        chunks = [json.loads(event) for event in events[:-1]]
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]]
        assert status == 200
        assert events[-1] == b"[DONE]"
        assert reasons[-1] in ("length", "stop")
        assert set(reasons[:-1]) == {None}
        assert chunks[-1]["choices"] == []
        assert 0 < chunks[-1]["usage"]["completion_tokens"] <= 8

    def test_a_client_that_leaves_frees_its_slot_within_a_second(self, engine: Started) -> None:
        body = chat(max_tokens=900, stream=True, ignore_eos=True)
        connection, response = open_request(engine.endpoint, "/v1/chat/completions", body)
        response.readline()
        assert self.busy_slots(engine) == 1
        response.close()
        connection.close()
        until(lambda: self.busy_slots(engine) == 0, 1.0)

    def busy_slots(self, engine: Started) -> int:
        slots = json.loads(ask(engine.endpoint, "/slots")[1])
        return sum(slot["is_processing"] for slot in slots)

    def test_each_slot_has_the_whole_context_of_a_request(self, engine: Started) -> None:
        slots = json.loads(ask(engine.endpoint, "/slots")[1])
        assert [slot["n_ctx"] for slot in slots] == [CONTEXT, CONTEXT]

    def test_nobody_without_the_key_is_let_in(self, engine: Started, launch: Launch) -> None:
        for path in ("/v1/models", "/metrics", "/slots"):
            assert ask(engine.endpoint, path, with_key=False)[0] == 401
            assert ask(engine.endpoint, path)[0] == 200
        assert launch.api_key not in Path(launch.log_path).read_text()

    def test_it_holds_memory_and_can_be_adopted(
        self, engine: Started, launch: Launch, runtime: ProcessRuntime, model_path: Path
    ) -> None:
        held = runtime.memory(engine.ref)
        assert held is not None
        assert held.resident_bytes > model_path.stat().st_size / 2
        assert ProcessRuntime().find(launch.instance) == engine.ref


def started_and_ready(runtime: ProcessRuntime, wanted: LaunchPlan, folder: Path) -> Started:
    started = runtime.start(wanted, new_launch(folder))
    until(lambda: ready(started), 60)
    return started


def test_drafts_of_what_was_said_before(
    runtime: ProcessRuntime, model_path: Path, tmp_path: Path
) -> None:
    """The answer is the same as without them."""
    said = "The quick brown fox jumps over the lazy dog and runs away from the bear. " * 4
    body = chat(max_tokens=60, messages=[{"role": "user", "content": f"Repeat this: {said}"}])
    answers: list[dict[str, Any]] = []
    drafting: dict[str, Any] = {"spec_type": "ngram-simple", "draft_max": 4, "draft_min": 1}
    for more in ({}, drafting):
        started = started_and_ready(runtime, plan(model_path, **more), tmp_path)
        answers.append(json.loads(ask(started.endpoint, "/v1/chat/completions", body)[1]))
        assert runtime.stop(started.ref, 10)
    plain, drafted = answers
    assert drafted["choices"][0]["message"] == plain["choices"][0]["message"]
    assert drafted["timings"]["draft_n_accepted"] > 0
    assert "draft_n" not in plain["timings"]


def test_a_slot_outlives_its_engine(
    runtime: ProcessRuntime, model_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "slots"
    folder.mkdir()
    wanted = plan(model_path, parallel=1)
    wanted = structs.replace(wanted, args=(*wanted.args, "--slot-save-path", str(folder)))
    told: dict[str, dict[str, int]] = {}
    for action in ("save", "restore"):
        started = started_and_ready(runtime, wanted, tmp_path)
        if action == "save":
            ask(started.endpoint, "/v1/chat/completions", chat(max_tokens=4))
        status, body = ask(started.endpoint, f"/slots/0?action={action}", {"filename": "one"})
        assert status == 200
        told[action] = json.loads(body)
        assert runtime.stop(started.ref, 10)
    assert told["restore"]["n_restored"] == told["save"]["n_saved"] > 0


def test_texts_are_ranked(runtime: ProcessRuntime, model_path: Path, tmp_path: Path) -> None:
    """The route and its form; a chat model has no rank head, so that its scores mean nothing."""
    started = started_and_ready(runtime, plan(model_path, reranking=True), tmp_path)
    question = {"query": "What is a panda?", "documents": ["a bear of China", "a city"]}
    status, body = ask(started.endpoint, "/v1/rerank", question)
    assert status == 200
    assert sorted(one["index"] for one in json.loads(body)["results"]) == [0, 1]
    assert runtime.stop(started.ref, 10)


def test_a_stop_does_not_wait_for_answers(
    runtime: ProcessRuntime, model_path: Path, tmp_path: Path
) -> None:
    started = runtime.start(plan(model_path), new_launch(tmp_path))
    until(lambda: ready(started), 60)
    body = chat(max_tokens=900, stream=True, ignore_eos=True)
    connection, response = open_request(started.endpoint, "/v1/chat/completions", body)
    with closing(connection):
        response.readline()
        begun = time.monotonic()
        assert runtime.stop(started.ref, 10)
        assert time.monotonic() - begun < 5
        response.close()
    assert runtime.state(started.ref).exit_code == 0


def test_a_model_is_what_its_bytes_say_whatever_its_name(
    runtime: ProcessRuntime, model_path: Path, tmp_path: Path
) -> None:
    renamed = tmp_path / "model.bin"
    renamed.symlink_to(model_path)
    started = runtime.start(plan(renamed), new_launch(tmp_path))
    until(lambda: ready(started), 60)
    assert runtime.stop(started.ref, 10)


def test_stop_while_loading(runtime: ProcessRuntime, model_path: Path, tmp_path: Path) -> None:
    launch = new_launch(tmp_path)
    started = runtime.start(plan(model_path), launch)
    until(lambda: ask(started.endpoint, "/health")[0] in (200, 503), 60)
    assert runtime.stop(started.ref, 5)
    assert runtime.owned(launch.installation) == []


@pytest.mark.parametrize(
    ("keep_bytes", "code"),
    [(0, "bad_model"), (100, "load_failed"), (30_000_000, "load_failed"), (-1, "load_failed")],
)
def test_damaged_weights_are_a_sentence(
    keep_bytes: int, code: str, runtime: ProcessRuntime, model_path: Path, tmp_path: Path
) -> None:
    """The check before a start and the engine agree on what is whole, to the byte."""
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(model_path.read_bytes()[:keep_bytes])
    check_whole(model_path)
    with pytest.raises(WeightsError):
        check_whole(damaged)
    launch = new_launch(tmp_path)
    started = runtime.start(plan(damaged), launch)
    until(lambda: runtime.state(started.ref).alive is False, 60)
    assert runtime.state(started.ref).code == code
    log = Path(launch.log_path).read_text().splitlines()
    assert str(damaged) in (sentence_in(log) or "")
    assert not any("Traceback" in line for line in log)
