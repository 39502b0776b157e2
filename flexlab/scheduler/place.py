"""Who runs where, and who must go: a pure answer from candidates and occupancy.

No victim is named before the whole placement (all pools, all groups) is known to be possible, and
a worse class of candidate is never taken merely because a better one needs an idle victim (rule 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from flexlab.scheduler.policy import Occupant, Policy, may_yield
from flexlab.scheduler.room import Seen, any_short, missing_for
from flexlab.spec.plan import Candidate, Candidates, Grant, Placement, Refusal, Wait


class Asker(msgspec.Struct, frozen=True, kw_only=True):
    """For whom a place is sought."""

    priority: int
    displaces_busy: bool = True
    """False for a model whose last start failed (rule 11)."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one candidate comes to."""

    candidate: Candidate
    victims: tuple[Occupant, ...] | None = None
    """Who must yield; None: it cannot be placed now."""
    said: Wait | Refusal | None = None
    """Why not; None: it depends on who is in its way, and is asked only where it matters."""
    awaits_busy: bool = False
    """Of what has to be gone first, and leaves already, something still works."""
    is_for_it: bool = False
    """Of that, something leaves for its sake."""
    cost: tuple[float, ...] = ()
    """Of the victims: those that cost less are taken."""

    @property
    def is_under_way(self) -> bool:
        """Room is being made for it already."""
        return isinstance(self.said, Wait) and self.said.under_way


def place(
    candidates: Candidates, occupancy: Seen, policy: Policy, asker: Asker
) -> Placement | Wait | Refusal:
    """The best possible placement now, or what it waits for, or why it can never be."""

    def judge_it(index: int) -> Answer:
        return judge(candidates.items[index], occupancy, policy, asker)

    return choose(candidates, occupancy, judge_it, by_preference(candidates))


def by_preference(candidates: Candidates) -> list[list[int]]:
    """Indexes of the candidates of each class, the preferred class first."""
    classes: dict[int, list[int]] = {}
    for index, candidate in enumerate(candidates.items):
        classes.setdefault(candidate.preference, []).append(index)
    return [classes[preference] for preference in sorted(classes)]


def choose(
    candidates: Candidates,
    occupancy: Seen,
    answer_of: Callable[[int], Answer],
    classes: Sequence[Sequence[int]],
) -> Placement | Wait | Refusal:
    """As `place`; `answer_of(index)` judges a candidate, or knows the answer already."""
    if not candidates.items:
        return candidates.refusal or Refusal(
            code="no_candidate", message=f"nothing here can run {candidates.model}"
        )
    refusal: Refusal | None = None
    for indexes in classes:
        for index in indexes:  # what is free is found without judging all that is not
            if not any_short(missing_for(candidates.items[index], occupancy)):
                answer = answer_of(index)
                if answer.victims is not None and not answer.victims:
                    return _placement(answer)  # nothing costs less, and the first of these counts
        best: Answer | None = None
        others: list[Answer] = []
        for index in indexes:
            answer = answer_of(index)
            if answer.victims is None:
                others.append(answer)
            elif best is None or answer.cost < best.cost:
                best = answer
        ways = [one for one in others if one.is_under_way]
        under_way = min(ways, key=lambda one: (one.awaits_busy, not one.is_for_it), default=None)
        if best is not None and (under_way is None or _is_sooner(best, under_way)):
            return _placement(best)
        for answer in others if under_way is None else [under_way]:
            said = answer.said or _why_not_now(answer.candidate, occupancy)
            if isinstance(said, Wait):
                return said
            refusal = refusal or said
    assert refusal is not None, "a candidate is placed, waits or is refused"
    return refusal


def _is_sooner(best: Answer, under_way: Answer) -> bool:
    """Than room that is being made already: nobody more is disturbed while that is under way."""
    if not under_way.awaits_busy or best.awaits_busy:
        return False
    return not any(o.in_flight for o in best.victims or ())


def _placement(answer: Answer) -> Placement:
    candidate, victims = answer.candidate, answer.victims or ()
    because = "fits in free memory"
    if victims:
        because = "after " + ", ".join(sorted({o.model for o in victims})) + " has yielded"
    return Placement(
        candidate=candidate,
        grant=Grant(
            devices=candidate.devices,
            claims={need.pool: need.total_bytes for need in candidate.needs},
        ),
        victims=tuple(o.instance for o in victims),
        because=because,
    )


def judge(candidate: Candidate, occupancy: Seen, policy: Policy, asker: Asker) -> Answer:
    """One candidate by itself: depends on nothing but what is on its pools and devices."""
    others = occupancy.near(candidate)
    never = _never_fits(candidate, occupancy, others)
    if never is not None:
        return Answer(candidate=candidate, said=never)
    if (why := occupancy.unknown.get(candidate.runtime)) is not None:
        why = f"waits for {candidate.runtime}: {why}"
        return Answer(candidate=candidate, said=Wait(candidate=candidate, blocked_by=(), why=why))
    missing = missing_for(candidate, occupancy)
    must_go, going, pending = _in_the_way(candidate, others, missing)
    victims = _victims(others, must_go, missing, policy, asker)
    if victims is None:
        return Answer(candidate=candidate)
    busy = pending and any(o.in_flight for o in going)
    if pending and not victims:
        names = ", ".join(sorted({o.model for o in going}))
        wait = Wait(
            candidate=candidate,
            blocked_by=tuple(o.instance for o in going),
            why=f"waits for {names} to be gone",
            under_way=True,
        )
        is_for_it = any(o.yields_to == candidate.model for o in going)
        return Answer(candidate=candidate, said=wait, awaits_busy=busy, is_for_it=is_for_it)
    cost = _cost(victims)
    return Answer(candidate=candidate, victims=tuple(victims), awaits_busy=busy, cost=cost)


def _cost(victims: Sequence[Occupant]) -> tuple[float, ...]:
    """Rule 4: fewest busy, lowest priority, shortest reload."""
    return (
        sum(o.in_flight > 0 for o in victims),
        max((o.priority for o in victims), default=0),
        sum(o.load_s for o in victims),
    )


def _in_the_way(
    candidate: Candidate, others: Sequence[Occupant], missing: dict[str, int]
) -> tuple[set[str], list[Occupant], bool]:
    """(who must go for the groups' sake, whose leaving is waited for, whether anybody's is).

    Takes what these leave off `missing`: the soonest first, and no more than is needed.
    """
    must_go = {o.instance for o in others if _same_group(candidate, o)}
    leaving = [o for o in others if o.phase == "stopping" or o.settling]
    leaving.sort(key=lambda o: (o.in_flight > 0, o.yields_to != candidate.model))
    going: list[Occupant] = []
    for occupant in leaving:
        helps = any(n > 0 and occupant.claims.get(pool, 0) for pool, n in missing.items())
        if helps or occupant.instance in must_go:
            going.append(occupant)
            for pool in missing:
                missing[pool] -= occupant.claims.get(pool, 0)
    return must_go - {o.instance for o in going}, going, bool(going)


def _same_group(candidate: Candidate, occupant: Occupant) -> bool:
    """Rule 15: on a shared device, same group, or one of the two takes in the whole card."""
    if candidate.group is None and occupant.group is None:
        return False
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
        if not any_short(left):
            break
        if any(left[pool] > 0 and occupant.claims.get(pool, 0) > 0 for pool in left):
            chosen.append(occupant)
            for pool in left:
                left[pool] -= occupant.claims.get(pool, 0)
    if any_short(left):
        return None
    for occupant in list(chosen):  # a later, larger victim may have made an earlier one needless
        without = {pool: left[pool] + occupant.claims.get(pool, 0) for pool in left}
        if occupant.instance not in must_go and not any_short(without):
            chosen.remove(occupant)
            left = without
    return chosen


def _yield_order(occupant: Occupant) -> tuple[float, ...]:
    """Replicas, then fewest busy, lowest priority, shortest reload, least recently used (rules 4
    and 18)."""
    return (
        not occupant.is_replica,
        occupant.in_flight,
        occupant.priority,
        occupant.load_s,
        occupant.idle_order,
    )


def _never_fits(
    candidate: Candidate, occupancy: Seen, others: Sequence[Occupant]
) -> Refusal | None:
    """Refused at once: larger than its pool, or than what pinned models leave of it (rule 8)."""
    pinned = [o for o in others if o.pinned]
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
        held = sum(o.claims.get(need.pool, 0) for o in pinned)
        if held and need.total_bytes > room.usable_bytes - held:
            holders = [o for o in pinned if o.claims.get(need.pool, 0)]
            what = f"{_gib(need.total_bytes)} of {need.pool}; {_gib(held)} of "
            return _pinned_in_the_way(candidate, holders, f"{what}{_gib(room.usable_bytes)} are")
    members = [o for o in pinned if _same_group(candidate, o)]
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


def _why_not_now(candidate: Candidate, occupancy: Seen) -> Wait | Refusal:
    """In somebody's way: wait for ours; what only strangers hold is refused with the numbers."""
    others = occupancy.near(candidate)
    must_go, _, _ = _in_the_way(candidate, others, {})
    missing = missing_for(candidate, occupancy, reserved=False)
    ours = [
        o
        for o in others
        if not o.pinned
        and (o.instance in must_go or any(o.claims.get(p, 0) for p, n in missing.items() if n > 0))
    ]
    freed = {p: n - sum(o.claims.get(p, 0) for o in ours) for p, n in missing.items()}
    if not any_short(freed):
        for occupant in sorted(ours, key=lambda o: sum(o.claims.values())):
            without = {p: n + occupant.claims.get(p, 0) for p, n in freed.items()}
            if occupant.instance not in must_go and not any_short(without):
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
