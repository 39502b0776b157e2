"""The memory need, held against what the real engine was measured to take."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import Shape, backend_recipe

from flexlab.backends.base import BackendSettings
from flexlab.backends.llamacpp import LlamaCppSettings
from flexlab.core.units import MIB
from flexlab.planning.fit import Estimate, Ground, Model, claim_bytes, estimate, highest
from flexlab.spec.plan import Need

WEIGHTS = 98_362_432
SMOLLM2 = Model(weight_bytes=WEIGHTS, parameters=134_515_008, shape=Shape())


def need(model: Model = SMOLLM2, overhead: int = 0, **settings: Any) -> Estimate:
    return estimate(LlamaCppSettings(**settings), model, Ground(overhead))


@pytest.mark.parametrize(
    ("settings", "resident_mb"),
    [
        ({}, 270),
        ({"context_size": 512}, 171),
        ({"context_size": 8192}, 363),
        ({"context_size": 2048, "parallel": 4}, 366),
        ({"ubatch_size": 2048}, 310),
        ({"cache_type_k": "q8_0", "cache_type_v": "q8_0"}, 226),
        ({"flash_attention": "off"}, 313),
        ({"embeddings": True}, 400),
    ],
)
def test_the_estimate_is_just_above_what_the_engine_took(
    settings: dict[str, Any], resident_mb: int
) -> None:
    # The prompt cache was off in these runs: how full it gets is the users' doing.
    found = need(overhead=80_000_000, cache_ram_mib=0, **settings).total_bytes / 1e6
    assert resident_mb < found < 1.35 * resident_mb


def test_with_the_shipped_overhead_a_full_prompt_cache_is_covered() -> None:
    # 432 MB resident after many requests: context 8192 in 4 slots, with the prompt cache on.
    overhead = backend_recipe("llamacpp").memory.overhead
    assert need(overhead=overhead, context_size=2048, parallel=4).total_bytes > 432_000_000


def test_the_kv_cache_is_layers_times_heads_times_tokens() -> None:
    assert need(context_size=4096).terms["kv_cache"] == 4096 * 30 * 3 * (64 + 64) * 2
    assert need(context_size=100).terms["kv_cache"] == need(context_size=256).terms["kv_cache"]


@pytest.mark.parametrize(
    ("cache_type", "bits"), [("f32", 32), ("f16", 16), ("q8_0", 8.5), ("q5_1", 6), ("q4_0", 4.5)]
)
def test_a_smaller_cache_type_takes_its_share(cache_type: str, bits: float) -> None:
    found = need(cache_type_k=cache_type, cache_type_v=cache_type).terms["kv_cache"]
    assert found == need().terms["kv_cache"] * bits / 16


def test_a_recurrent_model_keeps_no_tokens() -> None:
    model = Model(weight_bytes=1, shape=Shape(kv_heads_total=0))
    assert need(model).terms["kv_cache"] == 0


def test_without_a_header_the_kv_cache_is_guessed_and_marked() -> None:
    found = need(Model(weight_bytes=WEIGHTS, parameters=134_515_008))
    assert "kv_cache" in found.guessed
    assert 0.5 < found.terms["kv_cache"] / need().terms["kv_cache"] < 2
    assert found.certain_bytes == WEIGHTS + 256 * MIB
    assert set(found.certain_terms) == {"weights", "prompt_cache", "overhead"}


def test_what_nobody_knows_is_left_out_and_named() -> None:
    found = need(Model(weight_bytes=None))
    assert found.unknown == ("weights", "kv_cache")
    assert not {"weights", "kv_cache"} & set(found.terms)


def test_settings_of_another_engine_are_not_estimated_as_if_they_were_llamas() -> None:
    with pytest.raises(TypeError):
        estimate(BackendSettings(), SMOLLM2, Ground(0))


GROWING = st.fixed_dictionaries(
    {
        "context_size": st.integers(1, 200_000),
        "parallel": st.integers(1, 64),
        "cache_ram_mib": st.integers(0, 10_000),
    }
)


@given(GROWING, st.sampled_from(["context_size", "parallel", "cache_ram_mib"]), st.integers(1, 999))
def test_more_of_anything_never_needs_less(settings: dict[str, int], name: str, more: int) -> None:
    less = need(**settings)
    grown = need(
        **{**settings, name: min(settings[name] + more, 256 if name == "parallel" else 10**6)}
    )
    assert grown.total_bytes >= less.total_bytes
    assert less.total_bytes == sum(less.terms.values())
    assert all(size >= 0 for size in less.terms.values())


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.none() | st.integers(0, 10**12))
def test_a_claim_is_the_measurement_but_never_below_the_weights(
    weights: int, rest: int, measured: int | None
) -> None:
    whole = Need(
        pool="ram", total_bytes=weights + rest, terms={"weights": weights, "kv_cache": rest}
    )
    claim = claim_bytes(whole, measured)
    assert claim >= weights
    assert claim == (weights + rest if measured is None else max(weights, measured))


def test_the_highest_of_the_last_three_runs_counts() -> None:
    assert highest([900, 100, 300, 200]) == 300
    assert highest([]) is None
