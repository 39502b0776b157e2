"""What is here: the machine, its devices and the memory pools that they draw from."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import msgspec

Vendor = Literal["amd", "nvidia", "intel"]
PoolKind = Literal["ram", "vram", "unified", "mig", "devices"]

RAM_POOL = "ram"
CPU_DEVICE = "cpu"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """Something wrong or assumed: a stable code, one sentence, the next command."""

    code: str
    message: str
    hint: str


class DeviceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A file in /dev that a process needs to use a GPU."""

    path: str
    gid: int | None = None
    """Numeric group of the node: names differ between a host and an image. None: not readable."""


class MigSlice(msgspec.Struct, frozen=True, kw_only=True):
    """One MIG slice of an NVIDIA card; planning and pools see slices, not their card."""

    uuid: str
    gi: int | None = None
    profile: str | None = None
    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One schedulable accelerator. Identity is `id` (PCI slot, MIG UUID, or slot#kfd_node)."""

    index: int
    id: str
    pool: str
    vendor: Vendor | None
    arch: str | None
    name: str
    pci_id: str | None = None
    pci_slot: str | None = None
    card: str | None = None
    render_minor: int | None = None
    kfd_node: int | None = None
    hip_index: int | None = None
    cu_count: int | None = None
    is_apu: bool | None = None
    driver: str | None = None
    vram_total_bytes: int | None = None
    vram_used_bytes: int | None = None
    gtt_total_bytes: int | None = None
    pool_total_bytes: int | None = None
    pool_free_bytes: int | None = None
    busy_percent: float | None = None
    power_w: float | None = None
    temps_c: dict[str, float] = {}
    mig: tuple[MigSlice, ...] = ()
    usable: bool = True
    best: bool = False
    problems: tuple[Problem, ...] = ()
    gtt_used_bytes: int | None = None
    vram_reserved_bytes: int | None = None
    """The driver's own part of the total, counted in neither used nor free (NVML)."""
    unified: bool = False
    """Its memory is the host's RAM (an APU, a GB10, a Jetson)."""
    uuid: str | None = None
    """`GPU-…` as the vendor's runtime takes it; None where it has none (APUs)."""
    revision: str | None = None
    """PCI revision, two hex digits: tells products apart that share a device id."""
    driver_version: str | None = None
    cuda_version: str | None = None
    """The newest CUDA that the driver speaks; not what the card can run."""
    asleep: bool = False
    """Runtime-suspended: its sensors are not read, since that would wake it."""
    nodes: tuple[DeviceNode, ...] = ()


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """The CPU as a device: what this process may use of it, not what is soldered in."""

    name: str | None
    threads_total: int | None
    threads_usable: int | None
    """Whole threads by affinity and cgroup quota, at least 1; None when unreadable."""
    flags: frozenset[str] = frozenset()
    pool: str = RAM_POOL


class Pool(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that is accounted together. `used_bytes` is a reading with an age, not a constant."""

    id: str
    kind: PoolKind
    total_bytes: int | None
    used_bytes: int | None = None
    reserve_bytes: int = 0
    """Never planned with: kept for the system."""
    sampled_at: float | None = None
    budget_bytes: int | None = None
    """All our instances together may take at most this (setting `ram_limit`); None: no bound."""


CHIP_TEMPS = ("edge", "gpu", "pkg")
"""What the makers call the temperature of the chip as a whole, the first of these that it has."""


class GpuReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one read of a GPU's sensors gave; a value that the card does not have is absent.

    Names of numbers: `vram_total_bytes vram_used_bytes vram_reserved_bytes` (held back by the
    driver, in neither used nor free) `gtt_total_bytes gtt_used_bytes busy_percent
    memory_busy_percent power_w power_limit_w clock_core_mhz clock_memory_mhz fan_rpm fan_percent`
    and `temp_NAME_c` (`temp_edge_c`, `temp_junction_c`, `temp_mem_c`, `temp_gpu_c` …).
    """

    numbers: dict[str, float] = {}
    asleep: bool = False
    throttle: tuple[str, ...] = ()
    """Why the card runs slower than it could: thermal, power, current, hardware, other."""


class Aged(msgspec.Struct, frozen=True, array_like=True):
    """A value and how many seconds ago it was read."""

    value: float
    age_s: float


class GpuSample(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU in one tick: every known value with its age."""

    id: str
    values: dict[str, Aged] = {}
    asleep: bool = False
    throttle: tuple[str, ...] = ()
    stale: bool = False
    """Its source did not answer in time: the values are the last ones that it gave."""
    problem: Problem | None = None


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU, or of one MIG slice (`gpu` is then its UUID)."""

    gpu: str
    pid: int
    """As seen from here; 0 where the driver names a process of another pid namespace."""
    name: str | None = None
    cgroup: str | None = None
    """Path of its control group: tells containers apart."""
    vram_bytes: int | None = None
    gtt_bytes: int | None = None
    busy_percent: float | None = None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One tick of the hardware helper: one JSON line."""

    at: float
    seq: int
    gpus: tuple[GpuSample, ...] = ()
    holders: tuple[Holder, ...] = ()
    holders_age_s: float | None = None
    """None until the first full scan of other processes ended."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Everything that was detected, at one moment."""

    hostname: str
    platform: str | None
    """`linux/amd64` or `linux/arm64`; None when unknown."""
    cpu: Cpu
    gpus: tuple[Gpu, ...] = ()
    pools: tuple[Pool, ...] = ()
    findings: tuple[Problem, ...] = ()
    wsl: bool = False
    board: str | None = None
    """The device tree's or the firmware's name of the machine (`NVIDIA Jetson AGX Orin …`)."""

    def pool(self, pool_id: str) -> Pool | None:
        """The pool of this id, or None."""
        return self._pools_by_id.get(pool_id)

    @cached_property
    def _pools_by_id(self) -> dict[str, Pool]:
        return {pool.id: pool for pool in self.pools}
