"""The scheduler: one object on the loop. Every event is a plain call that runs to its end.

Callers ask (`acquire`, `down`, ...), the launcher reports (`prepared`, `ready`, `gone`, ...); each
call changes the state and ends in one pass of the policy, which tells `Effects` what to do. Nothing
here awaits, so events are atomic and ordered, and no one looks first and acts later.
"""

from __future__ import annotations

import asyncio

from flexlab.scheduler.reports import Reports, stuck
from flexlab.scheduler.state import (
    NEVER,
    HeldLease,
    Model,
    PoolAccount,
    Waiter,
)
from flexlab.spec.lease import Lease, Refused
from flexlab.spec.plan import Keep, Refusal, Wishes


class Scheduler(Reports):
    """See the module."""

    # -- what callers ask

    def acquire(
        self,
        name: str,
        *,
        wants_download: bool = False,
        deadline_s: float | None = None,
        key: str | None = None,
        since: float | None = None,
    ) -> HeldLease | asyncio.Future[Lease]:
        """A lease at once on a ready instance, else a future of one (cancel it to withdraw).

        Raises Refused for what cannot be served; the future fails with Refused. `name` must be
        a registered model. `wants_download` is an `up`: it may fetch, and ends a back-off. `key`
        says whose request it is; `since` is the first coming of one that was cut (loop time): it
        queues at the head (rule 9).
        """
        model = self.models[name]
        able = [i for i in self._of(name) if i.admits and not self._owes_turn(model, i)]
        if able and model.enabled and not model.waiters and self._may_enter(model, key):
            least = able[0] if len(able) == 1 else min(able, key=lambda one: len(one.leases))
            lease = self._lease(least, key=key, is_work=not wants_download)
            if self._full:
                self._pass()
            return lease
        now = self._clock()
        self._judge_new_waiter(model, now, wants_download)
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        wait_s = self.policy.queue_timeout_s if deadline_s is None else deadline_s
        first = now if since is None else min(since, now)
        # Cut for an equal, its model has had its turn, and queues behind all who wait by now.
        winner = self.models.get(model.preempted_by or "")
        has_had_turn = winner is not None and winner.priority <= model.priority
        queued = now if has_had_turn else first
        waiter = Waiter(future, first, queued, now + wait_s, wants_download, key)
        waiters = [*model.waiters, waiter]
        if since is not None:
            waiters.sort(key=lambda one: one.since)
        self._set_waiters(model, waiters)
        future.add_done_callback(lambda done: self._withdrawn(model, waiter, done))
        self._pass()
        return future

    def _judge_new_waiter(self, model: Model, now: float, wants_download: bool) -> None:
        if self.closing is not None:
            raise Refused(self.closing)
        if not model.enabled:
            raise Refused(_disabled(model.name))
        if any("stuck" in instance.conditions for instance in self._of(model.name)):
            raise Refused(stuck(model.name))
        if wants_download:
            model.failures, model.back_off_until = 0, 0.0
        elif now < model.back_off_until:
            cause = f": {model.problem.message}" if model.problem else ""
            raise Refused(
                Refusal(
                    code="backing_off",
                    message=f"{model.name} failed {model.failures} times{cause}",
                    hint=f"flexlab logs {model.name}; flexlab up {model.name} tries at once",
                    retry_after_s=model.back_off_until - now,
                )
            )
        if len(model.waiters) >= self.policy.queue_limit:
            raise Refused(
                Refusal(
                    code="queue_full",
                    message=f"{len(model.waiters)} requests wait for {model.name} already",
                    status=429,
                    retry_after_s=5.0,
                )
            )
        if not model.waiters and not self._of(model.name):
            model.candidates = None  # weights, memory and recipes may have changed since
        model.held_down = model.restore_blocked = False
        model.problem = None

    def _withdrawn(self, model: Model, waiter: Waiter, done: asyncio.Future[Lease]) -> None:
        if not done.cancelled():
            done.exception()  # retrieved: an unheeded refusal is no program error
            return
        if waiter in model.waiters:
            self._set_waiters(model, [w for w in model.waiters if w is not waiter])
            preparing = model.preparing
            wanted = any(other.wants_download for other in model.waiters)
            if preparing and preparing.download and not wanted and not preparing.cancelled:
                preparing.cancelled = True
                self._effects.cancel_prepare(model.name)
            if not model.waiters:
                self._abandon_load(model)
            self._pass()

    def _abandon_load(self, model: Model) -> None:
        """Nobody waits any more: an `up` or request that was withdrawn loads nothing."""
        for instance in self._of(model.name):
            if instance.is_replica or model.is_warm:
                continue
            if instance.state in ("starting", "loading"):
                self._stop(instance, "nobody waits for it any more")

    def wish(self, name: str, wishes: Wishes, *, replace: bool = True) -> None:
        """New wishes for a model; `replace`: what runs on other ones is drained for them."""
        model = self.models[name]
        if wishes == model.wishes:
            return
        model.wishes, model.candidates, model.took = wishes, None, {}
        for instance in self._of(name):
            if replace and instance.live and not instance.external:
                self._drain(instance, "replaced: other settings were asked for")
        self._pass()

    def replace_stale(self, name: str) -> None:
        """An idle instance of an older plan is not what an `up` asks for: start it anew."""
        for instance in self._of(name):
            if instance.live and "stale" in instance.conditions and not instance.leases:
                self._stop(instance, instance.conditions["stale"].why)

    def keep(self, name: str, *, warm: bool | None = None, pinned: bool | None = None) -> None:
        """Set `keep: warm` or the pin; None leaves it."""
        model = self.models[name]
        self._note_change(name, "kept", model.keep == "warm", warm)
        self._note_change(name, "pinned", model.pinned, pinned)
        if warm is not None:
            model.keep = "warm" if warm else "cold"
            model.restore_blocked, model.is_member = False, True
            self._keep_or_not(model)
        if pinned is not None:
            model.pinned = pinned
        self._pass()

    def _note_change(self, name: str, word: str, before: bool, after: bool | None) -> None:
        if after is not None and after != before:
            not_ = "" if after else "not "
            self._effects.note("model", f"{name} is {not_}{word}", model=name)

    def enable(self, name: str, *, enabled: bool) -> list[str]:
        """A disabled model is refused with that reason, and what runs of it is drained.

        Returns the ids of the instances that will end.
        """
        model = self.models[name]
        if model.enabled == enabled:
            return []
        model.enabled, model.since = enabled, self._clock()
        self._effects.note("model", f"{name} is {'en' if enabled else 'dis'}abled", model=name)
        if enabled:
            self._pass()
            return []
        self._refuse_waiters(model, _disabled(name))
        ending = [i for i in self._of(name) if i.live and not i.external]
        for instance in ending:
            self._drain(instance, "disabled by its user")
        self._pass()
        return [instance.id for instance in ending]

    def renew(self, name: str, why: str) -> None:
        """Every instance of it is drained; whoever asks next gets a new one."""
        for instance in self._of(name):
            if instance.live and not instance.external:
                self._drain(instance, why)
        self.models[name].candidates = None
        self._pass()

    def down(self, name: str, *, force: bool = False) -> list[str]:
        """Stop a model for its user: no one new, drained (cut at once by `force`), not restored.

        Returns the ids of the instances that will end; `when_gone` tells of each.
        """
        model = self.models[name]
        model.held_down = True
        stopped = Refusal(
            code="stopped", message=f"{name} was stopped by its user", hint=f"flexlab up {name}"
        )
        self._refuse_waiters(model, stopped)
        if model.preparing and not model.preparing.cancelled:
            model.preparing.cancelled = True
            self._effects.cancel_prepare(name)
        ending = [i for i in self._of(name) if not i.external]
        for instance in ending:
            if force:
                self._stop(instance, "stopped by its user")  # first: nobody new enters
                self._cut_leases(instance, stopped)
            elif instance.live:
                self._drain(instance, "stopped by its user")
            elif "stuck" in instance.conditions:
                self._stop(instance, "stopped by its user")
        self._pass()
        return [instance.id for instance in ending]

    def when_gone(self, instance: str) -> asyncio.Future[bool]:
        """True once confirmed gone, False when its stop was not confirmed in time."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if instance not in self.instances:
            future.set_result(True)
        else:
            self._gone_waiters.setdefault(instance, []).append(future)
        return future

    def end_loading(self) -> list[str]:
        """Stop what is not ready yet; the ids of those instances."""
        ending = [i for i in self.instances.values() if i.state in ("starting", "loading")]
        for instance in ending:
            self._stop(instance, "nobody waits for it any more")
        return [instance.id for instance in ending]

    def refuse_all(self, refusal: Refusal) -> None:
        """The daemon ends: every waiter gets its answer, nothing new starts."""
        self.closing = refusal
        for model in self.models.values():
            self._refuse_waiters(model, refusal)

    def tick(self) -> None:
        """A time that was asked for by `wake_at` has come (perhaps a little early)."""
        self._wake = NEVER
        self._pass()

    # -- registration

    def add_model(self, model: Model) -> None:
        """Make a model known; one that is known keeps its state."""
        model.since = self._clock()
        self._keep_or_not(self.models.setdefault(model.name, model))
        self._by_model.setdefault(model.name, [])

    def revise(
        self,
        name: str,
        *,
        priority: int,
        idle_timeout_s: float | None,
        replicas: int,
        max_in_flight: int | None,
        keep: Keep,
    ) -> None:
        """What its recipe says now; what runs goes on."""
        model = self.models[name]
        model.priority, model.idle_timeout_s = priority, idle_timeout_s
        model.replicas, model.max_in_flight = replicas, max_in_flight
        if keep != model.keep:
            model.keep, model.is_member = keep, True
        model.restore_blocked = False
        self._keep_or_not(model)
        self._pass()

    def replan(self, name: str) -> None:
        """The next launch is planned anew: recipes or settings have changed."""
        model = self.models[name]
        model.candidates, model.restore_blocked = None, False

    def remove_model(self, name: str) -> None:
        """Forget a model that has neither instance nor waiter."""
        model = self.models[name]
        if not self._of(name) and not model.waiters and model.preparing is None:
            del self.models[name]
            self._kept.pop(name, None)
            del self._by_model[name]

    def _keep_or_not(self, model: Model) -> None:
        if model.keep == "warm":
            self._kept[model.name] = model
        else:
            self._kept.pop(model.name, None)

    def add_pool(self, pool: PoolAccount) -> None:
        """Make a pool known."""
        self.pools[pool.id] = pool


def _disabled(model: str) -> Refusal:
    return Refusal(
        code="model_disabled", message=f"{model} is disabled", hint=f"flexlab enable {model}"
    )
