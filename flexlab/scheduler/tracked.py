"""What placement sees, kept from pass to pass: only what changed is looked at, and judged, anew.

An answer to one candidate depends on nothing but its own pools and devices. So a change on one card
costs one candidate of each model that waits, not all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flexlab.scheduler.occupancy import leaving_occupants, occupant
from flexlab.scheduler.place import Answer, Asker, by_preference, choose, judge
from flexlab.scheduler.policy import ROUNDING_S, Occupant, Policy, turn_end
from flexlab.scheduler.room import Room, others_at, places_of
from flexlab.scheduler.state import NEVER, Instance, Model, PoolAccount
from flexlab.spec.plan import Candidate, Candidates, Placement, Refusal, Wait

HISTORY = 512
"""Changes that are remembered; who was judged before all of them is judged anew."""
MEMORY = 512
"""Models whose answers are remembered."""


class _Known:
    """One instance as it was last seen."""

    __slots__ = ("changes_at", "places", "seen", "state")

    def __init__(
        self, state: object, changes_at: float, seen: Occupant, places: tuple[str, ...]
    ) -> None:
        self.state, self.changes_at, self.seen, self.places = state, changes_at, seen, places


@dataclass(slots=True)
class _Answers:
    """What one model's candidates came to, when, and for whom."""

    candidates: Candidates
    asker: Asker
    version: int
    reserved: dict[str, int]
    classes: list[list[int]]
    known: dict[int, Answer] = field(default_factory=dict)
    _by_place: dict[str, list[int]] | None = None

    def by_place(self) -> dict[str, list[int]]:
        """Pool or device -> indexes of the candidates that would be there."""
        if self._by_place is None:  # most are placed at once, and never ask
            self._by_place = {}
            for index, candidate in enumerate(self.candidates.items):
                for place in places_of(candidate):
                    self._by_place.setdefault(place, []).append(index)
        return self._by_place


class Tracked:
    """Implements room.Seen; `look` brings it up to date."""

    def __init__(self) -> None:
        self.rooms: dict[str, Room] = {}
        self.reserved: Mapping[str, int] = {}
        self.unknown: Mapping[str, str] = {}
        self._policy = Policy()
        self._instances: dict[str, _Known] = {}
        self._accounts: dict[str, object] = {}
        self._at: dict[str, dict[str, Occupant]] = {}
        """Pool or device -> who is there, in the order of the instances."""
        self._lists: dict[str, list[Occupant]] = {}
        """The same with what is gone and still to be seen free."""
        self._version = 0
        self._history: list[set[str]] = []
        """Places that changed, the last entry at `_version`."""
        self._answers: dict[str, _Answers] = {}

    def near(self, candidate: Candidate) -> list[Occupant]:
        """Instances of other models that share a pool or a device with it."""
        lists = self._lists
        return others_at([lists.get(place, ()) for place in places_of(candidate)], candidate)

    # -- looking

    def look(
        self,
        models: Mapping[str, Model],
        instances: Mapping[str, Instance],
        pools: Mapping[str, PoolAccount],
        policy: Policy,
        *,
        now: float,
        unknown: Mapping[str, str],
    ) -> None:
        """See what changed since the last time. `now`: loop time."""
        if policy is not self._policy or unknown != self.unknown:
            self._policy, self.unknown = policy, dict(unknown)
            self._instances, self._accounts, self._at, self._lists = {}, {}, {}, {}
            self._answers = {}
        changed: set[str] = set()
        for instance in instances.values():
            self._see(instance, models[instance.model], now, changed)
        if len(self._instances) != len(instances):
            for gone in [name for name in self._instances if name not in instances]:
                places = self._instances.pop(gone).places
                changed.update(places)
                for place in places:
                    self._at[place].pop(gone, None)
        for pool in pools.values():
            self._account(pool, changed)
        for place in changed:
            here = [*self._at.get(place, {}).values()]
            self._lists[place] = here + leaving_occupants(pools[place]) if place in pools else here
        if changed:
            self._version += 1
            self._history = [*self._history[-HISTORY:], changed]

    def _see(self, instance: Instance, model: Model, now: float, changed: set[str]) -> None:
        """Everything that `occupant` reads, but for `now`: of that only when it decides anew."""
        state = (
            instance.state,
            len(instance.leases),
            instance.idle_since,
            instance.ready_at,
            instance.load_s,
            not model.waiters,
            model.priority,
            model.pinned,
            instance.drained_for,
            (*instance.conditions,),
            (*instance.measured.values(),),
        )
        known = self._instances.get(instance.id)
        if known is not None and known.state == state and now < known.changes_at:
            return
        seen = occupant(instance, model, now, self._policy)
        places = (*instance.claims, *instance.candidate.devices)
        changes_at = _changes_at(instance, now, self._policy)
        self._instances[instance.id] = _Known(state, changes_at, seen, places)
        changed.update(places)
        for place in places:
            self._at.setdefault(place, {})[instance.id] = seen

    def _account(self, pool: PoolAccount, changed: set[str]) -> None:
        leaving = [(one.model, one.size_bytes) for one in pool.leaving] if pool.leaving else None
        account = (
            pool.total_bytes, pool.reserve_bytes, pool.limit_bytes, pool.foreign_bytes, leaving
        )  # fmt: skip
        if pool.id not in changed and self._accounts.get(pool.id) == account:
            return
        self._accounts[pool.id] = account
        changed.add(pool.id)
        held = sum(one.claims.get(pool.id, 0) for one in self._at.get(pool.id, {}).values())
        held += sum(one.size_bytes for one in pool.leaving)
        free = pool.free_bytes(held)
        self.rooms[pool.id] = Room(usable_bytes=pool.usable_bytes, free_bytes=free)

    # -- answering

    def place(
        self, name: str, candidates: Candidates, asker: Asker, reserved: Mapping[str, int]
    ) -> Placement | Wait | Refusal:
        """As `place.place`, for the model of this name."""
        self.reserved = reserved
        answers = self._answers_for(name, candidates, asker, reserved)
        known = answers.known

        def answer_of(index: int) -> Answer:
            answer = known.get(index)
            if answer is None:
                answer = judge(candidates.items[index], self, self._policy, asker)
                known[index] = answer
            return answer

        return choose(candidates, self, answer_of, answers.classes)

    def _answers_for(
        self, name: str, candidates: Candidates, asker: Asker, reserved: Mapping[str, int]
    ) -> _Answers:
        """What is known and still true; who is judged for the first time knows nothing."""
        found = self._answers.get(name)
        oldest = self._version - len(self._history)
        if (
            found is None
            or found.candidates is not candidates
            or found.asker != asker
            or found.version < oldest
        ):
            if len(self._answers) >= MEMORY:
                self._answers.clear()
            found = _Answers(
                candidates, asker, self._version, dict(reserved), by_preference(candidates)
            )
            self._answers[name] = found
            return found
        changed: set[str] = set()
        for places in self._history[found.version - oldest :]:
            changed |= places
        if found.reserved != reserved:
            pools = {*found.reserved, *reserved}
            changed |= {p for p in pools if found.reserved.get(p) != reserved.get(p)}
            found.reserved = dict(reserved)
        found.version = self._version
        by_place = found.by_place()
        for place in changed & by_place.keys():
            for index in by_place[place]:
                found.known.pop(index, None)
        return found


def _changes_at(instance: Instance, now: float, policy: Policy) -> float:
    """When time alone makes another occupant of it: it has lingered, or its turn is over."""
    ends = []
    if instance.ready_at is not None:
        ends.append(turn_end(instance.ready_at, instance.load_s, policy))
    if instance.idle_since is not None:
        ends.append(instance.idle_since + policy.linger_s - ROUNDING_S)
    return min([end for end in ends if end > now], default=NEVER)
