"""The daemon at work: everything wired, adopted, listening, and ended in order."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from flexlab import __version__
from flexlab.core import paths
from flexlab.core.errors import EXIT_OK
from flexlab.core.settings import Settings
from flexlab.daemon.adopt import adopt_all
from flexlab.daemon.events import EventLog
from flexlab.daemon.files import Records, installation_id
from flexlab.daemon.lab import Lab, pool_account
from flexlab.daemon.launcher import Launcher
from flexlab.daemon.main import ReadyPipe, write_lock
from flexlab.daemon.registry import Registry
from flexlab.gateway.control import ControlServer
from flexlab.gateway.proxy import Gateway
from flexlab.gateway.routes import Router
from flexlab.gpus.memory import sample_ram
from flexlab.runtimes.base import Runtime
from flexlab.runtimes.external import ExternalRuntime
from flexlab.runtimes.logfile import rotate
from flexlab.runtimes.process import ProcessRuntime
from flexlab.scheduler.policy import Policy
from flexlab.scheduler.scheduler import Scheduler
from flexlab.spec.control import DownRequest, ShutdownRequest
from flexlab.spec.machine import RAM_POOL
from flexlab.spec.plan import Refusal

SAMPLE_S = 2.0
ENDING = Refusal(
    code="daemon_ending",
    message="the FlexLab daemon is ending",
    hint="send the request again in a moment",
    retry_after_s=5.0,
)


async def serve(
    settings: Settings,
    externals: Mapping[str, str],
    lock: IO[str],
    ready: ReadyPipe,
    *,
    detached: bool,
) -> int:
    """Run until a signal or `shutdown`. Raises ProxyError when the port is taken."""
    service = Service(settings, externals)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, service.stop, ShutdownRequest(why=number.name))
    try:
        await service.start()
        write_lock(lock, address=service.lab.address)
        ready.ready()
        if not detached:
            print(f"listening on {service.lab.address}/v1 (Ctrl-C ends)", file=sys.stderr)
        request = await service.until_told()
        write_lock(lock, address="")
        await service.drain(request)
        if not detached and (left := sorted({r.model for r in service.launcher.held.values()})):
            print(
                f"still running: {', '.join(left)}; the next flexlab up takes over", file=sys.stderr
            )
        return EXIT_OK
    finally:
        await service.close()


def policy_of(settings: Settings) -> Policy:
    """The scheduler's numbers out of the settings."""
    return Policy(
        linger_s=settings.linger_s,
        min_residency_s=settings.min_residency_s,
        drain_timeout_s=settings.drain_timeout_s,
        drain_limit_s=settings.drain_limit_s,
        stop_timeout_s=settings.stop_timeout_s,
        start_timeout_s=settings.start_timeout_s,
        queue_timeout_s=settings.queue_timeout_s,
        queue_limit=settings.queue_limit,
        idle_timeout_s=settings.idle_timeout_s,
    )


class Service:
    """One daemon's parts. `runtimes` replaces the real ones in tests and in the demo."""

    def __init__(
        self,
        settings: Settings,
        externals: Mapping[str, str],
        *,
        runtimes: Mapping[str, Runtime] | None = None,
        registry: Registry | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        state = paths.private_dir(paths.state_dir())
        self.settings = settings
        self.runtimes: Mapping[str, Runtime] = runtimes or {
            "process": ProcessRuntime(log_max_bytes=settings.log_max_bytes),
            "external": ExternalRuntime(externals),
        }
        self.installation = installation_id(state)
        self.events = EventLog(state / "events.jsonl")
        self.records = Records(paths.instances_dir())
        self.registry = registry or Registry(settings, self.runtimes, externals)
        self.launcher = Launcher(
            settings, self.registry, self.runtimes, self.records, self.events, self.installation
        )
        self.scheduler = Scheduler(
            self.launcher, policy_of(settings), clock=loop.time, wall=time.time
        )
        self.launcher.scheduler = self.scheduler
        self.lab = Lab(
            settings,
            self.registry,
            self.scheduler,
            self.launcher,
            self.events,
            self.runtimes,
            self.installation,
            self.stop,
        )
        self.gateway = Gateway(Router(self.lab, settings))
        self.control = ControlServer(self.lab, paths.socket_path())
        self._told: asyncio.Future[ShutdownRequest] = loop.create_future()

    async def start(self) -> None:
        """Adopt, then listen."""
        self.lab.machine = await self.launcher.threads.call("worker", self.registry.machine)
        for pool in self.lab.machine.pools:
            self.scheduler.add_pool(pool_account(pool))
        self.lab.register_all()
        self.lab.attach_externals()
        await adopt_all(
            self.records,
            self.runtimes,
            self.registry,
            self.scheduler,
            self.launcher,
            self.installation,
        )
        self.lab.address = await self.gateway.start(self.settings.host, self.settings.port)
        await self.control.start()
        self.launcher.tasks.spawn("memory readings", self._sample())
        self.launcher.note("daemon", f"FlexLab {__version__} listens on {self.lab.address}")
        self.scheduler.tick()
        gc.collect()
        gc.freeze()  # what start-up made lives as long as we do: keep it out of every collection

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
        if request.stop_models:
            await self.lab.down(DownRequest(all=True))
        await self.gateway.drain(self.settings.drain_timeout_s)

    async def close(self) -> None:
        """Let go of everything; what runs goes on."""
        await self.gateway.close()
        await self.control.close()
        await self.launcher.close()
        for runtime in self.runtimes.values():
            runtime.close()

    async def _sample(self) -> None:
        """The host's memory, and what each instance of ours holds of it."""
        while True:
            await asyncio.sleep(SAMPLE_S)
            pool = await self.launcher.threads.call("worker", sample_ram)
            measured: dict[str, int] = {}
            for instance, record in list(self.launcher.held.items()):
                runtime = self.runtimes[record.plan.runtime]
                if record.ref is None or record.ready_at is None:
                    continue
                held = await self.launcher.threads.call(
                    runtime.name, runtime.memory_bytes, record.ref
                )
                if held is not None:
                    measured[instance] = held
                await self.launcher.threads.call(
                    "worker", rotate, Path(record.log_path), self.settings.log_max_bytes
                )
            self.scheduler.sample(RAM_POOL, pool.used_bytes, measured)
