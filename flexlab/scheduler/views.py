"""The state as the wire types show it: words are derived here, never stored."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flexlab.scheduler.passes import Passes
from flexlab.scheduler.policy import turn_end
from flexlab.scheduler.state import Instance, Model, PoolAccount
from flexlab.spec.lab import InstanceView, ModelView, ModelWord, PoolView


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What the catalogue and the store know of a model, for its view."""

    aliases: tuple[str, ...] = ()
    installed: bool = False
    weight_bytes: int | None = None
    capabilities: tuple[str, ...] = ()
    context: int | None = None
    tokens_per_s: float | None = None
    ttft_s: float | None = None


class Views:
    """Reads a scheduler's state; changes nothing."""

    def __init__(self, state: Passes, clock_to_wall: float) -> None:
        self._state = state
        self._offset = clock_to_wall
        """Add to the loop's time to get Unix time."""

    def models(self, known: Mapping[str, Known]) -> tuple[ModelView, ...]:
        """One view per model that is known, in its order."""
        return tuple(
            self.model(self._state.models[name], facts)
            for name, facts in known.items()
            if name in self._state.models
        )

    def model(self, model: Model, known: Known) -> ModelView:
        """One model's view."""
        instances = [i for i in self._state.instances.values() if i.model == model.name]
        word, since, why, until = self._word(model, instances)
        idle = [i.idle_since for i in instances if i.idle_since is not None]
        unload = [when for i in instances if (when := self._state.unload_at(i)) is not None]
        return ModelView(
            name=model.name,
            word=word,
            since=since,
            why=why,
            until=until,
            keep=model.keep,
            pinned=model.pinned,
            enabled=model.enabled,
            priority=model.priority,
            in_flight=sum(len(i.leases) for i in instances),
            waiting=len(model.waiters),
            instances=tuple(i.id for i in instances),
            progress=model.preparing.progress if model.preparing else None,
            idle_since=self._wall(min(idle)) if idle else None,
            unload_at=self._wall(min(unload)) if unload else None,
            starts=model.starts,
            preempted=model.preempted,
            crashes=model.crashes,
            last_load_s=model.last_load_s,
            problem=model.problem,
            **msgspec.structs.asdict(known) | _running_context(instances),
        )

    def _word(
        self, model: Model, instances: list[Instance]
    ) -> tuple[ModelWord, float, str, float | None]:
        """(word, since, why, until at the latest), times in Unix seconds."""
        if not model.enabled:
            return "off", self._wall(model.since), "disabled", None
        order = ("ready", "draining", "loading", "starting", "stopping", "failed")
        for instance in sorted(instances, key=lambda i: order.index(i.state)):
            word = _instance_word(instance)
            until = None if instance.until is None else self._wall(instance.until)
            return word, self._wall(instance.since), _why(instance), until
        if model.preparing:
            since = self._wall(model.preparing.since)
            what = "fetching weights" if model.preparing.download else "planning"
            return "preparing", since, what, None
        if model.waiters:
            last = self._wall(max(w.deadline for w in model.waiters))
            return "queued", self._wall(model.oldest), model.waits_for or "queued", last
        since = self._wall(model.since)
        if model.problem and model.failures:
            return "failed", since, model.problem.message, self._wall(model.back_off_until)
        if model.preempted_by:
            return "preempted", since, f"by {model.preempted_by}", None
        return "cold", since, model.problem.message if model.problem else "not running", None

    def instances(self) -> tuple[InstanceView, ...]:
        """Every instance that has not been confirmed gone."""
        return tuple(self.instance(i) for i in self._state.instances.values())

    def instance(self, instance: Instance) -> InstanceView:
        """One instance's view."""
        return InstanceView(
            id=instance.id,
            model=instance.model,
            variant=instance.candidate.variant,
            backend=instance.candidate.backend,
            runtime=instance.candidate.runtime,
            arch=instance.candidate.arch,
            devices=instance.candidate.devices,
            state=instance.state,
            since=self._wall(instance.since),
            why=instance.why,
            until=None if instance.until is None else self._wall(instance.until),
            conditions=tuple(instance.conditions.values()),
            claims=dict(instance.claims),
            measured_bytes=dict(instance.measured),
            endpoint=instance.endpoint.url if instance.endpoint else None,
            ref=instance.ref,
            image=instance.image,
            plan_hash=instance.plan_hash,
            log_path=instance.log_path,
            ready_at=None if instance.ready_at is None else self._wall(instance.ready_at),
            load_s=instance.load_s,
            in_flight=len(instance.leases),
            group=instance.candidate.group,
            group_with_card=instance.candidate.group_with_card,
            idle_since=None if instance.idle_since is None else self._wall(instance.idle_since),
            turn_ends_at=self._turn_end(instance),
        )

    def _turn_end(self, instance: Instance) -> float | None:
        if instance.ready_at is None:
            return None
        return self._wall(turn_end(instance.ready_at, instance.load_s, self._state.policy))

    def pools(self) -> tuple[PoolView, ...]:
        """Every pool's account."""
        return tuple(self._pool(pool) for pool in self._state.pools.values())

    def _pool(self, pool: PoolAccount) -> PoolView:
        holders = [i for i in self._state.instances.values() if pool.id in i.claims]
        free = pool.free_bytes(self._state.held(pool.id))
        return PoolView(
            id=pool.id,
            kind=pool.kind,
            total_bytes=pool.total_bytes,
            used_bytes=pool.used_bytes,
            reserve_bytes=pool.reserve_bytes,
            foreign_bytes=pool.foreign_bytes,
            free_bytes=None if free is None else max(0, free),
            usable_bytes=pool.usable_bytes,
            claims={i.id: i.held(pool.id) for i in holders},
            sampled_at=pool.sampled_at,
        )

    def _wall(self, when: float) -> float:
        return when + self._offset


def _running_context(instances: list[Instance]) -> dict[str, int]:
    """What one request really gets of what runs; beside that, the recipe's word counts."""
    found = [i.candidate.context for i in instances if i.candidate.context is not None]
    return {"context": found[0]} if found else {}


def _instance_word(instance: Instance) -> ModelWord:
    if "unknown" in instance.conditions:
        return "unknown"
    if instance.state == "ready":
        return "degraded" if "degraded" in instance.conditions else "ready"
    if instance.state in ("draining", "stopping"):
        return "draining"
    return "failed" if instance.state == "failed" else "loading"


def _why(instance: Instance) -> str:
    """The state's reason, and what conditions add to it."""
    return "; ".join([instance.why, *(c.why for c in instance.conditions.values())])
