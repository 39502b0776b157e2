"""How whoever started a detached daemon hears whether it came up."""

from __future__ import annotations

import logging
import os

import msgspec

from flexlab.core.errors import FlexLabError
from flexlab.spec.control import Ready, WireProblem

log = logging.getLogger(__name__)


class ReadyPipe:
    """Tells the one who started a detached daemon, with one JSON line, how that went."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def ready(self) -> None:
        """It listens."""
        self._tell(Ready(ready=True))

    def already(self) -> None:
        """Another one was faster."""
        self._tell(Ready(already=True))

    def failed(self, error: FlexLabError) -> None:
        """It cannot start, and why."""
        self._tell(Ready(error=WireProblem.of(error)))

    def _tell(self, said: Ready) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            os.write(descriptor, msgspec.json.encode(said) + b"\n")
        except BrokenPipeError:
            log.info("whoever started this daemon has left already")
        finally:
            os.close(descriptor)
