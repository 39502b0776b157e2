"""What the hardware helper says, joined with our instances and told to the scheduler."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping

from msgspec.structs import asdict, replace

from flexlab.gpus import inventory, pools
from flexlab.scheduler.scheduler import Scheduler
from flexlab.spec.instance import ContainerRef, LaunchRecord, MemoryUse, ProcessRef
from flexlab.spec.lab import HolderView
from flexlab.spec.machine import (
    RAM_POOL,
    Gpu,
    GpuSample,
    Holder,
    Machine,
    Sample,
)

FRESH_HOLDERS_S = 3.0
"""A scan of other processes that is older says nothing of what is held now."""


class GpuReadings:
    """The machine's GPUs with their last values, and who holds their memory."""

    def __init__(
        self,
        scheduler: Scheduler,
        held: Mapping[str, LaunchRecord],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`held`: instance id -> its launch record, as the launcher keeps them."""
        self._scheduler = scheduler
        self._held = held
        self._clock = clock
        self._machine: Machine | None = None
        self._sample: Sample | None = None
        self._epoch = -1
        self._quiet_since: float | None = None
        """The first tick since which nothing of ours came or went; None: not so at this one."""
        self._settled: set[str] = set()

    def begin(self, machine: Machine) -> None:
        """What was detected; live values are laid over it."""
        self._machine = machine
        self._settled = self._seen()

    @property
    def has_changed(self) -> bool:
        """The helper sees other GPUs than were detected, and was not yet believed.

        It sees none until its search has ended.
        """
        seen = self._seen()
        if self._machine is None or not seen or seen == self._settled:
            return False
        return seen != {gpu.id for gpu in self._machine.gpus}

    def _seen(self) -> set[str]:
        return {part.id for part in self._sample.gpus} if self._sample else set()

    def take(self, sample: Sample) -> None:
        """One tick of the helper, on the loop."""
        before, self._epoch = self._epoch, self._scheduler.epoch
        self._sample = sample
        if before != self._epoch:
            self._quiet_since = None
            return
        now = self._clock()
        if self._quiet_since is None:
            self._quiet_since = now
        age_s = sample.holders_age_s
        # A scan of before says what was held while a model still loaded, of a card that is full.
        fresh = age_s is not None and age_s <= min(FRESH_HOLDERS_S, now - self._quiet_since)
        measured = self._measured(sample.holders) if fresh else {}
        ours = {pool for i in self._scheduler.instances.values() for pool in i.claims}
        silent = {part.id for part in sample.gpus if part.stale or part.asleep}
        for gpu in self.gpus():
            for pool in pools.own_pools(gpu) if gpu.id not in silent else ():
                # Without a fresh scan, what is ours of the use is not known.
                if fresh or pool.id not in ours:
                    use = measured.get(pool.id, {})
                    self._scheduler.sample(pool.id, pool.used_bytes, use, self._epoch)

    def gpus(self) -> tuple[Gpu, ...]:
        """Every GPU, with the values of the last tick."""
        if self._machine is None:
            return ()
        if self._sample is None:
            return self._machine.gpus
        parts = {part.id: part for part in self._sample.gpus}
        read = [inventory.with_sample(gpu, parts.get(gpu.id)) for gpu in self._machine.gpus]
        # The host's RAM has readings of its own; what is shared is bounded by the last of them.
        account = self._scheduler.pools.get(RAM_POOL)
        ram = self._machine.pool(RAM_POOL)
        if ram is None:
            return tuple(read)
        now = replace(ram, used_bytes=account.used_bytes) if account else ram
        return tuple(pools.assign(read, now).gpus)

    @property
    def latest(self) -> Sample | None:
        """The last tick as it came; None before the first."""
        return self._sample

    def samples(self) -> tuple[GpuSample, ...]:
        """Every value of the last tick, with its age."""
        return self._sample.gpus if self._sample else ()

    def holders(self) -> tuple[HolderView, ...]:
        """Who holds GPU memory, and which of them are ours."""
        if self._sample is None:
            return ()
        owners = Owners(self._held)
        return tuple(_view(holder, owners, self._held) for holder in self._sample.holders)

    def _measured(self, holders: Iterable[Holder]) -> dict[str, dict[str, MemoryUse]]:
        """Pool -> instance -> what it holds there."""
        owners = Owners(self._held)
        sums: dict[tuple[str, str], int] = {}
        for holder in holders:
            instance = owners.of(holder)
            if instance is not None and holder.vram_bytes is not None:
                key = (holder.gpu, instance)
                sums[key] = sums.get(key, 0) + holder.vram_bytes
        found: dict[str, dict[str, MemoryUse]] = {}
        for (pool, instance), held in sums.items():
            use = MemoryUse(resident_bytes=held, own_bytes=held)
            found.setdefault(pool, {})[instance] = use
        return found


class Owners:
    """Whose a process is: by its session (our engines lead one each) or its container."""

    def __init__(self, held: Mapping[str, LaunchRecord]) -> None:
        self._by_session: dict[int, str] = {}
        self._by_container: dict[str, str] = {}
        for instance, record in held.items():
            if isinstance(record.ref, ProcessRef):
                self._by_session[record.ref.pid] = instance
            elif isinstance(record.ref, ContainerRef):
                self._by_container[record.ref.id] = instance

    def of(self, holder: Holder) -> str | None:
        """The instance that `holder` belongs to."""
        for container, instance in self._by_container.items():
            if container in (holder.cgroup or ""):
                return instance
        if holder.pid <= 0 or not self._by_session:
            return None
        try:
            return self._by_session.get(os.getsid(holder.pid))
        except OSError:
            return None


def _view(holder: Holder, owners: Owners, held: Mapping[str, LaunchRecord]) -> HolderView:
    instance = owners.of(holder)
    model = held[instance].plan.model if instance else None
    return HolderView(**asdict(holder), instance=instance, model=model)
