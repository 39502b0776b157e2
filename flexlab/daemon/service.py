"""The daemon at work: everything wired, adopted, listening, and ended in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from flexlab import __version__
from flexlab.core import paths
from flexlab.core.errors import EXIT_OK
from flexlab.core.logging import limit_log
from flexlab.core.settings import Loaded, Settings
from flexlab.daemon.adopt import Adoption
from flexlab.daemon.claims import Claims
from flexlab.daemon.events import EventLog
from flexlab.daemon.externals import Externals
from flexlab.daemon.files import Records, installation_id
from flexlab.daemon.gpu_readings import GpuReadings
from flexlab.daemon.hardware import Hardware
from flexlab.daemon.history import TICK_S, Recorder, tokens_of
from flexlab.daemon.lab import Lab
from flexlab.daemon.launcher import Launcher
from flexlab.daemon.lockfile import Lock
from flexlab.daemon.models import Models
from flexlab.daemon.readings import Readings
from flexlab.daemon.readypipe import ReadyPipe
from flexlab.daemon.registry import Registry
from flexlab.daemon.reload import LOOK_S, Reload
from flexlab.gateway.control import ControlServer
from flexlab.gateway.proxy import Gateway
from flexlab.gateway.requests import cancel_one, observed
from flexlab.gateway.routes import Router
from flexlab.gpus.memory import sample_ram
from flexlab.runtimes.base import Runtime
from flexlab.runtimes.docker import DockerRuntime
from flexlab.runtimes.external import ExternalRuntime
from flexlab.runtimes.process import ProcessRuntime
from flexlab.scheduler.policy import Policy
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import PoolAccount
from flexlab.scheduler.views import Views
from flexlab.spec.control import DownRequest, ShutdownRequest
from flexlab.spec.machine import Machine, Pool
from flexlab.spec.plan import Refusal

READING_S = 2.0
SOCKET_S = 2.0
LOGS_S = 30.0
EXTERNALS_S = 10.0
NEW_GPUS_S = 2.0
log = logging.getLogger(__name__)
ENDING = Refusal(
    code="daemon_ending",
    message="the FlexLab daemon is ending",
    hint="send the request again in a moment",
    retry_after_s=5.0,
)


async def serve(loaded: Loaded, externals: Mapping[str, str], lock: Lock, ready: ReadyPipe) -> int:
    """Run until a signal or `shutdown`. Raises ProxyError when the port is taken."""
    service = Service(loaded.settings, externals, options=loaded.options())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, service.stop, ShutdownRequest(why=number.name))
    try:
        await service.start(lock)
        ready.ready()
        if lock.foreground:
            print(f"listening on {service.lab.address}/v1 (Ctrl-C ends)", file=sys.stderr)
        request = await service.until_told()
        lock.withdraw()
        await service.drain(request)
        left = sorted({record.model for record in service.launcher.held.values()})
        if lock.foreground and left:
            names = ", ".join(left)
            print(f"still running: {names}; the next flexlab up takes over", file=sys.stderr)
        return EXIT_OK
    finally:
        await service.close()


def policy_of(settings: Settings) -> Policy:
    """The scheduler's numbers out of the settings."""
    return Policy(
        linger_s=settings.linger_s,
        min_residency_s=settings.min_residency_s,
        turn_max_s=settings.turn_max_s,
        drain_timeout_s=settings.drain_timeout_s,
        drain_limit_s=settings.drain_limit_s,
        stop_timeout_s=settings.stop_timeout_s,
        stop_confirm_s=settings.stop_confirm_s,
        queue_timeout_s=settings.queue_timeout_s,
        queue_limit=settings.queue_limit,
        idle_timeout_s=settings.idle_timeout_s,
        yield_after_s=settings.yield_after_s,
        back_off_first_s=settings.back_off_first_s,
        back_off_max_s=settings.back_off_max_s,
        settled_s=settings.settled_s,
        freed_within_s=settings.freed_within_s,
        pressed_s=settings.pressed_s,
        restore_tries=settings.restore_tries,
    )


class Service:
    """One daemon's parts. The demo and the tests bring runtimes and a machine of their own."""

    def __init__(
        self,
        settings: Settings,
        externals: Mapping[str, str],
        *,
        options: Mapping[str, object] | None = None,
        runtimes: Mapping[str, Runtime] | None = None,
        detect: Callable[[], Machine] | None = None,
        read_ram: Callable[[], Pool] = sample_ram,
        hardware_command: Sequence[str] | None = None,
    ) -> None:
        """`options`: settings that beat the file at every later reading of it too.

        `hardware_command` starts another hardware helper than FlexLab's own.
        """
        loop = asyncio.get_running_loop()
        state = paths.private_dir(paths.state_dir())
        self.settings = settings
        self.runtimes: Mapping[str, Runtime] = runtimes or {
            "process": ProcessRuntime(log_max_bytes=settings.log_max_bytes),
            "docker": DockerRuntime(settings.docker_host),
            "external": ExternalRuntime(externals),
        }
        self.installation = installation_id(state)
        self.events = EventLog(paths.events_file())
        self.records = Records(paths.instances_dir())
        claims = Claims(state / "claims.json")
        self.registry = Registry(settings, self.runtimes, externals, claims=claims, detect=detect)
        self.launcher = Launcher(
            settings,
            self.registry,
            self.runtimes,
            self.records,
            self.events,
            self.installation,
            claims,
        )
        self.scheduler = Scheduler(
            self.launcher, policy_of(settings), clock=loop.time, wall=time.time
        )
        self.launcher.scheduler = self.scheduler
        views = Views(self.scheduler, time.time() - loop.time())
        self.models = Models(
            self.registry, self.scheduler, views, self.launcher.tasks, self.launcher.threads
        )
        self.gpu_readings = GpuReadings(self.scheduler, self.launcher.held)
        self.hardware = Hardware(self.gpu_readings.take, command=hardware_command)
        self._watches_gpus = False
        self.externals = Externals(
            self.runtimes.get("external"), self.scheduler, self.launcher.threads
        )
        self.lab = Lab(
            settings,
            self.registry,
            self.scheduler,
            self.launcher,
            self.events,
            self.runtimes,
            self.models,
            views,
            self.gpu_readings,
            self.installation,
            self.stop,
        )
        self.router = Router(self.lab, settings)
        self.gateway = Gateway(self.router, max_body_bytes=settings.max_body_bytes)
        self.lab.requests_total = lambda: self.gateway.observer.requests_total
        self.lab.observed = partial(observed, self.gateway)
        self.lab.cancel_one = partial(cancel_one, self.gateway)
        self.models.speed_of = self.gateway.observer.speed_of
        self.history = Recorder(
            self.scheduler,
            lambda: tokens_of(self.gateway),
            makes_text=self.models.makes_text,
        )
        self.events.heard.append(self.history.note)
        self.lab.recorded = self.history.history
        self.control = ControlServer(self.lab)
        self.readings = Readings(
            self.scheduler, self.launcher, self.runtimes, settings.log_max_bytes, read_ram
        )
        self.reload = Reload(
            settings,
            options or {},
            self.registry,
            self.scheduler,
            self.models,
            self.launcher,
            self._apply,
        )
        self.lab.pending = lambda: self.reload.pending
        self._told: asyncio.Future[ShutdownRequest] = loop.create_future()

    async def start(self, lock: Lock) -> None:
        """Adopt, then listen, then say where."""
        await self._detect()
        await self.launcher.threads.call("worker", self.models.derive_again)
        self.models.register_all()
        await self.models.look_again()
        for name in self.registry.externals:
            self.externals.attach(name, self.installation)
        self.scheduler.paused = True
        await Adoption(
            self.records,
            self.runtimes,
            self.registry,
            self.scheduler,
            self.launcher,
            self.models.register,
        ).run(self.installation)
        self.scheduler.paused = False
        await self.readings.take()
        self.lab.address = await self.gateway.start(self.settings.host, self.settings.port)
        await self._listen(lock)
        tasks = self.launcher.tasks
        tasks.every(READING_S, "memory readings", self.readings.take)
        if self.registry.externals:
            tasks.every(EXTERNALS_S, "external servers", self.externals.look)
        tasks.every(LOGS_S, "log rotation", self.readings.rotate_logs)
        tasks.every(TICK_S, "history", self._remember)
        tasks.every(LOOK_S, "settings and recipes", self.reload.look)
        tasks.every(NEW_GPUS_S, "new GPUs", self._look_for_new_gpus)
        tasks.every(SOCKET_S, "control socket", lambda: self._be_reachable(lock))
        self.launcher.note("daemon", f"FlexLab {__version__} listens on {self.lab.address}")
        self.scheduler.tick()
        gc.collect()
        gc.freeze()  # what start-up made lives as long as we do: keep it out of every collection

    async def _detect(self) -> None:
        """What is here. Live readings begin with the first GPU.

        Of pools that were known, only what the settings keep and allow of them is new.
        """
        machine = await self.launcher.threads.call("worker", self.registry.machine)
        self.lab.machine = machine
        self.gpu_readings.begin(machine)
        for pool in machine.pools:
            if (known := self.scheduler.pools.get(pool.id)) is None:
                self.scheduler.add_pool(PoolAccount.of(pool))
            else:
                known.reserve_bytes, known.limit_bytes = pool.reserve_bytes, pool.budget_bytes
        if machine.gpus and not self._watches_gpus:
            self._watches_gpus = True
            self.hardware.start()

    async def _remember(self) -> None:
        self.history.tick(time.time(), self.gpu_readings.latest)

    async def _look_for_new_gpus(self) -> None:
        """The helper sees a card that came (or went) after the start."""
        if self.gpu_readings.has_changed:
            log.info("the GPUs of this machine changed; looking again")
            await self._detect()

    async def _apply(self, settings: Settings, changed: frozenset[str]) -> None:
        """Tell every part of settings that have changed."""
        self.settings = self.lab.settings = self.launcher.settings = settings
        self.registry.use(settings)
        self.scheduler.policy = policy_of(settings)
        self.gateway.max_body_bytes = settings.max_body_bytes
        self.router.admit(settings)
        self.readings.log_max_bytes = settings.log_max_bytes
        for runtime in self.runtimes.values():
            if isinstance(runtime, ProcessRuntime):
                runtime.log_max_bytes = settings.log_max_bytes
        limit_log(settings.log_max_bytes)
        if changed & {"ram_reserve_bytes", "ram_limit_bytes"}:
            await self._detect()
        self.scheduler.tick()

    async def _listen(self, lock: Lock) -> None:
        path = paths.socket_path()
        await self.control.listen(path)
        lock.announce(socket=path, address=self.lab.address)

    async def _be_reachable(self, lock: Lock) -> None:
        """A logout takes the runtime folder away, and with it the socket: it is made anew."""
        if not self.control.is_reachable and not self._told.done():
            log.warning("the control socket is gone; listening again")
            await self._listen(lock)

    def stop(self, request: ShutdownRequest) -> None:
        """Begin the end; the first request counts."""
        if not self._told.done():
            self._told.set_result(request)

    async def until_told(self) -> ShutdownRequest:
        """Wait for a signal or a `shutdown`."""
        return await self._told

    async def drain(self, request: ShutdownRequest) -> None:
        """Nobody new, who waits hears why, what streams may end, models stop if they are to."""
        self.launcher.note("daemon", f"the daemon ends: {request.why or 'it was told to'}")
        await self.gateway.stop_accepting()
        self.scheduler.refuse_all(ENDING)
        await self.lab.end_loading()
        if request.stop_models:
            await self.lab.down(DownRequest(all=True))
        await self.gateway.drain(self.settings.drain_timeout_s)

    async def close(self) -> None:
        """Let go of everything; what runs goes on."""
        await self.gateway.close()
        await self.control.close()
        await self.hardware.close()
        await self.launcher.close()
        for runtime in self.runtimes.values():
            runtime.close()
