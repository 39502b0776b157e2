"""What a user's settings do to a plan: who wins, who is told, and what is nobody's mistake."""

from __future__ import annotations

from typing import Any

import pytest
from planning_lab import ask_shipped, card, launched, refused, shipped, source, with_cards

from flexlab.backends.vllm import VllmSettings
from flexlab.core.units import GIB
from flexlab.planning.conditions import WRONG_WISH
from flexlab.spec.plan import Candidates

XTX = with_cards(card())
A_PATH = {"slot_save_path": "/etc/slots"}


def ask(model: str = "qwen3-8b", **wishes: Any) -> Candidates:
    return ask_shipped(model, XTX, **wishes)


# -- wrong names and values


@pytest.mark.parametrize(
    ("settings", "right"),
    [
        ({"contextsize": "8192"}, "context_size"),
        ({"num_ctx": "8192"}, "context_size"),
        ({"gpuMemoryUtilization": "0.8"}, "gpu_memory_utilization"),
        ({"max_num_seq": "4"}, "max_num_seqs"),
    ],
)
def test_a_name_that_no_engine_knows_is_the_askers_mistake(
    settings: dict[str, str], right: str
) -> None:
    refusal = refused(ask(settings=settings))
    assert (refusal.code, refusal.status) == ("wrong_setting", 400)
    assert right in f"{refusal.message} {refusal.hint}"
    # Each engine that this model has a variant for says what it knows instead, once.
    backends = {variant.backend for variant in shipped().resolve("qwen3-8b").variants}
    assert len(refusal.problems) == len(backends)


@pytest.mark.parametrize("value", ["4k", "-1", "true", "1e3", ""])
def test_a_value_that_no_engine_takes_is_the_askers_mistake(value: str) -> None:
    refusal = refused(ask(settings={"context_size": value}))
    assert (refusal.code, refusal.status) == ("wrong_setting", 400)


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({"max_num_seqs": "4"}, "vllm"),
        ({"enforce_eager": "false"}, "vllm"),
        ({"max_num_sequence": "1"}, "mlc"),
        ({"n_gpu_layers": "20"}, "llamacpp"),
        ({"cache_type": "q8_0"}, "ollama"),
        ({"max_num_seqs": "4", "context_size": "4096"}, "vllm"),
    ],
)
def test_a_setting_that_one_engine_knows_leads_to_that_engine(
    settings: dict[str, str], backend: str
) -> None:
    items = ask(settings=settings).items
    assert items
    assert {one.backend for one in items} == {backend}
    others = {reason.choice for reason in items[-1].reasons if reason.choice.startswith("not ")}
    assert backend == "llamacpp" or any("q4-k-m" in choice for choice in others)


def test_settings_of_two_engines_lead_nowhere() -> None:
    refusal = refused(ask(settings={"max_num_seqs": "4", "n_gpu_layers": "20"}))
    assert refusal.status == 400


def test_a_backend_that_was_asked_for_judges_its_settings_alone() -> None:
    refusal = refused(ask(backend="vllm", settings={"n_gpu_layers": "20"}))
    assert refusal.status == 400
    (problem,) = refusal.problems
    assert "vllm" in f"{problem.message} {problem.hint}"


@pytest.mark.parametrize(
    ("backend", "settings"),
    [
        ("llamacpp", A_PATH),
        ("llamacpp", {"slot_save_path": "/models/../etc"}),
        ("llamacpp", {"lora": "/models/a.gguf,/etc/b.gguf"}),
        ("mlc", {"model_lib_path": "/tmp/lib.so"}),
        ("mlc", {"model_lib_path": "lib.so"}),
    ],
)
def test_a_path_that_leaves_the_models_is_refused_and_no_mistake_of_names(
    backend: str, settings: dict[str, str]
) -> None:
    refusal = refused(ask(backend=backend, settings=settings))
    assert refusal.status == 503
    first = refusal.problems[0]
    assert first.code == "path_outside_models"
    assert first.code not in WRONG_WISH
    assert "/models" in first.message
    assert first.hint


def test_with_a_wrong_name_beside_it_the_mistake_is_told() -> None:
    refusal = refused(ask(backend="llamacpp", settings={**A_PATH, "contextsize": "1"}))
    assert refusal.status == 400
    assert "context_size" in refusal.message


# -- who wins


def test_a_setting_of_the_users_beats_what_the_arch_asks_for() -> None:
    """The recipe of gfx1100 asks vLLM for eager mode, where the user says nothing."""
    usual = ask(variant="bf16").items[0]
    assert usual.settings["enforce_eager"] is True
    assert "--enforce-eager" in launched(usual, XTX).args
    asked = ask(variant="bf16", settings={"enforce_eager": "false"}).items[0]
    assert asked.settings["enforce_eager"] is False
    assert "--enforce-eager" not in launched(asked, XTX).args
    assert source(asked, "enforce_eager") == "option --set"


def test_what_an_arch_asks_for_is_of_that_arch_only() -> None:
    nvidia = with_cards(card(0, "sm_89", 24 * GIB, "nvidia"))
    chosen = ask_shipped("qwen3-8b", nvidia, variant="bf16").items[0]
    assert chosen.settings["enforce_eager"] is False


def test_on_maxwell_the_limit_of_five_gigabytes_is_the_archs_and_the_users_beats_it() -> None:
    maxwell = with_cards(card(0, "sm_52", 12 * GIB, "nvidia"))
    library = {"model_lib_path": "/models/qwen/lib.so"}
    wishes: dict[str, Any] = {"backend": "mlc", "allow_experimental": True}
    usual = ask_shipped("qwen3-1.7b", maxwell, settings=library, **wishes).items[0]
    assert usual.settings["gpu_memory_bytes"] == 5_000_000_000
    assert usual.need("0000:03:00.0") == 5_000_000_000
    asked = {**library, "gpu_memory_bytes": "6000000000"}
    mine = ask_shipped("qwen3-1.7b", maxwell, settings=asked, **wishes).items[0]
    assert mine.settings["gpu_memory_bytes"] == 6_000_000_000


def test_a_variants_own_setting_beats_what_the_arch_asks_for() -> None:
    whole = shipped().resolve("qwen3-8b")
    bf16 = next(one for one in whole.variants if one.name == "bf16")
    own = VllmSettings(enforce_eager=False, max_num_seqs=3)
    variant = bf16.model_copy(update={"settings": own})
    (chosen,) = ask_shipped(whole.model_copy(update={"variants": (variant,)}), XTX).items
    assert (chosen.settings["enforce_eager"], chosen.settings["max_num_seqs"]) == (False, 3)


@pytest.mark.parametrize("backend", ["llamacpp", "vllm", "ollama"])
def test_every_setting_that_was_asked_for_is_told_with_its_source(backend: str) -> None:
    (chosen, *_) = ask(backend=backend, settings={"context_size": "5000"}).items
    told = [one for one in chosen.reasons if "5000 tokens" in one.choice]
    assert [one.source for one in told] == ["option --set"]
    assert chosen.context == 5000
    assert "5000" in launched(chosen, XTX).args or backend == "ollama"
