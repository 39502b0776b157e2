"""A read that hangs, fails or comes late: what the others get, and what it costs them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from flexlab.gpus.patience import Background, Outcome, Patience, Workers

DEADLINE_S = 3.0


class SettledWorkers(Workers):
    """Real threads, of which each has ended or hangs by the time it was started; and a clock that
    moves only when somebody waits in vain."""

    def __init__(self) -> None:
        self.time = 0.0
        self.started = 0
        self._here = threading.local()
        self._threads: list[threading.Thread] = []
        self._let_go = threading.Event()

    def now(self) -> float:
        return self.time

    def start(self, work: Callable[[], None]) -> None:
        settled = threading.Event()

        def run() -> None:
            self._here.settled = settled
            work()
            settled.set()

        thread = threading.Thread(target=run, daemon=True)
        self._threads.append(thread)
        self.started += 1
        thread.start()
        assert settled.wait(30)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.time += seconds
        return event.is_set()

    def hang(self, release: threading.Event | None = None) -> None:
        """What a job does that does not come back before `release`, or the test's end."""
        self._here.settled.set()
        (release or self._let_go).wait(30)

    def join(self) -> None:
        """Until every thread has ended, once those that hang were released."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    def let_all_go(self) -> None:
        self._let_go.set()
        self.join()


@contextmanager
def settled_workers() -> Iterator[SettledWorkers]:
    workers = SettledWorkers()
    try:
        yield workers
    finally:
        workers.let_all_go()


@pytest.fixture
def workers() -> Iterator[SettledWorkers]:
    with settled_workers() as workers:
        yield workers


def fail() -> int:
    raise OSError(5, "Input/output error", "/sys/card/power")


def test_jobs_that_answer_share_one_thread_and_keep_their_order(workers: SettledWorkers) -> None:
    threads: list[int] = []

    def job() -> int:
        threads.append(threading.get_ident())
        return len(threads)

    outcomes = Patience(DEADLINE_S, workers=workers).collect({"b": job, "a": job, "c": job})
    assert [(key, outcome.value) for key, outcome in outcomes.items()] == [
        ("b", 1),
        ("a", 2),
        ("c", 3),
    ]
    assert len(set(threads)) == 1
    assert workers.time == 0


def test_an_error_is_one_line_in_plain_words(workers: SettledWorkers) -> None:
    def garbage() -> int:
        raise ValueError("a line\n\x1b[31mand another\n")

    def wordless() -> int:
        raise RuntimeError

    outcomes = Patience(DEADLINE_S, workers=workers).collect(
        {"os": fail, "garbage": garbage, "wordless": wordless}
    )
    assert {key: outcome.error for key, outcome in outcomes.items()} == {
        "os": "cannot use /sys/card/power: input/output error",
        "garbage": "a line and another",
        "wordless": "RuntimeError",
    }


@given(st.lists(st.sampled_from(["answer", "fail", "hang"]), max_size=12))
def test_a_hung_job_changes_no_other_answer_and_costs_two_deadlines_at_most(
    behaviours: list[str],
) -> None:
    with settled_workers() as workers:

        def job(number: int) -> Callable[[], int]:
            def run() -> int:
                if behaviours[number] == "fail":
                    return fail()
                if behaviours[number] == "hang":
                    workers.hang()
                return number

            return run

        patience = Patience(DEADLINE_S, workers=workers)
        jobs = {number: job(number) for number in range(len(behaviours))}
        first = patience.collect(jobs)
        spent_s = workers.time
        second = patience.collect(jobs)

        assert list(first) == list(second) == list(jobs)
        for outcomes in (first, second):
            for number, behaviour in enumerate(behaviours):
                outcome = outcomes[number]
                assert outcome.hung == (behaviour == "hang")
                assert outcome.value == (number if behaviour == "answer" else None)
                assert (outcome.error is not None) == (behaviour == "fail")
        hung = behaviours.count("hang")
        assert spent_s == DEADLINE_S * min(hung, 2)
        assert workers.time == spent_s, "a job known to hang costs nothing"


def test_a_hung_job_is_not_asked_again_and_its_late_value_is_used(
    workers: SettledWorkers,
) -> None:
    asked = 0
    release = threading.Event()

    def slow() -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            workers.hang(release)
        return f"answer {asked}"

    patience = Patience(DEADLINE_S, workers=workers)
    jobs = {"slow": slow}
    assert patience.collect(jobs)["slow"] == Outcome(hung=True)
    assert patience.collect(jobs)["slow"] == Outcome(hung=True)
    assert asked == 1
    workers.time = 17.0
    release.set()
    workers.join()
    workers.time = 20.0
    assert patience.collect(jobs)["slow"] == Outcome(value="answer 1", at=17.0)
    assert patience.collect(jobs)["slow"] == Outcome(value="answer 2", at=20.0)
    assert patience.collect(jobs)["slow"] == Outcome(value="answer 3", at=20.0)
    assert workers.started == 3


def test_a_job_that_is_always_late_delays_nobody_after_the_first_time(
    workers: SettledWorkers,
) -> None:
    releases = [threading.Event() for _ in range(5)]
    asked = iter(releases)

    def late() -> int:
        workers.hang(next(asked))
        return 1

    patience = Patience(DEADLINE_S, workers=workers)
    jobs = {"late": late, "quick": lambda: 2}
    patience.collect(jobs)
    for release in releases[:4]:
        before = workers.time
        workers.time += DEADLINE_S * 2
        release.set()
        until(lambda: patience.collect(jobs)["late"].value == 1)
        assert patience.collect(jobs)["quick"].value == 2
        assert workers.time == before + DEADLINE_S * 2
    releases[4].set()


def test_what_hangs_is_remembered_while_its_card_is_gone(workers: SettledWorkers) -> None:
    asked = 0
    release = threading.Event()

    def job() -> int:
        nonlocal asked
        asked += 1
        if asked == 1:
            workers.hang(release)
        return asked

    patience = Patience(DEADLINE_S, workers=workers)
    patience.collect({"card": job})
    patience.collect({})
    assert patience.collect({"card": job})["card"].hung
    release.set()
    workers.join()
    patience.collect({})
    assert patience.collect({"card": job})["card"].value == 2


def test_without_threads_every_job_has_a_reason() -> None:
    class NoThreads(Workers):
        def start(self, work: Callable[[], None]) -> None:
            raise RuntimeError("can't start new thread")

    outcomes = Patience(DEADLINE_S, workers=NoThreads()).collect({"a": lambda: 1, "b": lambda: 2})
    assert [outcome.error for outcome in outcomes.values()] == ["can't start new thread"] * 2


def test_with_real_threads_and_time_the_others_answer() -> None:
    release = threading.Event()
    jobs: dict[str, Callable[[], object]] = {
        "before": lambda: "quick",
        "hung": lambda: release.wait(30),
        "after": lambda: "quick",
    }
    patience = Patience(0.5)
    try:
        outcomes = patience.collect(jobs)
        assert [outcome.value for outcome in outcomes.values()] == ["quick", None, "quick"]
        assert outcomes["hung"].hung
    finally:
        release.set()
    assert until(lambda: patience.collect(jobs)["hung"].value)


def test_background_work_is_given_once_and_begun_again_only_after_it_returned(
    workers: SettledWorkers,
) -> None:
    release = threading.Event()
    background: Background[int] = Background(workers=workers)
    assert background.take() is None

    def slow() -> int:
        workers.hang(release)
        return 7

    background.begin(slow)
    assert background.busy
    assert background.take() is None
    release.set()
    workers.join()
    assert not background.busy
    outcome = background.take()
    assert outcome is not None
    assert outcome.value == 7
    assert background.take() is None
    background.begin(fail)
    background.wait(DEADLINE_S)
    outcome = background.take()
    assert outcome is not None
    assert outcome.error
