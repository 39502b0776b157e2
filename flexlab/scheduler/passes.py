"""The pass: after every event, what follows from the state.

Order matters: overdue waiters leave, drains end or are taken back, the queue is served by priority
and age, idle models unload, the warm set comes back, replicas grow in what is free, and the next
wake-up is set.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flexlab.scheduler.accounts import Accounts
from flexlab.scheduler.occupancy import occupant
from flexlab.scheduler.place import Asker
from flexlab.scheduler.policy import drain_s, turn_end
from flexlab.scheduler.state import NEVER, Instance, Model, Preparing, new_id
from flexlab.scheduler.warm import Warm, warm_set
from flexlab.spec.plan import Candidate, Candidates, Placement, Refusal, Wait


class Passes(Accounts):
    """State, and the pass over it."""

    def _pass(self) -> None:
        """Run until nothing follows any more; a call from inside a pass is one more round."""
        self._again = True
        if self._passing or self.paused:
            return
        self._passing = True
        try:
            while self._again:
                self._again = False
                self._round(self._clock())
                wanted = self._pools_of_warm_models_that_are_out()
                if wanted != self._wanted_pools:  # who idles out sooner now may be due already
                    self._wanted_pools, self._again = wanted, True
        finally:
            self._passing = False
        self._set_wake(self._clock())

    def _round(self, now: float) -> None:
        self._is_seen = False
        self._expire_leaving(now)
        self._judge_warm()
        self._expire(now)
        self._settle_drains(now)
        self._admit_waiters()
        self._serve_queue(now)
        if self._again:
            return  # the next round looks at those who leave and come by themselves
        self._unload_idle(now)
        self._relieve(now)
        if not any(not self._of(name) for name in self._waiting):
            self._restore_warm(now)
            self._grow(now)

    # -- who waits

    def _expire(self, now: float) -> None:
        for model in list(self._waiting.values()):
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
        for instance in self._draining():
            wanted = instance.drained_for
            if wanted is not None and (not self.models[wanted].waiters or self._of(wanted)):
                instance.drained_for = None
                self._admit(instance, f"{wanted} does not need its memory any more")
            elif (
                wanted is not None
                and self.models[instance.model].pinned
                and not instance.is_replica
            ):
                instance.drained_for = None
                self._admit(instance, "it is pinned now")
            elif not instance.leases:
                self._stop(instance, instance.why)
            elif instance.until is not None and now >= instance.until:
                self._cut_leases(instance, _preempted(instance))
                self._stop(instance, instance.why)

    def _draining(self) -> list[Instance]:
        return [i for i in self.instances.values() if i.state == "draining"]

    def _admit_waiters(self) -> None:
        """Who queued behind another model's turn gets in again when that one is not wanted, and
        who waited for a place within the model's limit when there is one."""
        for model in list(self._waiting.values()):
            able = next((i for i in self._of(model.name) if i.admits), None)
            if able is not None and not self._owes_turn(model, able):
                self._hand_out(model, able)

    def _serve_queue(self, now: float) -> None:
        """Serve models that have waiters, by priority, then age."""
        reserved: dict[str, int] = {}
        for model in self.waiting():
            if self._of(model.name) or self.closing:
                continue  # starting, or its last instance is still on its way out
            if all(waiter.future.done() for waiter in model.waiters):
                continue  # they have hung up, and that is about to be told
            if model.candidates is None:
                self._prepare(model, now)
                continue
            asker = Asker(priority=model.priority, displaces_busy=not model.failures)
            answer = self._place(model.name, model.candidates, asker, now, reserved)
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
            self._hasten(model, answer.candidate, now)
            if answer.candidate.runtime in self.unknown:
                continue  # nobody can say when: others may have the memory meanwhile
            for need in answer.candidate.needs:
                reserved[need.pool] = reserved.get(need.pool, 0) + need.total_bytes

    def _place(
        self,
        name: str,
        candidates: Candidates,
        asker: Asker,
        now: float,
        reserved: Mapping[str, int],
    ) -> Placement | Wait | Refusal:
        if not self._is_seen:
            self._tracked.look(
                self.models,
                self.instances,
                self.pools,
                self.policy,
                now=now,
                unknown=self.unknown,
            )
            self._is_seen = True
        return self._tracked.place(name, candidates, asker, reserved)

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
            is_replica=bool(self._of(model.name)),
        )
        model.starts += 1
        others_wait = any(other is not model for other in self._waiting.values())
        if others_wait or any(i.drained_for == model.name for i in self.instances.values()):
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
        victim.drained_for = model.name
        self._again = True  # one ahead may have use for that room, too
        if victim.leases and victim.state == "ready":
            bound_s = drain_s(
                occupant(victim, loser, now, self.policy), model.priority, self.policy
            )
            self._to(victim, "draining", f"yields to {model.name}", until=now + bound_s)
        else:
            self._stop(victim, f"preempted by {model.name}")

    def _hasten(self, model: Model, candidate: Candidate, now: float) -> None:
        """Rule 5: who drains for a lower one gets no longer than this one grants by itself."""
        places = {*(need.pool for need in candidate.needs), *candidate.devices}
        for instance in self._draining():
            wanted, loser = instance.drained_for, self.models[instance.model]
            if wanted is None or self.models[wanted].priority >= model.priority or model.failures:
                continue
            if not places & {*instance.claims, *instance.candidate.devices}:
                continue
            bound_s = drain_s(
                occupant(instance, loser, now, self.policy), model.priority, self.policy
            )
            until = min(instance.until or NEVER, now + bound_s)
            instance.drained_for = loser.preempted_by = model.name
            self._to(instance, "draining", f"yields to {model.name}", until=until)

    # -- who leaves by himself

    def _unload_idle(self, now: float) -> None:
        self._next_unload = NEVER
        for instance in [i for i in self.instances.values() if i.idle_since is not None]:
            due = self.unload_at(instance)
            if due is None:
                continue
            if now < due:
                self._next_unload = min(self._next_unload, due)
                continue
            stale = instance.conditions.get("stale")
            self._stop(instance, stale.why if stale else "idle")

    # -- who comes back, and who grows

    def _warm(self) -> list[Model]:
        return list(self._kept.values())

    def _judge_warm(self) -> None:
        """Rule 12: of the warm models those that fit together; the others count as cold."""
        warm = self._warm()
        if not warm:
            return
        for model in warm:
            found = model.candidates
            if found is not None and self._needs_of.get(model.name) is not found:
                self._needs_of[model.name] = found
                model.known_needs = tuple(
                    {need.pool: need.total_bytes for need in candidate.needs}
                    for candidate in found.items
                )
        if self._what_warm_hangs_on(warm) == self._judged:
            return
        told = [
            Warm(name=model.name, priority=model.priority, ways=model.known_needs)
            for model in warm
            if model.enabled and not model.held_down
        ]
        usable = {pool.id: pool.usable_bytes for pool in self.pools.values()}
        members = warm_set(told, usable)
        for model in warm:
            is_member = model.name in members or not model.enabled or model.held_down
            if model.is_member and not is_member:
                text = f"{model.name} is kept warm, and does not fit beside the others: it is cold"
                self._effects.note("model", text, model=model.name)
            model.is_member = is_member
        self._judged = self._what_warm_hangs_on(warm)

    def _what_warm_hangs_on(self, warm: list[Model]) -> object:
        """All that the warm set follows from."""
        return (
            [
                (m.name, m.priority, m.enabled, m.held_down, m.is_member, m.known_needs)
                for m in warm
            ],
            [(p.id, p.total_bytes, p.reserve_bytes, p.limit_bytes) for p in self.pools.values()],
        )

    def _pools_of_warm_models_that_are_out(self) -> frozenset[str]:
        return frozenset(
            need.pool
            for model in self._warm()
            if model.awaits_memory and self._to_restore(model) and not self._of(model.name)
            if model.candidates
            for candidate in model.candidates.items
            for need in candidate.needs
        )

    def _to_restore(self, model: Model) -> bool:
        wanted = model.is_warm and model.enabled and not model.held_down
        return wanted and not model.restore_blocked and self.closing is None

    def _restore_warm(self, now: float) -> None:
        """Rule 12: comes back when nobody waits and its memory is free; displaces nobody."""
        for model in sorted(self._warm(), key=lambda m: (-m.priority, m.name)):
            if not self._to_restore(model) or self._of(model.name) or now < model.back_off_until:
                continue
            if model.candidates is None:
                self._prepare(model, now)
                continue
            answer = self._place(
                model.name, model.candidates, Asker(priority=model.priority), now, {}
            )
            # What nobody of ours could make room for hurries nobody.
            model.awaits_memory = not isinstance(answer, Refusal)
            if isinstance(answer, Placement) and not answer.victims and self._has_room(model):
                self._start(model, answer, now)

    def _has_room(self, model: Model) -> bool:
        """For what it had when it was unloaded for want of memory, whatever is estimated."""
        for name, size in model.took.items():
            free = self.pools[name].free_bytes(self.held(name))
            if free is not None and free < size:
                return False
        return True

    def _grow(self, now: float) -> None:
        """Rule 18: one more instance where all are busy, in free memory of other devices only."""
        for model in [self.models[name] for name in self._full]:
            mine = self._of(model.name)
            if len(mine) >= model.replicas or not model.candidates or not self._is_full(model):
                continue
            taken = {device for instance in mine for device in instance.candidate.devices}
            items = tuple(c for c in model.candidates.items if not taken & set(c.devices))
            if not items or model.failures:
                continue
            elsewhere = Candidates(model=model.name, items=items)
            answer = self._place(model.name, elsewhere, Asker(priority=model.priority), now, {})
            if isinstance(answer, Placement) and not answer.victims:
                because = f"all of its {len(mine)} are busy, and memory is free"
                self._start(model, msgspec.structs.replace(answer, because=because), now)
        self._full.clear()

    def _is_full(self, model: Model) -> bool:
        """Every instance is ready and works on as many requests as it has slots."""
        mine = self._of(model.name)
        return bool(mine) and all(
            i.state == "ready" and not i.external and len(i.leases) >= (i.candidate.slots or 1)
            for i in mine
        )

    # -- when to look again

    def _set_wake(self, now: float) -> None:
        """The next time at which something is due by itself."""
        due: list[float] = [
            waiter.deadline for model in self._waiting.values() for waiter in model.waiters
        ]
        for model in self._warm():
            if self._to_restore(model) and not self._of(model.name):
                due.append(model.back_off_until)
        for pool in self.pools.values():
            if pool.leaving:
                due += [one.until for one in pool.leaving]
            if pool.pressed_since is not None:
                due.append(pool.pressed_since + self.policy.pressed_s)
        due.append(self._next_unload)
        due += [i.until for i in self._draining() if i.until is not None]
        if self._waiting:
            due += self._turns_and_lingerings(now)
        self._arm(min([when for when in due if when > now], default=NEVER))

    def _turns_and_lingerings(self, now: float) -> list[float]:
        """When somebody may become a victim by time alone."""
        linger_s = self.policy.linger_s
        oldest = now - max(self.policy.turn_max_s, self.policy.min_residency_s, linger_s)
        due: list[float] = []
        for instance in self.instances.values():
            ready_at, idle_since = instance.ready_at, instance.idle_since
            if ready_at is not None and ready_at > oldest:
                due.append(turn_end(ready_at, instance.load_s, self.policy))
            if ready_at is not None and idle_since is not None and idle_since > oldest:
                due.append(idle_since + linger_s)
        return due


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
