"""Which memory a GPU draws from, and how much of it a model may have.

A discrete card has its VRAM. An APU has two pools that amdgpu uses interchangeably: a carve-out
(`mem_info_vram_total`, set in the firmware) and the RAM that it may map (GTT). Which one is meant
for models is the larger one; they are not added, since no backend is known to fill both. The
system's RAM is shared with everything else, so such a GPU names the pool `ram`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from flexlab.spec.machine import RAM_POOL, Gpu, Pool


class Pooled(NamedTuple):
    """GPUs that name their pool, and the pools beside the host's RAM."""

    gpus: list[Gpu]
    pools: list[Pool]


def assign(gpus: Sequence[Gpu], ram: Pool) -> Pooled:
    """Give every GPU its pool; MIG slices are pools of their own, in place of their card."""
    named = [_with_pool(gpu, ram) for gpu in gpus]
    return Pooled(named, [pool for gpu in named for pool in own_pools(gpu, ram.sampled_at)])


def shares_ram(gpu: Gpu) -> bool:
    """Its models live in the host's RAM.

    Unified memory does, except an AMD carve-out that is at least as large as the GTT limit: that
    was set aside for the GPU and is no RAM of the host's any more (ollama/ollama#13677, #17277).
    """
    if not gpu.unified and not gpu.is_apu:
        return False
    carved, mapped = gpu.vram_total_bytes, gpu.gtt_total_bytes
    # vram_total of other vendors' unified memory is the RAM itself.
    return not (gpu.vendor == "amd" and carved and mapped is not None and carved >= mapped)


def _with_pool(gpu: Gpu, ram: Pool) -> Gpu:
    if gpu.mig:
        return replace(gpu, pool=gpu.id)
    if not shares_ram(gpu):
        total, used = gpu.vram_total_bytes, gpu.vram_used_bytes
        reserved = gpu.vram_reserved_bytes or 0
        free = None if total is None or used is None else max(0, total - used - reserved)
        return replace(gpu, pool=gpu.id, pool_total_bytes=total, pool_free_bytes=free)
    total, free = _shared_memory(gpu, ram)
    return replace(gpu, pool=RAM_POOL, unified=True, pool_total_bytes=total, pool_free_bytes=free)


def _shared_memory(gpu: Gpu, ram: Pool) -> tuple[int | None, int | None]:
    """min(what the GPU may map, what the host can spare), total and free now; None: unknown."""
    if ram.total_bytes is None:
        return gpu.gtt_total_bytes, None
    total = max(0, ram.total_bytes - ram.reserve_bytes)
    free = None if ram.used_bytes is None else max(0, total - ram.used_bytes)
    if gpu.vendor != "amd":
        return total, free  # no limit below the RAM itself
    mapped = gpu.gtt_total_bytes
    if mapped is None:
        return None, None
    if gpu.gtt_used_bytes is None:
        free = None
    elif free is not None:
        free = min(free, max(0, mapped - gpu.gtt_used_bytes))
    return min(total, mapped), free


def own_pools(gpu: Gpu, sampled_at: float | None = None) -> list[Pool]:
    """The pools that only `gpu` draws from: its VRAM, or its slices; none where it shares RAM."""
    if gpu.mig:
        return [
            Pool(
                id=part.uuid,
                kind="mig",
                total_bytes=part.vram_total_bytes,
                used_bytes=part.vram_used_bytes,
                sampled_at=sampled_at,
            )
            for part in gpu.mig
        ]
    if gpu.pool == RAM_POOL:
        return []
    return [
        Pool(
            id=gpu.pool,
            kind="vram",
            total_bytes=gpu.vram_total_bytes,
            used_bytes=gpu.vram_used_bytes,
            reserve_bytes=gpu.vram_reserved_bytes or 0,
            sampled_at=sampled_at,
        )
    ]
