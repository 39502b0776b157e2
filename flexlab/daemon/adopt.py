"""What an earlier daemon left running: believed only after the runtimes were asked.

Adopted is what bears our installation id, was ready once, and lives. Reaped is what never became
ready, whose model is gone, or a second one of the same model. What another installation started is
never touched.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import msgspec

from flexlab.core.errors import FlexLabError
from flexlab.daemon.files import Records
from flexlab.daemon.launcher import Launcher, show_ref
from flexlab.daemon.registry import Registry
from flexlab.runtimes.base import Runtime
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import Instance
from flexlab.spec.instance import Condition, LaunchRecord
from flexlab.spec.plan import Candidate, LaunchPlan, Need

log = logging.getLogger(__name__)
REAP_TIMEOUT_S = 5.0


class Adoption:
    """Before listening: every record, and everything of ours that runs, is adopted or reaped."""

    def __init__(
        self,
        records: Records,
        runtimes: Mapping[str, Runtime],
        registry: Registry,
        scheduler: Scheduler,
        launcher: Launcher,
        register: Callable[[str], None],
    ) -> None:
        """`register(model)` makes a model known to the scheduler."""
        self._records = records
        self._runtimes = runtimes
        self._registry = registry
        self._scheduler = scheduler
        self._launcher = launcher
        self._register = register
        self._call = launcher.threads.call

    async def run(self, installation: str) -> None:
        """All of it; one record that cannot be judged is left as it is and stops no other."""
        recorded = await self._call("worker", self._records.names)
        for record in await self._call("worker", self._records.all):
            if record.installation != installation or record.plan.runtime not in self._runtimes:
                continue
            try:
                await self._judge(record)
            except Exception:  # an edge: as a launcher effect
                log.exception("%s can be neither adopted nor ended", record.instance)
        await self._reap_strays(installation, recorded)

    async def _judge(self, record: LaunchRecord) -> None:
        runtime = self._runtimes[record.plan.runtime]
        record = await self._located(record, runtime)
        if record.ref is None:
            await self._call("worker", self._records.remove, record.instance)
            return
        model = await self._model_of(record)
        if record.ready_at is None or record.endpoint is None:
            await self._reap(record, runtime, "it never became ready")
        elif model is None or self._scheduler.instances_of(model):
            await self._reap(record, runtime, "its model is gone, or runs already")
        elif await self._launcher.loading.ask(record.plan, record.endpoint) == "closed":
            await self._reap(record, runtime, "it does not listen any more")
        else:
            await self._adopt(record, model)

    async def _located(self, record: LaunchRecord, runtime: Runtime) -> LaunchRecord:
        """With the reference of what lives, or with none when it is gone."""
        ref = record.ref or await self._call(runtime.name, runtime.find, record.instance)
        if ref is not None and (await self._call(runtime.name, runtime.state, ref)).alive is False:
            # It may have left something behind: a container that does not run.
            await self._call(runtime.name, runtime.stop, ref, 0.0)
            ref = None
        return msgspec.structs.replace(record, ref=ref)

    async def _model_of(self, record: LaunchRecord) -> str | None:
        """The model that it runs, under the name that the lab knows it by now."""
        try:
            if record.recipe is not None:
                name = await self._call("worker", self._registry.derive, record.recipe)
            else:
                name = self._registry.find(record.model)
        except FlexLabError as error:
            log.warning("%s is not adopted: %s", record.instance, error)
            return None
        self._register(name)
        return name

    async def _adopt(self, record: LaunchRecord, model: str) -> None:
        assert record.ref is not None
        loop = asyncio.get_running_loop()
        ready_at = loop.time() - max(0.0, time.time() - (record.ready_at or time.time()))
        instance = Instance(
            id=record.instance,
            model=model,
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
        self._launcher.held[record.instance] = record
        self._scheduler.adopt(instance)
        self._launcher.watch(record.instance, loading=False)
        wishes = self._scheduler.models[model].wishes
        why = await self._call("worker", self._registry.why_stale, model, wishes, record.plan.hash)
        if why is not None:
            condition = Condition(kind="stale", since=time.time(), why=why)
            self._scheduler.mark(record.instance, condition)

    async def _reap(self, record: LaunchRecord, runtime: Runtime, why: str) -> None:
        """End it; one that does not go keeps its record, for the next daemon to try again."""
        assert record.ref is not None
        self._launcher.note("instance", f"{record.instance} is ended: {why}", model=record.model)
        if await self._call(runtime.name, runtime.stop, record.ref, REAP_TIMEOUT_S):
            await self._call("worker", self._records.remove, record.instance)
        else:
            log.warning("%s does not go away and keeps its memory", record.instance)

    async def _reap_strays(self, installation: str, recorded: set[str]) -> None:
        """Ours, running, and without any record: nobody could ever reach or stop it again."""
        for runtime in self._runtimes.values():
            for found in await self._call(runtime.name, runtime.owned, installation):
                if found.instance not in recorded:
                    text = f"{found.instance} is ended: it has no launch record"
                    self._launcher.note("instance", text)
                    await self._call(runtime.name, runtime.stop, found.ref, REAP_TIMEOUT_S)


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
        context=plan.context,
        memory_key=plan.memory_key,
        slots=plan.slots,
    )
