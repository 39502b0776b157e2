"""What the scheduler holds: models, waiters, instances, pools. Changed by scheduler.py only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from secrets import token_hex
from typing import Self

from flexlab.spec.instance import Condition, Endpoint, InstanceState
from flexlab.spec.lab import Progress
from flexlab.spec.lease import Lease
from flexlab.spec.machine import Pool, PoolKind
from flexlab.spec.plan import Candidate, Candidates, Keep, Refusal, Wishes

NEVER = float("inf")


def safe_name(model: str) -> str:
    """A model's name as part of file names, labels and environments; unique, as the name is."""
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in model)
    safe = safe[:40].strip("-.")
    if safe == model:
        return safe
    return f"{safe or 'model'}-{sha256(model.encode()).hexdigest()[:6]}"


def new_id(model: str) -> str:
    """A readable, unique instance id."""
    return f"{safe_name(model)}-{token_hex(4)}"


@dataclass(slots=True, eq=False)
class Waiter:
    """Somebody who asked for a model that is not ready. Cancelling `future` withdraws it."""

    future: asyncio.Future[Lease]
    since: float
    """When its client came; a request that was cut keeps the time of its first coming."""
    queued: float
    """From when its model queues among others on its account."""
    deadline: float
    wants_download: bool
    key: str | None = None
    """Whose it is, where a limit counts by that."""


class HeldLease:
    """The scheduler's Lease: one unit of work on one instance."""

    __slots__ = ("_cut", "_instance", "_on_release", "is_work", "key", "model")

    def __init__(
        self,
        instance: Instance,
        on_release: Callable[[HeldLease, Instance], None],
        *,
        key: str | None = None,
        is_work: bool = True,
    ) -> None:
        """`is_work`: a request or a job, rather than an `up` that waits."""
        self.key = key
        self.is_work = is_work
        self._instance: Instance = instance
        self._on_release: Callable[[HeldLease, Instance], None] | None = on_release
        self._cut: Callable[[Refusal], None] | None = None
        self.model = instance.model

    @property
    def instance(self) -> str:
        return self._instance.id

    @property
    def endpoint(self) -> Endpoint:
        endpoint = self._instance.endpoint
        assert endpoint is not None, "a lease exists on a ready instance only"
        return endpoint

    def release(self) -> None:
        on_release, self._on_release, self._cut = self._on_release, None, None
        if on_release is not None:
            on_release(self, self._instance)

    def on_cut(self, callback: Callable[[Refusal], None]) -> None:
        self._cut = callback

    def cut(self, refusal: Refusal) -> None:
        """Tell the holder, once, that its instance must go."""
        callback, self._cut = self._cut, None
        if callback is not None:
            callback(refusal)


@dataclass(slots=True, eq=False)
class Instance:
    """One launch. Times are the loop's clock."""

    id: str
    model: str
    candidate: Candidate
    claims: dict[str, int]
    state: InstanceState
    since: float
    why: str
    until: float | None = None
    conditions: dict[str, Condition] = field(default_factory=dict)
    leases: set[HeldLease] = field(default_factory=set)
    endpoint: Endpoint | None = None
    ref: str | None = None
    image: str | None = None
    plan_hash: str = ""
    log_path: str | None = None
    ready_at: float | None = None
    load_s: float | None = None
    idle_since: float | None = None
    measured: dict[str, int] = field(default_factory=dict)
    """Bytes per pool, as last read."""
    peak: dict[str, int] = field(default_factory=dict)
    """The highest of those readings."""
    served: int = 0
    """Requests that ended on it."""
    is_replica: bool = False
    """Beyond the first of its model: no turn, and the first to go (rule 18)."""
    drained_for: str | None = None
    """Model that it yields to; None when it drains for its user or for a replacement."""
    external: bool = False

    @property
    def admits(self) -> bool:
        """Whether a new lease may be given on it."""
        return self.state == "ready"

    @property
    def live(self) -> bool:
        return self.state in ("starting", "loading", "ready", "draining")

    def held(self, pool: str) -> int:
        """Bytes that it is accounted with: the claim, or what was measured if that is more."""
        return max(self.claims.get(pool, 0), self.measured.get(pool, 0))


@dataclass(slots=True)
class Preparing:
    """Planning, and weights where an `up` asked for them."""

    since: float
    download: bool
    wishes: Wishes
    progress: Progress | None = None
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Model:
    """One model that the lab knows, with its wishes and its history."""

    name: str
    priority: int = 100
    keep: Keep = "cold"
    pinned: bool = False
    enabled: bool = True
    held_down: bool = False
    """Stopped by its user: not restored until the next request or `up`."""
    idle_timeout_s: float | None = None
    replicas: int = 1
    """How many instances it may have at most."""
    max_in_flight: int | None = None
    """Requests that are let in at the same time; the others wait."""
    wishes: Wishes = field(default_factory=Wishes)
    waiters: list[Waiter] = field(default_factory=list)
    candidates: Candidates | None = None
    preparing: Preparing | None = None
    waits_for: str | None = None
    blocked_by: frozenset[str] = frozenset()
    """Instances that must go before it can start."""
    preempted_by: str | None = None
    problem: Refusal | None = None
    """The last refusal, for people to see; nothing is decided by it."""
    is_member: bool = True
    """Of the warm set (rule 12); one that is warm and no member counts as cold."""
    known_needs: tuple[dict[str, int], ...] = ()
    """Of one that is kept warm: bytes per pool for each way to run it, as last planned."""
    took: dict[str, int] = field(default_factory=dict)
    """Bytes per pool that it had when it was unloaded for want of memory; less is no room."""
    awaits_memory: bool = False
    """Warm and out: others of ours hold what it would need to come back."""
    restore_blocked: bool = False
    """It failed too often, or cannot be planned: not restored by itself until it is wanted."""
    failures: int = 0
    back_off_until: float = 0.0
    starts: int = 0
    preempted: int = 0
    crashes: int = 0
    last_load_s: float | None = None
    since: float = 0.0

    @property
    def is_warm(self) -> bool:
        return self.keep == "warm" and self.is_member

    @property
    def oldest(self) -> float:
        """By which models are served: when the first of its waiters queued."""
        return min((waiter.queued for waiter in self.waiters), default=NEVER)


@dataclass(slots=True)
class Leaving:
    """Memory of an instance that is confirmed gone, until a reading shows it free (rule 10)."""

    model: str
    size_bytes: int
    until: float
    """Loop time after which nobody waits for it any more."""
    below_bytes: int | None
    """It is free once less than this is used; None where nobody knows what was used before."""


@dataclass(slots=True)
class PoolAccount:
    """One pool's totals and its last reading."""

    id: str
    kind: PoolKind
    total_bytes: int | None
    reserve_bytes: int = 0
    limit_bytes: int | None = None
    """Budget for all models together, where the user set one."""
    used_bytes: int | None = None
    foreign_bytes: int | None = None
    sampled_at: float | None = None
    """Unix time of the reading."""
    leaving: list[Leaving] = field(default_factory=list)
    """What is gone and was not yet seen to be free."""
    is_short: bool = False
    """Others hold so much that what is ours and theirs exceeds what there is."""
    pressed_since: float | None = None
    """Of the host's RAM: since when less than its reserve is free (loop time)."""

    @classmethod
    def of(cls, pool: Pool) -> Self:
        """A pool of the machine as the scheduler accounts it."""
        return cls(
            id=pool.id,
            kind=pool.kind,
            total_bytes=pool.total_bytes,
            reserve_bytes=pool.reserve_bytes,
            limit_bytes=pool.budget_bytes,
            used_bytes=pool.used_bytes,
            sampled_at=pool.sampled_at,
        )

    @property
    def usable_bytes(self) -> int | None:
        """What could ever be given out: total less reserve, within the user's limit."""
        if self.total_bytes is None:
            return self.limit_bytes
        usable = max(0, self.total_bytes - self.reserve_bytes)
        return usable if self.limit_bytes is None else min(usable, self.limit_bytes)

    def free_bytes(self, held_bytes: int) -> int | None:
        """Rule 1: usable less foreign less what our instances hold; None while unknown.

        Below 0 where strangers or wrong estimates took more than there is.
        """
        usable = self.usable_bytes
        if usable is None:
            return None
        unspoken = usable
        if self.total_bytes is not None:
            beside = self.total_bytes - self.reserve_bytes - (self.foreign_bytes or 0)
            unspoken = min(usable, beside)
        return unspoken - held_bytes
