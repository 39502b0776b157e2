"""Virtual time, and what every policy is measured by."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import NamedTuple

from traffic import Request, Spec


class Clock:
    """Time moves from one deed to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, when: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when, self.now), next(self._order), deed))

    def after(self, seconds: float, deed: Callable[[], None]) -> None:
        self.at(self.now + seconds, deed)

    def step(self, until: float) -> bool:
        """Do what is due next; False when nothing is before `until`."""
        if not self._due or self._due[0][0] > until:
            return False
        self.now, _, deed = heapq.heappop(self._due)
        deed()
        return True


class Lab(NamedTuple):
    """What is played: cards of one size, models, requests, and the bounds that all share."""

    cards: int
    card_bytes: int
    specs: list[Spec]
    trace: list[Request]
    hours: float
    queue_timeout_s: float = 600.0
    idle_timeout_s: float = 900.0
    stop_s: float = 1.0
    freed_s: float = 1.0
    """From the end of an engine until its memory is seen free."""

    @property
    def end_s(self) -> float:
        """By then every request was answered or has given up."""
        return self.hours * 3600.0 + 2 * self.queue_timeout_s


class Tally:
    """What became of the requests, and what was loaded for them. Times in seconds."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.waits: list[float] = []
        """Of every request: until an engine began to work on it, or until it was given up."""
        self.longest: dict[str, float] = {}
        """Model -> the longest of its waits."""
        self.starved = 0
        """Waited for the whole of `queue_timeout`."""
        self.refused = 0
        """Refused before that."""
        self.cut = 0
        """Ended in the middle of the answer, because the engine had to go."""
        self.loads = 0
        self.swaps = 0
        """Engines that were stopped so that another model can have their memory."""
        self.loading_s = 0.0

    def waited(self, model: str, seconds: float) -> None:
        self.waits.append(seconds)
        if seconds > self.longest.get(model, 0.0):
            self.longest[model] = seconds

    def loaded(self, seconds: float) -> None:
        self.loads += 1
        self.loading_s += seconds


def percentile(values: list[float], share: float) -> float:
    """Of a list in any order; nan of an empty one."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
