"""`flexlab run` with a prompt: where the prompt comes from, and what is odd about the answer."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest
from cli_process import Flexlab, command, environment
from fake_daemon import ANSWER, MODEL, FakeDaemon

from flexlab.cli.stream import AnswerStream


def asked(daemon: FakeDaemon) -> str:
    """The last question that arrived."""
    return str(daemon.chats[-1]["messages"][-1]["content"])


def test_a_pipes_text_is_put_behind_the_prompt(flexlab: Flexlab, daemon: FakeDaemon) -> None:
    shown = flexlab("run", "smollm2", "Translate:", stdin="guten Tag\n")
    assert shown.returncode == 0, shown.stderr
    assert asked(daemon) == "Translate:\n\nguten Tag"


@pytest.mark.parametrize("redirect", ["</dev/null", "<&-", "<empty"])
def test_without_text_on_stdin_the_prompt_is_all(
    home: Path, daemon: FakeDaemon, redirect: str
) -> None:
    (home / "empty").touch()
    line = f"{' '.join(command('run', 'smollm2', 'hello'))} {redirect}"
    done = subprocess.run(
        ["sh", "-c", line], env=environment(), cwd=home, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == ANSWER + "\n", done.stderr
    assert asked(daemon) == "hello"


def test_a_pipe_that_stays_silent_is_named(home: Path, daemon: FakeDaemon) -> None:
    read_fd, write_fd = os.pipe()
    with open(write_fd, "wb") as pipe:
        process = subprocess.Popen(
            command("run", "smollm2", "hello"),
            stdin=read_fd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(),
        )
        os.close(read_fd)
        assert process.stderr
        assert b"reading the prompt from stdin" in process.stderr.readline()
        pipe.write(b"there")
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert asked(daemon) == "hello\n\nthere"


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt_is_refused(flexlab_here: Flexlab, daemon: FakeDaemon, prompt: str) -> None:
    shown = flexlab_here("run", "smollm2", prompt)
    assert shown.returncode == 2
    assert "the prompt is empty" in shown.stderr
    assert daemon.requests == []


def test_an_answer_that_was_cut_says_by_what(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    daemon.finish_reason = "length"
    tokens = str(len(daemon.pieces))
    shown = flexlab_here("run", "smollm2", "hello", "--max-tokens", tokens)
    assert shown.stderr == f"(stopped after {tokens} tokens: --max-tokens)\n"
    assert "context is full" in flexlab_here("run", "smollm2", "hello").stderr


def test_an_unknown_option_in_a_prompt_has_the_way_out(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("run", "smollm2", "-hello")
    assert shown.returncode == 2
    assert "no option -hello" in shown.stderr
    assert "put -- before it" in shown.stderr


def test_a_late_first_token_is_said_once_and_waited_for(daemon: FakeDaemon) -> None:
    daemon.chat_waits = threading.Event()
    said = []

    def say(text: str) -> None:
        said.append(text)
        assert daemon.chat_waits is not None
        daemon.chat_waits.set()

    body = {"model": MODEL, "messages": []}
    path = "/v1/chat/completions"
    stream = AnswerStream(daemon.address, path, body, say=say, patience_s=0.05)
    assert "".join(stream) == ANSWER
    assert said == ["waiting for the first token (0 s) ..."]
