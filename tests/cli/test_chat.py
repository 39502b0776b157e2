"""`flexlab run` in a real terminal: a chat."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import command
from fake_daemon import ANSWER, FakeDaemon
from terminal import Terminal

from flexlab import daemons
from flexlab.client import Client


@pytest.fixture
def chat(home: Path, daemon: FakeDaemon) -> Iterator[Terminal]:
    terminal = Terminal(command("run", "smollm2", "--system", "be brief"))
    terminal.expect("chatting with")
    terminal.expect("> ")
    yield terminal
    terminal.close()


def test_a_chat_remembers_what_was_said_and_forgets_on_clear(
    chat: Terminal, daemon: FakeDaemon
) -> None:
    for words in ("hello", "and again", "/clear", "anew"):
        chat.type(f"{words}\n")
        chat.expect("conversation forgotten" if words == "/clear" else ANSWER)
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
    chat.until_it_waits()
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


def test_a_chat_goes_on_with_a_new_daemon_where_the_old_one_ended(
    chat: Terminal, daemon: FakeDaemon
) -> None:
    chat.type("hello\n")
    chat.expect(ANSWER)
    chat.expect("> ")
    daemon.close()
    chat.type("are you there?\n")
    chat.expect("starting the daemon")
    chat.expect(ANSWER)
    chat.type("/bye\n")
    assert chat.exit_code() == 0
    info = daemons.read_lock_file()
    assert info
    Client(info).shutdown(stop_models=True)


def test_a_chat_says_which_commands_there_are_and_that_an_answer_is_empty(
    chat: Terminal, daemon: FakeDaemon
) -> None:
    chat.type("/help me\n")
    chat.expect("no command /help; /bye leaves")
    daemon.pieces = []
    chat.type("hello\n")
    chat.expect("(empty answer)")


def test_a_closed_terminal_ends_a_chat(chat: Terminal, daemon: FakeDaemon) -> None:
    daemon.pieces, daemon.chat_hangs = ["so it begins"], True
    chat.type("a long story\n")
    chat.expect("so it begins")
    chat.process.send_signal(signal.SIGHUP)
    assert chat.exit_code() == 130
    assert daemon.chat_left.wait(10)
