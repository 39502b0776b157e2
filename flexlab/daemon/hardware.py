"""Keeps one hardware helper running, and replaces one that hangs, dies or talks nonsense."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from flexlab.core import paths
from flexlab.core.text import os_sentence
from flexlab.daemon.tasks import Tasks
from flexlab.gpus import helper
from flexlab.runtimes.logfile import open_for_engine
from flexlab.spec.machine import Sample

SILENCE_S = 10.0
"""A helper that said nothing for so long, or for five ticks, hangs."""
SILENCE_TICKS = 5
PAUSE_FIRST_S = 1.0
"""Before the next helper; doubled each time, up to the longest."""
PAUSE_LONGEST_S = 60.0
HEALTHY_S = 60.0
"""A helper that spoke for so long was well: the pause after it is the first one again."""
LOG_MAX_BYTES = 1 << 20
_BLOCK_BYTES = 256 * 1024
log = logging.getLogger(__name__)


class Child(Protocol):
    """A helper that was started."""

    async def line(self) -> bytes:
        """The next line; without a newline at the end of its output. Raises ValueError for a line
        that is too long."""
        ...

    def ask_holders_every(self, seconds: float) -> None:
        """How often it is to scan other processes."""
        ...

    def abandon(self) -> None:
        """Kill it and do not wait."""
        ...


Launch = Callable[[Sequence[str]], Child]
"""Starts a helper by its command. Raises OSError."""


class Hardware:
    """The helper's supervisor. Used on the loop."""

    def __init__(
        self,
        on_sample: Callable[[Sample], None],
        *,
        command: Sequence[str] | None = None,
        interval_s: float = helper.INTERVAL_S,
        holders_every_s: float = helper.HOLDERS_EVERY_S,
        wall: Callable[[], float] = time.time,
        launch: Launch | None = None,
    ) -> None:
        """`on_sample` is called on the loop with each sample."""
        self.latest: Sample | None = None
        self.stale_since: float | None = None
        """Since when (Unix time) there are no new samples, while a helper is being replaced."""
        self._on_sample = on_sample
        self._command = command or helper.command(
            interval_s=interval_s, holders_every_s=holders_every_s
        )
        self._silence_s = max(SILENCE_S, SILENCE_TICKS * interval_s)
        self._holders_every_s: float | None = None
        self._wall = wall
        self._launch: Launch = launch or _launch
        self._tasks = Tasks()
        self._child: Child | None = None

    def start(self) -> None:
        """Begin; a machine without a GPU needs none of this."""
        self._tasks.spawn("hardware helper", self._keep_one())

    async def close(self) -> None:
        """End the helper, without waiting for it."""
        await self._tasks.close()

    def ask_holders_every(self, seconds: float) -> None:
        """How often other processes are scanned: often while a screen shows them."""
        self._holders_every_s = seconds
        if self._child is not None:
            self._child.ask_holders_every(seconds)

    async def _keep_one(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_FIRST_S
        while True:
            begun = loop.time()
            heard = begun
            try:
                self._child = child = self._launch(self._command)
                if self._holders_every_s is not None:
                    child.ask_holders_every(self._holders_every_s)
            except OSError as error:
                why = f"cannot be started: {os_sentence(error)}"
            else:
                try:
                    heard, why = await self._hear(child)
                finally:
                    self._child = None
                    child.abandon()
            if self.stale_since is None:
                self.stale_since = self.latest.at if self.latest else self._wall()
            pause_s = PAUSE_FIRST_S if heard - begun >= HEALTHY_S else pause_s
            log.warning("the hardware helper %s; another one starts in %g s", why, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(PAUSE_LONGEST_S, pause_s * 2)

    async def _hear(self, child: Child) -> tuple[float, str]:
        """Pass on what it says. When the last sample came (loop time), and why there is no more."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while True:
            try:
                async with asyncio.timeout_at(heard + self._silence_s):
                    line = await child.line()
            except TimeoutError:
                return heard, f"said nothing for {self._silence_s:g} s"
            except ValueError:
                return heard, "wrote a line without end"
            if not line.endswith(b"\n"):
                return heard, "ended"
            try:
                sample = msgspec.json.decode(line, type=Sample)
            except msgspec.MsgspecError:
                continue  # a helper that says nothing else is silent
            heard = loop.time()
            self.latest, self.stale_since = sample, None
            # A defect in the callback is the loop's to log; the readings go on.
            loop.call_soon(self._on_sample, sample)


class _Process:
    """A helper as a process, with its output on the loop.

    Its pipe is read by a plain descriptor: a transport of uvloop closes the descriptor a second
    time, when it may be another file's.
    """

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        self._child = child
        self._descriptor = child.stdout.fileno()
        self._lines = asyncio.StreamReader(limit=helper.LINE_LIMIT_BYTES)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(self._descriptor, False)
        self._loop.add_reader(self._descriptor, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if block := os.read(self._descriptor, _BLOCK_BYTES):
                self._lines.feed_data(block)
            else:
                self._loop.remove_reader(self._descriptor)
                self._lines.feed_eof()

    async def line(self) -> bytes:
        return await self._lines.readline()

    def ask_holders_every(self, seconds: float) -> None:
        helper.ask_holders_every(self._child, seconds)

    def abandon(self) -> None:
        self._loop.remove_reader(self._descriptor)
        helper.abandon(self._child)


def _launch(command: Sequence[str]) -> Child:
    log_path = paths.logs_dir() / "hardware.log"
    complaints = open_for_engine(log_path, LOG_MAX_BYTES)
    try:
        return _Process(helper.start(command, stderr=complaints))
    finally:
        os.close(complaints)
