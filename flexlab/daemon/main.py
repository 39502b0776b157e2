"""From start to end of the daemon: lock, adopt, listen, serve, and leave in order.

lock -> records -> ask the runtimes -> adopt -> only then listen. The end: refuse who waits, drain
what streams, close; engines go on unless they are to be stopped too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from flexlab.core import paths
from flexlab.core.errors import (
    EXIT_OK,
    FlexLabError,
    RuntimeUnavailable,
    SettingsError,
    UsageError,
)
from flexlab.core.logging import logging_to
from flexlab.core.settings import Loaded, Settings
from flexlab.daemon.lockfile import take_lock
from flexlab.daemon.readypipe import ReadyPipe
from flexlab.daemon.tasks import THREAD_PREFIX
from flexlab.gateway.access import is_loopback

log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.0005
"""A busy thread otherwise holds the GIL for 5 ms at a time: the gateway's p50 0.1 -> 11 ms."""


def run(
    loaded: Loaded, *, externals: Mapping[str, str], detached: bool, ready_fd: int | None
) -> int:
    """Serve until told to end; the exit code. Tells `ready_fd` how the start went.

    Raises FlexLabError when it cannot start, or when another daemon already runs.
    """
    ready = ReadyPipe(ready_fd)
    try:
        require_private(loaded.settings)
        lock = take_lock(foreground=not detached)
        if lock is None:
            ready.already()
            return _already(detached)
        log_file = paths.private_dir(paths.logs_dir()) / "daemon.log"
        with contextlib.closing(lock), logging_to(log_file, loaded.settings.log_max_bytes):
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            for warning in loaded.warnings:
                log.warning("%s", warning)
            # Imported here: whoever finds another daemon need not load all of this one.
            from flexlab.daemon.service import serve

            code = run_loop(serve(loaded, externals, lock, ready))
        leave_hung_threads(code)
        return code
    except FlexLabError as error:
        ready.failed(error)
        raise
    except OSError as error:
        wrapped = RuntimeUnavailable(
            f"the daemon cannot use {paths.state_dir()}: {error.strerror or error}",
            "set FLEXLAB_STATE_DIR to a folder that you may write to",
        )
        ready.failed(wrapped)
        raise wrapped from error


def leave_hung_threads(code: int) -> None:
    """End now if a call into a driver or a dead disk still hangs: Python would wait for it."""
    if any(t.name.startswith(THREAD_PREFIX) and t.is_alive() for t in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def require_private(settings: Settings) -> None:
    """Loopback, or it is said that everybody may come. Raises SettingsError."""
    if is_loopback(settings.host) or settings.open_to_network:
        return
    raise SettingsError(
        f"listening on {settings.host} lets everybody on its network use this lab without a key",
        "if that is meant: flexlab serve --open-to-network, or open_to_network: true in "
        f"{paths.settings_file()}",
    )


def run_loop(work: Coroutine[Any, Any, int]) -> int:
    """On uvloop where there is one, else on asyncio's own loop."""
    runner: Callable[[Coroutine[Any, Any, int]], int]
    try:
        import uvloop

        runner = uvloop.run
    except ImportError:
        runner = asyncio.run
    return runner(work)


def _already(detached: bool) -> int:
    if detached:
        return EXIT_OK
    raise UsageError(
        "a FlexLab daemon of yours already runs on this machine",
        "flexlab ps shows it, flexlab down --daemon ends it",
        code="already_running",
    )
