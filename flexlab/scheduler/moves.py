"""The state, and the moves that change it: what a pass and an event are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from flexlab.scheduler.effects import Effects
from flexlab.scheduler.policy import Policy, turn_end
from flexlab.scheduler.state import (
    NEVER,
    HeldLease,
    Instance,
    Leaving,
    Model,
    PoolAccount,
    Waiter,
)
from flexlab.scheduler.tracked import Tracked
from flexlab.spec.instance import InstanceState
from flexlab.spec.lease import Refused
from flexlab.spec.plan import Candidates, Refusal


class Moves:
    """Base of the scheduler. Nothing here decides; every move keeps the accounts true."""

    def __init__(
        self,
        effects: Effects,
        policy: Policy,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`clock` is the loop's time; `wall` gives Unix time for conditions."""
        self.policy = policy
        self.models: dict[str, Model] = {}
        self.instances: dict[str, Instance] = {}
        self.pools: dict[str, PoolAccount] = {}
        self.unknown: dict[str, str] = {}
        """Runtimes that cannot be reached, with the reason (rule 19)."""
        self.closing: Refusal | None = None
        self.epoch = 0
        """Changes with every change of an instance: a reading that spans one is worth nothing."""
        self._effects = effects
        self._clock = clock
        self._wall = wall
        self._by_model: dict[str, list[Instance]] = {}
        self._waiting: dict[str, Model] = {}
        """Models that have waiters: few among many."""
        self._kept: dict[str, Model] = {}
        """Models that are to be kept warm: few among many, too."""
        self._full: set[str] = set()
        """Models with replicas whose instances may all be busy: looked at by the next pass."""
        self._gone_waiters: dict[str, list[asyncio.Future[bool]]] = {}
        self._wanted_pools: frozenset[str] = frozenset()
        """Pools that a warm model which is out waits for."""
        self._next_unload = NEVER
        """When the next idle instance unloads, as the last round saw it."""
        self.paused = False
        """While what an earlier daemon left is being judged, nothing is decided."""
        self._tracked = Tracked()
        self._is_seen = False
        """Whether `_tracked` shows the state as it is; forgotten by every move."""
        self._judged: object = None
        """What the warm set was last judged from."""
        self._needs_of: dict[str, Candidates] = {}
        """Of what is kept warm: the candidates that its needs were taken from."""
        self._passing = False
        self._again = False
        self._wake = NEVER

    def _pass(self) -> None:
        """Everything that follows from the state."""
        raise NotImplementedError

    # -- looking

    def _of(self, model: str) -> list[Instance]:
        return self._by_model.get(model, [])

    def waiting(self) -> list[Model]:
        """Models that somebody waits for, in the order in which they are served."""
        return sorted(self._waiting.values(), key=lambda one: (-one.priority, one.oldest))

    def instances_of(self, name: str) -> tuple[Instance, ...]:
        """Those of a model that are not confirmed gone."""
        return tuple(self._of(name))

    def _owes_turn(self, model: Model, instance: Instance) -> bool:
        """Rule 6: after its turn, a model with an equal behind it admits no one new."""
        if not self._waiting or model.pinned or instance.external:
            return False
        if not instance.leases or instance.ready_at is None:
            return False
        if self._clock() < turn_end(instance.ready_at, instance.load_s, self.policy):
            return False
        return any(
            other.priority >= model.priority and instance.id in other.blocked_by
            for other in self._waiting.values()
        )

    def unload_at(self, instance: Instance) -> float | None:
        """When an idle instance unloads; None for one that stays (busy, pinned, warm, external)."""
        model = self.models[instance.model]
        if instance.idle_since is None or instance.external or instance.state != "ready":
            return None
        if "unknown" in instance.conditions:  # a stop could not be confirmed (rule 19)
            return None
        if "stale" in instance.conditions:
            return None if model.pinned else instance.idle_since + self.policy.linger_s
        if instance.is_replica:
            return instance.idle_since + self.policy.yield_after_s
        if model.pinned or model.is_warm:
            return None
        timeout_s = model.idle_timeout_s
        if timeout_s is None:
            timeout_s = self.policy.idle_timeout_s
        if self._wanted_pools and self._wanted_pools & instance.claims.keys():  # rule 12
            timeout_s = min(timeout_s, self.policy.yield_after_s)
        return instance.idle_since + timeout_s

    # -- leases

    def _may_enter(self, model: Model, key: str | None) -> bool:
        """Within the limits of the model and of the key."""
        per_key = self.policy.max_in_flight_per_key if key is not None else None
        if model.max_in_flight is None and per_key is None:
            return True
        leases = [lease for instance in self._of(model.name) for lease in instance.leases]
        if model.max_in_flight is not None and len(leases) >= model.max_in_flight:
            return False
        return per_key is None or sum(lease.key == key for lease in leases) < per_key

    def _lease(
        self, instance: Instance, *, key: str | None = None, is_work: bool = True
    ) -> HeldLease:
        lease = HeldLease(instance, self._released, key=key, is_work=is_work)
        instance.leases.add(lease)
        instance.idle_since = None
        model = self.models[instance.model]
        if model.replicas > 1 and len(instance.leases) >= (instance.candidate.slots or 1):
            self._full.add(model.name)
        return lease

    def _released(self, lease: HeldLease, instance: Instance) -> None:
        instance.leases.discard(lease)
        self._is_seen = False
        instance.served += lease.is_work
        if instance.id not in self.instances:
            return
        if not instance.leases:
            instance.idle_since = self._clock()
            unload = self.unload_at(instance)
            if instance.state == "draining" or self._waiting:
                self._pass()
            elif unload is not None and unload < self._wake:
                self._arm(unload)
        elif instance.model in self._waiting:
            self._pass()  # somebody waits for a place within the model's limit

    def _hand_out(self, model: Model, instance: Instance) -> None:
        """Leases for its waiters, the oldest first, as far as its limits allow."""
        left: list[Waiter] = []
        for waiter in model.waiters:
            if waiter.future.done():
                continue
            if self._may_enter(model, waiter.key):
                lease = self._lease(
                    self._least_busy(instance), key=waiter.key, is_work=not waiter.wants_download
                )
                waiter.future.set_result(lease)
            else:
                left.append(waiter)
        self._set_waiters(model, left)
        if left:
            model.waits_for = self._limit_in_words(model)

    def _limit_in_words(self, model: Model) -> str:
        limit = model.max_in_flight
        whose = ""
        if limit is None:
            limit, whose = self.policy.max_in_flight_per_key, " of one key"
        return f"{model.name} lets in {limit} request{'' if limit == 1 else 's'}{whose} at a time"

    def _least_busy(self, instance: Instance) -> Instance:
        """Among the instances of a model that admit, the one with the fewest requests."""
        if len(self._of(instance.model)) == 1:
            return instance
        able = [one for one in self._of(instance.model) if one.admits]
        return min(able, key=lambda one: len(one.leases), default=instance)

    def _set_waiters(self, model: Model, waiters: list[Waiter]) -> None:
        model.waiters = waiters
        self._is_seen = False
        if waiters:
            self._waiting[model.name] = model
        else:
            self._waiting.pop(model.name, None)
            model.waits_for, model.blocked_by = None, frozenset()

    def _cut_leases(self, instance: Instance, refusal: Refusal) -> None:
        for lease in list(instance.leases):
            lease.cut(refusal)

    def _refuse_waiters(self, model: Model, refusal: Refusal) -> None:
        self._refuse_some(model, model.waiters, refusal)

    def _refuse_some(self, model: Model, waiters: Iterable[Waiter], refusal: Refusal) -> None:
        gone = list(waiters)
        self._set_waiters(model, [w for w in model.waiters if w not in gone])
        for waiter in gone:
            if not waiter.future.done():
                waiter.future.set_exception(Refused(refusal))
        if gone:
            self._again = True  # nobody yields to it any more
            model.problem = refusal
            self._effects.note("refused", refusal.message, model=model.name, why=refusal.code)

    # -- instances

    def _admit(self, instance: Instance, why: str, *, seconds: float | None = None) -> None:
        """Ready (again): its waiters get their leases, oldest first."""
        now = self._clock()
        self._to(instance, "ready", why, seconds=seconds)
        instance.ready_at = instance.ready_at or now
        instance.idle_since = None if instance.leases else now
        self._hand_out(self.models[instance.model], instance)

    def _drain(self, instance: Instance, why: str) -> None:
        """Admit no one; stop when the last lease ends, or after `drain_timeout`."""
        if instance.state in ("ready", "draining") and instance.leases:
            instance.drained_for = None
            self._to(instance, "draining", why, until=self._clock() + self.policy.drain_timeout_s)
        else:
            self._stop(instance, why)

    def _stop(self, instance: Instance, why: str) -> None:
        if instance.state == "stopping" and "stuck" not in instance.conditions:
            return
        instance.conditions.pop("stuck", None)
        bound_s = self.policy.stop_timeout_s + self.policy.stop_confirm_s
        self._to(instance, "stopping", why, until=self._clock() + bound_s)
        self._effects.stop(instance.id)

    def _to(
        self,
        instance: Instance,
        state: InstanceState,
        why: str,
        *,
        until: float | None = None,
        seconds: float | None = None,
    ) -> None:
        now = self._clock()
        if instance.state == "ready" and instance.ready_at is not None:
            model = self.models[instance.model]
            if now - instance.ready_at >= self.policy.settled_s:
                model.failures, model.back_off_until = 0, 0.0
        self.epoch += 1
        self._is_seen = False
        instance.state, instance.why, instance.until = state, why, until
        instance.since = now
        self._note(instance, state, f"{instance.model}: {state} ({why})", seconds=seconds)

    def _note(
        self, instance: Instance, state: str, text: str, *, seconds: float | None = None
    ) -> None:
        self._effects.note(
            "preempt" if instance.drained_for else "instance",
            text,
            model=instance.model,
            instance=instance.id,
            state=state,
            why=instance.why,
            by=instance.drained_for,
            seconds=seconds,
            size=sum(instance.held(pool) for pool in instance.claims),
        )

    def _add(self, instance: Instance) -> None:
        self.epoch += 1
        self._is_seen = False
        self.instances[instance.id] = instance
        self._by_model[instance.model].append(instance)

    def _remove(self, instance: Instance) -> None:
        """Confirmed gone. Memory of a card is watched until it is seen free (rule 10)."""
        self.epoch += 1
        self._is_seen = False
        del self.instances[instance.id]
        left = self._by_model[instance.model]
        left.remove(instance)
        if left and not instance.is_replica:
            left[0].is_replica = False  # it is the first now
        now = self._clock()
        for name in instance.claims:
            pool = self.pools.get(name)
            if pool is None or pool.kind == "ram" or pool.used_bytes is None:
                continue
            size = instance.held(name)
            # Only what was seen to be used can be seen to be free again.
            if size and instance.ready_at is not None:
                # Others that leave at this moment make the same reading lower, too.
                before = pool.used_bytes - sum(one.size_bytes for one in pool.leaving)
                below = before - min(size, instance.measured.get(name, size)) // 2
                until = now + self.policy.freed_within_s
                pool.leaving.append(Leaving(instance.model, size, until, below))

    def _arm(self, when: float) -> None:
        """Be woken then; `tick` forgets the time, so that a timer that fired early is set again."""
        if when != self._wake:
            self._wake = when
            self._effects.wake_at(when)
