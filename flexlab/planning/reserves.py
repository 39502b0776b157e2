"""Memory of a card that is never planned with, by what its arch's recipe says. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.spec.machine import RAM_POOL, Machine


def with_reserves(
    machine: Machine, gpu_recipe: Callable[[str | None], GpuRecipe | None]
) -> Machine:
    """The machine with each card's reserve in its pool; the host's RAM has one of its own."""
    reserved = {
        gpu.pool: recipe.memory_reserve.bytes
        for gpu in machine.gpus
        if gpu.pool != RAM_POOL
        and (recipe := gpu_recipe(gpu.arch)) is not None
        and recipe.memory_reserve is not None
    }
    pools = tuple(
        msgspec.structs.replace(pool, reserve_bytes=max(pool.reserve_bytes, reserved[pool.id]))
        if pool.id in reserved
        else pool
        for pool in machine.pools
    )
    return msgspec.structs.replace(machine, pools=pools)
