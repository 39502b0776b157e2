"""Waiting for what another process, thread or task does: with a limit, never for a guess."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_beat = threading.Event()


def until(what: Callable[[], T], limit_s: float = 30.0, *, every_s: float = 0.02) -> T:
    """What `what()` returns once that is true; fails when it is not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (answer := what()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        _beat.wait(every_s)
    return answer


async def soon(what: Callable[[], object], limit_s: float = 10.0) -> None:
    """As `until`, on the loop. Raises TimeoutError."""
    async with asyncio.timeout(limit_s):
        while not what():
            await moment(0.005)


async def moment(seconds: float) -> None:
    """Let so much time pass on the loop."""
    over = asyncio.get_running_loop().create_future()
    timer = asyncio.get_running_loop().call_later(seconds, over.set_result, None)
    try:
        await over
    finally:
        timer.cancel()


async def for_ever() -> None:
    """What a task does that is only ever cancelled."""
    await asyncio.Event().wait()
