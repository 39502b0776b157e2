"""One small record per request, the counters behind /metrics, and a ring of the last requests.

Nothing here parses an answer while it streams: tokens are counted as SSE events as they pass, and
`usage` is looked for once, in the last bytes of an answer that has ended.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import Literal

RING_LENGTH = 1000
USAGE_TAIL_BYTES = 4096
EVENT_MARK = b"data: {"
"""Start of an SSE event that carries JSON: one per token with every engine that we run."""

How = Literal["done", "local", "client_gone", "drained", "broken", "cut", "upgraded"]
"""How a request ended. `local`: answered by the gateway; `broken`: the engine failed it."""

# Seconds. A small model's first token takes milliseconds, a cold 70B's minutes.
TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300)
DURATION_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)

_USAGE_NUMBER = re.compile(rb'"(prompt|completion)_tokens"\s*:\s*(\d+)')


class Record:
    """One request. Times are seconds of the loop's clock but `at`, which is a time of day."""

    __slots__ = (
        "at", "bytes_in", "bytes_out", "client", "duration_s", "events", "first_body_at",
        "granted_at", "how", "method", "model", "request_id", "route", "started", "status",
        "tokens_in", "tokens_out",
    )  # fmt: skip

    def __init__(
        self, request_id: bytes, method: bytes, route: str, client: str, at: float, started: float
    ) -> None:
        self.request_id = request_id
        self.method = method
        self.route = route
        self.client = client
        self.at = at
        self.started = started
        self.model: str | None = None
        self.status: int | None = None
        """None while no head of an answer was sent."""
        self.granted_at: float | None = None
        """When the lease came: before that it waited for a model."""
        self.first_body_at: float | None = None
        self.duration_s: float | None = None
        self.events = 0
        """SSE events counted: tokens, give or take the role and usage events."""
        self.tokens_in: int | None = None
        self.tokens_out: int | None = None
        """As the engine's own `usage` says, where it was seen."""
        self.bytes_in = 0
        self.bytes_out = 0
        self.how: How | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first byte of the answer's body."""
        return None if self.first_body_at is None else self.first_body_at - self.started

    def read_usage(self, tail: bytes) -> None:
        """Token numbers out of the last bytes of a complete answer."""
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


class Observer:
    """What happened to all requests. Written on the loop only."""

    def __init__(self) -> None:
        self.recent: deque[Record] = deque(maxlen=RING_LENGTH)
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """By (model, route, status); model "" where none was reached, status 0 if none was sent."""
        self.ends: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.ttft: dict[str, Histogram] = {}
        self.duration: dict[str, Histogram] = {}
        self.in_flight = 0
        self.requests_total = 0

    def begin(self) -> None:
        self.in_flight += 1

    def finish(self, record: Record, how: How, now: float) -> None:
        """Exactly once per `begin`."""
        self.in_flight -= 1
        self.requests_total += 1
        record.how = how
        record.duration_s = duration_s = now - record.started
        model = record.model or ""
        self.requests[model, record.route, record.status or 0] += 1
        self.ends[how] += 1
        self.recent.append(record)
        if not model:
            return
        self.tokens[model] += record.events if record.tokens_out is None else record.tokens_out
        durations = self.duration.get(model)
        if durations is None:
            durations = self.duration[model] = Histogram(DURATION_BUCKETS_S)
            self.ttft[model] = Histogram(TTFT_BUCKETS_S)
        durations.observe(duration_s)
        if record.first_body_at is not None:
            self.ttft[model].observe(record.first_body_at - record.started)
