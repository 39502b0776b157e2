"""`ps --watch`: drawn in place on a terminal, a line for each change elsewhere."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
from cli_process import Flexlab, Result, command
from fake_daemon import MODEL, FakeDaemon, instance_view, model_view
from terminal import Terminal

from flexlab.cli import ps_watch

Watched = Callable[..., Result]


@pytest.fixture
def watched(flexlab_here: Flexlab, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """`watched(*words, between=[f, g])`: three looks, with `f` and `g` between them; Ctrl-C."""

    def watch(*words: str, between: list[Callable[[], Any]]) -> Result:
        steps = iter(between)

        def pause(_seconds: float) -> None:
            try:
                next(steps)()
            except StopIteration:
                raise KeyboardInterrupt from None

        monkeypatch.setattr(ps_watch, "sleep", pause)
        return flexlab_here("ps", "--watch", *words)

    return watch


def test_a_line_for_each_change_and_none_without(watched: Watched, daemon: FakeDaemon) -> None:
    def works() -> None:
        daemon.models = (model_view(in_flight=1, waiting=2, idle_since=None),)

    def older() -> None:
        daemon.models = (model_view(in_flight=1, waiting=2, idle_since=None, unload_at=None),)

    def unloads() -> None:
        cold = model_view(word="cold", instances=(), why="idle for 15m", idle_since=None)
        daemon.models, daemon.instances = (cold,), ()

    def vanishes() -> None:
        daemon.models = ()

    shown = watched(between=[works, older, unloads, vanishes])
    assert shown.returncode == 130
    assert [line[len("12:00:00  ") :] for line in shown.stdout.splitlines()] == [
        f"{MODEL}: ready, llamacpp on the CPU (answers)",
        f"{MODEL}: ready, llamacpp on the CPU, in flight 1+2 (answers)",
        f"{MODEL}: cold (idle for 15m)",
        f"{MODEL}: gone",
    ]


def test_what_does_not_run_is_watched_only_when_asked(watched: Watched, daemon: FakeDaemon) -> None:
    daemon.models = (model_view(word="cold", instances=(), why="", keep="warm", pinned=True),)
    assert watched(between=[]).stdout == ""
    assert watched("--all", between=[]).stdout[10:] == f"{MODEL}: cold, kept, pinned\n"


def test_as_json_each_look_is_a_line(watched: Watched, daemon: FakeDaemon) -> None:
    first, second = watched("--json", between=[lambda: None]).stdout.splitlines()
    assert json.loads(first)["models"][0]["name"] == MODEL
    assert set(json.loads(second)) == {"daemon", "models", "instances", "pools", "gpus"}


def test_it_ends_with_the_daemon(watched: Watched, daemon: FakeDaemon) -> None:
    assert watched(between=[daemon.close]).returncode == 4


def test_without_a_daemon_there_is_nothing_to_watch(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("ps", "--watch")
    assert shown.returncode == 4
    assert "the daemon is not running" in shown.stderr


def test_the_interval_is_judged(flexlab_here: Flexlab) -> None:
    for words in (["--interval", "2"], ["--watch", "--interval", "0"], ["-w", "--interval", "x"]):
        shown = flexlab_here("ps", *words)
        assert shown.returncode == 2
        assert "flexlab ps --watch --interval" in shown.stderr


def test_on_a_terminal_it_is_drawn_in_place_until_ctrl_c(daemon: FakeDaemon) -> None:
    terminal = Terminal(command("ps", "--watch", "--interval", "0.1"))
    try:
        terminal.expect("MODEL")
        terminal.expect(MODEL)
        daemon.instances = (instance_view(devices=("gpu7",)),)
        terminal.expect("\x1b[H")
        terminal.expect("gpu7")
        daemon.models, daemon.instances = (), ()
        terminal.expect("no model is running")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.exit_code() == 130
    finally:
        terminal.close()
