"""What people see when they decide about models: pin, keep, disable and their opposites."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
from cli_process import Flexlab
from fake_daemon import MODEL, FakeDaemon, model_view


def held(daemon: FakeDaemon, *models: Mapping[str, Any]) -> None:
    """What the daemon answers: how these models stand then."""
    views = [msgspec.to_builtins(model_view(**model)) for model in models]
    daemon.answers["/hold"] = {"models": views}


@pytest.mark.parametrize(
    ("verb", "asked"),
    [
        ("pin", {"pin": True}),
        ("unpin", {"pin": False}),
        ("keep", {"keep": "warm"}),
        ("unkeep", {"keep": "cold"}),
        ("enable", {"enabled": True}),
        ("disable", {"enabled": False}),
    ],
)
def test_each_verb_decides_one_thing_and_leaves_the_others(
    flexlab_here: Flexlab, daemon: FakeDaemon, verb: str, asked: dict[str, object]
) -> None:
    held(daemon, {})
    assert flexlab_here(verb, "smollm2", "other", "smollm2").returncode == 0
    [body] = daemon.bodies("POST /hold")
    assert {key: value for key, value in body.items() if value is not None} == {
        "models": ["smollm2", "other"],
        **asked,
    }


@pytest.mark.parametrize(
    ("verb", "then", "said"),
    [
        ("pin", {"pinned": True}, "is pinned: it stays when idle"),
        ("unpin", {}, "is not pinned: it is unloaded when idle"),
        ("unpin", {"keep": "warm"}, "is not pinned, but kept: it stays when idle"),
        ("keep", {"keep": "warm"}, "comes back after it made room"),
        ("unkeep", {"pinned": True}, "never makes room"),
        ("enable", {}, "is enabled\n"),
        ("disable", {"enabled": False, "in_flight": 2}, "it still answers 2 requests"),
        ("disable", {"enabled": False}, f"until flexlab enable {MODEL}\n"),
    ],
)
def test_the_answer_says_what_holds_now(
    flexlab_here: Flexlab, daemon: FakeDaemon, verb: str, then: dict[str, object], said: str
) -> None:
    held(daemon, then)
    shown = flexlab_here(verb, "smollm2").stdout
    assert shown.startswith(f"{MODEL} is ")
    assert said in shown


def test_of_a_model_that_does_not_run_the_answer_says_what_starts_it(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    held(
        daemon,
        {"instances": (), "pinned": True},
        {"instances": (), "enabled": False},
        {"instances": (), "keep": "warm"},
    )
    cold, disabled, kept = flexlab_here("pin", "one", "two", "three").stdout.splitlines()
    assert f"flexlab up {MODEL} starts it" in cold
    assert f"flexlab why {MODEL}" in kept, "it may come back without anybody's doing"
    assert f"flexlab enable {MODEL}" in disabled


def test_as_json_the_models_are_told_whole(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    held(daemon, {"pinned": True})
    [model] = json.loads(flexlab_here("pin", "smollm2", "--json").stdout)["models"]
    assert model["name"] == MODEL
    assert model["pinned"] is True


def test_an_unknown_name_keeps_the_daemons_suggestion(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    problem = {"code": "model_not_found", "message": "no model named 'x'; did you mean xy?"}
    daemon.errors["/hold"] = (404, {**problem, "exit_code": 2, "near": ["xy"]})
    shown = flexlab_here("disable", "x", "--json")
    assert shown.returncode == 2
    assert "did you mean xy?" in shown.stderr
    assert json.loads(shown.stdout)["error"]["near"] == ["xy"]


def test_without_a_daemon_it_names_the_commands_that_start_one(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("keep", "smollm2")
    assert shown.returncode == 4
    assert shown.stdout == ""
    assert "flexlab up MODEL" in shown.stderr
    assert "flexlab serve" in shown.stderr
    mistyped = flexlab_here("keep", "smolm2")
    assert mistyped.returncode == 2
    assert "did you mean smollm2" in mistyped.stderr
