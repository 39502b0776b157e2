"""The lab: what the gateway and the control API ask of the daemon, in one object on the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec

from flexlab import __version__
from flexlab.core import paths
from flexlab.core.errors import FlexLabError, UnknownModel, UsageError
from flexlab.core.settings import Settings
from flexlab.daemon.enginelogs import newest_log
from flexlab.daemon.events import EventLog
from flexlab.daemon.files import ModelState, read_models, write_models
from flexlab.daemon.launcher import Launcher
from flexlab.daemon.registry import Registry
from flexlab.daemon.tasks import stream
from flexlab.daemon.up import up_steps
from flexlab.runtimes.base import Runtime
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import Instance, Model, PoolAccount
from flexlab.scheduler.views import Known, Views
from flexlab.spec.control import (
    DownRequest,
    Removed,
    ShutdownRequest,
    Status,
    Stopped,
    StoppedModel,
    UpRequest,
)
from flexlab.spec.instance import Condition, ExternalRef, Launch
from flexlab.spec.lab import Event, ModelView, Snapshot, UpStep
from flexlab.spec.lease import Lease, Refused
from flexlab.spec.machine import Machine, Pool
from flexlab.spec.plan import Candidate, LaunchPlan, Probe, Refusal, Wishes

log = logging.getLogger(__name__)
KNOWN_FOR_S = 1.0
"""How long facts about files (what is installed) are believed; each look costs a few stat calls."""


class Lab:
    """Implements gateway.routes.Lab and gateway.control.ControlLab."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        scheduler: Scheduler,
        launcher: Launcher,
        events: EventLog,
        runtimes: Mapping[str, Runtime],
        installation: str,
        stop: Callable[[ShutdownRequest], None],
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.scheduler = scheduler
        self.launcher = launcher
        self.log = events
        self.installation = installation
        self.started_at = time.time()
        self.address = ""
        self.machine: Machine | None = None
        self.requests_total: Callable[[], int] = lambda: 0
        self.speed_of: Callable[[str], tuple[float | None, float | None]] = lambda _: (None, None)
        """Model -> time to first token and tokens/s of its last streamed answer."""
        self._runtimes = runtimes
        self._stop = stop
        self._views = Views(scheduler, time.time() - asyncio.get_running_loop().time())
        self._known: dict[str, Known] = {}
        self._ups = 0
        """Calls of `up` that are not waiters yet."""
        self._known_at = 0.0
        self._known_stamp = 0
        self._states_file = paths.state_dir() / "models.json"
        self._states = read_models(self._states_file)

    # -- models

    def derive_again(self) -> None:
        """Models without a recipe that an earlier daemon knew. Blocks."""
        for state in self._states.values():
            if state.source is not None:
                with contextlib.suppress(FlexLabError):  # its file may be gone; then so is it
                    self.registry.derive(state.source)

    def register_all(self) -> None:
        """Tell the scheduler of every model: recipes, derived ones, external servers."""
        for name in self.registry.known():
            self.register(name)

    def find(self, name: str) -> str:
        """The model of a name or alias, known to the scheduler from here on.

        Raises UnknownModel.
        """
        model = self.registry.find(name)
        self.register(model)
        return model

    def register(self, name: str) -> None:
        """Make a model known to the scheduler; one that is known keeps its state."""
        if name in self.scheduler.models:
            return
        state = self._states.get(name, ModelState())
        model = Model(
            name=name,
            keep=state.keep,
            pinned=state.pinned,
            enabled=state.enabled,
            held_down=state.held_down,
            wishes=state.wishes,
        )
        if name not in self.registry.externals:
            recipe = self.registry.recipe(name)
            model.priority = recipe.priority
            model.idle_timeout_s = recipe.idle_timeout
            if name not in self._states:
                model.keep = recipe.keep
        self.scheduler.add_model(model)

    def attach_externals(self) -> None:
        """External servers are ready for as long as we run; whether they answer, requests show."""
        runtime = self._runtimes.get("external")
        for name in self.registry.externals:
            assert runtime is not None
            plan = _external_plan(name)
            launch = Launch(
                instance=f"external-{name}",
                installation=self.installation,
                api_key="",
                log_path="",
            )
            started = runtime.start(plan, launch)
            now = asyncio.get_running_loop().time()
            candidate = _external_candidate(name)
            instance = Instance(
                id=launch.instance,
                model=name,
                candidate=candidate,
                claims={},
                state="ready",
                since=now,
                why="runs elsewhere; FlexLab only routes to it",
                endpoint=started.endpoint,
                ref=started.endpoint.url,
                ready_at=now,
                idle_since=now,
                external=True,
            )
            self.scheduler.adopt(instance)

    async def save_states(self) -> None:
        """Keep what users decided, also of models that cannot be found at present."""
        for model in self.scheduler.models.values():
            self._states[model.name] = ModelState(
                keep=model.keep,
                pinned=model.pinned,
                enabled=model.enabled,
                held_down=model.held_down,
                wishes=model.wishes,
                source=self.registry.sources.get(model.name) if self._proved(model) else None,
            )
        states = dict(self._states)
        try:
            await self.launcher.threads.call("worker", write_models, self._states_file, states)
        except OSError as error:
            log.warning("what you decided about models is not kept: %s", error)

    def _proved(self, model: Model) -> bool:
        """A derived model is one of the lab's once it has run, not by being named once."""
        before = self._states.get(model.name)
        return model.last_load_s is not None or (before is not None and before.source is not None)

    # -- gateway.routes.Lab

    def acquire(
        self, name: str, *, client: str, capability: str | None = None
    ) -> Lease | asyncio.Future[Lease]:
        """See gateway.routes.Lab. Raises Refused."""
        try:
            model = self.find(name)
        except UnknownModel as error:
            refusal = Refusal(code=error.code, message=error.message, hint=error.hint, status=404)
            raise Refused(refusal) from None
        if capability is not None:
            self._require(model, capability)
        was_down = self.scheduler.models[model].held_down
        lease = self.scheduler.acquire(model)
        if was_down:
            self.launcher.tasks.spawn("save states", self.save_states())
        return lease

    def _require(self, model: str, capability: str) -> None:
        """Refuse what the recipe says that the model cannot do; of others nothing is known."""
        known = self._known.get(model)
        derived = model in self.registry.sources or model in self.registry.externals
        if derived or known is None or capability in known.capabilities:
            return
        can = ", ".join(known.capabilities)
        raise Refused(
            Refusal(
                code="not_supported",
                message=f"{model} has no {capability}; it can: {can}",
                status=400,
            )
        )

    def models(self) -> tuple[ModelView, ...]:
        """Every model of the lab."""
        return self._views.models(
            {name: self._as_seen(name, known) for name, known in self._facts().items()}
        )

    def _as_seen(self, name: str, known: Known) -> Known:
        """With the speed of its last answer; what never ran of a mere source is not installed."""
        ttft_s, rate = self.speed_of(name)
        if rate is not None:
            known = msgspec.structs.replace(known, ttft_s=ttft_s, tokens_per_s=rate)
        model = self.scheduler.models.get(name)
        if model is not None and name in self.registry.sources and not self._proved(model):
            known = msgspec.structs.replace(known, installed=False)
        return known

    def snapshot(self) -> Snapshot:
        """The whole lab now."""
        return Snapshot(
            flexlab_version=__version__,
            hostname=socket.gethostname(),
            installation=self.installation,
            pid=os.getpid(),
            started_at=self.started_at,
            at=time.time(),
            address=self.address,
            gpus=self.machine.gpus if self.machine else (),
            pools=self._views.pools(),
            models=self.models(),
            instances=self._views.instances(),
            requests_total=self.requests_total(),
            last_event=self.log.last_id,
        )

    def _facts(self) -> dict[str, Known]:
        """What is installed: read anew when the store says that it changed, else a second old.

        Files that the store does not keep (paths, a hub's cache) are looked at in the worker.
        """
        stamp = self.registry.store.stamp()
        if stamp != self._known_stamp or not self._known:
            self._know(self.registry.known(), stamp)
        elif time.monotonic() - self._known_at > KNOWN_FOR_S:
            self._known_at = time.monotonic()
            self.launcher.tasks.spawn("look at weights", self._look_again())
        return self._known

    async def _look_again(self) -> None:
        stamp = self.registry.store.stamp()
        self._know(await self.launcher.threads.call("worker", self.registry.known), stamp)

    def _know(self, known: dict[str, Known], stamp: int) -> None:
        self._known, self._known_stamp, self._known_at = known, stamp, time.monotonic()

    # -- gateway.control.ControlLab

    def status(self) -> Status:
        """Who this daemon is, and whether it holds anything."""
        waiting = sum(len(m.waiters) for m in self.scheduler.models.values())
        running = sum(not i.external for i in self.scheduler.instances.values())
        return Status(
            flexlab_version=__version__,
            pid=os.getpid(),
            address=self.address,
            started_at=self.started_at,
            installation=self.installation,
            holds=waiting + running + self._ups + len(self.registry.externals),
        )

    async def up(self, request: UpRequest) -> AsyncIterator[UpStep]:
        """Steps until it is ready or refused; closing the iterator withdraws the wish.

        Raises FlexLabError for a name or source that leads to no model.
        """
        self._ups += 1
        try:
            in_use = {i.model for i in self.scheduler.instances.values()}
            name = await self.launcher.threads.call(
                "worker", self.registry.derive, request.model, in_use
            )
            self.register(name)
            await self._look_again()
            if name not in self.registry.externals:
                refusal = await self._wish(name, request.wishes)
                if refusal is not None:
                    return _only(UpStep(kind="refused", text=refusal.message, refusal=refusal))
        finally:
            self._ups -= 1
        return up_steps(self, name, keep=request.keep, pin=request.pin)

    async def _wish(self, name: str, wishes: Wishes) -> Refusal | None:
        """Wishes hold until the next `up`; what runs is replaced only if its plan would differ.

        An `up` without wishes leaves what runs as it is, and starts what does not run by its
        recipe alone. Wishes that cannot be fulfilled change nothing: the refusal is returned.
        """
        running = [i for i in self.scheduler.instances_of(name) if i.live]
        if running and wishes == Wishes():
            self.scheduler.replace_stale(name)
            return None
        call = self.launcher.threads.call
        planned = await call("worker", self.registry.plan, name, wishes)
        if planned.candidates.refusal is not None:
            return planned.candidates.refusal
        same = bool(running) and await call(
            "worker", self.registry.would_be, name, wishes, running[0].plan_hash
        )
        self.scheduler.wish(name, wishes, replace=not same)
        return None

    async def down(self, request: DownRequest) -> Stopped:
        """Stop and wait until each is confirmed gone (or is not, in time)."""
        names = [self.find(name) for name in request.models]
        external = [name for name in names if name in self.registry.externals]
        if external:
            raise UsageError(
                f"{', '.join(external)} runs elsewhere: FlexLab only routes to it",
                "end `flexlab serve --external` to stop routing",
            )
        if request.all:
            names = [m.name for m in self.scheduler.models.values() if self._busy(m)]
        waits: list[tuple[str, str, asyncio.Future[bool]]] = []
        not_running = []
        began = time.monotonic()
        for name in names:
            was_busy = self._busy(self.scheduler.models[name])
            ending = self.scheduler.down(name, force=request.force)
            waits += [(name, each, self.scheduler.when_gone(each)) for each in ending]
            if not was_busy:
                not_running.append(name)
        await self.save_states()  # first: it holds even if this daemon is killed while it waits
        stopped = []
        for name, instance, gone in waits:
            confirmed = await gone
            took_s = time.monotonic() - began
            stopped.append(
                StoppedModel(model=name, instance=instance, seconds=took_s, confirmed=confirmed)
            )
        return Stopped(stopped=tuple(stopped), not_running=tuple(not_running))

    async def look_at_externals(self) -> None:
        """Whether servers that are not ours still take connections: said, never acted upon."""
        runtime = self._runtimes.get("external")
        for instance in [i for i in self.scheduler.instances.values() if i.external]:
            assert runtime is not None
            ref = ExternalRef(url=self.registry.externals[instance.model])
            state = await self.launcher.threads.call("external", runtime.state, ref)
            if state.alive:
                instance.conditions.pop("unknown", None)
            elif "unknown" not in instance.conditions:
                why = state.why or "it takes no connections"
                condition = Condition(kind="unknown", since=time.time(), why=why)
                self.scheduler.mark(instance.id, condition)

    async def end_loading(self) -> None:
        """At the end of the daemon: what nobody waits for any more is not left half loaded."""
        for instance in list(self.scheduler.instances.values()):
            if instance.state in ("starting", "loading"):
                self.scheduler.down(instance.model, force=True)
                await self.scheduler.when_gone(instance.id)

    def _busy(self, model: Model) -> bool:
        ours = any(not i.external for i in self.scheduler.instances_of(model.name))
        return ours or bool(model.waiters) or model.preparing is not None

    async def rm(self, model: str) -> Removed:
        """Delete the weights of a model that does not run."""
        name = self.find(model)
        if name in self.registry.externals:
            raise UsageError(f"{name} runs elsewhere: there are no weights of it here")
        sources = self.registry.sources_of(name)
        for other in self.scheduler.models.values():
            if self._busy(other) and sources & self.registry.sources_of(other.name):
                same = "" if other.name == name else f" from the same weights as {name}"
                raise UsageError(f"{other.name} is running{same}", f"flexlab down {other.name}")
        paths_removed, freed = await self.launcher.threads.call(
            "worker", self.registry.remove_weights, name
        )
        self.forget(name)
        await self.save_states()
        await self._look_again()
        return Removed(removed=tuple(paths_removed), freed_bytes=freed)

    def forget(self, name: str) -> None:
        """A derived model that does not run; it is known again by its source."""
        if name in self.registry.sources and not self._busy(self.scheduler.models[name]):
            self.registry.forget(name)
            self.scheduler.remove_model(name)
            self._states.pop(name, None)
            self._known = {known: facts for known, facts in self._known.items() if known != name}

    def shutdown(self, request: ShutdownRequest) -> bool:
        """Begin the end; False when it was asked for an idle daemon and this one is not."""
        if request.only_if_idle and self.status().holds:
            return False
        self._stop(request)
        return True

    async def logs(self, model: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """The log of the newest instance of a model, running or not."""
        name = self.find(model)
        if name in self.registry.externals:
            raise UsageError(f"{name} runs elsewhere, and so does its log")
        found = [r for r in self.launcher.held.values() if r.model == name]
        ref, log_path = (found[-1].ref, found[-1].log_path) if found else (None, None)
        if log_path is None:
            log_path = await self.launcher.threads.call("worker", newest_log, name)
        if log_path is None:
            raise UsageError(f"{name} has no log: it was never started", f"flexlab up {name}")
        runtime = self._runtimes[found[-1].plan.runtime if found else "process"]
        lines = runtime.logs(ref, log_path, tail=tail, follow=follow)
        return stream(lines)

    async def events(self, after: int, *, follow: bool) -> AsyncIterator[Event]:
        """Events newer than `after`, and then as they come if `follow`."""
        while True:
            found = await self.log.wait(after) if follow else self.log.after(after)
            for event in found:
                yield event
                after = event.id
            if not follow:
                return


async def _only(step: UpStep) -> AsyncIterator[UpStep]:
    yield step


def pool_account(pool: Pool) -> PoolAccount:
    """A pool of the machine as the scheduler accounts it."""
    return PoolAccount(
        id=pool.id,
        kind=pool.kind,
        total_bytes=pool.total_bytes,
        reserve_bytes=pool.reserve_bytes,
        limit_bytes=pool.budget_bytes,
        used_bytes=pool.used_bytes,
        sampled_at=pool.sampled_at,
    )


def _external_candidate(name: str) -> Candidate:
    return Candidate(
        model=name,
        variant="external",
        backend="external",
        runtime="external",
        arch="?",
        support="unknown",
        devices=(),
        needs=(),
        weights=(),
    )


def _external_plan(name: str) -> LaunchPlan:
    return LaunchPlan(
        model=name,
        variant="external",
        backend="external",
        runtime="external",
        arch="?",
        served_name=name,
        ready=Probe(path="/health"),
    )
