"""What is here: the machine, its devices and the memory pools that they draw from."""

from __future__ import annotations

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


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was detected, at one moment."""

    hostname: str
    platform: str | None
    """`linux/amd64` or `linux/arm64`; None when unknown."""
    cpu: Cpu
    gpus: tuple[Gpu, ...] = ()
    pools: tuple[Pool, ...] = ()
    findings: tuple[Problem, ...] = ()

    def pool(self, pool_id: str) -> Pool | None:
        """The pool of this id, or None."""
        return next((pool for pool in self.pools if pool.id == pool_id), None)
