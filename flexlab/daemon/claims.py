"""What models really took: remembered between daemons, so that the next claim is a measurement.

`$STATE/claims.json`: by memory key (what takes the same memory whenever it runs) the highest use
of the last runs that served, and the least to claim after one died for lack of memory.
"""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from flexlab.daemon.files import read_state, write_private

log = logging.getLogger(__name__)
SCHEMA = 1
RUNS = 3
KEYS_MAX = 500
"""The oldest are forgotten: each variant, image and driver makes a key of its own."""
RAISED_BY = 1.15
"""Of the claim that was not enough (rule 2)."""


class Use(msgspec.Struct, kw_only=True):
    """Of one memory key, per pool in bytes."""

    runs: list[dict[str, int]] = []
    """Highest use of each of the last runs, the oldest first."""
    floor: dict[str, int] = {}
    """Never claim less."""


class _Claims(msgspec.Struct, kw_only=True):
    schema: int = SCHEMA
    uses: dict[str, Use] = {}


class Claims:
    """Kept on the loop, written by a worker; read by planning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = read_state(path, _Claims, SCHEMA)
        self._uses = dict(found.uses) if found else {}

    def measured(self) -> dict[str, dict[str, int]]:
        """Memory key -> pool -> the highest use of the last runs, never below the floor."""
        return {
            key: {
                pool: max(max(run.get(pool, 0) for run in use.runs), use.floor.get(pool, 0))
                for pool in {pool for run in use.runs for pool in run}
            }
            for key, use in self._uses.items()
            if use.runs
        }

    def floors(self) -> dict[str, dict[str, int]]:
        """Memory key -> pool -> the least to claim."""
        return {key: dict(use.floor) for key, use in self._uses.items() if use.floor}

    def remember_use(self, key: str, peak: dict[str, int]) -> None:
        """A run that served has ended."""
        use = self._uses.pop(key, Use())
        use.runs = [*use.runs, dict(peak)][-RUNS:]
        self._keep(key, use)

    def remember_shortage(self, key: str, claims: dict[str, int]) -> None:
        """It died for lack of memory: what was measured is worth nothing, and it was too little."""
        use = self._uses.pop(key, Use())
        use.runs = []
        raised = {pool: int(size * RAISED_BY) for pool, size in claims.items()}
        use.floor = {
            pool: max(raised.get(pool, 0), use.floor.get(pool, 0)) for pool in {*raised, *use.floor}
        }
        self._keep(key, use)

    def _keep(self, key: str, use: Use) -> None:
        self._uses[key] = use  # the newest last
        while len(self._uses) > KEYS_MAX:
            del self._uses[next(iter(self._uses))]

    def encoded(self) -> bytes:
        """As it is kept; on the loop, so that nothing changes meanwhile."""
        return msgspec.json.encode(_Claims(uses=self._uses))

    def write(self, content: bytes) -> None:
        """In a worker. A disk that is full loses what was learnt, and nothing else."""
        try:
            write_private(self._path, content)
        except OSError as error:
            log.warning("what models took is not kept: %s", error)
