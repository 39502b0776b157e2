"""A lab in virtual time: engines that load, serve, crash and stop as they are told to.

Drives the real Scheduler through its own protocol; time moves only when nothing is left to do now.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

from flexlab.scheduler.policy import Policy
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import NEVER, HeldLease, Model, PoolAccount
from flexlab.spec.instance import Endpoint, MemoryUse, RunState
from flexlab.spec.lease import Refused
from flexlab.spec.plan import (
    Candidate,
    Candidates,
    Need,
    Placement,
    Refusal,
    Weight,
    Wishes,
)

GIB = 1024**3
T = TypeVar("T")


def play(story: Coroutine[Any, Any, T]) -> T:
    """Run a story to its end on a loop of its own (the test runner's stays what it is)."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(story)
    finally:
        loop.close()


def candidate(model: str, gib: float, **more: Any) -> Candidate:
    """A CPU candidate that needs so much RAM."""
    return Candidate(
        model=model,
        variant="v",
        backend="llamacpp",
        runtime="process",
        arch="cpu",
        support="full",
        devices=("cpu",),
        needs=(Need(pool="ram", total_bytes=int(gib * GIB)),),
        weights=(Weight(source=f"file:///{model}.gguf"),),
        **more,
    )


class World:
    """The scheduler, its effects, and the clock."""

    def __init__(self, ram_gib: float = 8.0, **policy: Any) -> None:
        self.now = 1000.0
        self.scheduler = Scheduler(
            self, Policy(**policy), clock=lambda: self.now, wall=lambda: self.now
        )
        self.scheduler.add_pool(PoolAccount("ram", "ram", int(ram_gib * GIB)))
        self.needs: dict[str, float] = {}
        self.load_s: dict[str, float] = {}
        self.stop_s: dict[str, float] = {}
        self.not_installed: set[str] = set()
        self.fails: set[str] = set()
        self.never_stops: set[str] = set()
        self.prepared_with: dict[str, Wishes] = {}
        self.early_s = 0.0
        """How much too early timers fire."""
        self.deeds: list[str] = []
        self.events: list[str] = []
        self.used: dict[str, dict[str, int]] = {}
        self.short: dict[str, dict[str, int]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wake = 0
        self._fetches: dict[str, int] = {}

    def add(self, name: str, gib: float, *, load_s: float = 2.0, **model: Any) -> None:
        """A model, installed unless put into `not_installed`."""
        self.needs[name], self.load_s[name] = gib, load_s
        self.scheduler.add_model(Model(name=name, **model))

    # -- Effects

    def prepare(self, model: str, wishes: Wishes, *, download: bool) -> None:
        self.deeds.append(f"prepare {model}{' with download' if download else ''}")
        found = Candidates(model=model, items=(candidate(model, self.needs[model]),))
        self.prepared_with[model] = wishes
        if model not in self.not_installed:
            self.after(0.05, lambda: self.scheduler.prepared(model, found))
        elif download:
            token = self._fetches[model] = next(self._order)
            self.after(100.0, lambda: self._fetched(model, token, found))
        else:
            refusal = Refusal(code="model_not_installed", message="not here", status=404)
            self.after(0.05, lambda: self.scheduler.prepare_failed(model, refusal))

    def _fetched(self, model: str, token: int, found: Candidates) -> None:
        if self._fetches.get(model) == token:
            self.not_installed.discard(model)
            self.scheduler.prepared(model, found)

    def cancel_prepare(self, model: str) -> None:
        self.deeds.append(f"cancel {model}")
        if self._fetches.pop(model, None) is not None:
            gone = Refusal(code="cancelled", message="nobody waits")
            self.after(0.01, lambda: self.scheduler.prepare_failed(model, gone))

    def start(self, instance: str, placement: Placement) -> None:
        model = placement.candidate.model
        self.deeds.append(f"start {model}")
        endpoint = Endpoint(port=1)
        self.after(0.1, lambda: self.scheduler.launched(instance, endpoint))
        if model in self.fails:
            why = Refusal(code="launch", message=f"{model} is broken", status=502)
            self.after(0.5, lambda: self.scheduler.start_failed(instance, why))
        else:
            load_s = self.load_s[model]
            self.after(load_s, lambda: self.scheduler.ready(instance, load_s))

    def stop(self, instance: str) -> None:
        model = instance.rpartition("-")[0]
        self.deeds.append(f"stop {model}")
        if model in self.never_stops:
            self.after(20.0, lambda: self.scheduler.stop_unconfirmed(instance))
        else:
            state = RunState(alive=False)
            self.after(self.stop_s.get(model, 0.3), lambda: self.scheduler.gone(instance, state))

    def wake_at(self, when: float) -> None:
        self._wake += 1
        wish = self._wake
        if when != NEVER:
            fires = max(self.now, when - self.early_s) if when - self.now > 0.001 else when
            self._at(fires, lambda: self.scheduler.tick() if wish == self._wake else None)

    def note(self, kind: str, text: str, **more: Any) -> None:
        self.events.append(text)

    def remember_use(self, memory_key: str, peak: dict[str, int]) -> None:
        self.used[memory_key] = peak

    def remember_shortage(self, memory_key: str, claims: dict[str, int]) -> None:
        self.short[memory_key] = claims

    # -- time

    def _at(self, when: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._due, (when, next(self._order), deed))

    def after(self, seconds: float, deed: Callable[[], None]) -> None:
        """Do it so many seconds from now."""
        self._at(self.now + seconds, deed)

    async def settle(self) -> None:
        """Let the loop deliver what is due now: cancellations, results."""
        for _ in range(2):
            turn = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(turn.set_result, None)
            await turn

    async def run(self, seconds: float) -> None:
        """Let so much time pass."""
        end = self.now + seconds
        await self.settle()
        while self._due and self._due[0][0] <= end:
            when, _, deed = heapq.heappop(self._due)
            self.now = max(self.now, when)
            deed()
            await self.settle()
            self.check()
        self.now = end

    @property
    def pending(self) -> int:
        """Things that will still happen by themselves."""
        return len(self._due)

    # -- asking and looking

    def ask(self, model: str, **more: Any) -> Asked:
        """One request."""
        return Asked(self, model, **more)

    def running(self) -> set[str]:
        """Models that have an instance."""
        return {instance.model for instance in self.scheduler.instances.values()}

    def crash(self, model: str) -> None:
        """Its engine dies by itself."""
        for instance in self.scheduler.instances_of(model):
            if instance.state == "ready":
                self.scheduler.gone(instance.id, RunState(alive=False, why="killed by signal 9"))

    def read_memory(self, used_gib: float, **own_gib: float) -> None:
        """A reading of the pool, and of what each model's engine has of it."""
        measured = {
            instance.id: MemoryUse(resident_bytes=size, own_bytes=size)
            for model, gib in own_gib.items()
            for instance in self.scheduler.instances_of(model)
            for size in [int(gib * GIB)]
        }
        self.scheduler.sample("ram", int(used_gib * GIB), measured, self.scheduler.epoch)

    def check(self) -> None:
        """What must hold at every moment."""
        for pool in self.scheduler.pools.values():
            assert pool.usable_bytes is not None
            assert self.scheduler.held(pool.id) <= pool.usable_bytes, "claims exceed the pool"
        names = [i.model for i in self.scheduler.instances.values()]
        assert len(names) == len(set(names)), "two instances of one model"
        for instance in self.scheduler.instances.values():
            if instance.leases:
                assert instance.state in ("ready", "draining", "stopping", "failed")


class Asked:
    """A request as its client sees it."""

    def __init__(self, world: World, model: str, **more: Any) -> None:
        self.model = model
        self.asked_at = world.now
        self.lease: HeldLease | None = None
        self.refused: Refusal | None = None
        self.cut: Refusal | None = None
        self.ended_at: float | None = None
        self._world = world
        self._brief = False
        self._future: asyncio.Future[HeldLease] | None = None
        try:
            answer = world.scheduler.acquire(model, **more)
        except Refused as refused:
            self._refuse(refused.refusal)
            return
        if isinstance(answer, HeldLease):
            self._got(answer)
        else:
            self._future = answer
            answer.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[HeldLease]) -> None:
        if future.cancelled():
            self.ended_at = self._world.now
        elif isinstance(error := future.exception(), Refused):
            self._refuse(error.refusal)
        else:
            self._got(future.result())

    def _got(self, lease: HeldLease) -> None:
        self.lease, self.ended_at = lease, self._world.now
        lease.on_cut(self._was_cut)
        if self._brief:
            lease.release()

    def _was_cut(self, refusal: Refusal) -> None:
        self.cut = refusal
        self.done()

    def _refuse(self, refusal: Refusal) -> None:
        self.refused, self.ended_at = refusal, self._world.now

    @property
    def waits(self) -> bool:
        return self.ended_at is None

    def hang_up(self) -> None:
        """The client leaves, whatever it was doing."""
        if self._future is not None and not self._future.done():
            self._future.cancel()
        self.done()

    def done(self) -> None:
        """The answer is complete (or takes no time, once there is a lease)."""
        self._brief = True
        if self.lease is not None:
            self.lease.release()
