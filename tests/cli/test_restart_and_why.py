"""`restart` and `why`, as people see them."""

from __future__ import annotations

import json

import msgspec
from cli_process import Flexlab
from fake_daemon import MODEL, FakeDaemon, instance_view, model_view, up_ready, up_story

from flexlab.spec.lab import UpStep
from flexlab.spec.plan import Refusal


def test_a_restart_tells_its_steps_and_where_the_model_answers(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    gone = UpStep(kind="event", text=f"{MODEL} is gone (restarted by its user)")
    daemon.steps = [gone, *up_story()]
    shown = flexlab_here("restart", "smollm2")
    assert shown.returncode == 0, shown.stderr
    assert shown.stderr.splitlines()[0] == gone.text
    assert shown.stdout.startswith(f"{MODEL} is ready again at {daemon.address}/v1")
    assert daemon.bodies("POST /restart") == [{"model": "smollm2"}]
    assert daemon.chats == [], "nothing is asked of it"


def test_a_restart_says_whose_answers_it_waits_for(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.models = (model_view(in_flight=2),)
    said = flexlab_here("restart", "smollm2").stderr
    assert f"{MODEL} answers 2 requests" in said
    assert f"flexlab down {MODEL} --force" in said


def test_a_restart_as_json_names_the_new_instance(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.steps = [up_ready(id="i2")]
    shown = json.loads(flexlab_here("restart", "smollm2", "--json").stdout)
    assert shown["model"] == MODEL
    assert shown["endpoint"] == f"{daemon.address}/v1"
    assert shown["instance"]["id"] == "i2"


def test_a_restart_that_is_refused_says_why(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    refusal = Refusal(code="model_disabled", message="it is disabled", hint="flexlab enable it")
    daemon.steps = [UpStep(kind="refused", refusal=refusal)]
    shown = flexlab_here("restart", "smollm2")
    assert shown.returncode == 1
    assert shown.stderr == "error: it is disabled\nhint: flexlab enable it\n"


def test_a_restart_needs_a_daemon_and_a_known_model(flexlab_here: Flexlab) -> None:
    assert flexlab_here("restart", "smollm2").returncode == 4
    assert flexlab_here("restart", "smolm2").returncode == 2
    assert flexlab_here("restart").returncode == 2


def test_why_answers_in_sentences_that_fit_the_terminal(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    sentences = ["1 request waits, for another 9m at most", "big holds " + "much memory " * 9]
    view = msgspec.to_builtins(model_view(word="queued", instances=()))
    daemon.answers["/why"] = {"model": view, "sentences": sentences}
    lines = flexlab_here("why", "smollm2", COLUMNS="40").stdout.splitlines()
    assert lines[0] == f"{MODEL} is queued"
    assert max(map(len, lines)) <= 40
    assert " ".join(" ".join(lines[1:]).split()) == " ".join(sentences).strip()
    whole = json.loads(flexlab_here("why", "smollm2", "--json").stdout)
    assert whole["sentences"] == sentences
    assert whole["model"]["word"] == "queued"
    assert "model=smollm2" in daemon.bodies("GET /why")[0]


def test_why_without_a_daemon_is_an_answer_too(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("why", "smollm2")
    assert shown.returncode == 0
    assert "the daemon is not running" in shown.stdout
    assert json.loads(flexlab_here("why", "smollm2", "--json").stdout)["model"] is None
    assert flexlab_here("why", "smolm2").returncode == 2


def test_the_instance_of_a_restart_is_told_as_up_tells_it(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.steps = [UpStep(kind="ready", model=model_view(), instance=instance_view(load_s=1.5))]
    assert "(llamacpp on the CPU, loaded in 1.5 s)" in flexlab_here("restart", "smollm2").stdout
