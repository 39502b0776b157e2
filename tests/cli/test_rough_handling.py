"""Daemons that are stopped, streams that are closed, terminals that hang up."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Flexlab, command, environment
from fake_daemon import MODEL, FakeDaemon, up_story

from flexlab import client, daemons


@pytest.fixture
def stopped(
    flexlab: Flexlab, home: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[client.DaemonInfo]:
    """A daemon that lives and does nothing, as after `kill -STOP`."""
    monkeypatch.setattr(client, "QUICK_TIMEOUT_S", 0.4)
    assert flexlab("up", "smollm2", "--no-probe").returncode == 0
    info = daemons.read_lock_file()
    assert info
    os.kill(info.pid, signal.SIGSTOP)
    yield info
    os.kill(info.pid, signal.SIGKILL)


def test_a_stopped_daemon_keeps_no_command_waiting(
    stopped: client.DaemonInfo, flexlab_here: Flexlab
) -> None:
    for words in (
        ("ps",),
        ("up", "smollm2"),
        ("run", "smollm2", "hello"),
        ("down", "smollm2"),
        ("down", "--daemon"),
        ("logs", "smollm2"),
        ("rm", "smollm2", "--yes"),
    ):
        shown = flexlab_here(*words)
        assert shown.returncode == 4, words
        assert f"the daemon (pid {stopped.pid}) does not answer" in shown.stderr
        assert f"hint: kill -9 {stopped.pid}" in shown.stderr
    assert "does not answer" in flexlab_here("doctor", "--offline").stdout
    assert MODEL in flexlab_here("completion", "running").stdout


def in_shell(line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", line], env=environment(), capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize("words", [("ps", "--json"), ("--help",), ("up", "--help"), ("recipes",)])
def test_an_answer_that_cannot_be_written_is_one_sentence(
    home: Path, words: tuple[str, ...]
) -> None:
    done = in_shell(f"{' '.join(command(*words))} >/dev/full")
    assert done.returncode == 1
    complaints = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert complaints == ["error: the answer cannot be written: no space left on device"]
    assert "Exception" not in done.stderr


def test_without_stdout_nothing_is_done_and_without_stderr_all_is(home: Path) -> None:
    line = " ".join(command("ps", "--json"))
    closed = in_shell(f"{line} >&-")
    assert closed.returncode == 1
    assert closed.stderr.startswith("error: stdout is closed")
    quiet = in_shell(f"{line} 2>&-")
    assert quiet.returncode == 0
    assert quiet.stdout.startswith("{")
    assert "daemon is not running" not in quiet.stdout
    assert in_shell(f"{line} >/dev/full 2>&-").returncode == 1


def test_ctrl_c_in_the_probe_says_that_the_model_stays(home: Path, daemon: FakeDaemon) -> None:
    daemon.steps = up_story()
    daemon.pieces, daemon.chat_hangs = ["one"], True
    process = subprocess.Popen(
        command("up", "smollm2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stderr
    while "loading" not in process.stderr.readline():
        pass
    assert daemon.chat_came.wait(20)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert f"{MODEL} is ready and stays; flexlab down {MODEL} stops it" in said
    assert daemon.bodies("POST /down") == []
