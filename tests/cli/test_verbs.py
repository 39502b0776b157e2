"""What people see of the verbs that speak with a daemon."""

from __future__ import annotations

import json
import os
import time

import pytest
from cli_process import Flexlab
from fake_daemon import ANSWER, MODEL, FakeDaemon, instance_view, model_view, up_ready, up_story

from flexlab.core import paths
from flexlab.spec.lab import UpStep
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Refusal


def test_ps_names_the_model_its_state_and_its_reason(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    shown = flexlab_here("ps", COLUMNS="120")
    header, row = shown.stdout.splitlines()
    assert shown.returncode == 0
    assert header.split()[0] == "MODEL"
    assert MODEL in row
    assert "ready" in row
    assert "400.0M" in row
    assert row.endswith("answers")


def test_ps_fits_forty_columns_and_keeps_model_and_state(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    lines = flexlab_here("ps", COLUMNS="40").stdout.splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].split()[:2] == ["MODEL", "STATE"]


def test_ps_as_json_has_the_stable_shape(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    shown = json.loads(flexlab_here("ps", "--json").stdout)
    assert set(shown) == {"daemon", "models", "instances", "pools", "gpus"}
    assert shown["models"][0]["name"] == MODEL
    assert shown["daemon"]["address"] == daemon.address


def test_ps_shows_cold_models_only_when_asked(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    daemon.models = (model_view(word="cold", instances=(), idle_since=None),)
    daemon.instances = ()
    assert MODEL not in flexlab_here("ps").stdout
    assert MODEL in flexlab_here("ps", "--all").stdout


@pytest.mark.parametrize(
    ("more", "shown"),
    [
        ({"unload_at": time.time() + 3600}, "idle 2 s, unloads in"),
        ({"unload_at": None, "keep": "warm"}, "idle 2 s, kept"),
        ({"unload_at": None, "keep": "warm", "pinned": True}, "idle 2 s, kept, pinned"),
        ({"idle_since": None, "pinned": True}, "pinned"),
    ],
)
def test_ps_says_how_long_a_model_stays(
    flexlab_here: Flexlab, daemon: FakeDaemon, more: dict[str, object], shown: str
) -> None:
    daemon.models = (model_view(**{"idle_since": time.time() - 2, **more}),)
    [_, row] = flexlab_here("ps", COLUMNS="80").stdout.splitlines()
    assert shown in row


def test_ps_tells_of_a_failure_whole_however_narrow_the_table(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    why = "the engine ended: " + "it said very much " * 8
    until = time.time() + 4.4
    daemon.models = (
        model_view(word="failed", why=why, instances=(), idle_since=None, until=until),
    )
    shown = flexlab_here("ps", COLUMNS="80")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "next try in 4 s" in shown.stdout
    assert f"{MODEL} failed: {why.strip()} (flexlab logs {MODEL})" in shown.stderr


def test_ps_without_a_daemon_says_so_and_succeeds(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("ps", "--json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["models"] == []
    assert "not running" in shown.stderr


def test_control_characters_of_a_name_never_reach_the_terminal(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.models = (model_view(name="evil\x1b[2Jname", why="x\x07y"),)
    shown = flexlab_here("ps", COLUMNS="160").stdout
    assert "evilname" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_up_tells_the_story_and_ends_with_what_to_do_next(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.steps = up_story()
    shown = flexlab_here("up", "smollm2", "--keep", "--set", "parallel=2")
    assert shown.returncode == 0, shown.stderr
    assert "Test CPU, 2 threads" in shown.stderr
    assert "variant cpu: no GPU was found" in shown.stderr
    assert f"{daemon.address}/v1" in shown.stdout
    assert "42.5 tokens/s" in shown.stdout
    assert f"flexlab down {MODEL}" in shown.stdout
    [body] = daemon.bodies("POST /up")
    assert body["model"] == "smollm2"
    assert body["keep"] == "warm"
    assert body["wishes"]["settings"] == {"parallel": "2"}


def test_the_curl_line_works_when_pasted(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    import subprocess

    daemon.steps = up_story()
    shown = flexlab_here("up", "smollm2", "--no-probe")
    [line] = [line for line in shown.stdout.splitlines() if line.startswith("curl ")]
    pasted = subprocess.run(
        ["sh", "-c", line.replace("curl ", "curl -s ", 1)], capture_output=True, timeout=20
    )
    assert json.loads(pasted.stdout)["choices"][0]["message"]["content"] == ANSWER


def test_up_of_a_running_model_is_short_and_probes_nothing(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    shown = flexlab_here("up", "smollm2")
    assert shown.stdout.strip() == f"{MODEL} is running at {daemon.address}/v1"
    assert daemon.chats == []


def test_up_of_a_running_model_says_what_now_holds(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    held = model_view(keep="warm", pinned=True)
    daemon.steps = [UpStep(kind="ready", model=held, instance=instance_view())]
    shown = flexlab_here("up", "smollm2", "--keep", "--pin").stdout
    assert "\nkept " in shown
    assert "\npinned " in shown
    daemon.steps = [up_ready()]
    assert "\nnot kept " in flexlab_here("up", "smollm2", "--no-keep").stdout


def test_that_it_is_ready_is_said_once(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    daemon.steps = up_story()
    daemon.steps.insert(-1, UpStep(kind="event", text=f"{MODEL}: ready (loaded in 0.8 s)"))
    shown = flexlab_here("up", "smollm2", "--no-probe")
    assert "ready" not in shown.stderr
    assert shown.stdout.startswith(f"{MODEL} is ready")


@pytest.mark.parametrize("runtime", ["k3s", "demo", "external"])
def test_a_runtime_of_another_version_is_refused_here(
    flexlab_here: Flexlab, daemon: FakeDaemon, runtime: str
) -> None:
    shown = flexlab_here("up", "smollm2", "--runtime", runtime)
    assert shown.returncode == 2
    assert f"runtime '{runtime}' is not in this version; there is: process, docker" in shown.stderr
    assert daemon.requests == []


def test_up_as_json_holds_endpoint_and_probe(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    daemon.steps = up_story()
    shown = json.loads(flexlab_here("up", "smollm2", "--json").stdout)
    assert shown["endpoint"] == f"{daemon.address}/v1"
    assert shown["model"] == MODEL
    assert shown["probe"]["tokens_per_s"] == 42.5


@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [("too_big", 503, 3), ("no_memory", 503, 3), ("unknown_variant", 400, 2), ("launch", 503, 1)],
)
def test_a_refusal_ends_up_with_its_own_exit_code(
    flexlab_here: Flexlab, daemon: FakeDaemon, code: str, status: int, exit_code: int
) -> None:
    message, hint = "it needs 9.0G", "close something"
    problems = (
        Problem(code=code, message=message, hint=hint),
        Problem(code="other", message="and no GPU", hint="buy one"),
    )
    refusal = Refusal(code=code, message=message, hint=hint, status=status, problems=problems)
    daemon.steps = [UpStep(kind="refused", refusal=refusal)]
    shown = flexlab_here("up", "smollm2", "--json")
    assert shown.returncode == exit_code
    assert shown.stderr == ("error: it needs 9.0G\n  and no GPU (buy one)\nhint: close something\n")
    assert json.loads(shown.stdout)["error"]["code"] == code


def test_a_failed_probe_is_a_note_and_the_model_stays_up(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.steps = up_story()
    daemon.errors["/v1/chat/completions"] = (429, {"message": "queue is full", "code": "busy"})
    shown = flexlab_here("up", "smollm2")
    assert shown.returncode == 0
    assert "queue is full" in shown.stderr


def test_a_daemon_that_dies_meanwhile_is_a_sentence_with_exit_4(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.steps = up_story()[:2]
    shown = flexlab_here("up", "smollm2")
    assert shown.returncode == 4
    assert "ended before smollm2 was ready" in shown.stderr


def test_down_says_how_long_it_took_and_what_did_not_run(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    stopped = [{"model": MODEL, "instance": "i1", "seconds": 0.3}]
    daemon.answers["/down"] = {"stopped": stopped, "not_running": ["other"]}
    shown = flexlab_here("down", "smollm2", "other")
    assert shown.returncode == 0
    assert shown.stdout.splitlines() == [
        f"{MODEL} is stopped (0.3 s)",
        "other was not running",
    ]


def test_down_of_an_unknown_model_keeps_the_daemons_words_and_code(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    problem = {"code": "model_not_found", "message": "no model named 'x'", "hint": "flexlab ls"}
    daemon.errors["/down"] = (404, {**problem, "exit_code": 2, "near": ["xy"]})
    shown = flexlab_here("down", "x", "--json")
    assert shown.returncode == 2
    assert shown.stderr == "error: no model named 'x'\nhint: flexlab ls\n"
    assert json.loads(shown.stdout)["error"]["near"] == ["xy"]


def test_down_all_and_daemon_waits_until_the_lock_is_free(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.answers["/down"] = {"stopped": [], "not_running": []}
    shown = flexlab_here("down", "--all", "--daemon")
    assert shown.returncode == 0
    assert daemon.ended.is_set()
    asked = [path for path, _ in daemon.requests if path.startswith("POST")]
    assert asked == ["POST /down", "POST /shutdown"]


def test_down_all_without_a_daemon_is_no_error(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("down", "--all", "--daemon")
    assert shown.returncode == 0
    assert "nothing is running" in shown.stderr


def test_logs_prints_lines_without_their_escape_codes(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.log_lines = ["plain", "\x1b[31mred\x1b[0m"]
    shown = flexlab_here("logs", "smollm2", "-n", "5")
    assert shown.stdout.splitlines() == ["plain", "red"]
    assert "tail=5" in daemon.bodies("GET /logs")[0]


def test_logs_without_a_daemon_shows_the_last_start(flexlab_here: Flexlab) -> None:
    never = flexlab_here("logs", "smollm2")
    assert never.returncode == 2
    assert "never started" in never.stderr
    paths.logs_dir().mkdir(parents=True)
    for at, word in enumerate(("00000002", "00000001")):
        log = paths.logs_dir() / f"{MODEL}-{word}.log"
        log.write_text(f"start {at}\n\x1b[31mlast words {at}\n")
        os.utime(log, (at, at))
    shown = flexlab_here("logs", "smollm2", "-n", "1")
    assert shown.returncode == 0
    assert shown.stdout == "last words 1\n"
    assert "not running" in shown.stderr
    assert flexlab_here("logs", "smolm2").returncode == 2


def test_run_streams_the_answer_to_stdout(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    shown = flexlab_here(
        "run", "smollm2", "hello", "there", "--system", "be brief", "--max-tokens", "9"
    )
    assert shown.stdout == ANSWER + "\n"
    [chat] = daemon.chats
    assert [message["content"] for message in chat["messages"]] == ["be brief", "hello there"]
    assert chat["max_tokens"] == 9


def test_run_reads_its_prompt_from_a_pipe(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    shown = flexlab_here("run", "smollm2", "--json", stdin="what is up?\n")
    assert json.loads(shown.stdout)["content"] == ANSWER
    assert daemon.chats[0]["messages"][0]["content"] == "what is up?"


@pytest.mark.parametrize("env", [{}, {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_prompt_reaches_the_model_whole_in_any_locale(
    flexlab: Flexlab, daemon: FakeDaemon, env: dict[str, str]
) -> None:
    words = "wie schön, 日本"
    asked = flexlab("run", "smollm2", words, "--system", words, LC_ALL="C", **env)
    assert asked.returncode == 0, asked.stderr
    flexlab("run", "smollm2", stdin=words, LC_ALL="C", **env)
    said = [message["content"] for chat in daemon.chats for message in chat["messages"]]
    assert said == [words] * 3


def test_run_strips_escape_codes_from_the_models_answer(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.pieces = ["a\x1b]0;title\x07b", "\tc\n"]
    assert flexlab_here("run", "smollm2", "hi").stdout == "ab\tc\n\n"


def test_an_older_command_says_so_and_goes_on(flexlab_here: Flexlab) -> None:
    with FakeDaemon(version="99.0.0") as daemon:
        shown = flexlab_here("up", "smollm2")
        assert shown.returncode == 0
        assert "the daemon is FlexLab 99.0.0" in shown.stderr
        assert not daemon.ended.is_set()


def test_a_newer_command_replaces_the_daemon_and_says_so(flexlab: Flexlab) -> None:
    with FakeDaemon(version="0.0.1") as old:
        shown = flexlab("up", "smollm2", "--no-probe")
        assert shown.returncode == 0, shown.stderr
        assert "replacing the daemon of FlexLab 0.0.1" in shown.stderr
        [body] = old.bodies("POST /shutdown")
        assert body["stop_models"] is False
        assert "replaced by" in body["why"]
    assert flexlab("down", "--daemon").returncode == 0


def test_ready_instances_are_shown_with_their_conditions(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.steps = [up_ready()]
    daemon.instances = (instance_view(why="first answers"),)
    assert "first answers" in flexlab_here("ps", COLUMNS="160").stdout
