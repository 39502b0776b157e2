"""The host's memory and what each of our engines holds of it, for the scheduler's accounts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from flexlab.daemon.launcher import Launcher
from flexlab.runtimes.base import Runtime
from flexlab.runtimes.logfile import rotate
from flexlab.scheduler.scheduler import Scheduler
from flexlab.spec.instance import MemoryUse
from flexlab.spec.machine import RAM_POOL, Pool


class Readings:
    """Reads in threads, tells the scheduler on the loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        launcher: Launcher,
        runtimes: Mapping[str, Runtime],
        log_max_bytes: int,
        read_ram: Callable[[], Pool],
    ) -> None:
        """`read_ram` is called in a thread."""
        self._scheduler = scheduler
        self._launcher = launcher
        self._runtimes = runtimes
        self.log_max_bytes = log_max_bytes
        self._read_ram = read_ram

    async def take(self) -> None:
        """One reading of the RAM pool."""
        call = self._launcher.threads.call
        epoch = self._scheduler.epoch
        measured: dict[str, MemoryUse] = {}
        for instance, record in list(self._launcher.held.items()):
            runtime = self._runtimes[record.plan.runtime]
            if record.ref is None or record.ready_at is None:
                continue
            use = await call(runtime.name, runtime.memory, record.ref)
            if use is not None:
                measured[instance] = use
        pool = await call("worker", self._read_ram)
        self._scheduler.sample(RAM_POOL, pool.used_bytes, measured, epoch)

    async def rotate_logs(self) -> None:
        """Engines write for as long as they run; their logs do not grow for as long."""
        for record in list(self._launcher.held.values()):
            path = Path(record.log_path)
            await self._launcher.threads.call("worker", rotate, path, self.log_max_bytes)
