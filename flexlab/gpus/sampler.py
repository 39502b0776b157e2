"""One tick after another: every GPU's values with their age, and who holds its memory.

Nothing slow delays a tick. A card that hangs keeps its last values, which grow old; the search for
GPUs and the scan of other processes run beside the ticks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flexlab.core.text import clean_line
from flexlab.gpus import inventory, problems
from flexlab.gpus.files import list_names
from flexlab.gpus.patience import Background, Outcome, Patience
from flexlab.gpus.source import Source
from flexlab.spec.machine import Aged, Gpu, GpuReading, GpuSample, Problem, Sample

if TYPE_CHECKING:
    from flexlab.gpus.holders import Scan

READ_DEADLINE_S = 1.0
"""One card's readings; a healthy one answers in a few milliseconds."""
LOOK_EVERY_S = 2.0
"""How often the bus is looked at for cards that came, went or changed their driver."""
FAILING_S = (5.0, 60.0)
"""All cards fail (a driver that is being replaced): found anew after so long, doubled up to."""
SILENT_S = (60.0, 3600.0)
"""A driver hung when its cards were searched: asked anew after so long, doubled up to; each time
may cost a thread that never ends."""


class Sampler:
    """Makes Samples. Its methods are for one thread; `holders_every_s` may be set from any."""

    def __init__(
        self,
        root: Path,
        *,
        holders_every_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.holders_every_s = holders_every_s
        self._clock = clock
        self._wall = wall
        self._finder = _Finder(root)
        self._holders = _Holders(root)
        self._patience = Patience(READ_DEADLINE_S)
        self._gpus: Mapping[str, Gpu] = {}
        self._sources: Mapping[str, Source] = {}
        self._last: dict[str, _Last] = {}
        self._seq = 0

    def begin(self, patience_s: float) -> None:
        """Search for GPUs, at most so long; what is found later is in later ticks."""
        self._finder.look(self._clock(), failing=False)
        self._finder.wait(patience_s)

    def tick(self) -> Sample:
        """Everything now. Takes milliseconds, or two deadlines when a card has begun to hang."""
        self._find()
        outcomes = self._patience.collect({key: s.read for key, s in self._sources.items()})
        now = self._clock()
        for gpu_id, outcome in outcomes.items():
            self._last[gpu_id] = self._last.get(gpu_id, _Last()).after(outcome, gpu_id)
        scan, scan_age_s = self._holders.at(now, self.holders_every_s, self._gpus.values())
        self._seq += 1
        return Sample(
            at=self._wall(),
            seq=self._seq,
            gpus=tuple(self._last.get(key, _Last()).sample(key, now) for key in self._gpus),
            holders=scan.holders if scan else (),
            holders_age_s=scan_age_s,
        )

    def _find(self) -> None:
        lost = [last.failed for key, last in self._last.items() if key in self._sources]
        found = self._finder.look(self._clock(), failing=bool(lost) and all(lost))
        if found is None:
            return
        before = self._gpus
        self._gpus = {gpu.id: gpu for gpu in found.gpus}
        self._sources = {
            source.gpu_id: self._old(source.gpu_id, before) or source for source in found.sources
        }
        self._last = {key: last for key, last in self._last.items() if key in self._gpus}

    def _old(self, gpu_id: str, before: Mapping[str, Gpu]) -> Source | None:
        """The source that this card has: it knows the counters that rates are made of.

        Not when the card has changed (MIG slices, a driver), nor when its source fails.
        """
        same = before.get(gpu_id) == self._gpus.get(gpu_id)
        failed = gpu_id in self._last and self._last[gpu_id].failed
        return self._sources.get(gpu_id) if same and not failed else None


class _Last(NamedTuple):
    """What a card said last, when, and what is wrong since."""

    reading: GpuReading = GpuReading()
    at: float = 0.0
    failed: bool = False
    problem: Problem | None = None

    def after(self, outcome: Outcome[GpuReading], gpu_id: str) -> _Last:
        """With what came of the next read."""
        if outcome.value is not None and outcome.at is not None:
            return _Last(outcome.value, outcome.at)
        if outcome.hung:
            why = f"the driver of GPU {gpu_id} does not answer"
        else:
            why = f"GPU {gpu_id} cannot be read: {clean_line(outcome.error or 'no answer')}"
        problem = problems.not_answering(f"{why}; its values are the last ones that it gave")
        return self._replace(failed=not outcome.hung, problem=problem)

    def sample(self, gpu_id: str, now: float) -> GpuSample:
        """As it is told; an age is never below 0."""
        age_s = round(max(0.0, now - self.at), 3)
        return GpuSample(
            id=gpu_id,
            values={
                name: Aged(float(value), age_s)
                for name, value in self.reading.numbers.items()
                if math.isfinite(value)  # JSON has no other
            },
            asleep=self.reading.asleep,
            throttle=self.reading.throttle,
            stale=self.problem is not None,
            problem=self.problem,
        )


class _Found(NamedTuple):
    bus: tuple[tuple[str, ...], ...]
    gpus: list[Gpu]
    sources: list[Source]


class _Finder:
    """Searches for GPUs beside the ticks: at first, when the bus changes, when all cards fail."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._search: Background[_Found | None] = Background()
        self._bus: tuple[tuple[str, ...], ...] | None = None
        self._silent = False
        self._looked_at = -math.inf
        self._searched_at = -math.inf
        self._vain = 0
        """Searches in a row that were made because something was wrong."""

    def wait(self, seconds: float) -> None:
        """Until a search that runs is over, at most so long."""
        self._search.wait(seconds)

    def look(self, now: float, *, failing: bool) -> _Found | None:
        """What a search found, once; begins one when it is time."""
        if self._search.busy:
            return None
        outcome = self._search.take()
        found = outcome.value if outcome else None
        if found is not None:
            self._bus = found.bus
            self._silent = any(_is_silent(gpu) for gpu in found.gpus)
            self._searched_at = now
        if not failing and not self._silent:
            self._vain = 0
        anew = now - self._searched_at >= self._gap_s(failing)
        if anew or now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at = now
            self._vain += anew
            known = None if anew else self._bus
            self._search.begin(lambda: _search(self._root, known))
        return found

    def _gap_s(self, failing: bool) -> float:
        if self._bus is None or not (failing or self._silent):
            return math.inf
        first, longest = SILENT_S if self._silent else FAILING_S
        return min(longest, first * 2.0 ** min(self._vain, 16))


def _search(root: Path, known: tuple[tuple[str, ...], ...] | None) -> _Found | None:
    """The GPUs, unless the bus looks as `known`."""
    bus = _bus(root)
    if bus == known:
        return None
    gpus, _findings = inventory.find_gpus(root)
    return _Found(bus, gpus, inventory.sources(root, gpus))


def _is_silent(gpu: Gpu) -> bool:
    return any(problem.code == "not_answering" for problem in gpu.problems)


def _bus(root: Path) -> tuple[tuple[str, ...], ...]:
    """Names that change when a card or a MIG slice comes or goes, or gets another driver.

    Names only: to list a folder wakes no card.
    """
    folders = [
        "sys/bus/pci/devices",
        "sys/class/drm",
        "sys/class/kfd/kfd/topology/nodes",
        "proc/driver/nvidia/gpus",
    ]
    drivers = ("amdgpu", "radeon", "nvidia", "nouveau", "i915", "xe", "vfio-pci")
    folders += [f"sys/bus/pci/drivers/{driver}" for driver in drivers]
    capabilities = "proc/driver/nvidia/capabilities"
    folders += [f"{capabilities}/{gpu}/mig" for gpu in list_names(root / capabilities)]
    # Connectors (card0-DP-1) come and go with monitors.
    return tuple(
        tuple(name for name in list_names(Path(os.path.join(root, folder))) if "-" not in name)
        for folder in folders
    )


class _Holders:
    """The scan of other processes, beside the ticks: it may take seconds, or hang."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._job: Background[Scan] = Background()
        self._scan: Scan | None = None
        self._at = 0.0
        self._begun_at = -math.inf

    def at(
        self, now: float, every_s: float, gpus: Iterable[Gpu]
    ) -> tuple[Scan | None, float | None]:
        """The last scan and its age in seconds; begins the next one when it is time."""
        outcome = self._job.take()
        if outcome is not None and outcome.value is not None and outcome.at is not None:
            self._scan, self._at = outcome.value, outcome.at
        here = list(gpus)
        if here and not self._job.busy and now - self._begun_at >= every_s:
            self._begun_at = now
            self._job.begin(lambda: _scan(self._root, here, self._scan))
        if self._scan is None:
            return None, None
        return self._scan, round(max(0.0, now - self._at), 3)


def _scan(root: Path, gpus: list[Gpu], previous: Scan | None) -> Scan:
    # Imported beside the ticks: the first line does not wait for it.
    from flexlab.gpus import holders

    return holders.scan(root, gpus, previous=previous)
