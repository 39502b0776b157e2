"""Commands that start a daemon: one daemon whoever starts it, and none left that nobody wants."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Flexlab, command, environment
from fake_daemon import MODEL, FakeDaemon
from waiting import until

from flexlab import daemons
from flexlab.core import paths
from flexlab.core.errors import DaemonUnreachable


@pytest.fixture(autouse=True)
def _no_daemon_is_left(home: Path) -> Iterator[None]:
    yield
    info = daemons.read_lock_file()
    if info and info.pid != os.getpid() and daemons.lock_is_held():
        os.kill(info.pid, signal.SIGKILL)


def test_two_ups_at_once_end_with_one_daemon(home: Path) -> None:
    both = [
        subprocess.Popen(
            command("up", "smollm2", "--no-probe"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert MODEL in out
    assert len(_daemons(home)) == 1


def test_a_killed_daemon_is_started_again_by_the_next_up(flexlab: Flexlab) -> None:
    assert flexlab("up", "smollm2", "--no-probe").returncode == 0
    first = daemons.read_lock_file()
    assert first
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not daemons.lock_is_held())
    assert "not running" in flexlab("ps").stderr
    assert flexlab("up", "smollm2", "--no-probe").returncode == 0
    second = daemons.read_lock_file()
    assert second
    assert second.pid != first.pid


def test_what_the_daemon_says_of_its_failure_is_what_the_user_reads(flexlab: Flexlab) -> None:
    shown = flexlab("up", "smollm2", FAKE_DAEMON="port")
    assert shown.returncode == 1
    assert "error: port 8484 is taken by nc" in shown.stderr
    assert "hint: flexlab serve --port 8485" in shown.stderr


def test_a_daemon_that_dies_without_a_word_is_named_with_its_log(flexlab: Flexlab) -> None:
    shown = flexlab("up", "smollm2", FAKE_DAEMON="dies")
    assert shown.returncode == 4
    assert "died on purpose" in shown.stderr
    assert "daemon.log" in shown.stderr
    assert "died on purpose" in flexlab("logs", "--daemon").stdout


def test_a_typo_starts_no_daemon(flexlab: Flexlab) -> None:
    shown = flexlab("up", "smolm2")
    assert shown.returncode == 2
    assert "smollm2" in shown.stderr
    assert not paths.lock_file().exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ctrl_c_in_up_ends_the_daemon_that_it_started(home: Path, number: signal.Signals) -> None:
    """So does a terminal that is closed, and a plain kill."""
    process = subprocess.Popen(
        command("up", "smollm2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(FAKE_DAEMON="empty"),
    )
    assert process.stderr
    while "loading" not in process.stderr.readline():
        pass
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "withdrawn" in err
    assert "Traceback" not in err
    until(lambda: not daemons.lock_is_held())


def test_ctrl_c_in_up_withdraws_the_wish_and_leaves_a_daemon_that_ran_before(
    home: Path, daemon: FakeDaemon
) -> None:
    daemon.hang_after_steps = True
    daemon.steps = []
    process = subprocess.Popen(
        command("up", "smollm2"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    until(lambda: bool(daemon.bodies("POST /up")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert daemon.withdrawn.wait(10)
    assert daemon.bodies("POST /shutdown") == []


def test_a_daemon_that_holds_the_lock_but_does_not_answer_is_named(daemon: FakeDaemon) -> None:
    daemon._control.shutdown()
    daemon._control.server_close()
    with pytest.raises(DaemonUnreachable, match="does not answer") as caught:
        daemons.find(wait_s=0.2)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("ours", "theirs", "order"),
    [
        ("0.2.0", "0.1.9", 1),
        ("0.1.0", "0.1.0", 0),
        ("0.1.0", "0.10.0", -1),
        ("1.0", "0.9.1.dev3+g12", 1),
        ("1.0", "unknown", 0),
    ],
)
def test_versions_are_compared_as_numbers(ours: str, theirs: str, order: int) -> None:
    assert daemons.compare_versions(ours, theirs) == order


def _daemons(home: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environ = (process / "environ").read_bytes()
        except OSError:
            continue
        if b"serve" in words and str(home).encode() in environ:
            found.append(int(process.name))
    return found
