"""What an earlier daemon left running: believed only after the runtimes were asked.

Adopted is what bears our installation id, was ready once, and lives. Reaped is what never became
ready, whose model is gone, or a second one of the same model. What another installation started is
never touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

from flexlab.core.errors import FlexLabError
from flexlab.daemon.files import Records
from flexlab.daemon.launcher import Launcher, show_ref
from flexlab.daemon.registry import Registry
from flexlab.runtimes.base import Runtime
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import Instance
from flexlab.spec.instance import Condition, LaunchRecord
from flexlab.spec.plan import Candidate, LaunchPlan, Need, Wishes

log = logging.getLogger(__name__)
REAP_TIMEOUT_S = 5.0


async def adopt_all(
    records: Records,
    runtimes: Mapping[str, Runtime],
    registry: Registry,
    scheduler: Scheduler,
    launcher: Launcher,
    installation: str,
) -> None:
    """Before listening: every record and everything of ours that runs is adopted or reaped."""
    seen: set[str] = set()
    for record in await launcher.threads.call("worker", records.all):
        if record.installation != installation or record.plan.runtime not in runtimes:
            continue
        seen.add(record.instance)
        runtime = runtimes[record.plan.runtime]
        record = await _located(record, runtime, launcher)
        if record.ref is None:
            await launcher.threads.call("worker", records.remove, record.instance)
            continue
        known = await _model_of(record, registry, scheduler, launcher)
        first = known is not None and not scheduler.instances_of(known)
        if record.ready_at is None or not first:
            why = "it never became ready" if record.ready_at is None else "it is not wanted"
            await _reap(record, runtime, launcher, why)
            await launcher.threads.call("worker", records.remove, record.instance)
            continue
        await _adopt(record, registry, scheduler, launcher)
    await _reap_strays(runtimes, launcher, installation, seen)


async def _located(record: LaunchRecord, runtime: Runtime, launcher: Launcher) -> LaunchRecord:
    """With the reference of what lives, or with none when it is gone."""
    import msgspec

    call = launcher.threads.call
    ref = record.ref or await call(runtime.name, runtime.find, record.instance)
    if ref is not None and (await call(runtime.name, runtime.state, ref)).alive is False:
        ref = None
    return msgspec.structs.replace(record, ref=ref)


async def _model_of(
    record: LaunchRecord, registry: Registry, scheduler: Scheduler, launcher: Launcher
) -> str | None:
    """The model that it runs, if the lab still knows it."""
    try:
        if record.recipe is not None:
            return await launcher.threads.call("worker", registry.derive, record.recipe)
        return registry.find(record.model)
    except FlexLabError as error:
        log.warning("%s is not adopted: %s", record.instance, error)
        return None


async def _adopt(
    record: LaunchRecord, registry: Registry, scheduler: Scheduler, launcher: Launcher
) -> None:
    assert record.ref is not None
    model = scheduler.models[record.model]
    loop = asyncio.get_running_loop()
    ready_at = loop.time() - max(0.0, time.time() - (record.ready_at or time.time()))
    instance = Instance(
        id=record.instance,
        model=model.name,
        candidate=candidate_of(record.plan),
        claims=dict(record.plan.claims),
        state="ready",
        since=ready_at,
        why="adopted",
        endpoint=record.endpoint,
        ref=show_ref(record.ref),
        image=record.plan.image,
        plan_hash=record.plan.hash,
        log_path=record.log_path,
        ready_at=ready_at,
        load_s=record.load_s,
        idle_since=loop.time(),
    )
    launcher.held[record.instance] = record
    scheduler.adopt(instance)
    launcher.watch(record.instance, loading=False)
    if why := await launcher.threads.call("worker", _stale, record, registry, model.wishes):
        condition = Condition(kind="stale", since=time.time(), why=why)
        scheduler.mark(record.instance, condition)


def _stale(record: LaunchRecord, registry: Registry, wishes: Wishes) -> str | None:
    """Why the running plan is not what would be launched today; None when it is. Blocks."""
    try:
        same = registry.would_be(record.model, wishes, record.plan.hash)
    except FlexLabError as error:
        return f"it could not be planned again: {error.message}"
    return None if same else "its plan has changed"


def candidate_of(plan: LaunchPlan) -> Candidate:
    """What the scheduler needs to know of something that runs already."""
    return Candidate(
        model=plan.model,
        variant=plan.variant,
        backend=plan.backend,
        runtime=plan.runtime,
        arch=plan.arch,
        support="full",
        devices=plan.devices or ("cpu",),
        needs=tuple(Need(pool=pool, total_bytes=size) for pool, size in plan.claims.items()),
        weights=(),
        group=plan.group,
        keep=plan.keep,
        priority=plan.priority,
        start_timeout_s=plan.start_timeout_s,
        image=plan.image,
    )


async def _reap(record: LaunchRecord, runtime: Runtime, launcher: Launcher, why: str) -> None:
    assert record.ref is not None
    launcher.note("instance", f"{record.instance} is ended: {why}", model=record.model)
    await launcher.threads.call(runtime.name, runtime.stop, record.ref, REAP_TIMEOUT_S)


async def _reap_strays(
    runtimes: Mapping[str, Runtime], launcher: Launcher, installation: str, seen: set[str]
) -> None:
    """Ours, running, and without a record: nobody could ever reach or stop it again."""
    for runtime in runtimes.values():
        for found in await launcher.threads.call(runtime.name, runtime.owned, installation):
            if found.installation == installation and found.instance not in seen:
                launcher.note("instance", f"{found.instance} is ended: it has no launch record")
                await launcher.threads.call(runtime.name, runtime.stop, found.ref, REAP_TIMEOUT_S)
