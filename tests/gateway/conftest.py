"""Each test of the gateway runs on plain asyncio and on uvloop: both are in use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import pytest_asyncio
from gateway_lab import Rig

try:
    import uvloop
except ImportError:  # not made for every platform
    uvloop = None


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"asyncio": asyncio.new_event_loop}
    if uvloop is not None:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    """A gateway over a lab of fakes, whose model `m1` is a fake upstream on real TCP."""
    async with Rig() as rig:
        yield rig
