"""`events`: what happened, from the daemon, from its files, and as it comes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cli_process import Flexlab, command, environment
from fake_daemon import MODEL, FakeDaemon, model_view

from flexlab.cli import output
from flexlab.core import paths
from flexlab.spec.lab import Event

NOON = time.mktime((2026, 1, 31, 12, 0, 0, 0, 0, -1))


def event(number: int, text: str = "", **more: Any) -> Event:
    fields: dict[str, Any] = {"kind": "instance", "at": NOON + number, "model": MODEL, **more}
    return Event(id=number, text=text or f"event {number}", **fields)


def write(events: list[Event], name: str = "events.jsonl") -> None:
    paths.private_dir(paths.state_dir())
    lines = [msgspec.json.encode(one) + b"\n" for one in events]
    (paths.state_dir() / name).write_bytes(b"".join(lines))


def test_each_event_is_a_line_with_time_kind_text_and_what_it_cost(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.events = [
        event(1, f"{MODEL} starts: fits in free memory", bytes=400 * 1024**2),
        event(2, f"{MODEL}: ready (loaded in 2.1 s)", seconds=2.1),
        event(3, "it made room", kind="preempt", seconds=1.2, bytes=2 * 1024**3),
    ]
    assert flexlab_here("events", COLUMNS="40").stdout.splitlines() == [
        f"2026-01-31 12:00:01  instance  {MODEL} starts: fits in free memory [400.0M]",
        f"2026-01-31 12:00:02  instance  {MODEL}: ready (loaded in 2.1 s)",
        "2026-01-31 12:00:03  preempt   it made room [1.2 s, 2.0G]",
    ]


def test_the_last_ones_are_shown_or_all_after_one(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.events = [event(number) for number in range(1, 401)]

    def shown(*words: str) -> list[int]:
        answer = json.loads(flexlab_here("events", "--json", *words).stdout)
        return [one["id"] for one in answer["events"]]

    assert shown() == list(range(201, 401))
    assert shown("-n", "2") == [399, 400]
    assert shown("-n", "0") == []
    assert shown("--after", "10") == list(range(11, 401))
    assert shown("--after", "10", "-n", "1") == [400]
    assert flexlab_here("events", "--after", "-1").returncode == 2


def test_events_that_the_daemon_has_forgotten_come_from_its_files(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    write([event(1), event(2)], "events.1.jsonl")
    write([event(3), event(4)])
    daemon.events = [event(4), event(5)]
    shown = flexlab_here("events").stdout.splitlines()
    assert [line.split()[-1] for line in shown] == ["1", "2", "3", "4", "5"]
    later = flexlab_here("events", "--after", "2").stdout.splitlines()
    assert [line.split()[-1] for line in later] == ["3", "4", "5"]


def test_without_a_daemon_the_files_tell_and_a_torn_line_is_passed_over(
    flexlab_here: Flexlab,
) -> None:
    nothing = flexlab_here("events")
    assert nothing.returncode == 0
    assert "nothing has happened" in nothing.stderr
    write([event(1)], "events.1.jsonl")
    write([event(2)])
    with (paths.state_dir() / "events.jsonl").open("ab") as file:
        file.write(b'{"id":3,"at":17')
    shown = flexlab_here("events")
    assert shown.returncode == 0
    assert [line.split()[-1] for line in shown.stdout.splitlines()] == ["1", "2"]
    assert "the daemon is not running" in shown.stderr


def test_one_model_is_told_of_with_what_it_caused(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.events = [
        event(1, "loads"),
        event(2, "makes room", model="other", by=MODEL),
        event(3, "loads", model="other"),
        event(4, "listens", model=None),
        event(5, "went", model="deleted-since"),
    ]

    def shown(word: str) -> list[int]:
        answer = json.loads(flexlab_here("events", "--model", word, "--json").stdout)
        return [one["id"] for one in answer["events"]]

    assert shown("smollm2") == [1, 2], "by its alias"
    assert shown("deleted-since") == [5], "which no recipe knows any more"
    wrong = flexlab_here("events", "--model", "smolm2")
    assert wrong.returncode == 2
    assert "did you mean smollm2" in wrong.stderr


def test_a_model_to_which_nothing_happened_is_said(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.models = (model_view(name="quiet", aliases=()),)
    daemon.events = [event(1)]
    assert "nothing has happened to quiet" in flexlab_here("events", "--model", "quiet").stderr


def test_followed_as_json_each_event_is_a_line_at_once(home: Path, daemon: FakeDaemon) -> None:
    daemon.events = [event(1), event(2, model="other")]
    words = command("events", "-f", "--json", "--model", MODEL)
    with subprocess.Popen(words, env=environment(), cwd=home, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        try:
            assert json.loads(running.stdout.readline())["id"] == 1
            daemon.events.extend([event(3, model="other"), event(4)])
            assert json.loads(running.stdout.readline())["id"] == 4
            running.send_signal(signal.SIGINT)
            assert running.wait(20) == 130
        finally:
            running.kill()


def test_following_ends_with_the_daemon_and_says_how_to_go_on(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    daemon.events = [event(6), event(7)]
    daemon.events_end.set()
    shown = flexlab_here("events", "--follow", "-n", "1")
    assert shown.returncode == 4
    assert shown.stdout.splitlines() == ["2026-01-31 12:00:07  instance  event 7"]
    assert "--after 7" in shown.stderr


def test_nothing_can_be_followed_without_a_daemon(flexlab_here: Flexlab) -> None:
    assert flexlab_here("events", "--follow").returncode == 4


@pytest.mark.parametrize("columns", [40, 100])
def test_on_a_terminal_a_long_sentence_is_folded_beside_its_time(
    flexlab_here: Flexlab, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda _stream: True)
    text = "waits for memory that another model holds, and that one is busy until the evening"
    daemon.events = [event(1, text), event(2, "evil\x1b[2Jtext", at=time.time())]
    shown = flexlab_here("events", COLUMNS=str(columns)).stdout
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert " ".join(shown.split()).startswith("2026-01-31 12:00:01 ")
    assert all(word in shown for word in text.split())
    assert lines[-1].endswith("eviltext")
    assert ("instance" in shown) == (columns == 100), "where there is room"
