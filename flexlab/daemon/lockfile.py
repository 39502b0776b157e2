"""The lock that one daemon per user and machine holds for life, and what it tells clients."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
from pathlib import Path
from typing import IO

from flexlab import __version__
from flexlab.core import paths

log = logging.getLogger(__name__)
TRIES = 5
TRY_AGAIN_S = 0.02


class Lock:
    """Held until `close()`; the kernel lets go of it when the process dies, however it dies."""

    def __init__(self, file: IO[str], *, foreground: bool) -> None:
        self._file = file
        self.foreground = foreground
        """Somebody watches this daemon in a terminal or a unit: it is not replaced unasked."""

    def announce(self, *, socket: Path, address: str) -> None:
        """For clients: who holds it and where to reach it. Raises OSError."""
        self._write(
            {
                "pid": os.getpid(),
                "socket": str(socket),
                "version": __version__,
                "address": address,
                "foreground": self.foreground,
            }
        )

    def withdraw(self) -> None:
        """Still held, but nobody is to come any more."""
        with contextlib.suppress(OSError):  # a full disk must not keep a daemon from ending well
            self._write({})

    def _write(self, content: dict[str, object]) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._file.write(json.dumps(content))
        self._file.flush()

    def close(self) -> None:
        """Let go of it."""
        self._file.close()


def take_lock(*, foreground: bool = False) -> Lock | None:
    """The lock, or None when another daemon has it. Raises OSError.

    Tried a few times: a client that looks whether there is a daemon holds it for a moment.
    """
    paths.private_dir(paths.state_dir())
    descriptor = os.open(paths.lock_file(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    file = os.fdopen(descriptor, "r+", encoding="utf-8")
    for _ in range(TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(TRY_AGAIN_S)
        else:
            lock = Lock(file, foreground=foreground)
            lock.withdraw()  # what an earlier daemon said of itself is not so any more
            return lock
    file.close()
    return None
