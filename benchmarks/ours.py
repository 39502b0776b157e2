"""The real scheduler in virtual time, with the cost of each of its calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from traffic import GIB, Request, Spec
from virtual import Clock, Lab, Tally

from flexlab.scheduler.policy import Policy
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import NEVER, HeldLease, Instance, Model, PoolAccount
from flexlab.spec.instance import Endpoint, MemoryUse, RunState
from flexlab.spec.lease import Lease, Refused
from flexlab.spec.plan import Candidate, Candidates, Keep, Need, Placement, Refusal, Wishes

PLANNING_S, LAUNCH_S = 0.005, 0.1
RESERVE_BYTES = GIB


def candidates(spec: Spec, cards: int) -> Candidates:
    """One for every card; one for every second pair of neighbours where it takes two."""
    groups = [
        [f"gpu{first + more}" for more in range(spec.cards)]
        for first in range(0, cards - spec.cards + 1, spec.cards)
    ]
    size = int(spec.gib * GIB)
    return Candidates(
        model=spec.name,
        items=tuple(
            Candidate(
                model=spec.name,
                variant="q4",
                backend="llamacpp",
                runtime="process",
                arch="gfx1100",
                support="full",
                devices=tuple(group),
                needs=tuple(Need(pool=f"{card}.vram", total_bytes=size) for card in group),
                weights=(),
            )
            for group in groups
        ),
    )


async def _callbacks() -> None:
    """Futures tell theirs on the loop."""
    await asyncio.sleep(0)


class Ours:
    """FlexLab: its scheduler, and its effects in virtual time."""

    def __init__(self, lab: Lab) -> None:
        self.tally = Tally("FlexLab")
        self.cost_us: dict[str, list[float]] = {}
        """Event -> wall time of each call."""
        self.cpu_us: list[float] = []
        self.most_waiting = 0
        self.most_instances = 0
        self._lab = lab
        self._clock = clock = Clock()
        policy = Policy(queue_timeout_s=lab.queue_timeout_s, idle_timeout_s=lab.idle_timeout_s)
        self.scheduler = Scheduler(self, policy, clock=lambda: clock.now, wall=lambda: clock.now)
        self._specs = {spec.name: spec for spec in lab.specs}
        self._candidates = {spec.name: candidates(spec, lab.cards) for spec in lab.specs}
        self._wish = 0
        self._working: dict[HeldLease, Callable[[], None]] = {}

    async def play(self) -> None:
        """The whole trace."""
        total = self._lab.card_bytes + RESERVE_BYTES
        for card in range(self._lab.cards):
            pool = f"gpu{card}.vram"
            self.scheduler.add_pool(PoolAccount(pool, "vram", total, RESERVE_BYTES))
        for spec in self._lab.specs:
            keep: Keep = "warm" if spec.warm or spec.pinned else "cold"
            model = Model(name=spec.name, priority=spec.priority, keep=keep, pinned=spec.pinned)
            self.scheduler.add_model(model)
        self._call("tick", self.scheduler.tick)
        for request in self._lab.trace:
            self._clock.at(request.at, partial(self._ask, request))
        while self._clock.step(self._lab.end_s):
            await _callbacks()

    def _call(self, event: str, deed: Callable[..., Any], *words: Any) -> Any:
        """One event of the scheduler, measured."""
        cpu, wall = time.thread_time_ns(), time.perf_counter_ns()
        try:
            return deed(*words)
        finally:
            self.cost_us.setdefault(event, []).append((time.perf_counter_ns() - wall) / 1000)
            self.cpu_us.append((time.thread_time_ns() - cpu) / 1000)
            self.most_waiting = max(self.most_waiting, len(self.scheduler.waiting()))
            self.most_instances = max(self.most_instances, len(self.scheduler.instances))

    # -- requests

    def _ask(self, request: Request) -> None:
        try:
            answer = self._call("acquire", self.scheduler.acquire, request.model)
        except Refused as refused:
            self._refused(request, refused.refusal)
            return
        if isinstance(answer, HeldLease):
            self._work(request, answer)
        else:
            answer.add_done_callback(partial(self._answered, request))

    def _answered(self, request: Request, future: asyncio.Future[Lease]) -> None:
        error = future.exception()
        if isinstance(error, Refused):
            self._refused(request, error.refusal)
            return
        lease = future.result()
        assert isinstance(lease, HeldLease)
        self._work(request, lease)

    def _refused(self, request: Request, refusal: Refusal) -> None:
        self.tally.waited(request.model, self._clock.now - request.at)
        if refusal.code == "queue_timeout":
            self.tally.starved += 1
        else:
            self.tally.refused += 1

    def _work(self, request: Request, lease: HeldLease) -> None:
        self.tally.waited(request.model, self._clock.now - request.at)
        lease.on_cut(partial(self._cut, lease))
        self._clock.after(request.work_s, partial(self._call, "release", lease.release))

    def _cut(self, lease: HeldLease, _: Refusal) -> None:
        self.tally.cut += 1
        lease.release()

    # -- Effects

    def prepare(self, model: str, wishes: Wishes, *, download: bool) -> None:
        found = self._candidates[model]
        self._later(PLANNING_S, "prepared", self.scheduler.prepared, model, found)

    def cancel_prepare(self, model: str) -> None:
        """Planning is short: it ends by itself."""

    def start(self, instance: str, placement: Placement) -> None:
        load_s = self._specs[placement.candidate.model].load_s
        self.tally.loaded(load_s)
        self._later(LAUNCH_S, "launched", self.scheduler.launched, instance, Endpoint(port=1))
        self._later(load_s, "ready", self.scheduler.ready, instance, load_s)

    def stop(self, instance: str) -> None:
        found = self.scheduler.instances[instance]
        self.tally.swaps += found.drained_for is not None
        self._clock.after(self._lab.stop_s, partial(self._gone, found))

    def _gone(self, instance: Instance) -> None:
        self._call("gone", self.scheduler.gone, instance.id, RunState(alive=False))
        for pool in instance.claims:
            self._clock.after(self._lab.freed_s, partial(self.read, pool))

    def read(self, pool: str) -> None:
        """A reading of one card: every engine takes what it claims."""
        ours = [i for i in self.scheduler.instances.values() if pool in i.claims]
        measured = {
            i.id: MemoryUse(resident_bytes=i.claims[pool], own_bytes=i.claims[pool])
            for i in ours
            if i.state == "ready"
        }
        used = sum(use.resident_bytes for use in measured.values())
        self._call("sample", self.scheduler.sample, pool, used, measured, self.scheduler.epoch)

    def wake_at(self, when: float) -> None:
        self._wish += 1
        if when != NEVER:
            self._clock.at(when, partial(self._tick, self._wish))

    def _tick(self, wish: int) -> None:
        if wish == self._wish:
            self._call("tick", self.scheduler.tick)

    def _later(self, seconds: float, event: str, deed: Callable[..., None], *words: Any) -> None:
        self._clock.after(seconds, partial(self._call, event, deed, *words))

    def note(self, kind: str, text: str, **more: Any) -> None:
        """Events are not what is measured."""

    def remember_use(self, memory_key: str, peak: dict[str, int]) -> None:
        """The same."""

    def remember_shortage(self, memory_key: str, claims: dict[str, int]) -> None:
        """The same."""
