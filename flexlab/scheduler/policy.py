"""The numbers and the small judgements of scheduling; pure.

Rule numbers refer to "Scheduling rules" in docs/scheduling.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

NOT_IDLE = float("inf")
Phase = Literal["starting", "loading", "ready", "draining", "stopping"]


ROUNDING_S = 1e-6
"""Two times may differ by a hair less than what was added to one of them."""


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds; every one is a setting."""

    linger_s: float = 5.0
    min_residency_s: float = 30.0
    turn_max_s: float = 300.0
    drain_timeout_s: float = 30.0
    drain_limit_s: float = 600.0
    stop_timeout_s: float = 10.0
    stop_confirm_s: float = 10.0
    queue_timeout_s: float = 600.0
    queue_limit: int = 256
    idle_timeout_s: float = 900.0
    yield_after_s: float = 30.0
    back_off_first_s: float = 10.0
    back_off_max_s: float = 300.0
    settled_s: float = 60.0
    """Ready for this long ends a series of failures."""
    freed_within_s: float = 15.0
    """How long memory of a card may take to be seen free after its engine is gone (rule 10)."""
    pressed_s: float = 10.0
    """Less than the host's reserve is free for this long: idle models there unload (rule 16)."""
    max_in_flight_per_key: int | None = None
    """Requests of one key that a model lets in at the same time; None: no limit."""
    restore_tries: int = 3
    """Failed starts in a row after which a warm model is not restored by itself any more."""


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as placement sees it."""

    instance: str
    model: str
    phase: Phase
    priority: int
    claims: dict[str, int]
    devices: tuple[str, ...] = ()
    group: str | None = None
    group_with_card: bool = False
    pinned: bool = False
    is_unreachable: bool = False
    """Its runtime does not answer: it cannot be made to go, and nobody knows for how long."""
    in_flight: int = 0
    waiting: int = 0
    """Waiters of its model: a loading instance without any counts as idle."""
    idle_s: float | None = None
    """Seconds without a lease; None while busy or loading."""
    idle_since: float | None = None
    """The same as a time, on a clock that all share; None where only `idle_s` is known."""
    turn_over: bool = True
    load_s: float = 0.0
    settling: bool = False
    """Draining on behalf of somebody else already."""
    yields_to: str | None = None
    """Model for whose sake it leaves."""
    is_replica: bool = False
    """Beyond the first of its model: the first victim, at any time (rule 18)."""

    @property
    def idle_order(self) -> float:
        """Smaller: not used for longer."""
        if self.idle_since is not None:
            return self.idle_since
        return NOT_IDLE if self.idle_s is None else -self.idle_s


def turn_s(load_s: float, policy: Policy) -> float:
    """Length of a turn (rule 6): residency, or twice the last load, at most `turn_max_s`."""
    return min(max(policy.min_residency_s, 2 * load_s), policy.turn_max_s)


def turn_end(ready_at: float, load_s: float | None, policy: Policy) -> float:
    """When the turn of an instance ends that is ready since `ready_at`, on the same clock."""
    return ready_at + turn_s(load_s or 0.0, policy)


def back_off_s(failures: int, policy: Policy, *, was_ready: bool) -> float:
    """Seconds before the next start is tried (rule 11): doubling, bounded.

    A first crash of an engine that had been ready costs nothing: the next request starts it again.
    """
    step = failures - 2 if was_ready else failures - 1
    if step < 0:
        return 0.0
    return min(policy.back_off_first_s * 2.0 ** min(step, 16), policy.back_off_max_s)


def has_lingered(idle_s: float, policy: Policy) -> bool:
    """Idle for long enough to make room."""
    return idle_s >= policy.linger_s - ROUNDING_S


def may_yield(
    occupant: Occupant, priority: int, policy: Policy, *, displaces_busy: bool = True
) -> bool:
    """Whether this instance may be made a victim now, for a model of `priority` (rule 5).

    `displaces_busy` False: for a model whose last start failed (rule 11).
    """
    if occupant.pinned or occupant.is_unreachable or occupant.phase == "stopping":
        return False
    if occupant.phase in ("starting", "loading"):
        return occupant.waiting == 0 or (displaces_busy and priority > occupant.priority)
    if occupant.in_flight == 0:
        if occupant.is_replica:
            return True
        lingered = occupant.idle_s is not None and has_lingered(occupant.idle_s, policy)
        return occupant.turn_over or lingered or priority > occupant.priority
    if not displaces_busy:
        return False
    if priority > occupant.priority:
        return True
    return priority == occupant.priority and (occupant.turn_over or occupant.is_replica)


def drain_s(occupant: Occupant, priority: int, policy: Policy) -> float:
    """How long a victim may go on with what is in flight before it is cut (rule 5)."""
    return policy.drain_timeout_s if priority > occupant.priority else policy.drain_limit_s
