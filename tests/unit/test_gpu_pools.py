"""Which memory a GPU draws from, and how much of it a model may have."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_trees import GIB, MIB
from hypothesis import example, given
from hypothesis import strategies as st

from flexlab.gpus import pools
from flexlab.spec.machine import RAM_POOL, Gpu, MigSlice, Pool

ID = "0000:03:00.0"


def ram(total: int | None = 64 * GIB, used: int | None = 10 * GIB, reserve: int = 4 * GIB) -> Pool:
    return Pool(id=RAM_POOL, kind="ram", total_bytes=total, used_bytes=used, reserve_bytes=reserve)


def card(**values: Any) -> Gpu:
    base: dict[str, Any] = {
        "index": 0,
        "id": ID,
        "pool": "",
        "vendor": "amd",
        "arch": None,
        "name": "a card",
    }
    return Gpu(**(base | {"is_apu": False} | values))


def apu(**values: Any) -> Gpu:
    return card(**({"is_apu": True, "unified": True} | values))


def assigned(gpu: Gpu, host: Pool | None = None) -> tuple[Gpu, list[Pool]]:
    found = pools.assign([gpu], host or ram())
    return found.gpus[0], found.pools


def sizes(gpu: Gpu, host: Pool | None = None) -> tuple[str, int | None, int | None]:
    named, _ = assigned(gpu, host)
    return named.pool, named.pool_total_bytes, named.pool_free_bytes


# -- a card of its own


def test_a_card_has_its_own_memory() -> None:
    named, (pool,) = assigned(card(vram_total_bytes=24 * GIB, vram_used_bytes=2 * GIB))
    assert (named.pool, named.pool_total_bytes, named.pool_free_bytes) == (ID, 24 * GIB, 22 * GIB)
    assert (pool.id, pool.kind) == (ID, "vram")
    assert (pool.total_bytes, pool.used_bytes) == (24 * GIB, 2 * GIB)


@pytest.mark.parametrize("gtt", [8 * GIB, 24 * GIB, 120 * GIB])
@pytest.mark.parametrize("is_apu", [False, None])
def test_what_a_card_may_map_is_never_its_memory(gtt: int, is_apu: bool | None) -> None:
    gpu = card(is_apu=is_apu, vram_total_bytes=24 * GIB, vram_used_bytes=0, gtt_total_bytes=gtt)
    assert sizes(gpu) == (ID, 24 * GIB, 24 * GIB)
    assert sizes(card(is_apu=is_apu, gtt_total_bytes=gtt, gtt_used_bytes=0)) == (ID, None, None)


def test_what_the_driver_keeps_is_not_free() -> None:
    gpu = card(
        vendor="nvidia",
        vram_total_bytes=24 * GIB,
        vram_used_bytes=GIB,
        vram_reserved_bytes=512 * MIB,
    )
    named, (pool,) = assigned(gpu)
    assert named.pool_free_bytes == 24 * GIB - GIB - 512 * MIB
    assert pool.reserve_bytes == 512 * MIB


@pytest.mark.parametrize(
    ("total", "used", "free"),
    [(None, None, None), (None, GIB, None), (24 * GIB, None, None), (24 * GIB, 25 * GIB, 0)],
)
def test_unknown_memory_is_unknown_and_never_below_nothing(
    total: int | None, used: int | None, free: int | None
) -> None:
    assert sizes(card(vram_total_bytes=total, vram_used_bytes=used)) == (ID, total, free)


def test_partitions_are_pools_of_their_own() -> None:
    parts = [
        card(id=f"{ID}#{node}", kfd_node=node, vram_total_bytes=24 * GIB, vram_used_bytes=node)
        for node in (1, 2)
    ]
    found = pools.assign(parts, ram())
    assert [(pool.id, pool.used_bytes) for pool in found.pools] == [(f"{ID}#1", 1), (f"{ID}#2", 2)]


# -- APUs


def test_a_strix_halo_with_a_small_carve_out_has_what_it_may_map() -> None:
    """mudler/LocalAI#12058: 512 MiB, nearly all used, is no shortage."""
    gpu = apu(
        vram_total_bytes=512 * MIB,
        vram_used_bytes=484 * MIB,
        gtt_total_bytes=120 * GIB,
        gtt_used_bytes=20 * GIB,
    )
    host = ram(total=127 * GIB, used=25 * GIB, reserve=2 * GIB)
    # GTT leaves 100 GiB, the host itself 127 - 2 - 25.
    assert sizes(gpu, host) == (RAM_POOL, 120 * GIB, 100 * GIB)
    assert sizes(gpu, ram(127 * GIB, 60 * GIB, 2 * GIB)) == (RAM_POOL, 120 * GIB, 65 * GIB)
    assert sizes(gpu, ram(64 * GIB, 25 * GIB, 2 * GIB)) == (RAM_POOL, 62 * GIB, 37 * GIB)
    assert assigned(gpu, host)[1] == []


def test_a_large_carve_out_is_the_pool_whatever_the_host_has_left() -> None:
    """ollama/ollama#17277: 96 GiB set aside, of which 25 are used; the host has 17 GiB left."""
    gpu = apu(
        vram_total_bytes=96 * GIB,
        vram_used_bytes=25 * GIB,
        gtt_total_bytes=15 * GIB,
        gtt_used_bytes=GIB,
    )
    named, (pool,) = assigned(gpu, ram(total=31 * GIB, used=14 * GIB))
    assert (named.pool, named.pool_total_bytes, named.pool_free_bytes) == (ID, 96 * GIB, 71 * GIB)
    assert (pool.kind, pool.total_bytes, pool.used_bytes) == ("vram", 96 * GIB, 25 * GIB)


@pytest.mark.parametrize(
    ("carved", "mapped", "pool"),
    [(16, 8, ID), (16, 16, ID), (16, 17, RAM_POOL), (None, 16, RAM_POOL), (0, 0, RAM_POOL)],
)
def test_the_larger_of_an_apus_two_memories_is_meant(
    carved: int | None, mapped: int, pool: str
) -> None:
    """ollama/ollama#13677: 16 GiB set aside are not halved by a GTT limit of 8."""
    gpu = apu(
        vram_total_bytes=None if carved is None else carved * GIB, gtt_total_bytes=mapped * GIB
    )
    assert sizes(gpu)[0] == pool


def test_an_apus_two_memories_are_not_added() -> None:
    gpu = apu(
        vram_total_bytes=8 * GIB, vram_used_bytes=0, gtt_total_bytes=30 * GIB, gtt_used_bytes=0
    )
    assert sizes(gpu)[1:] == (30 * GIB, 30 * GIB)


@pytest.mark.parametrize("carved", [None, 512 * MIB, 96 * GIB])
def test_an_apu_whose_limit_is_hidden_is_unknown(carved: int | None) -> None:
    gpu = apu(vram_total_bytes=carved, vram_used_bytes=0)
    assert sizes(gpu) == (RAM_POOL, None, None)


def test_an_apu_of_which_the_use_is_hidden_has_an_unknown_rest() -> None:
    assert sizes(apu(gtt_total_bytes=30 * GIB)) == (RAM_POOL, 30 * GIB, None)


def test_without_the_hosts_memory_an_apus_rest_is_unknown() -> None:
    gpu = apu(gtt_total_bytes=30 * GIB, gtt_used_bytes=0)
    assert sizes(gpu, ram(total=None, used=None)) == (RAM_POOL, 30 * GIB, None)
    assert sizes(gpu, ram(used=None)) == (RAM_POOL, 30 * GIB, None)


def test_an_apu_that_is_not_said_to_be_unified_is_all_the_same() -> None:
    named, _ = assigned(apu(unified=False, gtt_total_bytes=30 * GIB, gtt_used_bytes=0))
    assert (named.pool, named.unified) == (RAM_POOL, True)


# -- unified memory of others


@pytest.mark.parametrize("vendor", ["nvidia", "intel"])
@pytest.mark.parametrize("total", [None, 128 * GIB])
def test_other_unified_memory_is_bound_by_the_host_alone(vendor: str, total: int | None) -> None:
    """GB10, Jetson, Intel's integrated GPUs: the total that a driver tells is the RAM's own."""
    gpu = card(vendor=vendor, is_apu=None, unified=True, vram_total_bytes=total)
    named, own = assigned(gpu, ram(total=119 * GIB, used=20 * GIB, reserve=4 * GIB))
    assert (named.pool, own) == (RAM_POOL, [])
    assert (named.pool_total_bytes, named.pool_free_bytes) == (115 * GIB, 95 * GIB)


def test_two_gpus_may_share_the_hosts_memory_beside_a_card() -> None:
    integrated = apu(id="0000:12:00.0", gtt_total_bytes=30 * GIB)
    found = pools.assign([card(vram_total_bytes=GIB), integrated], ram())
    assert [gpu.pool for gpu in found.gpus] == [ID, RAM_POOL]
    assert [pool.id for pool in found.pools] == [ID]


# -- MIG


def test_slices_are_pools_in_place_of_their_card() -> None:
    parts = (
        MigSlice(uuid="MIG-1", vram_total_bytes=20 * GIB, vram_used_bytes=GIB),
        MigSlice(uuid="MIG-2", vram_total_bytes=10 * GIB),
    )
    gpu = card(vendor="nvidia", vram_total_bytes=80 * GIB, vram_used_bytes=30 * GIB, mig=parts)
    named, own = assigned(gpu)
    assert named.pool_total_bytes is None
    assert [(pool.id, pool.kind, pool.total_bytes, pool.used_bytes) for pool in own] == [
        ("MIG-1", "mig", 20 * GIB, GIB),
        ("MIG-2", "mig", 10 * GIB, None),
    ]


# -- anything

BYTES = st.one_of(st.none(), st.just(0), st.integers(0, 2**48))
VENDORS = st.sampled_from(["amd", "nvidia", "intel", None])
GPUS = st.builds(
    card,
    vendor=VENDORS,
    is_apu=st.sampled_from([True, False, None]),
    unified=st.booleans(),
    vram_total_bytes=BYTES,
    vram_used_bytes=BYTES,
    vram_reserved_bytes=BYTES,
    gtt_total_bytes=BYTES,
    gtt_used_bytes=BYTES,
)
HOSTS = st.builds(ram, total=BYTES, used=BYTES, reserve=st.integers(0, 2**40))


@given(GPUS, HOSTS)
@example(card(vram_total_bytes=0, vram_used_bytes=0), ram())
def test_what_is_free_lies_between_nothing_and_all(gpu: Gpu, host: Pool) -> None:
    named, own = assigned(gpu, host)
    total, free = named.pool_total_bytes, named.pool_free_bytes
    if free is not None:
        assert total is not None
        assert 0 <= free <= total
    shared = named.pool == RAM_POOL
    assert own == [] if shared else [pool.id for pool in own] == [named.pool]
    # Free memory cannot be known where what it is made of is not.
    needed = (host.total_bytes, host.used_bytes) if shared else (gpu.vram_total_bytes,)
    if None in needed or (not shared and gpu.vram_used_bytes is None):
        assert free is None


@given(GPUS, HOSTS)
def test_only_unified_memory_is_the_hosts(gpu: Gpu, host: Pool) -> None:
    named, _ = assigned(gpu, host)
    if named.pool == RAM_POOL:
        assert gpu.unified or gpu.is_apu
        assert named.unified
    elif gpu.unified or gpu.is_apu:
        assert gpu.vendor == "amd"
        assert (gpu.vram_total_bytes or 0) >= (gpu.gtt_total_bytes or 0)


@given(GPUS, HOSTS)
def test_to_give_a_gpu_its_pool_again_changes_nothing(gpu: Gpu, host: Pool) -> None:
    """Live values are laid over a machine whose GPUs have their pools."""
    once = pools.assign([gpu], host)
    assert pools.assign(once.gpus, host) == once
