"""The state as placement sees it: rooms and occupants, without identity.

The scheduler has it at first hand; whoever only has the daemon's snapshot (a forecast) sees the
same from there.
"""

from __future__ import annotations

from flexlab.scheduler.policy import Occupant, Phase, Policy, turn_end
from flexlab.scheduler.room import Occupancy, Room
from flexlab.scheduler.state import Instance, Leaving, Model, PoolAccount
from flexlab.spec.instance import InstanceState
from flexlab.spec.lab import InstanceView, ModelView, Snapshot

_PHASE: dict[InstanceState, Phase] = {
    "starting": "starting",
    "loading": "loading",
    "ready": "ready",
    "draining": "draining",
    "stopping": "stopping",
    "failed": "stopping",
}


def leaving_occupants(pool: PoolAccount) -> list[Occupant]:
    """What is gone from a pool and still to be seen free there."""
    return [_leaving(one, pool.id, index) for index, one in enumerate(pool.leaving)]


def _leaving(one: Leaving, pool: str, index: int) -> Occupant:
    """What is gone and still to be seen free: nobody can hurry it, and everybody waits for it."""
    return Occupant(
        instance=f"{one.model} (its memory in {pool}, {index})",
        model=f"{one.model} (its memory)",
        phase="stopping",
        priority=0,
        claims={pool: one.size_bytes},
    )


def occupant(instance: Instance, model: Model, now: float, policy: Policy) -> Occupant:
    """One instance with what its model's user decided."""
    # What does not go away makes no room, whatever is decided.
    stuck = "stuck" in instance.conditions
    unreachable = "unknown" in instance.conditions
    return Occupant(
        instance=instance.id,
        model=instance.model,
        phase="ready" if stuck else _PHASE[instance.state],
        priority=model.priority,
        claims={pool: instance.held(pool) for pool in instance.claims},
        devices=instance.candidate.devices,
        group=instance.candidate.group,
        group_with_card=instance.candidate.group_with_card,
        pinned=(model.pinned and not instance.is_replica) or instance.external or stuck,
        is_unreachable=unreachable,
        in_flight=len(instance.leases),
        waiting=len(model.waiters),
        idle_s=None if instance.idle_since is None else now - instance.idle_since,
        idle_since=instance.idle_since,
        turn_over=now >= turn_end(instance.ready_at or now, instance.load_s, policy),
        load_s=instance.load_s or 0.0,
        settling=instance.state == "draining",
        yields_to=instance.drained_for,
        is_replica=instance.is_replica,
    )


def seen(snapshot: Snapshot) -> Occupancy:
    """What a daemon showed, at the moment of its snapshot."""
    rooms = {
        pool.id: Room(usable_bytes=pool.usable_bytes, free_bytes=pool.free_bytes)
        for pool in snapshot.pools
    }
    models = {model.name: model for model in snapshot.models}
    return Occupancy(
        rooms=rooms,
        occupants=tuple(
            _seen(instance, models[instance.model], snapshot.at)
            for instance in snapshot.instances
            if instance.model in models
        ),
    )


def _seen(instance: InstanceView, model: ModelView, now: float) -> Occupant:
    kinds = {condition.kind for condition in instance.conditions}
    external = instance.runtime == "external"
    idle_since, turn_ends_at = instance.idle_since, instance.turn_ends_at
    return Occupant(
        instance=instance.id,
        model=instance.model,
        phase="ready" if "stuck" in kinds else _PHASE[instance.state],
        priority=model.priority,
        claims={
            pool: max(claim, instance.measured_bytes.get(pool, 0))
            for pool, claim in instance.claims.items()
        },
        devices=instance.devices,
        group=instance.group,
        group_with_card=instance.group_with_card,
        pinned=model.pinned or external or "stuck" in kinds,
        in_flight=instance.in_flight,
        waiting=model.waiting,
        idle_s=None if idle_since is None else now - idle_since,
        turn_over=turn_ends_at is None or now >= turn_ends_at,
        load_s=instance.load_s or 0.0,
        settling=instance.state == "draining",
    )
