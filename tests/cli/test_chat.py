"""`flexlab run` in a real terminal: a chat."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import command, environment
from fake_daemon import ANSWER, FakeDaemon


class Terminal:
    """A command that believes a person types into it."""

    def __init__(self, *words: str) -> None:
        self.fd, child = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            command(*words),
            stdin=child,
            stdout=child,
            stderr=child,
            env=environment(TERM="xterm"),
            start_new_session=True,
        )
        os.close(child)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str, deadline_s: float = 20) -> None:
        """Reads until `text` has been shown since the last `expect`."""
        deadline = time.monotonic() + deadline_s
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} was not shown, but {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def exit_code(self) -> int:
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)


@pytest.fixture
def chat(home: Path, daemon: FakeDaemon) -> Iterator[Terminal]:
    terminal = Terminal("run", "smollm2", "--system", "be brief")
    terminal.expect("chatting with")
    terminal.expect("> ")
    yield terminal
    terminal.close()


def test_a_chat_remembers_what_was_said_and_forgets_on_clear(
    chat: Terminal, daemon: FakeDaemon
) -> None:
    for words in ("hello", "and again", "/clear", "anew"):
        chat.type(f"{words}\n")
        if words != "/clear":
            chat.expect(ANSWER)
        chat.expect("> ")
    chat.type("/bye\n")
    assert chat.exit_code() == 0
    said = [[message["content"] for message in body["messages"]] for body in daemon.chats]
    assert said == [
        ["be brief", "hello"],
        ["be brief", "hello", ANSWER, "and again"],
        ["be brief", "anew"],
    ]


def test_ctrl_c_stops_the_answer_and_a_second_one_leaves(
    chat: Terminal, daemon: FakeDaemon
) -> None:
    daemon.pieces = ["so it begins"]
    daemon.chat_hangs = True
    chat.type("a long story\n")
    chat.expect("so it begins")
    chat.process.send_signal(signal.SIGINT)
    chat.expect("(stopped)")
    chat.expect("> ")
    assert daemon.chat_left.wait(10)
    chat.process.send_signal(signal.SIGINT)
    assert chat.exit_code() == 0


def test_a_refused_question_is_a_sentence_and_the_chat_goes_on(
    chat: Terminal, daemon: FakeDaemon
) -> None:
    daemon.errors["/v1/chat/completions"] = (503, {"message": "it had to go", "code": "preempted"})
    chat.type("hello\n")
    chat.expect("error: it had to go")
    chat.expect("> ")
    daemon.errors.clear()
    chat.type("hello\n")
    chat.expect(ANSWER)
    chat.expect("> ")
    chat.type("\x04")
    assert chat.exit_code() == 0
    assert len(daemon.chats[-1]["messages"]) == 2
