"""The memory that each engine is reckoned with: terms that add up, shares, splits, memory plans."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import ask_shipped, card, launched, refused, with_cards

from flexlab import backends
from flexlab.core.units import GIB
from flexlab.planning.fit import Estimate, Ground, KnownShape, Model, Share, by_size, estimate, even
from flexlab.spec.machine import Machine
from flexlab.spec.plan import Candidate

SHAPE = KnownShape(
    layers=36, heads=32, kv_heads_total=36 * 8, key_length=128, value_length=128,
    embedding_length=4096, vocabulary=151_936, context_length=40_960,
)  # fmt: skip
"""Of Qwen3 8B: 36 layers keep 8 heads of 128 numbers for keys, and as many for values."""
TOKEN_BYTES = 36 * 8 * (128 + 128) * 2
PARTS = {"unet": 5_135_000_000, "text": 1_390_000_000, "vae": 335_000_000}
WHOLE = sum(PARTS.values())
MODEL = Model(
    weight_bytes=5_000_000_000, shape=SHAPE, quantization="Q4_K_M", parameters=8_190_735_360
)
PIPELINE = Model(weight_bytes=WHOLE, parts=PARTS, activations=2_500_000_000)
OVERHEAD = 1_000_000_000
CARD = Ground(OVERHEAD, on_gpu=True, card_bytes=24 * GIB, driver_bytes=500_000_000)
CPU = Ground(OVERHEAD)
OTHER_SETTINGS: dict[str, dict[str, Any]] = {"ollama": {"model": "qwen3:8b"}}


def need(
    backend: str, model: Model | None = None, ground: Ground = CARD, **settings: Any
) -> Estimate:
    kind = backends.get(backend).settings_type
    chosen = kind.model_validate(OTHER_SETTINGS.get(backend, {}) | settings)
    usual = PIPELINE if backend in ("diffusers", "comfyui") else MODEL
    return estimate(chosen, model or usual, ground)


def nvidia(total: int = 24 * GIB, count: int = 1) -> Machine:
    return with_cards(*(card(n, "sm_89", total, "nvidia") for n in range(count)))


def first(model: str, here: Machine, **wishes: Any) -> Candidate:
    return ask_shipped(model, here, **wishes).items[0]


# -- engines that answer with text


@pytest.mark.parametrize(
    ("variant", "published"), [("awq", 6_098_581_864), ("bf16", 16.38e9), ("ollama", 5_225_388_164)]
)
def test_weights_are_near_what_is_published_before_anything_is_fetched(
    variant: str, published: float
) -> None:
    terms = first("qwen3-8b", nvidia(48 * GIB), variant=variant).needs[0].terms
    assert terms["weights"] == pytest.approx(published, rel=0.06)


def test_a_cache_holds_what_one_request_of_the_full_context_needs() -> None:
    for backend in ("vllm", "ollama", "llamacpp", "mlc"):
        terms = need(backend, context_size=8192).terms
        assert terms["kv_cache"] == 8192 * TOKEN_BYTES
        assert terms["weights"] == MODEL.weight_bytes


def test_a_smaller_type_of_cache_takes_less() -> None:
    whole = need("vllm").terms["kv_cache"]
    assert need("vllm", kv_cache_dtype="fp8").terms["kv_cache"] == whole / 2
    whole = need("ollama").terms["kv_cache"]
    assert need("ollama", cache_type="q8_0").terms["kv_cache"] == whole * 8.5 / 16


def test_mlc_keeps_what_its_quantisation_computes_in_for_all_sequences() -> None:
    in_32 = Model(weight_bytes=5_000_000_000, shape=SHAPE, quantization="q4f32_1")
    one = need("mlc", in_32, context_size=4096, max_num_sequence=1).terms["kv_cache"]
    assert one == 4096 * TOKEN_BYTES * 2
    assert need("mlc", in_32, context_size=4096, max_num_sequence=3).terms["kv_cache"] == 3 * one


def test_an_embedder_keeps_no_cache_in_vllm() -> None:
    assert need("vllm", embeddings=True).terms["kv_cache"] == 0


@pytest.mark.parametrize("backend", ["vllm", "mlc"])
def test_a_share_that_was_chosen_is_itself_the_claim(backend: str) -> None:
    found = need(backend, gpu_memory_utilization=0.8)
    (claimed,) = found.needs(Share("card"))
    assert claimed.total_bytes == int(0.8 * 24 * GIB)
    assert claimed.total_bytes == sum(claimed.terms.values())
    # What the weights and the program leave is cache.
    assert claimed.terms["weights"] == found.terms["weights"]
    assert claimed.terms["kv_cache"] > found.terms["kv_cache"]


def test_mlc_takes_bytes_as_well_as_a_share_and_the_share_counts_more() -> None:
    by_bytes = need("mlc", gpu_memory_bytes=5_000_000_000)
    assert by_bytes.fixed_bytes == 5_000_000_000
    both = need("mlc", gpu_memory_bytes=5_000_000_000, gpu_memory_utilization=0.5)
    assert both.fixed_bytes == 12 * GIB


def test_a_share_that_was_chosen_is_what_the_engine_is_told() -> None:
    here = nvidia()
    candidate = first("qwen3-8b", here, variant="awq", settings={"gpu_memory_utilization": "0.8"})
    assert candidate.need("0000:03:00.0") == int(0.8 * 24 * GIB)
    args = launched(candidate, here).args
    assert args[args.index("--gpu-memory-utilization") + 1] == "0.80"


def test_a_share_that_is_too_small_is_refused_with_the_numbers() -> None:
    answer = ask_shipped(
        "qwen3-8b", nvidia(), variant="awq", settings={"gpu_memory_utilization": "0.2"}
    )
    refusal = refused(answer)
    assert refusal.code == "share_too_small"
    assert "4.8 GiB" in refusal.message  # a fifth of 24 GiB
    assert "weights" in refusal.message
    assert "share" in (refusal.hint or "")


def test_a_share_may_be_enough_with_a_smaller_context() -> None:
    settings = {"gpu_memory_utilization": "0.36"}  # 9.3e9 bytes
    candidate = first("qwen3-8b", nvidia(), variant="awq", settings=settings)
    assert [limit.what for limit in candidate.limits] == ["context_size"]
    assert candidate.need("0000:03:00.0") == int(0.36 * 24 * GIB)


def test_a_share_of_each_of_two_cards_is_enough_where_one_is_not() -> None:
    here = nvidia(16 * GIB, count=2)
    settings = {"gpu_memory_utilization": "0.9"}
    candidate = first("qwen3-32b", here, variant="awq", settings=settings)
    assert len(candidate.devices) == 2
    assert candidate.limits == ()
    assert [one.total_bytes for one in candidate.needs] == [int(0.9 * 16 * GIB)] * 2


def test_tensor_parallel_halves_weights_and_cache_and_not_the_program() -> None:
    found = need("vllm")
    one, two = found.needs(*even(["a", "b"]))
    assert one.terms == two.terms
    assert one.terms["weights"] * 2 == found.terms["weights"]
    assert one.terms["kv_cache"] * 2 == found.terms["kv_cache"]
    assert one.terms["overhead"] == OVERHEAD


def test_layers_on_the_cpu_move_bytes_and_make_none() -> None:
    whole = need("llamacpp")
    for layers in range(37):
        split = need("llamacpp", n_gpu_layers=layers)
        assert split.total_bytes == whole.total_bytes
        on_card, in_ram = split.needs(Share("card"))
        assert on_card.total_bytes + in_ram.total_bytes == whole.total_bytes
    none, all_of_them = need("llamacpp", n_gpu_layers=0), need("llamacpp", n_gpu_layers=999)
    assert none.terms["weights"] == none.terms["kv_cache"] == 0
    assert all_of_them.terms == whole.terms


def test_on_the_cpu_everything_is_in_one_pool() -> None:
    for backend in ("llamacpp", "ollama", "diffusers", "comfyui"):
        found = need(backend, ground=CPU)
        (only,) = found.needs(Share("ram"))
        assert only.total_bytes == found.total_bytes
        assert "driver" not in only.terms


# -- engines that make images and video


PLANS: dict[str, tuple[str, list[str]]] = {
    "diffusers": (
        "memory_plan", ["resident", "model_offload", "group_offload", "sequential_offload"],
    ),
    "comfyui": ("memory", ["gpu_only", "normalvram", "lowvram", "novram"]),
}  # fmt: skip


@pytest.mark.parametrize("backend", PLANS)
def test_each_memory_plan_needs_less_of_the_card_and_more_ram(backend: str) -> None:
    name, plans = PLANS[backend]
    splits = []
    for plan in plans:
        chosen: dict[str, Any] = {name: plan}
        needs = need(backend, **chosen).needs(Share("card"))
        by_pool = {one.pool: one.total_bytes for one in needs}
        splits.append((by_pool["card"], by_pool.get("ram", 0)))
    assert splits[0] == (WHOLE + 2_500_000_000 + OVERHEAD, 0)
    for (more, less_ram), (less, more_ram) in itertools.pairwise(splits):
        assert more > less
        assert less_ram < more_ram
        assert more + less_ram == less + more_ram  # nothing is lost on the way
    largest = PARTS["unet"]
    assert splits[1][0] == largest + 2_500_000_000 + OVERHEAD


@pytest.mark.parametrize("backend", PLANS)
def test_a_memory_plan_of_a_card_says_nothing_on_the_cpu(backend: str) -> None:
    name, plans = PLANS[backend]
    chosen: list[dict[str, Any]] = [{name: plan} for plan in plans]
    assert len({need(backend, ground=CPU, **one).total_bytes for one in chosen}) == 1


def test_a_pipeline_in_fewer_bits_is_a_guess_and_says_so() -> None:
    found = need("diffusers", quantization="nf4")
    assert found.guessed == ("weights",)
    assert found.terms["weights"] < WHOLE / 3


def test_a_card_that_cannot_hold_it_all_gets_one_part_at_a_time() -> None:
    big, small = (with_cards(card(0, "sm_89", size * GIB, "nvidia")) for size in (24, 16))
    assert first("video-gen", big).variant == "resident"
    offloaded = first("video-gen", small)
    assert offloaded.variant == "offload"
    card_need, ram_need = offloaded.needs
    assert card_need.terms["weights"] == 11_360_000_000  # the largest of its parts
    assert ram_need.terms == {"weights_on_cpu": 2_838_000_000 + 508_000_000}


# -- rules for all of them


ENGINES = ("llamacpp", "ollama", "vllm", "mlc", "diffusers", "comfyui")


@given(
    backend=st.sampled_from(ENGINES),
    context=st.integers(256, 40_000),
    share=st.none() | st.sampled_from([0.3, 0.5, 0.9]),
    sizes=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    on_gpu=st.booleans(),
    known=st.booleans(),
)
def test_terms_add_up_whatever_is_asked(
    backend: str, context: int, share: float | None, sizes: list[int], on_gpu: bool, known: bool
) -> None:
    names = backends.get(backend).settings_type.model_fields
    wanted = {"context_size": context, "gpu_memory_utilization": share}
    settings = {name: value for name, value in wanted.items() if name in names and value}
    model = None if known else Model(weight_bytes=None, parameters=10**9)
    found = need(backend, model, CARD if on_gpu else CPU, **settings)
    assert found.total_bytes == sum(found.terms.values())
    assert all(size >= 0 for size in found.terms.values())
    assert found.certain_bytes <= found.total_bytes
    pools = [(f"card{at}", size * GIB) for at, size in enumerate(sizes)]
    shares = (Share("ram"),) if not on_gpu else by_size(pools)
    needs = found.needs(*shares)
    assert all(one.total_bytes == sum(one.terms.values()) for one in needs)
    if found.fixed_bytes is None:
        cards = len(shares)
        twice = sum(found.terms.get(term, 0) for term in found.each) * (cards - 1)
        assert abs(sum(one.total_bytes for one in needs) - found.total_bytes - twice) <= 4 * cards
    else:
        assert all(one.total_bytes >= found.fixed_bytes for one in needs)
