"""A model that is too big for one card, on several together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import ask_shipped, because, card, launched, refused, with_cards

from flexlab.core.units import GIB
from flexlab.planning import devices
from flexlab.planning.devices import gpu_devices
from flexlab.spec.machine import Gpu, Machine, MigSlice, Vendor
from flexlab.spec.plan import Candidate


def nvidia(index: int, total: int = 16 * GIB, arch: str = "sm_89") -> Gpu:
    return card(index, arch, total, "nvidia")


def slots(*indexes: int) -> tuple[str, ...]:
    return tuple(f"0000:{index + 3:02x}:00.0" for index in indexes)


def joined(model: str, here: Machine, **wishes: Any) -> list[Candidate]:
    return [one for one in ask_shipped(model, here, **wishes).items if len(one.devices) > 1]


def test_vllm_splits_every_layer_over_two_equal_cards() -> None:
    here = with_cards(nvidia(0), nvidia(1), nvidia(2))
    (chosen,) = joined("qwen3-32b", here, variant="awq")
    assert chosen.devices == slots(0, 1)
    assert because(chosen, "GPU 0") == "it is too big for one of them"
    first, second = chosen.needs
    assert (first.terms, first.total_bytes) == (second.terms, second.total_bytes)
    plan = launched(chosen, here)
    assert plan.args[plan.args.index("--tensor-parallel-size") + 1] == "2"
    assert plan.gpu_uuids == ("GPU-0", "GPU-1")
    assert plan.device_nodes == ()


def test_the_number_of_cards_that_share_every_layer_divides_the_heads() -> None:
    small = [nvidia(index, 11 * GIB) for index in range(5)]
    assert [one.devices for one in joined("qwen3-32b", with_cards(*small), variant="awq")] == [
        slots(0, 1, 2, 3)
    ]
    # Three do not, and two of 11 GiB are not enough.
    assert not joined("qwen3-32b", with_cards(*small[:3]), variant="awq")


@pytest.mark.parametrize(
    "other", [nvidia(1, 12 * GIB), nvidia(1, arch="sm_86"), card(1, "gfx1100", 16 * GIB)]
)
def test_unequal_cards_never_share_every_layer(other: Gpu) -> None:
    here = with_cards(nvidia(0), other)
    answer = ask_shipped("qwen3-32b", here, variant="awq")
    assert refused(answer).code == "too_big"


def test_llamacpp_gives_each_card_layers_by_its_memory() -> None:
    here = with_cards(card(0, total=16 * GIB), card(1, total=8 * GIB))
    (chosen,) = joined("qwen3-32b", here)
    assert (chosen.variant, chosen.devices) == ("q4-k-m", slots(0, 1))
    large, small, host = chosen.needs
    assert large.terms["weights"] == pytest.approx(2 * small.terms["weights"], rel=1e-6)
    assert large.terms["weights"] + small.terms["weights"] == 19_762_149_024
    # What every card needs for itself is there twice, what stays in RAM once.
    assert large.terms["compute"] == small.terms["compute"] > 0
    assert set(host.terms) == {"prompt_cache", "overhead"}


def test_only_the_chosen_cards_are_passed_in_and_they_count_from_zero_inside() -> None:
    here = with_cards(card(0, total=8 * GIB), card(1, total=16 * GIB), card(2, total=16 * GIB))
    chosen = next(one for one in joined("qwen3-32b", here) if one.backend == "llamacpp")
    assert chosen.devices == slots(1, 2)
    plan = launched(chosen, here)
    assert plan.env["HIP_VISIBLE_DEVICES"] == plan.env["ROCR_VISIBLE_DEVICES"] == "0,1"
    assert set(plan.device_nodes) == {"/dev/kfd", "/dev/dri/renderD129", "/dev/dri/renderD130"}
    assert plan.args[plan.args.index("--split-mode") + 1] == "layer"


def test_one_card_that_holds_it_is_better_than_two() -> None:
    answer = ask_shipped("qwen3-32b", with_cards(card(0, total=16 * GIB), card(1), card(2)))
    assert answer.items
    assert all(len(one.devices) == 1 for one in answer.items)


def test_no_model_is_split_over_two_vendors() -> None:
    here = with_cards(card(0, total=16 * GIB), nvidia(1))
    assert not joined("qwen3-32b", here)


def test_a_card_that_was_asked_for_stays_alone() -> None:
    here = with_cards(card(0, total=16 * GIB), card(1, total=16 * GIB))
    assert joined("qwen3-32b", here)
    assert not joined("qwen3-32b", here, gpu="0")


def test_archs_that_need_other_variables_are_no_pair() -> None:
    here = with_cards(card(0, "gfx906", 16 * GIB), card(1, "gfx1100", 16 * GIB))
    assert not joined("qwen3-32b", here)


def test_a_larger_card_of_another_arch_keeps_nobody_from_the_two_that_fit_together() -> None:
    odd = card(0, "gfx906", 18 * GIB)
    here = with_cards(odd, card(1, total=16 * GIB), card(2, total=16 * GIB))
    assert slots(1, 2) in [one.devices for one in joined("qwen3-32b", here, backend="llamacpp")]


def test_slices_of_a_card_and_the_hosts_ram_are_no_second_card() -> None:
    slices = tuple(
        MigSlice(uuid=f"MIG-{n}", gi=n, profile="2g.12gb", vram_total_bytes=12 * GIB)
        for n in range(4)
    )
    here = with_cards(card(0, "sm_90", 48 * GIB, "nvidia", mig=slices))
    assert not joined("qwen3-32b", here)
    shared = [card(n, total=16 * GIB, pool="ram", unified=True) for n in range(2)]
    assert not joined("qwen3-32b", with_cards(*shared, ram=18 * GIB))


cards = st.lists(
    st.tuples(
        st.sampled_from(["amd", "nvidia", "intel"]),
        st.sampled_from(["a", "b"]),
        st.sampled_from([None, 8 * GIB, 16 * GIB]),
        st.sampled_from(["own", "ram", "slices"]),
    ),
    max_size=10,
)


@given(cards, st.booleans())
def test_whatever_is_joined_is_of_one_vendor_and_whole_cards(
    drawn: list[tuple[Vendor, str, int | None, str]], alike: bool
) -> None:
    part = (MigSlice(uuid="MIG", vram_total_bytes=GIB),)
    gpus = [
        card(
            at,
            arch,
            pool_total_bytes=total,
            vendor=vendor,
            **({"pool": "ram"} if pool == "ram" else {"mig": part} if pool == "slices" else {}),
        )
        for at, (vendor, arch, total, pool) in enumerate(drawn)
    ]
    found = devices.together(gpu_devices(with_cards(*gpus)), alike=alike)
    assert len({tuple(one.id for one in group) for group in found}) == len(found)
    assert all(len(one) <= len(two) for one, two in itertools.pairwise(found))
    for group in found:
        assert len({one.id for one in group}) == len(group) > 1
        assert len({one.gpu.vendor for one in group if one.gpu}) == 1
        assert not any(one.slice or one.pool == "ram" or not one.total_bytes for one in group)
        if alike:
            assert len({(one.arch, one.total_bytes) for one in group}) == 1
            assert len(group) in (2, 4, 8)
