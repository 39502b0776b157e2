"""The pass: after every event, what follows from the state. Base of `Scheduler`.

Order matters: overdue waiters leave, drains end or are taken back, the queue is served by priority
and age, idle models unload, the warm set comes back, and the next wake-up is set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from flexlab.scheduler.effects import Effects
from flexlab.scheduler.occupancy import held, occupancy, occupant
from flexlab.scheduler.place import Asker, Occupancy, place
from flexlab.scheduler.policy import Policy, drain_s, turn_s
from flexlab.scheduler.state import (
    NEVER,
    HeldLease,
    Instance,
    Model,
    PoolAccount,
    Preparing,
    Waiter,
    new_id,
)
from flexlab.spec.instance import InstanceState
from flexlab.spec.lease import Refused
from flexlab.spec.plan import Placement, Refusal


class Passes:
    """State, and the pass over it."""

    def __init__(
        self,
        effects: Effects,
        policy: Policy,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self.policy = policy
        self.models: dict[str, Model] = {}
        self.instances: dict[str, Instance] = {}
        self.pools: dict[str, PoolAccount] = {}
        self.closing: Refusal | None = None
        self.epoch = 0
        """Changes with every change of an instance: a reading that spans one is worth nothing."""
        self._effects = effects
        self._clock = clock
        self._wall = wall
        self._by_model: dict[str, list[Instance]] = {}
        self._gone_waiters: dict[str, list[asyncio.Future[bool]]] = {}
        self._contested = False
        """Whether any model has waiters; kept by the pass, for the way of every request."""
        self._wanted_pools: frozenset[str] = frozenset()
        """Pools that a warm model which is out waits for."""
        self.paused = False
        """While what an earlier daemon left is being judged, nothing is decided."""
        self._passing = False
        self._again = False
        self._wake = NEVER

    # -- the pass

    def _pass(self) -> None:
        """Run until nothing follows any more; a call from inside a pass is one more round."""
        self._again = True
        if self._passing or self.paused:
            return
        self._passing = True
        try:
            while self._again:
                self._again = False
                now = self._clock()
                self._wanted_pools = self._pools_of_warm_models_that_are_out()
                self._expire(now)
                self._settle_drains(now)
                self._admit_waiters()
                waiting = self._serve_queue(now)
                self._unload_idle(now)
                if not waiting:
                    self._restore_warm(now)
        finally:
            self._passing = False
        self._wanted_pools = self._pools_of_warm_models_that_are_out()
        self._contested = any(model.waiters for model in self.models.values())
        self._set_wake(self._clock())

    def _expire(self, now: float) -> None:
        for model in self.models.values():
            fetching = model.preparing is not None and model.preparing.download
            late = [
                w
                for w in model.waiters
                if w.deadline <= now and not (fetching and w.wants_download)
            ]
            if late:
                why = "it is still loading" if model.waits_for is None else model.waits_for
                if fetching:
                    why = "its weights are still being fetched"
                self._refuse_some(
                    model,
                    late,
                    Refusal(
                        code="queue_timeout",
                        message=f"{model.name} was not ready in time: {why}",
                        hint="queue_timeout in the settings is the limit",
                        status=504,
                        retry_after_s=30.0,
                    ),
                )

    def _settle_drains(self, now: float) -> None:
        for instance in [i for i in self.instances.values() if i.state == "draining"]:
            wanted = instance.drained_for
            if wanted is not None and (not self.models[wanted].waiters or self._of(wanted)):
                instance.drained_for = None
                self._admit(instance, f"{wanted} does not need its memory any more")
            elif not instance.leases:
                self._stop(instance, instance.why)
            elif instance.until is not None and now >= instance.until:
                self._cut_leases(instance, _preempted(instance))
                self._stop(instance, instance.why)

    def _admit_waiters(self) -> None:
        """Who queued behind another model's turn gets in again when that one is not wanted."""
        for instance in self.instances.values():
            model = self.models[instance.model]
            if instance.admits and model.waiters and not self._owes_turn(model, instance):
                self._hand_out(model, instance)

    def _serve_queue(self, now: float) -> list[Model]:
        """Serve models that have waiters, by priority, then age. Returns those still waiting."""
        waiting = [m for m in self.models.values() if m.waiters]
        reserved: dict[str, int] = {}
        for model in sorted(waiting, key=lambda m: (-m.priority, m.oldest)):
            if self._of(model.name) or self.closing:
                continue  # starting, or its last instance is still on its way out
            if model.candidates is None:
                self._prepare(model, now)
                continue
            occupied = self._occupancy(now, reserved)
            asker = Asker(priority=model.priority, displaces_busy=not model.failures)
            answer = place(model.candidates, occupied, self.policy, asker)
            if isinstance(answer, Refusal):
                self._refuse_waiters(model, answer)
                continue
            if isinstance(answer, Placement) and not answer.victims:
                self._start(model, answer, now)
                continue
            if isinstance(answer, Placement):
                model.waits_for, model.blocked_by = answer.because, frozenset(answer.victims)
                for victim in [self.instances[name] for name in answer.victims]:
                    self._preempt(victim, model, now)
            else:
                model.waits_for, model.blocked_by = answer.why, frozenset(answer.blocked_by)
            for need in answer.candidate.needs:
                reserved[need.pool] = reserved.get(need.pool, 0) + need.total_bytes
        return [m for m in waiting if m.waiters]

    def _prepare(self, model: Model, now: float) -> None:
        if model.preparing is None:
            download = any(waiter.wants_download for waiter in model.waiters)
            model.preparing = Preparing(since=now, download=download, wishes=model.wishes)
            self._effects.prepare(model.name, model.wishes, download=download)

    def _start(self, model: Model, placement: Placement, now: float) -> None:
        instance = Instance(
            id=new_id(model.name),
            model=model.name,
            candidate=placement.candidate,
            claims=dict(placement.grant.claims),
            state="starting",
            since=now,
            why=placement.because,
            until=now + placement.candidate.start_timeout_s,
        )
        model.starts += 1
        self._again = True  # victims that still drain for it may be ready again
        model.waits_for = model.preempted_by = None
        model.blocked_by = frozenset()
        self._add(instance)
        self._note(instance, "starting", f"{model.name} starts: {placement.because}")
        self._effects.start(instance.id, placement)

    def _preempt(self, victim: Instance, model: Model, now: float) -> None:
        loser = self.models[victim.model]
        loser.preempted_by = model.name
        loser.preempted += 1
        if victim.leases and victim.state == "ready":
            victim.drained_for = model.name
            bound_s = drain_s(
                occupant(victim, loser, now, self.policy), model.priority, self.policy
            )
            self._to(victim, "draining", f"yields to {model.name}", until=now + bound_s)
        else:
            self._stop(victim, f"preempted by {model.name}")

    def _unload_idle(self, now: float) -> None:
        for instance in [i for i in self.instances.values() if i.state == "ready"]:
            due = self.unload_at(instance)
            if due is not None and now >= due:
                stale = instance.conditions.get("stale")
                self._stop(instance, stale.why if stale else "idle")

    def unload_at(self, instance: Instance) -> float | None:
        """When an idle instance unloads; None for one that stays (busy, pinned, warm, external)."""
        model = self.models[instance.model]
        if instance.idle_since is None or instance.external or instance.state != "ready":
            return None
        if model.pinned:
            return None
        if "stale" in instance.conditions:
            return instance.idle_since + self.policy.linger_s
        if model.keep == "warm":
            return None
        timeout_s = model.idle_timeout_s
        if timeout_s is None:
            timeout_s = self.policy.idle_timeout_s
        if self._wanted_pools & instance.claims.keys():  # rule 12
            timeout_s = min(timeout_s, self.policy.yield_after_s)
        return instance.idle_since + timeout_s

    def _pools_of_warm_models_that_are_out(self) -> frozenset[str]:
        return frozenset(
            need.pool
            for model in self.models.values()
            if model.awaits_memory and self._to_restore(model) and not self._of(model.name)
            if model.candidates
            for candidate in model.candidates.items
            for need in candidate.needs
        )

    def _to_restore(self, model: Model) -> bool:
        wanted = model.keep == "warm" and model.enabled and not model.held_down
        return wanted and not model.restore_blocked and self.closing is None

    def _restore_warm(self, now: float) -> None:
        """Rule 12: comes back when nobody waits and its memory is free; displaces nobody."""
        for model in sorted(self.models.values(), key=lambda m: (-m.priority, m.name)):
            if not self._to_restore(model) or self._of(model.name) or now < model.back_off_until:
                continue
            if model.candidates is None:
                self._prepare(model, now)
                continue
            occupied = self._occupancy(now, {})
            asker = Asker(priority=model.priority)
            answer = place(model.candidates, occupied, self.policy, asker)
            # What nobody of ours could make room for hurries nobody.
            model.awaits_memory = not isinstance(answer, Refusal)
            if isinstance(answer, Placement) and not answer.victims:
                self._start(model, answer, now)

    def _set_wake(self, now: float) -> None:
        """The next time at which something is due by itself."""
        due: list[float] = []
        for model in self.models.values():
            due += [waiter.deadline for waiter in model.waiters]
            if self._to_restore(model) and not self._of(model.name):
                due.append(model.back_off_until)
        for instance in self.instances.values():
            if instance.state == "draining" and instance.until is not None:
                due.append(instance.until)
            if (unload := self.unload_at(instance)) is not None:
                due.append(unload)
            if self._contested and instance.ready_at is not None:
                due.append(instance.ready_at + turn_s(instance.load_s or 0.0, self.policy))
                if instance.idle_since is not None:
                    due.append(instance.idle_since + self.policy.linger_s)
        self._arm(min((when for when in due if when > now), default=NEVER))

    def _arm(self, when: float) -> None:
        """Be woken then; `tick` forgets the time, so that a timer that fired early is set again."""
        if when != self._wake:
            self._wake = when
            self._effects.wake_at(when)

    # -- pieces

    def _of(self, model: str) -> list[Instance]:
        return self._by_model.get(model, [])

    def _owes_turn(self, model: Model, instance: Instance) -> bool:
        """Rule 6: after its turn, a model with an equal behind it admits no one new."""
        if model.pinned or not instance.leases or instance.ready_at is None or instance.external:
            return False
        if self._clock() < instance.ready_at + turn_s(instance.load_s or 0.0, self.policy):
            return False
        return any(
            other.waiters and other.priority >= model.priority and instance.id in other.blocked_by
            for other in self.models.values()
        )

    def _lease(self, instance: Instance) -> HeldLease:
        lease = HeldLease(instance, self._released)
        instance.leases.add(lease)
        instance.idle_since = None
        return lease

    def _released(self, lease: HeldLease, instance: Instance) -> None:
        instance.leases.discard(lease)
        if not instance.leases and instance.id in self.instances:
            instance.idle_since = self._clock()
            unload = self.unload_at(instance)
            if instance.state == "draining" or self._contested:
                self._pass()
            elif unload is not None and unload < self._wake:
                self._arm(unload)

    def _admit(self, instance: Instance, why: str, *, seconds: float | None = None) -> None:
        """Ready (again): its waiters get their leases, oldest first."""
        now = self._clock()
        self._to(instance, "ready", why, seconds=seconds)
        instance.ready_at = instance.ready_at or now
        instance.idle_since = None if instance.leases else now
        self._hand_out(self.models[instance.model], instance)

    def _hand_out(self, model: Model, instance: Instance) -> None:
        waiters, model.waiters = model.waiters, []
        model.waits_for, model.blocked_by = None, frozenset()
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_result(self._lease(instance))

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

    def _cut_leases(self, instance: Instance, refusal: Refusal) -> None:
        for lease in list(instance.leases):
            lease.cut(refusal)

    def _refuse_waiters(self, model: Model, refusal: Refusal) -> None:
        self._refuse_some(model, model.waiters, refusal)

    def _refuse_some(self, model: Model, waiters: list[Waiter], refusal: Refusal) -> None:
        gone = list(waiters)
        model.waiters = [w for w in model.waiters if w not in gone]
        if not model.waiters:
            model.waits_for, model.blocked_by = None, frozenset()
        for waiter in gone:
            if not waiter.future.done():
                waiter.future.set_exception(Refused(refusal))
        if gone:
            self._again = True  # nobody yields to it any more
            model.problem = refusal
            self._effects.note("refused", refusal.message, model=model.name, why=refusal.code)

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
        )

    def _add(self, instance: Instance) -> None:
        self.epoch += 1
        self.instances[instance.id] = instance
        self._by_model[instance.model].append(instance)

    def _occupancy(self, now: float, reserved: dict[str, int]) -> Occupancy:
        return occupancy(
            self.models, self.instances, self.pools, self.policy, now=now, reserved=reserved
        )

    def held(self, pool: str) -> int:
        """Bytes accounted to our instances in this pool."""
        return held(self.instances, pool)


def _preempted(instance: Instance) -> Refusal:
    """What a request hears whose instance was taken away under it (rule 9)."""
    if instance.drained_for is None:
        return Refusal(
            code="stopped",
            message=f"{instance.model} was stopped before the answer was complete: {instance.why}",
        )
    by = f" by {instance.drained_for}"
    return Refusal(
        code="preempted",
        message=f"{instance.model} was preempted{by} before the answer was complete",
        hint="send the request again",
        retry_after_s=30.0,
    )
