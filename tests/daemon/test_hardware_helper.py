"""The supervisor of the hardware helper: what it passes on, and when it takes another helper."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import looptime
import msgspec
import pytest
import uvloop
from waiting import moment, soon, until

from flexlab.daemon import hardware
from flexlab.daemon.hardware import Hardware
from flexlab.gpus import helper
from flexlab.spec.machine import Sample

WALL_S = 1_800_000_000.0


def told(seq: int) -> bytes:
    return msgspec.json.encode(Sample(at=WALL_S + seq, seq=seq)) + b"\n"


class FakeChild:
    """A helper of the test's own, in virtual time."""

    def __init__(self) -> None:
        self.wishes: list[float] = []
        self.abandoned_at: float | None = None
        self._lines = asyncio.StreamReader(limit=1000)

    async def line(self) -> bytes:
        return await self._lines.readline()

    def ask_holders_every(self, seconds: float) -> None:
        self.wishes.append(seconds)

    def abandon(self) -> None:
        assert self.abandoned_at is None
        self.abandoned_at = asyncio.get_running_loop().time()

    def says(self, *blocks: bytes) -> None:
        for block in blocks:
            self._lines.feed_data(block)

    def ends(self) -> None:
        self._lines.feed_eof()


class Bench:
    """A supervisor whose helpers do as `behave` says; times are seconds since the start."""

    def __init__(
        self, behave: Callable[[FakeChild], None] = lambda child: None, interval_s: float = 1.0
    ) -> None:
        self.heard: list[Sample] = []
        self.children: list[FakeChild] = []
        self.started_at: list[float] = []
        self.supervisor = Hardware(
            self.heard.append,
            command=["helper"],
            interval_s=interval_s,
            wall=lambda: WALL_S,
            launch=self._launch,
        )
        self._behave = behave
        self.supervisor.start()

    def _launch(self, command: Sequence[str]) -> FakeChild:
        assert command == ["helper"]
        child = FakeChild()
        self.children.append(child)
        self.started_at.append(asyncio.get_running_loop().time())
        self._behave(child)
        return child

    @property
    def gaps_s(self) -> list[float]:
        """From one start of a helper to the next."""
        return [round(after - before, 3) for before, after in pairwise(self.started_at)]


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a story in virtual time."""
    loop = looptime.new_event_loop(start=0.0)
    try:
        loop.run_until_complete(story())
    finally:
        loop.close()


def every_second(child: FakeChild) -> None:
    """Speaks as long as it is not abandoned."""
    loop = asyncio.get_running_loop()

    def speak(seq: int) -> None:
        if child.abandoned_at is None:
            child.says(told(seq))
            loop.call_later(1.0, speak, seq + 1)

    speak(1)


def test_samples_are_passed_on_and_the_last_one_is_kept() -> None:
    async def story() -> None:
        bench = Bench(every_second)
        await moment(4.5)
        assert [sample.seq for sample in bench.heard] == [1, 2, 3, 4, 5]
        assert bench.supervisor.latest == bench.heard[-1]
        assert bench.supervisor.stale_since is None
        await bench.supervisor.close()
        assert len(bench.children) == 1
        assert bench.children[0].abandoned_at is not None

    play(story)


@pytest.mark.parametrize(("interval_s", "silence_s"), [(1.0, 10.0), (0.5, 10.0), (4.0, 20.0)])
def test_a_silent_helper_is_replaced(interval_s: float, silence_s: float) -> None:
    async def story() -> None:
        bench = Bench(interval_s=interval_s)
        await moment(silence_s - 0.1)
        assert bench.children[0].abandoned_at is None
        await moment(0.2)
        assert bench.children[0].abandoned_at == pytest.approx(silence_s)
        assert bench.supervisor.stale_since == WALL_S
        await moment(1.0)
        assert len(bench.children) == 2
        await bench.supervisor.close()

    play(story)


def test_silence_counts_from_the_last_sample_whatever_else_is_written() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()

        def babble(child: FakeChild) -> None:
            child.says(told(1), b"NVRM: a library speaks\n", told(2), b'{"seq": "x"}\n', b"\n")
            for second in range(1, 30):
                loop.call_later(second, child.says, b"\xff\x00 garbage\n")

        bench = Bench(babble)
        await moment(10.5)
        assert [sample.seq for sample in bench.heard] == [1, 2]
        assert bench.children[0].abandoned_at == pytest.approx(10.0)
        assert bench.supervisor.stale_since == WALL_S + 2, "stale since the last sample"
        await bench.supervisor.close()

    play(story)


def test_a_helper_that_dies_at_once_is_started_ever_more_rarely() -> None:
    async def story() -> None:
        bench = Bench(FakeChild.ends)
        await moment(250)
        assert bench.gaps_s == [1, 2, 4, 8, 16, 32, 60, 60, 60]
        assert all(child.abandoned_at is not None for child in bench.children)
        await bench.supervisor.close()

    play(story)


def test_the_pause_is_short_again_after_a_minute_of_health() -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()

        def behave(child: FakeChild) -> None:
            if len(bench.children) in (4, 5):
                every_second(child)
                # The fourth is well for long enough, the fifth is not.
                loop.call_later(70.5 if len(bench.children) == 4 else 30.5, child.ends)
            else:
                child.ends()

        bench = Bench(behave)
        await moment(200)
        assert bench.gaps_s[:3] == [1, 2, 4]
        assert bench.gaps_s[3] == 70.5 + 1
        assert bench.gaps_s[4] == 30.5 + 2
        assert bench.gaps_s[5] == 4
        await bench.supervisor.close()

    play(story)


def test_a_helper_that_cannot_be_started_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        tried = 0

        def launch(command: Sequence[str]) -> FakeChild:
            nonlocal tried
            tried += 1
            if tried < 3:
                raise OSError(11, "Resource temporarily unavailable", "/usr/bin/python3")
            child = FakeChild()
            child.says(told(1))
            return child

        supervisor = Hardware(lambda sample: None, command=["helper"], launch=launch)
        supervisor.start()
        await moment(0.5)
        assert supervisor.stale_since is not None
        await moment(3)
        assert supervisor.latest is not None
        assert supervisor.stale_since is None
        await supervisor.close()

    with caplog.at_level(logging.WARNING):
        play(story)
    assert "cannot use /usr/bin/python3: resource temporarily unavailable" in caplog.text


def test_a_line_without_end_costs_the_helper() -> None:
    async def story() -> None:
        bench = Bench(lambda child: child.says(b"x" * 5000))
        await moment(0.5)
        assert bench.children[0].abandoned_at == 0
        await bench.supervisor.close()

    play(story)


def test_a_wish_reaches_this_helper_and_the_next_one() -> None:
    async def story() -> None:
        bench = Bench()
        await moment(1)
        bench.supervisor.ask_holders_every(2.0)
        await moment(15)
        assert [child.wishes for child in bench.children] == [[2.0], [2.0]]
        await bench.supervisor.close()
        bench.supervisor.ask_holders_every(10.0)

    play(story)


def test_a_defect_in_the_callback_does_not_end_the_readings() -> None:
    async def story() -> None:
        defects: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: defects.append(context["exception"])
        )
        child = FakeChild()
        child.says(told(1), told(2))

        def defect(sample: Sample) -> None:
            raise KeyError(sample.seq)

        supervisor = Hardware(defect, command=["helper"], launch=lambda command: child)
        supervisor.start()
        await moment(0.5)
        assert [error.args for error in defects] == [(1,), (2,)]
        assert supervisor.latest is not None
        assert supervisor.latest.seq == 2
        await supervisor.close()

    play(story)


# Each start of this helper reads what to do from a file, and leaves its pid behind.
SCRIPT = """\
import os, signal, sys
folder, sample = sys.argv[1], sys.argv[2].encode() + b"\\n"
with open(folder + "/pids", "a") as pids:
    print(os.getpid(), file=pids)
with open(folder + "/behaviour") as file:
    behaviour = file.read()
if behaviour == "long":
    os.write(1, sample)
    for _ in range(10):
        os.write(1, b"x" * (1 << 20))
elif behaviour == "speak":
    os.write(1, sample[:10])
    os.write(1, sample[10:])
    signal.pause()
elif behaviour == "echo":
    wish = os.read(0, 100)
    os.write(1, sample.replace(b"1", b"7", 1) if b"2.5" in wish else b"?")
    signal.pause()
elif behaviour == "silent":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
"""


class RealHelper:
    """A script as the helper, in a folder of the test's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sample = msgspec.json.encode({"at": 1.5, "seq": 4}).decode()
        self.command = [sys.executable, "-c", SCRIPT, str(folder), sample]

    def behaves(self, behaviour: str) -> None:
        (self.folder / "behaviour").write_text(behaviour)

    @property
    def pids(self) -> list[int]:
        path = self.folder / "pids"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def gone(self) -> bool:
        """Ended and collected, every one of them."""
        return not any(Path(f"/proc/{pid}").exists() for pid in self.pids)


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealHelper]:
    monkeypatch.setattr(hardware, "PAUSE_FIRST_S", 0.01)
    helper_script = RealHelper(tmp_path)
    yield helper_script
    until(helper_script.gone)


LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


def on(loop: asyncio.AbstractEventLoop, story: Coroutine[Any, Any, None]) -> None:
    try:
        loop.run_until_complete(story)
    finally:
        loop.close()


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_real_helper_that_dies_is_replaced_and_leaves_no_zombie(
    real: RealHelper, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def story() -> None:
        real.behaves("die")
        supervisor = Hardware(lambda sample: None, command=real.command)
        supervisor.start()
        await soon(lambda: len(real.pids) >= 3, 30)
        real.behaves("speak")
        await soon(lambda: supervisor.latest, 30)
        assert supervisor.latest == Sample(at=1.5, seq=4)
        await supervisor.close()

    on(new_loop(), story())
    assert len(real.pids) >= 4


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_real_helper_that_writes_a_line_without_end_is_replaced(
    real: RealHelper, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def story() -> None:
        real.behaves("long")
        supervisor = Hardware(lambda sample: None, command=real.command)
        supervisor.start()
        await soon(lambda: supervisor.stale_since, 30)
        assert supervisor.latest == Sample(at=1.5, seq=4)
        assert supervisor.stale_since == 1.5
        real.behaves("speak")
        await soon(lambda: supervisor.stale_since is None, 30)
        await supervisor.close()

    on(new_loop(), story())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_a_real_helper_hears_what_is_wanted(
    real: RealHelper, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def story() -> None:
        real.behaves("echo")
        supervisor = Hardware(lambda sample: None, command=real.command)
        supervisor.ask_holders_every(2.5)
        supervisor.start()
        await soon(lambda: supervisor.latest, 30)
        assert supervisor.latest == Sample(at=7.5, seq=4)
        await supervisor.close()

    on(new_loop(), story())


@pytest.mark.parametrize("new_loop", LOOPS)
def test_closing_does_not_wait_for_a_helper_that_does_not_end(
    real: RealHelper,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stuck: list[subprocess.Popen[bytes]] = []
    monkeypatch.setattr(helper, "abandon", stuck.append)  # as if the kill had no effect

    async def story() -> None:
        real.behaves("silent")
        supervisor = Hardware(lambda sample: None, command=real.command)
        supervisor.start()
        await soon(lambda: real.pids, 30)
        async with asyncio.timeout(10):
            await supervisor.close()

    on(new_loop(), story())
    assert not real.gone()
    monkeypatch.undo()
    for child in stuck:
        helper.abandon(child)
