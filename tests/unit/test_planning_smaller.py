"""What is given up where a model does not fit: in which order, how far, and said aloud."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_lab import ask_shipped, card, launched, refused, shipped, with_cards

from flexlab.core.units import GIB, MIB
from flexlab.planning.sizing import usable_bytes
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import Smaller
from flexlab.spec.machine import Machine
from flexlab.spec.plan import Candidate

CONTEXT, CACHE_K, CACHE_V, LAYERS = "context_size", "cache_type_k", "cache_type_v", "n_gpu_layers"


def one_card(total_mib: int, ram: int = 64 * GIB, used: int = 0) -> Machine:
    only = card(total=total_mib * MIB)
    return with_cards(only, ram=ram, used={only.pool: used})


def limited(candidate: Candidate) -> dict[str, tuple[str, str]]:
    return {one.what: (one.wanted, one.given) for one in candidate.limits}


def llamacpp(here: Machine, model: str | ModelRecipe = "qwen3-8b", **wishes: Any) -> Candidate:
    items = ask_shipped(model, here, backend="llamacpp", **wishes).items
    assert len({(one.devices, one.limits) for one in items}) == len(items)
    return items[0]


def test_what_fits_is_not_made_smaller() -> None:
    assert llamacpp(one_card(8 * 1024)).limits == ()


def test_a_smaller_context_comes_first() -> None:
    candidate = llamacpp(one_card(7 * 1024))
    given_context = candidate.settings[CONTEXT]
    assert limited(candidate) == {CONTEXT: ("16384", f"{given_context} (so that it fits)")}
    assert isinstance(given_context, int)
    assert 4096 <= given_context < 16384
    assert candidate.context == given_context
    # A step more would not have fitted, so no more was taken than had to be.
    more = str(given_context + 1024)
    whole = ask_shipped(
        "qwen3-8b", one_card(7 * 1024), variant="q4-k-m", settings={CONTEXT: more, LAYERS: "999"}
    )
    assert not [one for one in whole.items if CACHE_K not in limited(one)]


def test_then_the_type_of_the_cache_and_with_it_as_much_context_as_it_gives() -> None:
    smallest = str(4096)
    here = one_card(5900)
    least = ask_shipped("qwen3-8b", here, variant="q4-k-m", settings={CONTEXT: smallest}).items[0]
    assert CACHE_K in limited(least)  # even the least context did not fit in f16
    candidate = llamacpp(here)
    told = limited(candidate)
    assert told[CACHE_K] == told[CACHE_V] == ("f16", "q8_0 (so that it fits)")
    assert LAYERS not in told
    given_context = candidate.settings[CONTEXT]
    assert isinstance(given_context, int)
    assert given_context >= 4096
    more = {CONTEXT: str(given_context + 1024), CACHE_K: "q8_0", CACHE_V: "q8_0", LAYERS: "999"}
    assert refused(ask_shipped("qwen3-8b", here, variant="q4-k-m", settings=more))


def test_then_layers_go_to_the_cpu_each_with_its_number() -> None:
    here = one_card(4 * 1024)
    candidate = llamacpp(here)
    layers = candidate.settings[LAYERS]
    assert isinstance(layers, int)
    assert 18 <= layers < 36
    assert limited(candidate)[LAYERS] == ("all", f"{layers} (so that it fits)")
    assert candidate.settings[CONTEXT] == 4096
    assert candidate.need("ram") > 0
    args = launched(candidate, here).args
    assert args[args.index("--n-gpu-layers") + 1] == str(layers)


def test_layers_go_as_far_as_the_ram_takes_them() -> None:
    """The fewest that the recipe allows on the card would not fit into this RAM; a few more do."""
    candidate = llamacpp(one_card(5 * 1024, ram=GIB + 512 * MIB))
    assert candidate.settings[LAYERS] == llamacpp(one_card(5 * 1024)).settings[LAYERS]


def test_less_than_the_recipe_allows_is_refused_with_the_numbers() -> None:
    refusal = refused(ask_shipped("qwen3-8b", one_card(2 * 1024), variant="q4-k-m"))
    assert refusal.code == "too_big"
    assert "GiB" in refusal.message


def changed(**smaller: Any) -> ModelRecipe:
    """Qwen3 8B in llama.cpp, with another list of what may be given up."""
    whole = shipped().resolve("qwen3-8b")
    first = whole.variants[0].model_copy(update={"smaller": Smaller(**smaller)})
    return whole.model_copy(update={"variants": (first,)})


def test_only_what_the_recipe_allows_is_given_up() -> None:
    nothing = changed()
    assert refused(ask_shipped(nothing, one_card(7 * 1024))).code == "too_big"
    assert refused(ask_shipped(changed(cache_type="q8_0"), one_card(4 * 1024))).code == "too_big"
    assert limited(llamacpp(one_card(7 * 1024), changed(cache_type="q8_0"))).keys() == {
        CACHE_K, CACHE_V,
    }  # fmt: skip
    layers_only = llamacpp(one_card(5 * 1024), changed(n_gpu_layers_min=1))
    assert limited(layers_only).keys() == {LAYERS}


def test_the_least_context_is_tried_whatever_it_is() -> None:
    odd = changed(context_min=16000)
    room = llamacpp(one_card(8 * 1024), settings={CONTEXT: "16000"}).need("0000:03:00.0")
    here = one_card(-(-room // MIB))
    assert llamacpp(here, odd).settings[CONTEXT] == 16000


@pytest.mark.parametrize(
    ("settings", "untouched"),
    [
        ({CONTEXT: "16384"}, {CONTEXT}),
        ({CACHE_K: "f16"}, {CACHE_K}),
        ({CACHE_K: "f16", CACHE_V: "f16"}, {CACHE_K, CACHE_V}),
        ({LAYERS: "36"}, {LAYERS}),
    ],
)
@pytest.mark.parametrize("total_mib", [4096, 5120, 6144, 7168])
def test_what_was_asked_for_is_never_made_smaller(
    settings: dict[str, str], untouched: set[str], total_mib: int
) -> None:
    answer = ask_shipped("qwen3-8b", one_card(total_mib), variant="q4-k-m", settings=settings)
    for candidate in answer.items:
        assert not untouched & limited(candidate).keys()
        assert all(str(candidate.settings[name]) == text for name, text in settings.items())
    if not answer.items:
        assert refused(answer).code == "too_big"


def test_smaller_is_a_worse_class_than_whole_on_another_card() -> None:
    small, large = card(0, total=10 * GIB), card(1, total=24 * GIB)
    items = ask_shipped("qwen3-8b", with_cards(small, large), backend="vllm").items
    whole = [one.preference for one in items if not one.limits]
    less = [one.preference for one in items if one.limits]
    assert whole
    assert max(whole) < min(less, default=max(whole) + 1)
    assert {one.devices for one in items[:1]} == {("0000:04:00.0",)}


def test_each_of_several_small_cards_is_tried_smaller() -> None:
    cards = [card(n, total=7 * GIB) for n in range(2)]
    items = ask_shipped("qwen3-8b", with_cards(*cards), backend="ollama").items
    assert {one.devices for one in items} == {("0000:03:00.0",), ("0000:04:00.0",)}
    assert all(one.limits for one in items)


def test_beside_what_others_use_now_it_is_smaller_only_as_the_last_way() -> None:
    whole, less = ask_shipped("qwen3-8b", one_card(8 * 1024, used=GIB), variant="q4-k-m").items
    assert not whole.limits
    assert limited(less).keys() == {CONTEXT}
    assert less.need("0000:03:00.0") <= 7 * GIB
    assert whole.preference < less.preference


models = st.sampled_from(["qwen3-8b", "qwen3-32b", "mistral-7b-instruct", "qwen3-1.7b"])
wishes = st.fixed_dictionaries(
    {},
    optional={
        CONTEXT: st.sampled_from(["4096", "8192", "32768"]),
        "parallel": st.sampled_from(["1", "4"]),
        CACHE_K: st.sampled_from(["f16", "q8_0"]),
        LAYERS: st.sampled_from(["20", "999"]),
    },
)


@settings(max_examples=60)
@given(
    models,
    st.integers(1500, 24_000),
    st.integers(0, 8000),
    st.integers(1, 32),
    st.booleans(),
    wishes,
)
def test_whatever_is_made_smaller_fits(
    model: str, total: int, used: int, ram: int, pair: bool, wished: dict[str, str]
) -> None:
    cards = [card(n, total=total * MIB) for n in range(2 if pair else 1)]
    here = with_cards(*cards, ram=ram * GIB, used={cards[0].pool: min(used, total) * MIB})
    answer = ask_shipped(model, here, settings=wished)
    for candidate in answer.items:
        for need in candidate.needs:
            room = usable_bytes(here.pool(need.pool))
            assert need.total_bytes == sum(need.terms.values())
            assert room is None or need.total_bytes <= room
        assert not candidate.limits or not wished.keys() & limited(candidate).keys() - {CONTEXT}
    assert answer.items or refused(answer).problems
