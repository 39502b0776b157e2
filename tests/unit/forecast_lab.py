"""What a forecast stands on, for tests: a machine, and a daemon's snapshot of who runs there."""

from __future__ import annotations

from pathlib import Path

from planning_lab import shipped

from flexlab.core.settings import load_settings
from flexlab.forecast.here import Here, room
from flexlab.planning.reserves import with_reserves
from flexlab.scheduler.occupancy import seen
from flexlab.scheduler.room import Occupancy
from flexlab.spec.lab import InstanceView, ModelView, PoolView, Snapshot
from flexlab.spec.machine import Machine

NOW = 1_800_000_000.0


def here_of(
    found: Machine, snapshot: Snapshot | None = None, root: Path = Path("/recorded")
) -> Here:
    """A machine for a forecast; with `snapshot`: a daemon runs there."""
    known = with_reserves(found, shipped().gpu)
    alone = Occupancy(rooms={pool.id: room(pool) for pool in known.pools})
    return Here(
        root,
        catalogue=shipped(),
        settings=load_settings().settings,
        machine=known,
        occupancy=alone if snapshot is None else seen(snapshot),
        snapshot=snapshot,
    )


def running(
    model: str, claims: dict[str, int], *, busy: int = 0, pinned: bool = False, priority: int = 100
) -> tuple[ModelView, InstanceView]:
    """A model that has been ready for a minute, with `busy` requests in flight."""
    since = NOW - 60
    view = ModelView(
        name=model, word="ready", since=since, why="asked for", pinned=pinned, priority=priority,
        in_flight=busy,
    )  # fmt: skip
    instance = InstanceView(
        id=f"{model}-1", model=model, variant="whole", backend="llamacpp", runtime="docker",
        arch="gfx1100", devices=tuple(pool for pool in claims if pool != "ram"), state="ready",
        since=since, why="asked for", claims=claims, in_flight=busy,
        idle_since=None if busy else since, turn_ends_at=NOW + 30 if busy else NOW - 1,
    )  # fmt: skip
    return view, instance


def snapshot_of(found: Machine, *there: tuple[ModelView, InstanceView]) -> Snapshot:
    """What a daemon on this machine shows while these run and nobody else uses anything."""
    known = with_reserves(found, shipped().gpu)
    pools = []
    for pool in known.pools:
        ours = {one.id: one.claims[pool.id] for _, one in there if pool.id in one.claims}
        usable = None if pool.total_bytes is None else pool.total_bytes - pool.reserve_bytes
        pools.append(
            PoolView(
                id=pool.id,
                kind=pool.kind,
                total_bytes=pool.total_bytes,
                used_bytes=sum(ours.values()),
                reserve_bytes=pool.reserve_bytes,
                foreign_bytes=0,
                usable_bytes=usable,
                claims=ours,
                free_bytes=None if usable is None else usable - sum(ours.values()),
            )
        )
    return Snapshot(
        flexlab_version="0", hostname="lab", installation="a", pid=1, started_at=NOW - 3600,
        at=NOW, address="http://127.0.0.1:1", gpus=known.gpus, pools=tuple(pools),
        models=tuple(model for model, _ in there),
        instances=tuple(instance for _, instance in there),
    )  # fmt: skip
