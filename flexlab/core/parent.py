"""A helper process that is of no use without the one that started it."""

from __future__ import annotations

import signal

_SET_PARENT_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of prctl(2)."""


def die_with_parent() -> None:
    """Linux kills this process with the thread that started it. Elsewhere: nothing happens."""
    import ctypes  # only helpers pay for it

    library = ctypes.CDLL(None, use_errno=True)
    if hasattr(library, "prctl"):
        library.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
