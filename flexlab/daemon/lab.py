"""The lab: what the gateway and the control API ask of the daemon, in one object on the loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping

from flexlab import __version__
from flexlab.core.errors import UnknownModel, UsageError
from flexlab.core.settings import Settings
from flexlab.daemon.enginelogs import newest_log
from flexlab.daemon.events import EventLog
from flexlab.daemon.gpu_readings import GpuReadings
from flexlab.daemon.launcher import Launcher
from flexlab.daemon.models import Models
from flexlab.daemon.registry import Registry
from flexlab.daemon.tasks import stream
from flexlab.daemon.up import up_steps
from flexlab.runtimes.base import Runtime
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.views import Views
from flexlab.scheduler.why import why
from flexlab.spec.control import (
    Cancelled,
    CancelRequest,
    DownRequest,
    Held,
    HoldRequest,
    Removed,
    Requests,
    RequestView,
    RestartRequest,
    ShutdownRequest,
    Status,
    Stopped,
    StoppedModel,
    UpRequest,
    Why,
)
from flexlab.spec.lab import Event, History, ModelView, Snapshot, UpStep
from flexlab.spec.lease import Lease, Refused
from flexlab.spec.machine import Machine
from flexlab.spec.plan import Candidate, Refusal, Wishes

log = logging.getLogger(__name__)


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
        models: Models,
        views: Views,
        gpus: GpuReadings,
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
        self.pending: Callable[[], tuple[str, ...]] = lambda: ()
        """Settings that count from the next start on."""
        self.observed: Callable[[int], tuple[RequestView, ...]] = lambda _last: ()
        """The gateway's: requests in flight, and the last so many that ended."""
        self.cancel_one: Callable[[str], RequestView] = no_such_request
        self.recorded: Callable[[float, float], Callable[[], History]] = nothing_recorded
        """(seconds, now) -> what builds the history of so long."""
        self._runtimes = runtimes
        self._stop = stop
        self._models = models
        self._views = views
        self._gpus = gpus
        self._ups = 0
        """Calls of `up` that are not waiters yet."""

    # -- gateway.routes.Lab

    def acquire(
        self,
        name: str,
        *,
        client: str,
        capability: str | None = None,
        since: float | None = None,
    ) -> Lease | asyncio.Future[Lease]:
        """See gateway.routes.Lab. Raises Refused."""
        try:
            model = self._models.find(name)
        except UnknownModel as error:
            refusal = Refusal(code=error.code, message=error.message, hint=error.hint, status=404)
            raise Refused(refusal) from None
        if capability is not None:
            self._models.require(model, capability)
        was_down = self.scheduler.models[model].held_down
        lease = self.scheduler.acquire(model, since=since)
        if was_down:
            self.launcher.tasks.spawn("save states", self._models.save_states())
        return lease

    def models(self) -> tuple[ModelView, ...]:
        """Every model of the lab."""
        return self._models.views()

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
            gpus=self._gpus.gpus(),
            pools=self._views.pools(),
            models=self.models(),
            instances=self._views.instances(),
            requests_total=self.requests_total(),
            last_event=self.log.last_id,
            gpu_samples=self._gpus.samples(),
            holders=self._gpus.holders(),
        )

    async def save_models(self) -> None:
        """Keep what users decided."""
        await self._models.save_states()

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
            pending=self.pending(),
        )

    async def up(self, request: UpRequest) -> AsyncIterator[UpStep]:
        """Steps until it is ready or refused; closing the iterator withdraws the wish.

        Raises FlexLabError for a name or source that leads to no model.
        """
        self._ups += 1
        try:
            name = await self.launcher.threads.call(
                "worker", self.registry.derive, request.model, self._models.in_use()
            )
            self._models.register(name)
            await self._models.look_again()
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
        if wishes == Wishes() and self._models.is_busy(self.scheduler.models[name]):
            self.scheduler.replace_stale(name)
            return None
        call = self.launcher.threads.call
        planned = await call("worker", self.registry.plan, name, wishes)
        if planned.candidates.refusal is not None:
            return planned.candidates.refusal
        same = bool(running) and (
            await call("worker", self.registry.would_be, name, wishes, running[0].plan_hash)
            if running[0].plan_hash
            else _alike(planned.candidates.items[0], running[0].candidate)
        )
        self.scheduler.wish(name, wishes, replace=not same)
        return None

    async def down(self, request: DownRequest) -> Stopped:
        """Stop and wait until each is confirmed gone (or is not, in time)."""
        names = [self._models.find(name) for name in request.models]
        external = [name for name in names if name in self.registry.externals]
        if external:
            raise UsageError(
                f"{', '.join(external)} runs elsewhere: FlexLab only routes to it",
                "end `flexlab serve --external` to stop routing",
            )
        if request.all:
            names = [m.name for m in self.scheduler.models.values() if self._models.is_busy(m)]
        waits: list[tuple[str, str, asyncio.Future[bool]]] = []
        not_running = []
        began = time.monotonic()
        for name in names:
            was_busy = self._models.is_busy(self.scheduler.models[name])
            ending = self.scheduler.down(name, force=request.force)
            waits += [(name, each, self.scheduler.when_gone(each)) for each in ending]
            if not was_busy:
                not_running.append(name)
        await (
            self._models.save_states()
        )  # first: it holds even if this daemon is killed while it waits
        stopped = []
        for name, instance, gone in waits:
            confirmed = await gone
            took_s = time.monotonic() - began
            stopped.append(
                StoppedModel(model=name, instance=instance, seconds=took_s, confirmed=confirmed)
            )
        return Stopped(stopped=tuple(stopped), not_running=tuple(not_running))

    async def hold(self, request: HoldRequest) -> Held:
        """Keep, pin, enable: what a user decides, until decided otherwise.

        Raises FlexLabError for a name that leads to no model; then nothing is changed.
        """
        names = [self._models.find(name) for name in request.models]
        external = [name for name in names if name in self.registry.externals]
        if external and request.enabled is None:
            raise UsageError(
                f"{', '.join(external)} runs elsewhere: FlexLab neither starts nor stops it",
                f"flexlab disable {external[0]} refuses requests to it",
            )
        for name in names:
            warm = None if request.keep is None else request.keep == "warm"
            self.scheduler.keep(name, warm=warm, pinned=request.pin)
            if request.enabled is not None:
                self.scheduler.enable(name, enabled=request.enabled)
        await self._models.save_states()
        views = {view.name: view for view in self.models()}
        return Held(models=tuple(views[name] for name in names if name in views))

    async def restart(self, request: RestartRequest) -> AsyncIterator[UpStep]:
        """Drain what runs of it and start it anew; steps as of `up`."""
        name = self._models.find(request.model)
        if name in self.registry.externals:
            raise UsageError(f"{name} runs elsewhere: FlexLab cannot restart it")
        before = self.log.last_id
        self.scheduler.renew(name, "restarted by its user")
        return up_steps(self, name, after=before)

    def why(self, model: str) -> Why:
        """Why a model is in its state. Raises UnknownModel."""
        name = self._models.find(model)
        view = next(view for view in self.models() if view.name == name)
        sentences = why(self.scheduler, name, asyncio.get_running_loop().time())
        return Why(model=view, sentences=tuple(sentences))

    def requests(self, *, last: int) -> Requests:
        """Requests in flight, and the last that ended."""
        return Requests(requests=self.observed(last))

    def cancel(self, request: CancelRequest) -> Cancelled:
        """End a request: its client gets an error. Raises UsageError for an unknown id."""
        return Cancelled(request=self.cancel_one(request.id))

    async def end_loading(self) -> None:
        """At the end of the daemon: what nobody waits for any more is not left half loaded."""
        for instance in self.scheduler.end_loading():
            await self.scheduler.when_gone(instance)

    async def rm(self, model: str) -> Removed:
        """Delete the weights of a model that does not run."""
        name = self._models.find(model)
        if name in self.registry.externals:
            raise UsageError(f"{name} runs elsewhere: there are no weights of it here")
        sources = self.registry.sources_of(name)
        for other in self.scheduler.models.values():
            if self._models.is_busy(other) and sources & self.registry.sources_of(other.name):
                same = "" if other.name == name else f" from the same weights as {name}"
                raise UsageError(f"{other.name} is running{same}", f"flexlab down {other.name}")
        paths_removed, freed = await self.launcher.threads.call(
            "worker", self.registry.remove_weights, name
        )
        if not self._ups:  # an `up` that is on its way has it by name
            self._models.forget(name)
        await self._models.save_states()
        await self._models.look_again()
        return Removed(removed=tuple(paths_removed), freed_bytes=freed)

    def shutdown(self, request: ShutdownRequest) -> bool:
        """Begin the end; False when it was asked for an idle daemon and this one is not."""
        if request.only_if_idle and self.status().holds:
            return False
        self._stop(request)
        return True

    async def logs(self, model: str, *, tail: int, follow: bool) -> AsyncIterator[bytes]:
        """The log of the newest instance of a model, running or not."""
        name = self._models.find(model)
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

    async def history(self, seconds: float) -> History:
        """Series and runs of the last `seconds`."""
        build = self.recorded(seconds, time.time())
        return await self.launcher.threads.call("screens", build)  # it waits for no planning

    async def events(self, after: int, *, follow: bool) -> AsyncIterator[Event]:
        """Events newer than `after`, and then as they come if `follow`."""
        while True:
            found = await self.log.wait(after) if follow else self.log.after(after)
            for event in found:
                yield event
                after = event.id
            if not follow:
                return


def _alike(one: Candidate, other: Candidate) -> bool:
    """Whether two candidates lead to the same plan; for one that is not rendered yet."""
    return (one.variant, one.runtime, one.devices, one.settings) == (
        other.variant,
        other.runtime,
        other.devices,
        other.settings,
    )


async def _only(step: UpStep) -> AsyncIterator[UpStep]:
    yield step


def nothing_recorded(seconds: float, at: float) -> Callable[[], History]:
    """Of a lab that keeps no history."""
    return lambda: History(at=at, begin=at, step_s=1.0)


def no_such_request(request: str) -> RequestView:
    """Raises UsageError."""
    raise UsageError(f"no request {request} is in flight", "flexlab requests lists them")
