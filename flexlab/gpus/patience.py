"""Reads with a deadline each: a driver call that never returns costs its own answer only.

A call that hangs in the kernel cannot be cancelled, so its thread is given up (a daemon thread:
it does not hold the end of the process) and the others go on in new ones.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

from flexlab.core.text import clean_line, os_sentence

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Outcome(NamedTuple, Generic[T]):
    """What came of one job: a value, the reason why there is none, or nothing within the time."""

    value: T | None = None
    error: str | None = None
    """One line."""
    hung: bool = False
    at: float | None = None
    """When the job returned (monotonic clock); a value that came late says so by this."""


class Workers:
    """Threads and time as they are; tests bring others."""

    def now(self) -> float:
        """The monotonic clock, in seconds."""
        return time.monotonic()

    def start(self, work: Callable[[], None]) -> None:
        """Run `work` in a thread. Raises RuntimeError when the system gives none."""
        threading.Thread(target=work, name="flexlab-read", daemon=True).start()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Whether `event` is set within so long."""
        return event.wait(seconds)


class Patience:
    """Runs jobs, each with a deadline, and remembers which of them did not come back.

    Jobs run one after another in one thread as long as they answer: a thread for each costs more
    than the reads. Once one hangs, the rest of that round runs side by side, so that a driver that
    hangs for all of its cards costs two deadlines, not one for each card. A job that hung is not
    asked again before it has returned; then it runs beside the others, where it delays nobody,
    until it answers in time again.
    """

    def __init__(self, deadline_s: float, *, workers: Workers | None = None) -> None:
        self._deadline_s = deadline_s
        self._workers = workers or Workers()
        self._beside: dict[Hashable, _Call[Any]] = {}

    def collect(self, jobs: Mapping[K, Callable[[], T]]) -> dict[K, Outcome[T]]:
        """One outcome for each job, in their order; never raises what a job raises.

        A job that hung earlier and has returned since gives the value that came late.
        """
        late = {key: self._late(key, job) for key, job in jobs.items() if key in self._beside}
        calls = {key: _Call(job) for key, job in jobs.items() if key not in late}
        self._run(list(calls.values()))
        for key, call in calls.items():
            if call.outcome is None:
                self._beside[key] = call
        self._forget_all_but(jobs)
        return {key: late[key] if key in late else _told(calls[key]) for key in jobs}

    def _late(self, key: K, job: Callable[[], T]) -> Outcome[T]:
        call: _Call[T] = self._beside[key]
        if call.outcome is not None:
            if call.seconds <= self._deadline_s:
                del self._beside[key]
            else:
                self._beside[key] = again = _Call(job)
                self._start([again])
        return _told(call)

    def _forget_all_but(self, jobs: Mapping[K, Callable[[], T]]) -> None:
        # What still hangs stays known: its card may be found again, and must not be asked then.
        for key in [k for k, call in self._beside.items() if call.outcome and k not in jobs]:
            del self._beside[key]

    def _run(self, calls: list[_Call[T]]) -> None:
        if not calls:
            return
        lane = self._start(calls)
        while not self._workers.wait(lane.ended, lane.left_s(self._workers.now())):
            rest = lane.give_up(self._workers.now())
            if rest is not None:
                self._run_side_by_side(rest)
                return

    def _run_side_by_side(self, calls: Iterable[_Call[T]]) -> None:
        lanes = [self._start([call]) for call in calls]
        until = self._workers.now() + self._deadline_s
        for lane in lanes:
            self._workers.wait(lane.ended, max(0.0, until - self._workers.now()))

    def _start(self, calls: list[_Call[T]]) -> _Lane[T]:
        return _start(self._workers, calls, self._deadline_s)


class Background(Generic[T]):
    """One slow thing that is done beside everything else; never begun while it still runs."""

    def __init__(self, *, workers: Workers | None = None) -> None:
        self._workers = workers or Workers()
        self._lane: _Lane[T] | None = None
        self._call: _Call[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether it runs, or hangs."""
        return self._call is not None and self._call.outcome is None

    def begin(self, job: Callable[[], T]) -> None:
        """Run `job` in a thread. A programming error while it is busy."""
        assert not self.busy
        self._call = _Call(job)
        self._lane = _start(self._workers, [self._call], 0.0)

    def wait(self, seconds: float) -> None:
        """Until it has returned, at most so long."""
        if self._lane is not None:
            self._workers.wait(self._lane.ended, seconds)

    def take(self) -> Outcome[T] | None:
        """What came of it, once; None while it runs, and when it was taken."""
        if self._call is None or self._call.outcome is None:
            return None
        call, self._call = self._call, None
        return call.outcome


class _Call(Generic[T]):
    """One run of one job. Written by its thread; `outcome` last, which makes it readable."""

    def __init__(self, job: Callable[[], T]) -> None:
        self._job = job
        self.outcome: Outcome[T] | None = None
        self.seconds = 0.0

    def run(self, clock: Callable[[], float]) -> None:
        begun = clock()
        value, reason = None, None
        try:
            value = self._job()
        except OSError as error:
            reason = os_sentence(error)
        except Exception as error:  # an edge: a detection source
            reason = clean_line(str(error)) or type(error).__name__
        ended = clock()
        self.seconds = ended - begun
        self.outcome = Outcome(value=value, error=reason, at=ended)


class _Lane(Generic[T]):
    """A thread's work: calls one after another, until done or given up."""

    def __init__(
        self, calls: Iterable[_Call[T]], deadline_s: float, clock: Callable[[], float]
    ) -> None:
        self.ended = threading.Event()
        self._calls = deque(calls)
        self._deadline_s = deadline_s
        self._clock = clock
        self._begun_at = clock()
        self._lock = threading.Lock()
        """Makes it one side's decision who runs the rest: this thread or its successors."""
        self._given_up = False

    def run(self) -> None:
        """The thread."""
        while (call := self._next()) is not None:
            call.run(self._clock)
        self.ended.set()

    def _next(self) -> _Call[T] | None:
        with self._lock:
            if self._given_up or not self._calls:
                return None
            self._begun_at = self._clock()
            return self._calls.popleft()

    def left_s(self, now: float) -> float:
        """How long the call that runs now may still take."""
        return max(0.0, self._begun_at + self._deadline_s - now)

    def give_up(self, now: float) -> list[_Call[T]] | None:
        """The calls not begun, which are then not begun here; None: the one that runs has time."""
        with self._lock:
            if self.left_s(now) > 0:
                return None
            self._given_up = True
            return list(self._calls)

    def refuse(self, reason: str) -> None:
        """There is no thread to run them."""
        while self._calls:
            self._calls.popleft().outcome = Outcome(error=reason, at=self._clock())
        self.ended.set()


def _start(workers: Workers, calls: list[_Call[T]], deadline_s: float) -> _Lane[T]:
    lane = _Lane(calls, deadline_s, workers.now)
    try:
        workers.start(lane.run)
    except RuntimeError as error:  # the limit of threads is reached
        lane.refuse(str(error))
    return lane


def _told(call: _Call[T]) -> Outcome[T]:
    return call.outcome or Outcome(hung=True)
