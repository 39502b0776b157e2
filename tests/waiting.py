"""Waiting for something that another process or thread does: with a limit, never for a guess."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_beat = threading.Event()


def until(what: Callable[[], object], limit_s: float = 30.0, *, every_s: float = 0.02) -> None:
    """Return once `what()` is true; fail when it is not within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        _beat.wait(every_s)
