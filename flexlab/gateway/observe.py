"""One small record per request, the counters behind /metrics, and a ring of the last requests.

Nothing here parses an answer while it streams: tokens are counted as SSE events as they pass, and
`usage` is looked for once, in the last bytes of an answer that has ended.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Literal

from flexlab.gateway.http import Head

RING_LENGTH = 1000
_BATCH = 64
USAGE_TAIL_BYTES = 4096
EVENT_MARK = b"data: {"
"""Start of an SSE event that carries JSON: one per token with every engine that we run."""

How = Literal["done", "local", "client_gone", "drained", "broken", "cut", "cancelled", "upgraded"]
"""How a request ended. `local`: answered by the gateway; `broken`: the engine failed it; `cut`: its
instance was taken away; `cancelled`: by the user of the lab."""

# Seconds. A small model's first token takes milliseconds, a cold 70B's minutes.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

_USAGE_NUMBER = re.compile(rb'"(prompt|completion)_tokens"\s*:\s*(\d+)')


class Record:
    """One request. Times are seconds of time.monotonic()."""

    __slots__ = (
        "asked", "bytes_in", "bytes_out", "client", "duration_s", "events", "first_body_at",
        "granted_at", "how", "lost_s", "method", "model", "request_id", "route", "started",
        "status", "tail", "tokens_in", "tokens_out",
    )  # fmt: skip

    def __init__(self, head: Head, bytes_in: int, started: float) -> None:
        self.request_id = head.request_id
        self.method = head.method
        self.route = head.route
        self.client = head.client
        self.started = started
        self.model: str | None = None
        self.asked: str | None = None
        """The word that named the model, of one that had to wait or was answered here."""
        self.status: int | None = None
        """None while no head of an answer was sent."""
        self.granted_at: float | None = None
        """When the (last) lease came: before that it waited for a model."""
        self.lost_s = 0.0
        """With an engine that was taken away before it answered; then it waited again."""
        self.first_body_at: float | None = None
        self.duration_s: float | None = None
        self.events = 0
        """SSE events counted: tokens, give or take the role and usage events."""
        self.tokens_in: int | None = None
        self.tokens_out: int | None = None
        """As the engine's own `usage` says, where it was seen."""
        self.bytes_in = bytes_in
        self.bytes_out = 0
        self.how: How | None = None
        self.tail = b""
        """Last bytes of a complete answer, until `usage` has been read out of them."""

    @property
    def ttft_s(self) -> float | None:
        """Time to the first byte of the answer's body."""
        return None if self.first_body_at is None else self.first_body_at - self.started

    @property
    def tokens(self) -> int:
        """Generated so far."""
        return self.events if self.tokens_out is None else self.tokens_out

    def waited_s(self, now: float) -> float | None:
        """For models, all waits together, until `now` if it still waits; None: for none."""
        until = self.granted_at
        if until is None:
            if self.asked is None:
                return None
            until = now
        return until - self.started - self.lost_s

    def tokens_per_s(self, now: float) -> float | None:
        """After the first token. A whole answer arrives at once: only a stream tells."""
        ttft_s, tokens = self.ttft_s, self.tokens
        if ttft_s is None or self.events <= 1 or tokens <= 1:
            return None
        return (tokens - 1) / max(now - self.started - ttft_s, 1e-6)

    def read_usage(self) -> None:
        """Token numbers out of `tail`."""
        tail, self.tail = self.tail, b""
        at = tail.rfind(b'"usage"')
        if at < 0:
            return
        for kind, number in _USAGE_NUMBER.findall(tail, at)[:2]:
            if kind == b"prompt":
                self.tokens_in = int(number)
            else:
                self.tokens_out = int(number)


class Histogram:
    """Counts per bucket, not cumulated; the last one is everything above the last bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class ModelCounts:
    """What one model's requests came to."""

    __slots__ = ("duration", "last_tokens_per_s", "last_ttft_s", "requests", "tokens", "ttft")

    def __init__(self) -> None:
        self.last_ttft_s: float | None = None
        self.last_tokens_per_s: float | None = None
        """Of the last answer that was long enough to tell."""
        self.requests: dict[tuple[str, int | None], int] = {}
        """By (route, status); status None where no head of an answer was sent."""
        self.tokens = 0
        self.ttft = Histogram(TTFT_BUCKETS_S)
        self.duration = Histogram(DURATION_BUCKETS_S)

    def add(self, record: Record) -> None:
        """One that ended."""
        key = (record.route, record.status)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.tokens += record.tokens
        if record.duration_s is not None:
            self.duration.observe(record.duration_s)
        ttft_s = record.ttft_s
        if ttft_s is None:
            return
        self.ttft.observe(ttft_s)
        if record.duration_s is None:
            return
        tokens_per_s = record.tokens_per_s(record.started + record.duration_s)
        if tokens_per_s is not None:
            self.last_ttft_s, self.last_tokens_per_s = ttft_s, tokens_per_s


class Observer:
    """What happened to all requests. Used on the loop only.

    Requests that ended are counted in batches, or when somebody looks: one after the other that
    costs a fraction of what it would between two requests.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._recent: deque[Record] = deque(maxlen=RING_LENGTH)
        self._models: dict[str | None, ModelCounts] = {}
        self._ends: dict[How, int] = {}
        self._total = 0
        self._uncounted: list[Record] = []

    @property
    def recent(self) -> deque[Record]:
        """The last requests that ended, oldest first."""
        self._count()
        return self._recent

    @property
    def models(self) -> dict[str | None, ModelCounts]:
        """Counts by model; None: requests that reached no model."""
        self._count()
        return self._models

    def speed_of(self, model: str) -> tuple[float | None, float | None]:
        """Seconds to the first token and tokens/s of the model's last streamed answer."""
        counts = self.models.get(model)
        return (None, None) if counts is None else (counts.last_ttft_s, counts.last_tokens_per_s)

    @property
    def ends(self) -> dict[How, int]:
        """How many requests ended in which way."""
        self._count()
        return self._ends

    @property
    def requests_total(self) -> int:
        """Requests that ended."""
        return self._total + len(self._uncounted)

    def finish(self, record: Record, how: How, now: float) -> None:
        """Exactly once for each request that was counted in `in_flight`."""
        self.in_flight -= 1
        record.how = how
        record.duration_s = now - record.started
        self._uncounted.append(record)
        if len(self._uncounted) >= _BATCH:
            self._count()

    def _count(self) -> None:
        records, self._uncounted = self._uncounted, []
        self._total += len(records)
        self._recent.extend(records)
        for record in records:
            if record.tail:
                record.read_usage()
            counts = self._models.get(record.model)
            if counts is None:
                counts = self._models[record.model] = ModelCounts()
            counts.add(record)
            if record.how is not None:
                self._ends[record.how] = self._ends.get(record.how, 0) + 1
