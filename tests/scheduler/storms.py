"""Random stories: labs of any shape, deeds in any order, and what must hold after each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import strategies as st
from machine_shapes import GIB, Way, card, on, over, ram
from world import Asked, World

from flexlab.scheduler.state import Instance
from flexlab.spec.instance import Condition
from flexlab.spec.plan import Placement, Wishes

CARD_GIB = 24.0
CARDS = ("gpu0", "gpu1")
QUEUE_S = 150.0
EPSILON_S = 1.0
"""Planning, which counts as no waiting for an `up`, and the readings that show memory free."""
UNHURRIED_S = 65.0
"""drain_timeout [30 s] + stop_timeout [10 s] + 25 s: how long lower ones may keep their memory."""


@dataclass(frozen=True, repr=False)
class Shape:
    """One model of a story."""

    ways: tuple[Way, ...]
    priority: int
    load_s: float
    stop_s: float
    frees_s: float
    takes: float
    late: bool
    more: dict[str, Any]

    def __repr__(self) -> str:
        ways = " or ".join(
            f"{dict(way.needs)}"
            + (f" {way.group}{'+card' if way.with_card else ''}" if way.group else "")
            + (f" {way.runtime}" if way.runtime != "process" else "")
            for way in self.ways
        )
        return (
            f"<{ways}; priority {self.priority}, loads {self.load_s}, stops {self.stop_s}, "
            f"frees {self.frees_s}, takes {self.takes}, late {self.late}, {self.more}>"
        )


def _ways(size: float) -> st.SearchStrategy[tuple[Way, ...]]:
    either = tuple(on(name, size) for name in CARDS)
    return st.sampled_from(
        [
            either,
            either,
            (on("gpu0", size),),
            (over(CARDS, size * 0.8),),
            (on("ram", size * 0.5),),
            (*either, on("ram", size * 0.4, preference=1)),
            tuple(on(name, size * 0.5, group="video") for name in CARDS),
            tuple(on(name, size * 0.5, group="video", with_card=True) for name in CARDS),
            tuple(on(name, size, runtime="docker") for name in CARDS),
            tuple(on(name, size * 0.5, slots=1) for name in CARDS),
        ]
    )


def shapes(*, priorities: tuple[int, ...], most_taken: float) -> st.SearchStrategy[Shape]:
    """Models; `most_taken`: how far they may exceed their estimate, as a factor."""
    more = st.fixed_dictionaries(
        {},
        optional={
            "keep": st.just("warm"),
            "pinned": st.just(True),
            "replicas": st.just(2),
            "max_in_flight": st.just(1),
            "idle_timeout_s": st.just(20.0),
        },
    )
    return st.builds(
        Shape,
        ways=st.sampled_from([2.0, 9.0, 13.0, 22.0]).flatmap(_ways),
        priority=st.sampled_from(priorities),
        load_s=st.sampled_from([0.2, 2.0, 12.0, 40.0]),
        stop_s=st.sampled_from([0.3, 0.3, 4.0, 19.0, 27.0]),
        frees_s=st.sampled_from([0.2, 0.2, 3.0, 20.0]),
        takes=st.sampled_from([1.0, 0.7, most_taken]),
        late=st.booleans(),
        more=st.one_of(st.just({}), st.just({}), more),
    )


MODELS = st.integers(0, 4)
PAUSES = st.sampled_from([0.0, 0.0, 0.05, 0.3, 1.0, 3.0, 6.0, 15.0, 31.0, 61.0, 130.0])
REQUESTS = ("ask", "ask", "ask", "ask", "up", "done", "done", "hang up", "hang up")
TROUBLE = ("crash", "breaks", "starves", "works", "lose", "find")
USER = ("down", "force", "pin", "unpin", "keep", "unkeep", "disable", "enable", "renew")
RELOAD = ("wish", "stale", "priority", "policy")
STRANGERS = ("game", "game over")


def steps(*deeds: str, most: int) -> st.SearchStrategy[list[tuple[str, int, float]]]:
    """Deeds, on which model, and how long nothing else happens then."""
    one = st.tuples(st.sampled_from(deeds), MODELS, PAUSES)
    return st.one_of(
        st.lists(one, max_size=most // 3),
        st.lists(one, min_size=most // 2, max_size=most),
    )


class StormWorld(World):
    """A world that also looks at every start and every word about it."""

    def start(self, instance: str, placement: Placement) -> None:
        found = self.scheduler.instances[instance]
        model = self.scheduler.models[found.model]
        wanted = any(not waiter.future.cancelled() for waiter in model.waiters)
        assert wanted or model.is_warm or found.is_replica, f"nobody wants {model.name}"
        assert model.enabled, "disabled"
        assert placement.candidate.runtime not in self.scheduler.unknown, "out of reach"
        for name in found.claims:
            free = self.scheduler.pools[name].free_bytes(self.scheduler.held(name))
            assert free is None or free >= 0, f"{model.name} was started beyond {name}"
        super().start(instance, placement)

    def note(self, kind: str, text: str, **more: Any) -> None:
        super().note(kind, text, **more)
        found = self.scheduler.instances.get(more.get("instance") or "")
        if kind == "preempt" and found is not None and more["state"] in ("draining", "stopping"):
            pinned = self.scheduler.models[found.model].pinned and not found.is_replica
            assert not pinned, f"{found.model} is pinned and yields to {more['by']}"


class Storm:
    """Plays a story and judges it."""

    def __init__(self, models: list[Shape], *, is_strict: bool, **policy: Any) -> None:
        pools = [ram(16, reserve_bytes=GIB), *(card(name, CARD_GIB) for name in CARDS)]
        self.world = StormWorld(pools=pools, **({"queue_timeout_s": QUEUE_S} | policy))
        self.world.is_strict = is_strict
        self.asked: list[Asked] = []
        self.names = [f"m{index}" for index in range(len(models))]
        self.shapes = dict(zip(self.names, models, strict=True))
        for name, shape in self.shapes.items():
            self._add(name, shape)
        self.scheduler = self.world.scheduler
        self.bound_s: Callable[[Asked], float] = lambda asked: self.scheduler.policy.queue_timeout_s
        """How long a request may wait at most."""

    def _add(self, name: str, shape: Shape) -> None:
        world = self.world
        world.add(name, 0, *shape.ways, load_s=shape.load_s, priority=shape.priority, **shape.more)
        world.stop_s[name], world.frees_s[name] = shape.stop_s, shape.frees_s
        world.takes[name] = shape.takes
        if shape.late:
            world.late.add(name)

    @asynccontextmanager
    async def told(self) -> AsyncIterator[None]:
        """A failure shows the last events."""
        try:
            yield
        except AssertionError as error:
            error.add_note("\n".join(f"{n}: {s!r}" for n, s in self.shapes.items()))
            error.add_note(self.world.tell())
            raise

    async def play(self, story: list[tuple[str, int, float]]) -> None:
        """All steps; after each, nothing may be left undone."""
        self.scheduler.tick()
        for deed, number, pause in story:
            self.do(deed, self.names[number % len(self.names)])
            if not self.world.is_strict:
                self.world.read()  # as the daemon does every second
            await self.run(pause)

    async def run(self, seconds: float) -> None:
        """Let time pass, then see that nothing more follows from the state."""
        await self.world.run(seconds)
        before = (len(self.world.deeds), self._states())
        self.scheduler.tick()
        after = (len(self.world.deeds), self._states())
        assert after == before, f"something was due and not done: {before} {after}"
        await self.world.settle()
        self.world.check()
        self._check_waits()

    def _states(self) -> list[tuple[str, str]]:
        return [(one.id, one.state) for one in self.scheduler.instances.values()]

    def _check_waits(self) -> None:
        for each in self.asked:
            waited_s = (self.world.now if each.waits else each.ended_at or 0.0) - each.queued_at
            assert waited_s <= self.bound_s(each) + EPSILON_S, f"{each.model} waited {waited_s} s"

    def do(self, deed: str, name: str) -> None:
        """One step."""
        {
            **self._requests(name),
            **self._trouble(name),
            **self._user(name),
            **self._reload(name),
        }[deed]()

    def _requests(self, name: str) -> dict[str, Callable[[], object]]:
        mine = [each for each in self.asked if each.model == name and not each.is_over]
        return {
            "ask": lambda: self._ask(name, comes_back=True),
            "up": lambda: self._ask(name, wants_download=True),
            "done": lambda: [each.done() for each in mine[:1]],
            "hang up": lambda: [each.hang_up() for each in mine[-1:]],
        }

    def _ask(self, name: str, **more: Any) -> None:
        self.asked.append(self.world.ask(name, **more))

    def _trouble(self, name: str) -> dict[str, Callable[[], object]]:
        world = self.world
        return {
            "crash": lambda: world.crash(name),
            "breaks": lambda: world.fails.add(name),
            "starves": lambda: world.starves.add(name),
            "works": lambda: (world.fails.clear(), world.starves.clear()),
            "lose": lambda: world.lose("docker"),
            "find": lambda: world.find("docker"),
            "game": lambda: self._strangers(int(14 * GIB)),
            "game over": lambda: self._strangers(0),
        }

    def _strangers(self, size: int) -> None:
        for pool in self.scheduler.pools:
            self.world.memory.foreign[pool] = size
        self.world.read()

    def _user(self, name: str) -> dict[str, Callable[[], object]]:
        scheduler = self.scheduler
        return {
            "down": lambda: scheduler.down(name),
            "force": lambda: scheduler.down(name, force=True),
            "pin": lambda: scheduler.keep(name, pinned=True),
            "unpin": lambda: scheduler.keep(name, pinned=False),
            "keep": lambda: scheduler.keep(name, warm=True),
            "unkeep": lambda: scheduler.keep(name, warm=False),
            "disable": lambda: scheduler.enable(name, enabled=False),
            "enable": lambda: scheduler.enable(name, enabled=True),
            "renew": lambda: scheduler.renew(name, "restarted by its user"),
        }

    def _reload(self, name: str) -> dict[str, Callable[[], object]]:
        number = len(self.world.deeds)
        return {
            "wish": lambda: self.scheduler.wish(name, Wishes(settings={"n": str(number)})),
            "stale": lambda: self._mark_stale(self.scheduler.instances_of(name)),
            "priority": lambda: self._set_priority(name, (50, 100, 200)[number % 3]),
            "policy": lambda: self._set_policy(linger_s=(1.0, 5.0, 9.3)[number % 3]),
        }

    def _mark_stale(self, instances: tuple[Instance, ...]) -> None:
        for instance in instances:
            stale = Condition(kind="stale", since=self.world.now, why="other settings")
            self.scheduler.mark(instance.id, stale)
        self.scheduler.tick()

    def _set_priority(self, name: str, priority: int) -> None:
        self.scheduler.models[name].priority = priority
        self.scheduler.tick()

    def _set_policy(self, **changes: Any) -> None:
        self.scheduler.policy = msgspec.structs.replace(self.scheduler.policy, **changes)
        self.scheduler.tick()

    async def end(self) -> None:
        """Everybody leaves; what follows must come to rest (quiescence)."""
        for each in self.asked:
            each.hang_up()
        world = self.world
        world.fails.clear()
        world.starves.clear()
        if "docker" in self.scheduler.unknown:
            world.find("docker")
        await world.settle()
        before = len(world.deeds)
        await self.run(10_000)
        warm = [model for model in self.scheduler.models.values() if model.keep == "warm"]
        starts = [deed for deed in world.deeds[before:] if deed.startswith("start")]
        assert len(starts) <= len(warm), starts
        assert not any(i.leases for i in self.scheduler.instances.values())
        self.scheduler.tick()
        await world.run(0)
        assert world.pending == 0, "something is still due"
        before = len(world.deeds)
        await world.run(100_000)
        assert len(world.deeds) == before
