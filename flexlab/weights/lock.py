"""One fetch per source, over all processes of all users of a models folder."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from flexlab.weights.files import disk_trouble


class FileLock:
    """A flock that goes away with its holder, however that ends. `held` says whether it is ours."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    @property
    def held(self) -> bool:
        return self._handle is not None

    def try_hold(self) -> bool:
        """Take it unless somebody else has it. Raises WeightsError when the disk says no."""
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise disk_trouble(self._path, error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError as error:
            os.close(handle)
            raise disk_trouble(self._path, error) from error
        self._handle = handle
        return True

    def release(self) -> None:
        """Give it up; the file stays, since removing it would let two holders in."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
