"""The children of this process and how they ended.

Only a parent can reap a child and learn its exit code, and children belong to the process, not to
a runtime object: a second ProcessRuntime here must be able to say how they ended. Hence one table.
"""

from __future__ import annotations

import subprocess
import threading
from collections import OrderedDict

from flexlab.spec.instance import ProcessRef

REMEMBERED = 256
"""Exit codes kept after the end; a launcher asks at once, so this is far more than it needs."""


class Children:
    """Processes that this one started. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[ProcessRef, subprocess.Popen[bytes]] = {}
        self._ended: OrderedDict[ProcessRef, int] = OrderedDict()

    def add(self, ref: ProcessRef, child: subprocess.Popen[bytes]) -> None:
        """Take charge of a child that was just started."""
        with self._lock:
            self._running[ref] = child

    def exit_code(self, ref: ProcessRef) -> int | None:
        """Its exit code (128 + n for signal n), reaping it; None: still runs, or not our child."""
        with self._lock:
            child = self._running.get(ref)
            if child is None:
                return self._ended.get(ref)
            code = child.poll()
            if code is None:
                return None
            del self._running[ref]
            self._ended[ref] = code if code >= 0 else 128 - code
            while len(self._ended) > REMEMBERED:
                self._ended.popitem(last=False)
            return self._ended[ref]


children = Children()
