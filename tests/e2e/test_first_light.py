"""From the command to the answer, and through rough handling, with the real engine."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from household import ROOT, Household
from waiting import until

pytestmark = pytest.mark.e2e


def client_of(lab: Household) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"http://127.0.0.1:{lab.port}/v1", api_key="unused", max_retries=0
    )


QUESTION: Any = [{"role": "user", "content": "Count from one to ten."}]


class TestAnswers:
    """What clients get, through the whole way."""

    @pytest.fixture(autouse=True)
    def running(self, lab: Household) -> None:
        lab.up()

    def test_every_form_of_an_answer(self, lab: Household) -> None:
        """One model for several looks: starting it takes longer than they do."""
        with client_of(lab) as client:
            self._a_whole_answer(client)
            self._a_streamed_answer(client)
            self._a_completion(client)
            self._errors(client, lab)
            self._the_list(client)

    def _a_whole_answer(self, client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="smollm2", messages=QUESTION, max_tokens=12, temperature=0
        )
        assert answer.object == "chat.completion"
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 12
        spent = answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.usage.total_tokens == spent

    def _a_streamed_answer(self, client: openai.OpenAI) -> None:
        chunks = list(
            client.chat.completions.create(
                model="smollm2",
                messages=QUESTION,
                max_tokens=12,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        said = [c.choices[0].delta.content for c in chunks if c.choices]
        assert sum(bool(piece) for piece in said) >= 10
        ends = [c.choices[0].finish_reason for c in chunks if c.choices]
        assert ends[:-1] == [None] * (len(ends) - 1), "the reason comes last"
        assert ends[-1] == "length"
        assert chunks[-1].choices == [], "usage comes after all choices"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert len({chunk.id for chunk in chunks}) == 1

    def _a_completion(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(model="smollm2", prompt="One, two,", max_tokens=5)
        assert answer.choices[0].text
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 5

    def _errors(self, client: openai.OpenAI, lab: Household) -> None:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.chat.completions.create(model="smolm2", messages=QUESTION)
        assert unknown.value.code == "model_not_found"
        assert "smollm2" in str(unknown.value)
        status, answer = lab.chat(messages="nonsense")
        assert status == 400
        assert answer["error"]["message"]
        too_long: Any = [{"role": "user", "content": "word " * 9000}]
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="smollm2", messages=too_long)

    def _the_list(self, client: openai.OpenAI) -> None:
        assert [model.id for model in client.models.list()] == ["smollm2-135m"]

    def test_a_client_that_leaves_frees_its_slot_within_a_second(self, lab: Household) -> None:
        with client_of(lab) as client:
            stream = client.chat.completions.create(
                model="smollm2", messages=QUESTION, max_tokens=4000, stream=True
            )
            next(iter(stream))
            assert busy_slots(lab) == 1
            stream.close()
            left = time.monotonic()
            until(lambda: busy_slots(lab) == 0, 5)
            assert time.monotonic() - left < 1

    def test_up_again_says_so_at_once_and_changes_nothing(self, lab: Household) -> None:
        before = lab.engines()
        began = time.monotonic()
        again = lab.up()
        assert time.monotonic() - began < 3
        assert "is running" in again.stdout
        assert lab.engines() == before

    def test_the_curl_line_of_up_works_when_pasted(self, lab: Household) -> None:
        lab.flexlab("down", "smollm2")
        said = lab.up().stdout
        (line,) = [line for line in said.splitlines() if line.startswith("curl ")]
        answer = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, env=lab.env(), timeout=120
        )
        assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0

    def test_run_answers_on_stdout_alone(self, lab: Household) -> None:
        told = lab.flexlab("run", "smollm2", "Say hello.", "--max-tokens", "8")
        assert told.returncode == 0, told.stderr
        assert told.stdout.strip()
        piped = lab.flexlab("run", "smollm2", "--max-tokens", "8", stdin="Say hello.")
        assert piped.returncode == 0, piped.stderr
        assert piped.stdout.strip()

    def test_logs_show_the_engine_at_work(self, lab: Household) -> None:
        told = lab.flexlab("logs", "smollm2")
        assert told.returncode == 0, told.stderr
        assert told.stdout.strip()

    def test_metrics_count_what_was_served(self, lab: Household) -> None:
        assert lab.chat()[0] == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{lab.port}/metrics") as answer:
            text = answer.read().decode()
        served = r'requests_total\{model="smollm2-135m",route="/v1/chat/completions",status="200"\}'
        assert re.search(rf"{served} [1-9]", text)


def busy_slots(lab: Household) -> int:
    """Slots of the engine that work on a request, as it says itself."""
    status, slots = lab.ask("GET", "/upstream/smollm2-135m/slots")
    assert status == 200, slots
    return sum(bool(slot["is_processing"]) for slot in slots)


def test_two_ups_at_once_are_one_daemon_and_one_engine(lab: Household) -> None:
    pair = [lab.start("up", "smollm2", "--no-probe") for _ in range(2)]
    said = [each.communicate(timeout=300) for each in pair]
    assert [each.returncode for each in pair] == [0, 0], said
    assert len(lab.daemons()) == 1
    assert len(lab.engines()) == 1


def test_a_killed_daemon_leaves_its_engine_to_the_next(lab: Household) -> None:
    lab.up()
    engines = lab.engines()
    (daemon,) = lab.daemons()
    os.kill(daemon.pid, signal.SIGKILL)
    until(lambda: not lab.daemons(), 5)
    assert lab.engines() == engines, "the engine goes on by itself"
    again = lab.up()
    assert "is running" in again.stdout
    assert lab.engines() == engines
    assert lab.chat()[0] == 200


def test_an_orderly_end_of_the_daemon_leaves_engines_too(lab: Household) -> None:
    lab.up()
    engines = lab.engines()
    assert lab.flexlab("down", "--daemon").returncode == 0
    assert lab.daemons() == []
    assert lab.engines() == engines
    lab.up()
    assert lab.engines() == engines


def test_an_older_daemon_is_replaced_and_its_models_go_on(lab: Household) -> None:
    older = (
        "import flexlab; flexlab.__version__ = '0.0.9'\nfrom flexlab.cli.main import main; main()"
    )
    assert lab.flexlab("pull", "smollm2", timeout=300).returncode == 0
    command = [sys.executable, "-c", older, "serve", "--detached"]
    with subprocess.Popen(command, env=lab.env(), stderr=subprocess.DEVNULL) as old:
        until(lambda: lab.ask("GET", "/health")[0] == 200, 30)
        assert '"0.0.9"' in lab.flexlab("ps", "--json").stdout
        assert lab.chat()[0] == 200
        engines = lab.engines()
        told = lab.up()
        assert "replacing the daemon" in told.stderr
        assert old.wait(30) == 0
    assert lab.engines() == engines
    assert lab.chat()[0] == 200


def test_a_killed_engine_comes_back_with_the_next_request(lab: Household) -> None:
    lab.up()
    (engine,) = lab.engines()
    os.kill(engine.pid, signal.SIGKILL)
    until(lambda: engine not in lab.engines(), 5)
    until(lambda: lab.chat()[0] == 200, 30, every_s=0.5)
    assert [each.pid for each in lab.engines()] != [engine.pid]


def test_a_daemon_killed_while_a_model_loads_leaves_no_orphan(lab: Household) -> None:
    lab.up("--no-probe")
    lab.flexlab("down", "smollm2")
    rising = lab.start("up", "smollm2", "--no-probe")
    until(lab.engines, 30)
    (daemon,) = lab.daemons()
    os.kill(daemon.pid, signal.SIGKILL)
    rising.communicate(timeout=60)
    lab.up()
    assert len(lab.engines()) == 1
    assert len(lab.daemons()) == 1


def test_ctrl_c_while_loading_ends_the_load_and_the_daemon_it_started(lab: Household) -> None:
    lab.up("--no-probe")  # the weights are here from now on
    lab.flexlab("down", "--all", "--daemon")
    rising = lab.start("up", "smollm2")
    until(lab.engines, 30)
    rising.send_signal(signal.SIGINT)
    _, said = rising.communicate(timeout=60)
    assert rising.returncode == 130
    assert "Traceback" not in said
    until(lambda: not lab.processes(), 20)


def test_a_taken_port_names_its_owner_and_the_next_free_one(lab: Household) -> None:
    with socket.create_server(("127.0.0.1", lab.port)):
        told = lab.flexlab("up", "smollm2", "--no-probe")
    assert told.returncode == 1
    assert f"pid {os.getpid()}" in told.stderr
    assert "--port" in told.stderr
    assert "Traceback" not in told.stderr


def test_a_home_that_cannot_be_written_is_one_sentence() -> None:
    if os.getuid() != 0:
        pytest.skip("only root can run the command as another user")
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        env = {"HOME": folder, "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
        command = [*nobody, sys.executable, "-m", "flexlab"]

        def as_nobody(*words: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *words], env=env, capture_output=True, text=True, cwd="/", timeout=60
            )

        if as_nobody("--version").returncode != 0:
            pytest.skip("another user may not read this interpreter or checkout")
        for verb in (["up", "smollm2"], ["pull", "smollm2"], ["serve"], ["ps"], ["ls"]):
            told = as_nobody(*verb)
            assert "Traceback" not in told.stderr, verb
            if verb[0] not in ("ps", "ls"):
                assert told.returncode not in (0, 130), verb
                assert folder in told.stderr, "the folder that it needs is named"
                assert "hint:" in told.stderr
        assert os.listdir(folder) == []


@pytest.mark.parametrize("env", [{"LC_ALL": "C"}, {"COLUMNS": "40"}, {"NO_COLOR": "1"}])
def test_plain_terminals_get_plain_lines(lab: Household, env: dict[str, str]) -> None:
    lab.up("--no-probe")
    for verb in ("ps", "ls", "recipes", "doctor", "version"):
        told = lab.flexlab(verb, **env)
        assert "Traceback" not in told.stderr
        assert "\x1b" not in told.stdout + told.stderr
        if env.get("LC_ALL") == "C":
            assert told.stdout.isascii(), verb
        if "COLUMNS" in env and verb in ("ps", "ls"):
            assert max(map(len, told.stdout.splitlines())) <= 40, told.stdout


def test_an_external_server_is_routed_to_and_never_stopped(lab: Household) -> None:
    """The engine of one daemon, seen as somebody else's server by another."""
    lab.up()
    other = Household(lab.home / "other", port=lab.port + 1, data=lab.data)
    other.home.mkdir()
    serving = other.start("serve", "--external", f"theirs=http://127.0.0.1:{lab.port}")
    try:
        until(lambda: other.ask("GET", "/health")[0] == 200, 30)
        status, answer = other.ask(
            "POST",
            "/v1/chat/completions",
            {"model": "theirs", "messages": QUESTION, "max_tokens": 4},
        )
        assert status == 404, "the name passes untouched: that server knows no model `theirs`"
        assert answer["error"]["code"] == "model_not_found"
        told = other.flexlab("down", "theirs")
        assert told.returncode == 2
        assert "only routes" in told.stderr
    finally:
        serving.send_signal(signal.SIGINT)
        serving.communicate(timeout=30)
    assert serving.returncode in (0, 130)
    assert len(lab.engines()) == 1


def test_down_says_whom_it_waits_for_and_lets_the_answer_end(lab: Household) -> None:
    lab.up("--no-probe")
    with ThreadPoolExecutor(1) as clients:
        # Without an end of its own, so that it lasts for as many tokens as it is given.
        asking = clients.submit(lab.chat, max_tokens=120, ignore_eos=True)
        until(lambda: busy_slots(lab) == 1)
        told = lab.flexlab("down", "smollm2")
        status, answer = asking.result()
    assert status == 200, answer
    assert answer["usage"]["completion_tokens"] == 120
    assert "answers 1 request" in told.stderr
    assert "is stopped" in told.stdout
