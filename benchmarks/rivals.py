"""Two other ways to decide who runs, on the same trace. Each is given the kinder reading.

FIFO, llama-swap's rule: one queue; the first in it whose model is not loaded takes free room, else
what is in its way as soon as that is idle; everybody behind waits for that. Who asks for a loaded
model passes, unless it is the one that must go. Where it goes is not part of that rule: here the
card whose models are idle and unused for longest. Pinned models are outside of it.

Election, FlexInfer's rule: every card (every pair, for models that take two) is a group whose
members are fixed, spread by popularity; after every event the group elects a leader, and others
that are wanted run beside it, by priority, while they fit. Demand counts for 2 minutes after a
request came or was worked on; a change of leader holds for 5 minutes; a higher priority cuts what
runs; one of lower priority waits until the leader unloads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial

from traffic import GIB, Request, Spec
from virtual import Clock, Lab, Tally

DEMAND_S, RECENT_S, COOLDOWN_S, ACTIVATION_S = 120.0, 300.0, 300.0, 600.0
NEVER = float("-inf")


class Engine:
    """One model, with its engine where it has one."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.state = "off"  # off, loading, ready, stopping
        self.cards: tuple[int, ...] = ()
        self.waiting: list[Request] = []
        self.working: set[Request] = set()
        self.used_at = NEVER
        self.wanted_at = NEVER
        self.launch = 0

    @property
    def size(self) -> int:
        return int(self.spec.gib * GIB)

    @property
    def idle(self) -> bool:
        return self.state == "ready" and not self.working


class Rival:
    """What both have in common: engines that load, work, idle out and stop."""

    name = ""

    def __init__(self, lab: Lab) -> None:
        self.tally = Tally(self.name)
        self.lab, self.clock = lab, Clock()
        self.engines = {spec.name: Engine(spec) for spec in lab.specs}
        self.held = [0] * lab.cards
        self.on = [set[Engine]() for _ in range(lab.cards)]

    def play(self) -> None:
        self.begin()
        for request in self.lab.trace:
            self.clock.at(request.at, partial(self._ask, request))
        while self.clock.step(self.lab.end_s):
            pass

    def begin(self) -> None:
        """Pinned models are loaded before anybody asks."""

    def decide(self, engine: Engine) -> None:
        """Something about this model changed."""
        raise NotImplementedError

    def admits(self, engine: Engine) -> bool:
        return engine.state == "ready"

    # -- requests

    def _ask(self, request: Request) -> None:
        engine = self.engines[request.model]
        engine.wanted_at = self.clock.now
        if self.admits(engine):
            self._work(engine, request)
            return
        engine.waiting.append(request)
        self.clock.after(self.lab.queue_timeout_s, partial(self._give_up, engine, request))
        self.queued(engine, request)
        self.decide(engine)

    def queued(self, engine: Engine, request: Request) -> None:
        """Somebody waits."""

    def _give_up(self, engine: Engine, request: Request) -> None:
        if request in engine.waiting:
            engine.waiting.remove(request)
            self.tally.starved += 1
            self.tally.waited(request.model, self.clock.now - request.at)
            self.decide(engine)

    def _work(self, engine: Engine, request: Request) -> None:
        self.tally.waited(request.model, self.clock.now - request.at)
        engine.working.add(request)
        self.clock.after(request.work_s, partial(self._done, engine, request))

    def _done(self, engine: Engine, request: Request) -> None:
        if request not in engine.working:
            return  # it was cut
        engine.working.remove(request)
        engine.used_at = engine.wanted_at = self.clock.now
        if not engine.working:
            launch, used_at = engine.launch, engine.used_at
            self.clock.after(
                self.lab.idle_timeout_s, partial(self._unload, engine, launch, used_at)
            )
        self.decide(engine)

    def _unload(self, engine: Engine, launch: int, used_at: float) -> None:
        same = (engine.launch, engine.used_at) == (launch, used_at)
        if same and engine.idle and not engine.spec.pinned:
            self.stop(engine)

    # -- engines

    def free(self, cards: Iterable[int]) -> int:
        return min(self.lab.card_bytes - self.held[card] for card in cards)

    def load(self, engine: Engine, cards: tuple[int, ...]) -> None:
        engine.state, engine.cards = "loading", cards
        engine.launch += 1
        for card in cards:
            self.held[card] += engine.size
            self.on[card].add(engine)
        self.tally.loaded(engine.spec.load_s)
        self.clock.after(engine.spec.load_s, partial(self._ready, engine, engine.launch))

    def _ready(self, engine: Engine, launch: int) -> None:
        if engine.state != "loading" or engine.launch != launch:
            return
        engine.state, engine.used_at = "ready", self.clock.now
        waiting, engine.waiting = engine.waiting, []
        for request in waiting:
            self._work(engine, request)
        if not waiting:
            launch, used_at = engine.launch, engine.used_at
            self.clock.after(
                self.lab.idle_timeout_s, partial(self._unload, engine, launch, used_at)
            )
        self.decide(engine)

    def stop(self, engine: Engine, *, swap: bool = False) -> None:
        """What it works on is cut. Its memory is free once it is gone and that was seen."""
        self.tally.swaps += swap
        self.tally.cut += len(engine.working)
        engine.working.clear()
        engine.state = "stopping"
        self.clock.after(self.lab.stop_s + self.lab.freed_s, partial(self._gone, engine))

    def _gone(self, engine: Engine) -> None:
        for card in engine.cards:
            self.held[card] -= engine.size
            self.on[card].remove(engine)
        engine.state, engine.cards = "off", ()
        self.decide(engine)


class Fifo(Rival):
    name = "FIFO"

    def begin(self) -> None:
        self.line: deque[Engine] = deque()
        self.going: set[Engine] = set()
        self.chosen: tuple[int, ...] | None = None
        """Cards that the first in line waits for."""
        for engine in self.engines.values():
            if engine.spec.pinned:
                self._start_if_free(engine)

    def admits(self, engine: Engine) -> bool:
        return engine.state == "ready" and engine not in self.going

    def queued(self, engine: Engine, request: Request) -> None:
        if engine not in self.line and engine.state != "loading":
            self.line.append(engine)

    def decide(self, engine: Engine) -> None:
        while self.line:
            first = self.line[0]
            if not first.waiting or first.state == "loading" or self.admits(first):
                self._leave_line()
                self._admit(first)
            elif first.state == "off" and self._start_if_free(first):
                self._leave_line()
            elif first.state == "off":
                self._make_room(first)
                return
            else:
                return  # it is on its way out itself

    def _leave_line(self) -> None:
        self.line.popleft()
        stay, self.going, self.chosen = self.going, set(), None
        for engine in stay:
            self._admit(engine)

    def _admit(self, engine: Engine) -> None:
        if self.admits(engine):
            waiting, engine.waiting = engine.waiting, []
            for request in waiting:
                self._work(engine, request)

    def _places(self, engine: Engine) -> list[tuple[int, ...]]:
        step = engine.spec.cards
        return [tuple(range(at, at + step)) for at in range(0, self.lab.cards - step + 1, step)]

    def _start_if_free(self, engine: Engine) -> bool:
        for cards in self._places(engine) if self.chosen is None else [self.chosen]:
            if self.free(cards) >= engine.size:
                self.load(engine, cards)
                return True
        return False

    def _make_room(self, engine: Engine) -> None:
        if self.chosen is None:
            able = [p for p in self._places(engine) if not self._pinned_in_the_way(p, engine)]
            if not able:
                return
            self.chosen = min(able, key=self._disturbance)
        free = self.free(self.chosen)
        here = {one for card in self.chosen for one in self.on[card] if not one.spec.pinned}
        for one in sorted(here, key=lambda one: (bool(one.working), one.used_at, one.spec.name)):
            if free >= engine.size:
                return
            free += one.size
            self.going.add(one)
            if one.idle:
                self.stop(one, swap=True)

    def _pinned_in_the_way(self, cards: tuple[int, ...], engine: Engine) -> bool:
        return any(
            sum(one.size for one in self.on[card] if one.spec.pinned) + engine.size
            > self.lab.card_bytes
            for card in cards
        )

    def _disturbance(self, cards: tuple[int, ...]) -> tuple[float, ...]:
        here = [one for card in cards for one in self.on[card] if not one.spec.pinned]
        return (
            sum(not one.idle for one in here),
            max((one.used_at for one in here), default=NEVER),
            cards[0],
        )


class Group:
    """The cards that some models share, and whom they elected."""

    def __init__(self, cards: tuple[int, ...]) -> None:
        self.cards, self.members, self.load = cards, list[Engine](), 0.0
        self.leader: Engine | None = None
        self.swapped_at = NEVER
        self.primary: Engine | None = None


class Election(Rival):
    name = "election"

    def begin(self) -> None:
        self.groups: dict[str, Group] = {}
        pairs = max(1, self.lab.cards // 16)
        two = [Group((2 * at, 2 * at + 1)) for at in range(pairs)]
        one = [Group((card,)) for card in range(2 * pairs, self.lab.cards)]
        for engine in self.engines.values():
            able = two if engine.spec.cards == 2 else one
            if engine.spec.pinned:  # beside it the others must have room
                able = [g for g in able if not any(m.spec.pinned for m in g.members)]
            group = min(able, key=lambda g: (g.load, g.cards))
            group.load += engine.spec.weight
            group.members.append(engine)
            self.groups[engine.spec.name] = group
            if engine.spec.warm and group.primary is None:
                group.primary = engine
        for engine in self.engines.values():
            if engine.spec.pinned:
                self.load(engine, self.groups[engine.spec.name].cards)
        for group in (*two, *one):
            self._look(group)

    def _look(self, group: Group) -> None:
        """The operator looks every ten seconds, too."""
        self._elect(group)
        if self.clock.now < self.lab.end_s:
            self.clock.after(10.0, partial(self._look, group))

    def decide(self, engine: Engine) -> None:
        self._elect(self.groups[engine.spec.name])

    def _demand(self, engine: Engine, within_s: float) -> bool:
        return bool(engine.working) or self.clock.now - engine.wanted_at < within_s

    def _elect(self, group: Group) -> None:
        leader = self._leader(group)
        before = group.leader
        if leader is not before and before is not None and before.state in ("ready", "loading"):
            group.swapped_at = self.clock.now
        group.leader = leader
        wanted = [m for m in group.members if m is leader or m.spec.pinned]
        room = self.lab.card_bytes - sum(m.size for m in wanted)
        others = [m for m in group.members if m not in wanted and self._demand(m, RECENT_S)]
        for one in sorted(others, key=lambda m: (-m.spec.priority, -m.wanted_at, m.spec.name)):
            if one.size <= room:
                room -= one.size
                wanted.append(one)
        starting = [m for m in wanted if m.state == "off" and (m.waiting or m.spec.pinned)]
        starting += [m for m in wanted if m.state == "off" and m is group.primary is leader]
        for one in dict.fromkeys(starting):
            if not self._make_room(group, one, wanted):
                continue
            self.load(one, group.cards)

    def _make_room(self, group: Group, engine: Engine, wanted: list[Engine]) -> bool:
        """Whoever is not elected and holds what it needs is stopped."""
        free = self.free(group.cards)
        for one in sorted(group.members, key=lambda m: (m.used_at, m.spec.name)):
            if free >= engine.size:
                break
            if one.state in ("ready", "loading") and one not in wanted:
                self.stop(one, swap=True)
        return free >= engine.size

    def _leader(self, group: Group) -> Engine | None:
        now, active = self.clock.now, group.leader
        members = [m for m in group.members if not m.spec.pinned]
        living = active is not None and active.state in ("ready", "loading")
        if active is not None and living and now - group.swapped_at < COOLDOWN_S:
            return active
        loading = active is not None and active.state == "loading"
        if active is not None and loading and now - active.wanted_at < ACTIVATION_S:
            return active
        ready = active if active is not None and active.state == "ready" else None
        able = [m for m in members if m.state == "off" and m.waiting and self._demand(m, DEMAND_S)]
        best = max(able, key=_rank, default=None)
        if ready is not None:
            idle = not self._demand(ready, DEMAND_S)
            if best is not None and (
                best.spec.priority > ready.spec.priority
                or (best.spec.priority == ready.spec.priority and idle)
            ):
                return best
            if group.primary not in (None, ready) and idle:
                return group.primary
            return ready
        recent = [m for m in members if self._demand(m, RECENT_S)]
        first = max(recent, key=_rank, default=None)
        primary = group.primary
        if primary is not None and (first is None or primary.spec.priority >= first.spec.priority):
            return primary
        return first or max((m for m in members if m.waiting), key=_rank, default=None)


def _rank(engine: Engine) -> tuple[float, float, str]:
    return engine.spec.priority, engine.wanted_at, engine.spec.name
