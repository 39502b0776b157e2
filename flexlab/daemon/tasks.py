"""Tasks with names that never end unheard, and the threads that may block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from flexlab.runtimes.base import LogLines

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
THREAD_PREFIX = "flexlab-"
P = ParamSpec("P")
R = TypeVar("R")


class Tasks:
    """Holds references, names each task, and logs an unexpected end instead of losing it."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it in the background."""
        task = asyncio.get_running_loop().create_task(self._guard(name, work), name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        task.add_done_callback(lambda _done: work.close())  # cancelled before its first step
        return task

    async def _guard(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception:  # an edge: the guard of a daemon task
            log.exception("the task %s ended with a defect of FlexLab", name)

    def every(
        self, seconds: float, name: str, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Do it again and again; one round that fails is logged and does not end the others."""

        async def rounds() -> None:
            while True:
                await asyncio.sleep(seconds)
                await self._guard(name, work())

        self.spawn(name, rounds())

    async def close(self) -> None:
        """Cancel all and wait for them, but not for what hangs in a thread."""
        running = set(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_TIMEOUT_S)


class Threads:
    """A pool of its own per runtime (4 threads) and one worker for planning and disk.

    A pool whose threads all hang makes that runtime unusable and nothing else.
    """

    def __init__(self) -> None:
        self._pools: dict[str, ThreadPoolExecutor] = {}

    async def call(
        self, pool: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run a blocking call in the named pool (`worker`, or a runtime's name)."""
        if pool not in self._pools:
            size = 1 if pool == "worker" else 4
            self._pools[pool] = ThreadPoolExecutor(
                size, thread_name_prefix=f"{THREAD_PREFIX}{pool}"
            )
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pools[pool], lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Without waiting: a thread that hangs must not hold up the end of the daemon."""
        for pool in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)


async def stream(lines: LogLines) -> AsyncIterator[bytes]:
    """Lines of a log, each ended by a newline, read in a thread of the stream's own.

    The thread exists for as long as somebody reads.
    """
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, thread_name_prefix=f"{THREAD_PREFIX}stream")
    try:
        while (line := await loop.run_in_executor(thread, next, lines, None)) is not None:
            yield line + b"\n"
    finally:
        lines.close()  # wakes the thread if it waits for more
        thread.shutdown(wait=False)
