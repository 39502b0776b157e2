"""Who runs where, and who must go: a pure answer from candidates and occupancy.

No victim is named before the whole placement (all pools, all groups) is known to be possible, and
a worse class of candidate is never taken merely because a better one needs an idle victim (rule 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import msgspec

from flexlab.scheduler.policy import Occupant, Policy, may_yield
from flexlab.spec.plan import Candidate, Candidates, Grant, Placement, Refusal, Wait


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's account. None: unknown, and then never a reason to refuse."""

    usable_bytes: int | None
    """Total less reserve: what could ever be given out."""
    free_bytes: int | None
    """Usable less foreign use and all claims; below 0 where those are more than there is."""


class Occupancy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Who holds what at this moment."""

    rooms: dict[str, Room]
    occupants: tuple[Occupant, ...] = ()
    reserved: dict[str, int] = {}
    """Bytes per pool that a model ahead in the queue waits for (rule 7)."""
    unknown: dict[str, str] = {}
    """Runtimes that cannot be reached: nothing new starts there (rule 19)."""

    @cached_property
    def _by_place(self) -> dict[str, list[Occupant]]:
        """Pool or device -> who is there."""
        found: dict[str, list[Occupant]] = {}
        for one in self.occupants:
            for place in dict.fromkeys((*one.claims, *one.devices)):
                found.setdefault(place, []).append(one)
        return found

    def near(self, candidate: Candidate) -> list[Occupant]:
        """Instances of other models that share a pool or a device with it."""
        places = dict.fromkeys([*(need.pool for need in candidate.needs), *candidate.devices])
        found = {one.instance: one for place in places for one in self._by_place.get(place, ())}
        return [one for one in found.values() if one.model != candidate.model]


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """For whom a place is sought."""

    priority: int
    displaces_busy: bool = True
    """False for a model whose last start failed (rule 11)."""


def place(
    candidates: Candidates, occupancy: Occupancy, policy: Policy, asker: Asker
) -> Placement | Wait | Refusal:
    """The best possible placement now, or what it waits for, or why it can never be."""
    if not candidates.items:
        return candidates.refusal or Refusal(
            code="no_candidate", message=f"nothing here can run {candidates.model}"
        )
    refusals: list[Refusal] = []
    waits: list[Wait] = []
    by_class: dict[int, list[Candidate]] = {}
    for candidate in candidates.items:
        by_class.setdefault(candidate.preference, []).append(candidate)
    for preference in sorted(by_class):
        found: list[tuple[tuple[float, ...], Placement]] = []
        for index, candidate in enumerate(by_class[preference]):
            answer = _place_one(candidate, occupancy, policy, asker)
            if isinstance(answer, Placement):
                found.append(((*_cost(answer, occupancy), index), answer))
            elif isinstance(answer, Wait):
                waits.append(answer)
            else:
                refusals.append(answer)
        under_way = next((wait for wait in waits if wait.under_way), None)
        if found:
            best = min(found, key=lambda item: item[0])[1]
            if under_way is None or _is_sooner(best, under_way, occupancy):
                return best
        if waits:
            return under_way or waits[0]
    return refusals[0]


def _is_sooner(placement: Placement, wait: Wait, occupancy: Occupancy) -> bool:
    """Than room that is being made already: nobody more is disturbed while that is under way."""
    if not placement.victims:
        return True
    busy = {o.instance for o in occupancy.occupants if o.in_flight}
    return bool(busy.intersection(wait.blocked_by)) and not busy.intersection(placement.victims)


def _place_one(
    candidate: Candidate, occupancy: Occupancy, policy: Policy, asker: Asker
) -> Placement | Wait | Refusal:
    others = occupancy.near(candidate)
    never = _never_fits(candidate, occupancy, others)
    if never is not None:
        return never
    if (why := occupancy.unknown.get(candidate.runtime)) is not None:
        return Wait(candidate=candidate, blocked_by=(), why=f"waits for {candidate.runtime}: {why}")
    must_go = {o.instance for o in others if _same_group(candidate, o)}
    missing = _missing(candidate, occupancy)
    going = [o for o in others if o.phase == "stopping" or o.settling]
    for occupant in going:
        for pool in missing:
            missing[pool] -= occupant.claims.get(pool, 0)
    pending = bool(going) and (
        any(o.instance in must_go for o in going) or _short(_missing(candidate, occupancy))
    )
    must_go -= {o.instance for o in going}
    victims = _victims(others, must_go, missing, policy, asker)
    if victims is None:
        return _cannot_now(candidate, occupancy, others, must_go)
    if pending and not victims:
        names = ", ".join(sorted({o.model for o in going}))
        return Wait(
            candidate=candidate,
            blocked_by=tuple(o.instance for o in going),
            why=f"waits for {names} to be gone",
            under_way=True,
        )
    return Placement(
        candidate=candidate,
        grant=Grant(
            devices=candidate.devices,
            claims={need.pool: need.total_bytes for need in candidate.needs},
        ),
        victims=tuple(o.instance for o in victims),
        because="fits in free memory"
        if not victims
        else "after " + ", ".join(sorted({o.model for o in victims})) + " has yielded",
    )


def _missing(
    candidate: Candidate, occupancy: Occupancy, *, reserved: bool = True
) -> dict[str, int]:
    """Bytes short per pool (negative: to spare); a pool of unknown size lacks nothing.

    `reserved`: what models ahead in the queue wait for is not to be had (rule 7).
    """
    short: dict[str, int] = {}
    for need in candidate.needs:
        room = occupancy.rooms.get(need.pool)
        if room is None or room.free_bytes is None:
            short[need.pool] = 0
        else:
            ahead = occupancy.reserved.get(need.pool, 0) if reserved else 0
            short[need.pool] = need.total_bytes + ahead - room.free_bytes
    return short


def _short(missing: Mapping[str, int]) -> bool:
    return any(count > 0 for count in missing.values())


def _same_group(candidate: Candidate, occupant: Occupant) -> bool:
    """Rule 15: on a shared device, same group, or one of the two takes in the whole card."""
    if not set(candidate.devices) & set(occupant.devices):
        return False
    if candidate.group is not None and candidate.group == occupant.group:
        return True
    return (candidate.group is not None and candidate.group_with_card) or (
        occupant.group is not None and occupant.group_with_card
    )


def _victims(
    others: Sequence[Occupant],
    must_go: set[str],
    missing: Mapping[str, int],
    policy: Policy,
    asker: Asker,
) -> list[Occupant] | None:
    """The cheapest set of victims that makes room, [] when none is needed, None when none does."""
    left = dict(missing)
    able = [
        o
        for o in others
        if not o.settling
        and may_yield(o, asker.priority, policy, displaces_busy=asker.displaces_busy)
    ]
    chosen = [o for o in able if o.instance in must_go]
    if len(chosen) < len(must_go):
        return None
    for occupant in chosen:
        for pool in left:
            left[pool] -= occupant.claims.get(pool, 0)
    for occupant in sorted((o for o in able if o not in chosen), key=_yield_order):
        if not _short(left):
            break
        if any(left[pool] > 0 and occupant.claims.get(pool, 0) > 0 for pool in left):
            chosen.append(occupant)
            for pool in left:
                left[pool] -= occupant.claims.get(pool, 0)
    if _short(left):
        return None
    for occupant in list(chosen):  # a later, larger victim may have made an earlier one needless
        without = {pool: left[pool] + occupant.claims.get(pool, 0) for pool in left}
        if occupant.instance not in must_go and not _short(without):
            chosen.remove(occupant)
            left = without
    return chosen


def _yield_order(occupant: Occupant) -> tuple[float, ...]:
    """Replicas, then fewest busy, lowest priority, shortest reload, least recently used (rules 4
    and 18)."""
    idle_s = occupant.idle_s if occupant.idle_s is not None else 0.0
    return (
        not occupant.is_replica,
        occupant.in_flight,
        occupant.priority,
        occupant.load_s,
        -idle_s,
    )


def _cost(placement: Placement, occupancy: Occupancy) -> tuple[float, ...]:
    victims = [o for o in occupancy.occupants if o.instance in placement.victims]
    return (
        bool(victims),
        sum(o.in_flight > 0 for o in victims),
        max((o.priority for o in victims), default=0),
        sum(o.load_s for o in victims),
    )


def _never_fits(
    candidate: Candidate, occupancy: Occupancy, others: Sequence[Occupant]
) -> Refusal | None:
    """Refused at once: larger than its pool, or than what pinned models leave of it (rule 8)."""
    for need in candidate.needs:
        room = occupancy.rooms.get(need.pool)
        if room is None or room.usable_bytes is None:
            continue
        if need.total_bytes > room.usable_bytes:
            return Refusal(
                code="too_big",
                message=f"{candidate.model} needs {_gib(need.total_bytes)} of {need.pool}, "
                f"which has {_gib(room.usable_bytes)} to give",
                hint="a smaller context needs less: --set context_size=2048",
            )
        pinned = [o for o in others if o.pinned]
        held = sum(o.claims.get(need.pool, 0) for o in pinned)
        if held and need.total_bytes > room.usable_bytes - held:
            holders = [o for o in pinned if o.claims.get(need.pool, 0)]
            what = f"{_gib(need.total_bytes)} of {need.pool}; {_gib(held)} of "
            return _pinned_in_the_way(candidate, holders, f"{what}{_gib(room.usable_bytes)} are")
    members = [o for o in others if o.pinned and _same_group(candidate, o)]
    if members:
        return _pinned_in_the_way(candidate, members, f"the group {candidate.group}, which is")
    return None


def _pinned_in_the_way(candidate: Candidate, holders: Sequence[Occupant], what: str) -> Refusal:
    names = ", ".join(sorted({o.model for o in holders}))
    return Refusal(
        code="pinned_in_the_way",
        message=f"{candidate.model} needs {what} held by {names}, pinned or stuck",
        hint=f"flexlab down {holders[0].model}",
    )


def _cannot_now(
    candidate: Candidate, occupancy: Occupancy, others: Sequence[Occupant], must_go: set[str]
) -> Wait | Refusal:
    """In somebody's way: wait for ours; what only strangers hold is refused with the numbers."""
    missing = _missing(candidate, occupancy, reserved=False)
    ours = [
        o
        for o in others
        if not o.pinned
        and (o.instance in must_go or any(o.claims.get(p, 0) for p, n in missing.items() if n > 0))
    ]
    freed = {p: n - sum(o.claims.get(p, 0) for o in ours) for p, n in missing.items()}
    if not _short(freed):
        for occupant in sorted(ours, key=lambda o: sum(o.claims.values())):
            without = {p: n + occupant.claims.get(p, 0) for p, n in freed.items()}
            if occupant.instance not in must_go and not _short(without):
                ours.remove(occupant)  # it is not in the way of this one
                freed = without
        return Wait(
            candidate=candidate,
            blocked_by=tuple(o.instance for o in ours),
            why=_waits_for(ours),
        )
    pool = max(freed, key=lambda p: freed[p])
    room = occupancy.rooms[pool]
    return Refusal(
        code="no_memory",
        message=f"{candidate.model} needs {_gib(candidate.need(pool))} of {pool}; "
        f"{_gib(max(0, room.free_bytes or 0))} is free, the rest is held by other programs",
        hint="close something, or ask for a smaller context: --set context_size=2048",
        retry_after_s=30.0,
    )


def _waits_for(ours: Sequence[Occupant]) -> str:
    names = ", ".join(sorted({o.model for o in ours}))
    if any(o.is_unreachable for o in ours):
        return f"waits for {names}, of which nothing is heard"
    return f"waits for {names} to finish" if names else "waits for models ahead of it"


def _gib(count: int | None) -> str:
    return "?" if count is None else f"{count / 1024**3:.1f}G"
