"""Turns positions in files into progress for people: smooth, seldom, and never backwards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from flexlab.spec.lab import Progress

Report = Callable[[Progress], None]
Phase = Literal["weights", "verify", "waiting"]

INTERVAL_S = 0.2
"""At most five reports a second."""
RATE_WINDOW_S = 5.0


class Meter:
    """Adds up the files of one fetch. Files come one after the other: `begin`, `move`..., `end`."""

    def __init__(self, report: Report, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._phase: Phase = "weights"
        self._text = ""
        self._finished_bytes = 0
        self._position = 0
        self._highest: int | None = None
        self._total: int | None = None
        self._samples: deque[tuple[float, int]] = deque()
        self._reported_at = -INTERVAL_S

    def expect(self, total_bytes: int | None) -> None:
        """The sum of all files; an unknown or smaller sum changes nothing."""
        if total_bytes is not None:
            self._total = max(total_bytes, self._total or 0)

    def expect_file(self, file_bytes: int | None) -> None:
        """The size of the present file (or of all that are still to come)."""
        if file_bytes is not None:
            self.expect(self._finished_bytes + file_bytes)

    def say(self, phase: Phase, text: str) -> None:
        """A new sentence; reported at once."""
        if phase != "weights":
            self._samples.clear()
        self._phase, self._text = phase, text
        self._emit()

    def begin(self, position: int = 0) -> None:
        """A file, of which `position` bytes are here already; these do not count as speed."""
        self._position = position
        self._highest = self._highest or 0
        self._samples.clear()
        self._samples.append((self._clock(), position))

    def move(self, position: int) -> None:
        """So many bytes of the present file are here now."""
        now = self._clock()
        self._position = position
        if now - self._reported_at < INTERVAL_S:
            return
        self._samples.append((now, position))
        while len(self._samples) > 2 and now - self._samples[0][0] > RATE_WINDOW_S:
            self._samples.popleft()
        self._emit()

    def end(self) -> None:
        """The present file is complete."""
        self._finished_bytes += self._position
        self._position = 0
        self._samples.clear()

    def _rate(self) -> float | None:
        if self._phase != "weights" or len(self._samples) < 2:
            return None
        (since, first), (until, last) = self._samples[0], self._samples[-1]
        return (last - first) / (until - since) if until > since and last > first else None

    def _emit(self) -> None:
        self._reported_at = self._clock()
        if self._highest is not None:
            self._highest = max(self._highest, self._finished_bytes + self._position)
        if self._total is not None and self._highest is not None:
            self._total = max(self._total, self._highest)
        rate = self._rate()
        left = None
        if self._total is not None:
            left = self._total - (self._highest or 0)
        self._report(
            Progress(
                phase=self._phase,
                text=self._text,
                done_bytes=self._highest,
                total_bytes=self._total,
                bytes_per_s=rate,
                eta_s=left / rate if rate and left is not None else None,
            )
        )
