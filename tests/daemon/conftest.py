"""Daemons to talk to, and what runs under them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from daemon_lab import Lab, Start

from flexlab.core.settings import Settings
from flexlab.daemon.lockfile import take_lock
from flexlab.daemon.service import Service
from flexlab.demo.machine import demo_machine, demo_ram
from flexlab.demo.runtime import DemoRuntime
from flexlab.demo.world import DemoWorld
from flexlab.gpus import helper
from flexlab.gpus.inventory import detect
from flexlab.gpus.memory import sample_ram
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

    With `root`, on the machine whose files are below it, read by the real hardware helper.
    """
    open_labs: list[Lab] = []

    async def start_one(*, root: Path | None = None, **settings: Any) -> Lab:
        lock = take_lock()
        assert lock is not None, "another daemon of this test still has the lock"
        service = Service(
            Settings(port=0, **settings),
            {},
            options={"port": 0, **settings},
            runtimes={"process": DemoRuntime(world, name="process")},
            detect=demo_machine if root is None else partial(detect, root),
            read_ram=demo_ram if root is None else partial(sample_ram, root),
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
