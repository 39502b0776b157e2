"""A lab in virtual time: engines that load, serve, crash and stop as they are told to.

Drives the real Scheduler through its own protocol; time moves only when nothing is left to do now.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterable
from itertools import count
from typing import Any, TypeVar

from machine_shapes import GIB, Memory, Way, candidates, on, ram

from flexlab.scheduler.policy import Policy
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import NEVER, HeldLease, Model, PoolAccount
from flexlab.spec.engine import OUT_OF_MEMORY
from flexlab.spec.instance import Endpoint, MemoryUse, RunState
from flexlab.spec.lease import Lease, Refused
from flexlab.spec.plan import Candidates, Placement, Refusal, Wishes

T = TypeVar("T")
STUCK_AFTER_S = 20.0
"""Time-out of a stop and of its confirmation: what is not gone by then is reported so."""


def play(story: Coroutine[Any, Any, T]) -> T:
    """Run a story to its end on a loop of its own (the test runner's stays what it is)."""
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(story)
    finally:
        loop.close()


class World:
    """The scheduler, its effects, and the clock."""

    def __init__(
        self, ram_gib: float = 8.0, pools: Iterable[PoolAccount] | None = None, **policy: Any
    ) -> None:
        """`pools` replaces the only pool that there is by itself: `ram_gib` of RAM."""
        self.now = 1000.0
        self.scheduler = Scheduler(
            self, Policy(**policy), clock=lambda: self.now, wall=lambda: self.now
        )
        for pool in [ram(ram_gib)] if pools is None else pools:
            self.scheduler.add_pool(pool)
        self.memory = Memory()
        self.ways: dict[str, tuple[Way, ...]] = {}
        self.load_s: dict[str, float] = {}
        self.stop_s: dict[str, float] = {}
        """More than STUCK_AFTER_S: reported as unconfirmed first, and gone later."""
        self.frees_s: dict[str, float] = {}
        """How long after its end a model's memory is used; then there is a reading."""
        self.takes: dict[str, float] = {}
        """What a model really takes, as a factor of its estimate."""
        self.not_installed: set[str] = set()
        self.fails: set[str] = set()
        self.starves: set[str] = set()
        """Their start dies for lack of memory."""
        self.never_stops: set[str] = set()
        self.late: set[str] = set()
        """A start of theirs that is given up goes on, and is stopped when it comes."""
        self.prepared_with: dict[str, Wishes] = {}
        self.early_s = 0.0
        """How much too early timers fire."""
        self.is_strict = True
        """Whether claims must fit their pools: not where strangers or wrong estimates play."""
        self.deeds: list[str] = []
        self.events: list[str] = []
        self.notes: list[dict[str, Any]] = []
        self.used: dict[str, dict[str, int]] = {}
        self.short: dict[str, dict[str, int]] = {}
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._wake = 0
        self._fetches: dict[str, int] = {}
        self._starts_end: dict[str, float] = {}

    def add(
        self,
        name: str,
        gib: float = 1.0,
        *ways: Way,
        load_s: float = 2.0,
        **model: Any,
    ) -> None:
        """A model, installed unless put into `not_installed`; without `ways`, on the CPU."""
        self.ways[name], self.load_s[name] = ways or (on("ram", gib),), load_s
        self.scheduler.add_model(Model(name=name, **model))

    # -- Effects

    def prepare(self, model: str, wishes: Wishes, *, download: bool) -> None:
        self.deeds.append(f"prepare {model}{' with download' if download else ''}")
        self.prepared_with[model] = wishes
        if model not in self.not_installed:
            self.after(0.05, lambda: self.scheduler.prepared(model, self._plan(model)))
        elif download:
            token = self._fetches[model] = next(self._order)
            self.after(100.0, lambda: self._fetched(model, token))
        else:
            refusal = Refusal(code="model_not_installed", message="not here", status=404)
            self.after(0.05, lambda: self.scheduler.prepare_failed(model, refusal))

    def _plan(self, model: str) -> Candidates:
        return candidates(model, self.ways[model])

    def _fetched(self, model: str, token: int) -> None:
        if self._fetches.get(model) == token:
            self.not_installed.discard(model)
            self.scheduler.prepared(model, self._plan(model))

    def cancel_prepare(self, model: str) -> None:
        self.deeds.append(f"cancel {model}")
        if self._fetches.pop(model, None) is not None:
            gone = Refusal(code="cancelled", message="nobody waits")
            self.after(0.01, lambda: self.scheduler.prepare_failed(model, gone))

    def start(self, instance: str, placement: Placement) -> None:
        chosen = placement.candidate
        model, load_s = chosen.model, self.load_s[chosen.model]
        self.deeds.append(f"start {model}")
        self.memory.take(instance, chosen, self.takes.get(model, 1.0))
        endpoint = Endpoint(port=1)
        self._starts_end[instance] = self.now + load_s
        self.after(0.1, lambda: self.scheduler.launched(instance, endpoint))
        if model in self.fails:
            why = Refusal(code="launch", message=f"{model} is broken", status=502)
        elif model in self.starves:
            why = Refusal(code=OUT_OF_MEMORY, message=f"{model} had too little memory", status=502)
        else:
            self.after(load_s, lambda: self._is_ready(instance, load_s))
            return
        self.after(0.5, lambda: self.scheduler.start_failed(instance, why))

    def _is_ready(self, instance: str, load_s: float) -> None:
        """It answers, and its memory is seen with the next reading."""
        self.scheduler.ready(instance, load_s)
        self.read("vram")

    def stop(self, instance: str) -> None:
        found = self.scheduler.instances[instance]
        model = found.model
        self.deeds.append(f"stop {model}")
        takes_s = self.stop_s.get(model, 0.3)
        if found.ready_at is None and model in self.late:
            takes_s += max(0.0, self._starts_end.get(instance, self.now) - self.now)
        never = model in self.never_stops or found.candidate.runtime in self.scheduler.unknown
        if never or takes_s > STUCK_AFTER_S:
            self.after(STUCK_AFTER_S, lambda: self.scheduler.stop_unconfirmed(instance))
        if not never:
            self.after(takes_s, lambda: self._end(instance, RunState(alive=False)))

    def _end(self, instance: str, state: RunState) -> None:
        """Confirmed gone; its memory is seen free a little later."""
        found = self.scheduler.instances.get(instance)
        if found is None:
            return
        self._starts_end.pop(instance, None)
        self.after(self.frees_s.get(found.model, 0.2), lambda: self._freed(instance))
        self.scheduler.gone(instance, state)

    def _freed(self, instance: str) -> None:
        self.memory.free(instance)
        if any(pool.leaving for pool in self.scheduler.pools.values()):
            self.read()

    def wake_at(self, when: float) -> None:
        self._wake += 1
        wish = self._wake
        if when != NEVER:
            fires = max(self.now, when - self.early_s) if when - self.now > 0.001 else when
            self._at(fires, lambda: self.scheduler.tick() if wish == self._wake else None)

    def note(self, kind: str, text: str, **more: Any) -> None:
        self.events.append(text)
        self.notes.append({"kind": kind, "text": text, "at": self.now} | more)

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

    def tell(self, last: int = 25) -> str:
        """The latest events, for whoever must understand a failure."""
        return "\n".join(f"{one['at']:9.2f} {one['text']}" for one in self.notes[-last:])

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

    def state(self, model: str) -> str | None:
        """Of its first instance; None without any."""
        return next((one.state for one in self.scheduler.instances_of(model)), None)

    def crash(self, model: str) -> None:
        """Its engine dies by itself, ready or loading."""
        for instance in self.scheduler.instances_of(model):
            if instance.state in ("ready", "draining"):
                self._end(instance.id, RunState(alive=False, why="killed by signal 9"))
            elif instance.state in ("starting", "loading"):
                why = Refusal(code="launch", message=f"{model} died while it loaded", status=502)
                self.scheduler.start_failed(instance.id, why)

    def lose(self, runtime: str) -> None:
        """A runtime cannot be reached any more."""
        self.scheduler.runtime_lost(runtime, "no answer")

    def find(self, runtime: str) -> None:
        """It answers again, and says what became of those that were told to stop meanwhile."""
        self.scheduler.runtime_back(runtime)
        for instance in list(self.scheduler.instances.values()):
            if instance.state == "stopping" and instance.candidate.runtime == runtime:
                self._end(instance.id, RunState(alive=False))

    def read(self, *kinds: str) -> None:
        """A reading of every pool (of these kinds), as the memory really is."""
        alive = self.scheduler.instances.__contains__
        for name, pool in self.scheduler.pools.items():
            if kinds and pool.kind not in kinds:
                continue
            measured = self.memory.measured(name, alive)
            self.scheduler.sample(name, self.memory.used(name), measured, self.scheduler.epoch)

    def read_memory(self, used_gib: float, **own_gib: float) -> None:
        """A reading of the RAM, and of what each model's engine has of it."""
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
            if self.is_strict:
                held = self.scheduler.held(pool.id)
                assert held <= pool.usable_bytes, f"claims exceed {pool.id}"
        for model in self.scheduler.models.values():
            mine = self.scheduler.instances_of(model.name)
            assert len(mine) <= model.replicas, f"too many instances of {model.name}"
        for instance in self.scheduler.instances.values():
            if instance.leases:
                assert instance.state in ("ready", "draining", "stopping", "failed")
        self._check_groups()

    def _check_groups(self) -> None:
        """Rule 15, in every state between starting and gone."""
        grouped = [i for i in self.scheduler.instances.values() if i.candidate.group is not None]
        for one in grouped:
            for other in self.scheduler.instances.values():
                if other.model == one.model:
                    continue
                if set(one.candidate.devices) & set(other.candidate.devices):
                    same = one.candidate.group == other.candidate.group
                    assert not same, f"{one.model} and {other.model} share a group and a card"
                    alone = one.candidate.group_with_card
                    assert not alone, f"{other.model} is on the card that {one.model} has alone"


class Asked:
    """A request as its client sees it."""

    def __init__(self, world: World, model: str, *, comes_back: bool = False, **more: Any) -> None:
        """`comes_back`: cut before its first byte, it is queued again first, once (rule 9)."""
        self.model = model
        self.asked_at = self.queued_at = world.now
        self.lease: HeldLease | None = None
        self.refused: Refusal | None = None
        self.cut: Refusal | None = None
        self.ended_at: float | None = None
        self._world = world
        self.is_done = False
        """Its answer is complete."""
        self._brief = False
        self._comes_back = comes_back
        self._more = more
        self._future: asyncio.Future[Lease] | None = None
        self._acquire()

    def _acquire(self, **since: Any) -> None:
        try:
            answer = self._world.scheduler.acquire(self.model, **self._more, **since)
        except Refused as refused:
            self._refuse(refused.refusal)
            return
        if isinstance(answer, HeldLease):
            self._got(answer)
        else:
            self._future = answer
            answer.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[Lease]) -> None:
        if future.cancelled():
            self.ended_at = self._world.now
        elif isinstance(error := future.exception(), Refused):
            self._refuse(error.refusal)
        else:
            lease = future.result()
            assert isinstance(lease, HeldLease)
            self._got(lease)

    def _got(self, lease: HeldLease) -> None:
        self.lease, self.ended_at = lease, self._world.now
        lease.on_cut(self._was_cut)
        if self._brief:
            lease.release()

    def _was_cut(self, refusal: Refusal) -> None:
        self.cut = refusal
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        if self._comes_back and not self._brief and refusal.code == "preempted":
            self._comes_back, self.ended_at = False, None
            self.queued_at = self._world.now
            self._acquire(since=self.asked_at)

    def _refuse(self, refusal: Refusal) -> None:
        self.refused, self.ended_at = refusal, self._world.now

    @property
    def waits(self) -> bool:
        return self.ended_at is None

    @property
    def is_over(self) -> bool:
        """Neither waiting nor answered any more."""
        return not self.waits and (self.lease is None or self.is_done)

    def hang_up(self) -> None:
        """The client leaves, whatever it was doing."""
        if self._future is not None and not self._future.done():
            self._future.cancel()
        self.done()

    def done(self) -> None:
        """The answer is complete (or takes no time, once there is a lease)."""
        self._brief = True
        if self.lease is not None:
            self.is_done = True
            self.lease.release()
