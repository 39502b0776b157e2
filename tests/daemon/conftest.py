"""Daemons to talk to, and what runs under them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from daemon_lab import Lab, Start

from flexlab.core.settings import Settings
from flexlab.daemon.lockfile import take_lock
from flexlab.daemon.service import Service
from flexlab.demo.machine import demo_machine
from flexlab.demo.runtime import DemoRuntime
from flexlab.demo.world import DemoWorld
from flexlab.gpus import helper
from flexlab.gpus.inventory import detect
from flexlab.gpus.memory import sample_ram
from flexlab.runtimes.external import ExternalRuntime
from flexlab.spec.control import ShutdownRequest


@pytest.fixture
def world() -> Any:
    """What runs; outlives daemons."""
    lives = DemoWorld()
    yield lives
    lives.close()


@pytest_asyncio.fixture
async def start(world: DemoWorld) -> AsyncIterator[Start]:
    """`await start(setting=...)`: a daemon; those still open at the end are closed.

    With `root`, on the machine whose files are below it, read by the real hardware helper; else on
    the demo's, of whose `ram_gib` 1 GiB is in use and half a GiB is kept for the system.
    """
    open_labs: list[Lab] = []

    async def start_one(
        *,
        root: Path | None = None,
        externals: Mapping[str, str] | None = None,
        ram_gib: float = 16.0,
        **settings: Any,
    ) -> Lab:
        lock = take_lock()
        assert lock is not None, "another daemon of this test still has the lock"
        machine = demo_machine(ram_gib=ram_gib)
        service = Service(
            Settings(port=0, **settings),
            externals or {},
            options={"port": 0, **settings},
            runtimes={
                "process": DemoRuntime(world, name="process"),
                "external": ExternalRuntime(externals or {}),
            },
            detect=lambda: machine if root is None else detect(root),
            read_ram=lambda: machine.pools[0] if root is None else sample_ram(root),
            hardware_command=None if root is None else helper.command(root, interval_s=0.1),
        )
        lab = Lab(service, world, lock)
        open_labs.append(lab)
        await service.start(lock)
        return lab

    async def end(lab: Lab) -> None:
        open_labs.remove(lab)
        await lab.service.drain(ShutdownRequest(why="the test ends it"))
        await lab.service.close()
        lab.lock.close()

    start_one.end = end  # type: ignore[attr-defined]
    yield start_one
    for lab in list(open_labs):
        await lab.service.close()
        lab.lock.close()
