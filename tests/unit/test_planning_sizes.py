"""What a model needs against what there is: refusals with a way out, and measured claims."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import (
    SOURCE,
    Shape,
    ask,
    because,
    facts,
    machine,
    recipe,
    refused,
    source,
    variant,
)

from flexlab.core.units import GIB, MIB, say_bytes
from flexlab.recipes.catalogue import Catalogue
from flexlab.spec.machine import Machine
from flexlab.spec.plan import Candidate, Wishes


def test_too_big_says_the_need_what_there_is_and_why_no_more() -> None:
    model = recipe(variant("q4", SOURCE, 98_362_432, context_size=8192, parallel=8))
    refusal = refused(ask(model, machine(total=2 * GIB, reserve=GIB)))
    assert refusal.code == "too_big"
    assert "2.0 GiB less 1.0 GiB kept free" in refusal.message
    assert "there is 1.0 GiB" in refusal.message


@pytest.mark.parametrize(
    ("room_mib", "settings", "options"),
    [
        (500, {"parallel": 2}, "--set cache_ram_mib=0"),
        (500, {"parallel": 2, "cache_ram_mib": 0, "context_size": 8192}, "--set parallel=1"),
        (330, {"parallel": 2}, "--set parallel=1 --set cache_ram_mib=0"),
        (330, {"parallel": 2, "cache_ram_mib": 0}, "--set parallel=1"),
        (250, {"cache_ram_mib": 0}, "--set context_size=2048"),
        (250, {"parallel": 2, "cache_ram_mib": 0}, "--set parallel=1 --set context_size=2048"),
        (500, {"cache_ram_mib": 0, "context_size": 8192, "parallel": 64}, "--set parallel=1"),
        (300, {"context_size": 5000}, "--set cache_ram_mib=0 --set context_size=4096"),
    ],
)
def test_too_big_names_what_costs_its_user_least_and_what_it_then_needs(
    room_mib: int, settings: dict[str, int], options: str
) -> None:
    model = recipe(variant("q4", SOURCE, 98_362_432, **{"context_size": 4096, **settings}))
    here = machine(budget=room_mib * MIB)
    hint = refused(ask(model, here)).hint or ""
    assert hint.endswith(f") with {options}")
    # What the hint says is true, to the byte that it shows.
    wishes = dict(option.split("=") for option in options.removeprefix("--set ").split(" --set "))
    answer = ask(model, here, wishes=Wishes(settings=wishes))
    assert f"({say_bytes(answer.items[0].need('ram'))})" in hint


def test_too_big_at_any_context_names_the_least() -> None:
    model = recipe(variant("q4", SOURCE, 98_362_432, context_size=4096, parallel=2))
    refusal = refused(ask(model, machine(budget=100 * MIB)))
    least = {"parallel": "1", "cache_ram_mib": "0", "context_size": "512"}
    need = say_bytes(ask(model, wishes=Wishes(settings=least)).items[0].need("ram"))
    assert refusal.hint == (
        f"too small for this model at any context; the least is {need} (--set parallel=1 "
        "--set cache_ram_mib=0 --set context_size=512); flexlab recipes lists what fits"
    )
    smallest = ask(model, machine(budget=100 * MIB), wishes=Wishes(settings=least))
    assert f"the least is {need}; " in (refused(smallest).hint or "")


@given(
    context=st.integers(1, 8192),
    parallel=st.integers(1, 16),
    cache=st.integers(0, 512),
    room_mib=st.integers(1, 1200),
    is_here=st.booleans(),
)
def test_the_way_out_is_always_one(
    context: int, parallel: int, cache: int, room_mib: int, is_here: bool
) -> None:
    chosen = {"context_size": context, "parallel": parallel, "cache_ram_mib": cache}
    model = recipe(variant("q4", SOURCE, 98_362_432, **chosen))
    here, shapes = machine(budget=room_mib * MIB), {SOURCE: Shape()} if is_here else {}
    answer = ask(model, here, shapes=shapes)
    if answer.items:
        return
    hint = refused(answer).hint or ""
    options = dict(re.findall(r"--set (\w+)=(\d+)", hint))
    assert all(int(value) < chosen[name] for name, value in options.items())
    again = ask(model, here, shapes=shapes, wishes=Wishes(settings=options))
    if hint.startswith("it would fit"):
        assert options
        assert again.items
    elif is_here:  # what is only guessed refuses nothing, however large
        assert refused(again).code == "too_big"


SHAPE = {
    "layers": 30, "heads": 9, "kv_heads": 3, "key_length": 64, "value_length": 64,
    "embedding": 576, "vocabulary": 49152, "evidence": "tested", "reason": "it was read",
    "source": "the header", "date": "2026-01-31",
}  # fmt: skip


def test_with_the_shape_in_the_recipe_a_need_is_the_same_before_and_after_the_download() -> None:
    model = recipe(variant("q4", SOURCE, 98_362_432, parallel=2), shape=SHAPE)
    before = ask(model, known=facts(weights={}), shapes={}).items[0]
    after = ask(recipe(variant("q4", SOURCE, 98_362_432, parallel=2))).items[0]
    assert before.needs == after.needs
    assert "rule of thumb" not in because(before, "memory")


def test_what_cannot_fit_is_refused_before_anything_is_fetched() -> None:
    absent = {"known": facts(weights={}), "shapes": {}}
    certain = recipe(variant("q4", SOURCE, 98_362_432))
    refusal = refused(ask(certain, machine(budget=400 * MIB), **absent))
    assert refusal.code == "too_big"
    assert "needs at least 426." in refusal.message
    assert "KV cache" not in refusal.message
    assert "it would fit (about " in (refusal.hint or "")
    stated = recipe(variant("q4", SOURCE, 98_362_432, parallel=2), shape=SHAPE)
    assert "needs 636.8 MiB" in refused(ask(stated, machine(budget=500 * MIB), **absent)).message


def test_the_shipped_model_is_refused_before_its_download_with_a_way_out() -> None:
    model = Catalogue.load().resolve("smollm2")
    here = machine(budget=500_000_000)
    refusal = refused(ask(model, here, facts(weights={}), shapes={}))
    assert refusal.code == "too_big"
    assert (refusal.hint or "").endswith("--set cache_ram_mib=0")


def test_a_header_counts_more_than_what_the_recipe_says() -> None:
    model = recipe(variant("q4", SOURCE, 98_362_432), shape={**SHAPE, "layers": 300})
    assert ask(model).items[0].needs == ask().items[0].needs


def test_a_limit_of_the_users_counts_as_the_pools_size() -> None:
    refusal = refused(ask(here=machine(budget=100 * MIB)))
    assert "setting ram_limit" in refusal.message


def test_a_rule_of_thumb_alone_never_refuses() -> None:
    # 100 slots: the guessed KV cache is far beyond the pool, what is certain is not.
    model = recipe(variant("q4", SOURCE, 98_362_432, context_size=8192, parallel=100))
    assert ask(model, machine(total=4 * GIB), known=facts(weights={}), shapes={}).items
    assert refused(ask(model, machine(total=4 * GIB))).code == "too_big"


def test_a_pool_of_unknown_size_refuses_nothing() -> None:
    assert ask(recipe(variant("q4", SOURCE, 900 * GIB)), machine(total=None)).items


def measured(candidate: Candidate, here: Machine, taken: int) -> Candidate:
    known = facts(measured_bytes={candidate.memory_key: {"ram": taken}})
    return ask(here=here, known=known).items[0]


def test_what_earlier_runs_took_beats_the_estimate_and_both_are_shown() -> None:
    here = machine()
    estimated = ask(here=here).items[0]
    found = measured(estimated, here, 252_000_000)
    assert found.need("ram") == 252_000_000
    assert "the estimate was" in because(found, "memory")
    assert source(found, "memory") == "measurement"


def test_a_measured_claim_never_goes_below_the_weights() -> None:
    here = machine()
    assert measured(ask(here=here).items[0], here, 1).need("ram") == 98_362_432


def test_a_measurement_of_other_settings_does_not_count() -> None:
    here = machine()
    key = ask(here=here).items[0].memory_key
    answer = ask(
        here=here,
        known=facts(measured_bytes={key: {"ram": 7}}),
        wishes=Wishes(settings={"context_size": "8192"}),
    )
    assert "measured" not in answer.items[0].needs[0].terms


def test_what_was_too_little_once_is_claimed_no_more() -> None:
    here = machine()
    first = ask(here=here).items[0]
    floor = first.need("ram") + 5_000_000
    raised = ask(here=here, known=facts(floor_bytes={first.memory_key: {"ram": floor}})).items[0]
    assert raised.need("ram") == floor
    below = ask(here=here, known=facts(floor_bytes={first.memory_key: {"ram": 5}})).items[0]
    assert below.need("ram") == first.need("ram")
