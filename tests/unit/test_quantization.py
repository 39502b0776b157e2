"""Bits of a weight by the quantisation's name, held against files that were really published."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import shipped

from flexlab.planning.quantization import bits_per_weight, weight_bytes

QWEN3_8B, QWEN3_32B = 8_190_735_360, 32_762_123_264
ENDS_8B, ENDS_32B = 2 * 151_936 * 4096, 2 * 151_936 * 5120
"""Embeddings and head are two matrices of vocabulary x embedding."""


@pytest.mark.parametrize(
    ("parameters", "quantization", "ends", "published"),
    [
        (QWEN3_8B, "AWQ", ENDS_8B, 6_098_581_864),
        (QWEN3_32B, "AWQ", ENDS_32B, 19.33e9),
        (QWEN3_8B, "BF16", ENDS_8B, 16.38e9),
        (QWEN3_8B, "q4f16_1", ENDS_8B, 4_623_997_938),
        (QWEN3_8B, "Q8_0", ENDS_8B, 8.71e9),
    ],
)
def test_the_estimate_is_near_what_was_published(
    parameters: int, quantization: str, ends: int, published: float
) -> None:
    assert weight_bytes(parameters, quantization, ends) == pytest.approx(published, rel=0.06)


STATED = [
    (recipe.parameters, variant.quantization, variant.weights[0].size)
    for recipe in shipped().models()
    for variant in recipe.variants
    if variant.weights and variant.weights[0].size and (recipe.parameters or 0) > 10**9
]


@pytest.mark.parametrize(("parameters", "quantization", "size"), STATED)
def test_the_estimate_is_near_the_files_that_recipes_name(
    parameters: int, quantization: str, size: int
) -> None:
    assert weight_bytes(parameters, quantization) == pytest.approx(size, rel=0.06)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("Q4_K_M", "q4_k_m"),
        ("q4-k-m", "q4_k_m"),
        ("Qwen3-8B-Q4_K_M", "q4_k_m"),
        ("UD-IQ2_XXS", "iq2_xxs"),
        ("awq_marlin", "awq"),
        ("GPTQ Int8", "int8"),
        ("MXFP4-MoE", "mxfp4"),
        ("bnb nf4", "nf4"),
        ("FP8", "fp8"),
        ("W8A8", "w8a8"),
    ],
)
def test_names_are_known_as_people_write_them(name: str, like: str) -> None:
    assert bits_per_weight(name) == bits_per_weight(like) is not None


@pytest.mark.parametrize("name", [None, "", "mine", "q9_z", "seq4_0x", "4"])
def test_a_name_that_says_nothing_is_unknown_and_not_a_guess(name: str | None) -> None:
    assert bits_per_weight(name) is None
    assert weight_bytes(10**9, name) is None
    assert weight_bytes(None, "Q4_0") is None


def test_more_bits_are_more_bytes() -> None:
    rising = [
        "IQ1_S",
        "IQ2_XXS",
        "Q2_K",
        "Q3_K_M",
        "Q4_K_M",
        "Q5_K_M",
        "Q6_K",
        "Q8_0",
        "F16",
        "F32",
    ]
    sizes = [weight_bytes(10**9, name) or 0 for name in rising]
    assert sizes == sorted(set(sizes))


@given(
    st.integers(1, 10**12),
    st.integers(0, 10**12),
    st.sampled_from(["AWQ", "GPTQ", "GPTQ-Int4", "Q4_K_M", "FP8", "BF16"]),
)
def test_whole_ends_never_make_it_more_than_16_bits(
    parameters: int, ends: int, quantization: str
) -> None:
    found = weight_bytes(parameters, quantization, ends)
    less = weight_bytes(parameters, quantization)
    assert found is not None
    assert less is not None
    assert less <= found <= parameters * 2 + 1
