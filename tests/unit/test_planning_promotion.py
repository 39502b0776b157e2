"""What a candidate needs before it runs: a mark tested on this arch, a contract, a new engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from planning_lab import ask_shipped, backend_recipe, because, card, refused, shipped, with_cards
from planning_lab import with_image as with_one_more_image

from flexlab.core.units import GIB
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.schema import ModelRecipe
from flexlab.spec.machine import Vendor
from flexlab.spec.plan import Candidates

FABLE, CANARY = "qwen3.6-27b-fable-gptq", "qwen3.5-9b-gptq-mtp"
MTP_IMAGE = (
    "registry.harbor.lan/flexinfer/vllm"
    "@sha256:034f081861278a680fe54ddeb71db6446ce65f0a9c37ce9aecc061a99b1d40fc"
)
DIGEST = "lab/vllm@sha256:" + "b" * 64
MARK = "gptq_shuffle_guarded"
XTX, VII = with_cards(card()), with_cards(card(0, "gfx906", 16 * GIB))


def codes(answer: Candidates) -> set[str]:
    return {problem.code for problem in refused(answer).problems}


def with_image(backend: str = "vllm", **image: Any) -> Callable[[str], BackendRecipe]:
    changed = with_one_more_image(backend, **image)
    return lambda name: changed if name == backend else backend_recipe(name)


def changed(model: str, at: int = 0, **fields: Any) -> ModelRecipe:
    """A shipped model with one of its variants changed, and that alone."""
    whole = shipped().resolve(model)
    return whole.model_copy(update={"variants": (whole.variants[at].model_copy(update=fields),)})


# -- marks


def test_a_candidate_is_refused_with_what_its_promotion_needs() -> None:
    answer = ask_shipped(FABLE, XTX)
    assert codes(answer) == {"candidate", "forbidden_here"}
    told = f"{refused(answer).message} {refused(answer).hint}"
    for word in ("token salad", MARK, "greedy", "gfx1100", "GGUF"):
        assert word in told
    assert answer.closest is not None
    assert (answer.closest.arch, answer.closest.backend) == ("gfx1100", "vllm")


def test_a_mark_tested_on_this_very_arch_promotes_it() -> None:
    answer = ask_shipped(FABLE, XTX, with_image(image=DIGEST, archs=["gfx1100"], marks=[MARK]))
    assert [one.image for one in answer.items] == [DIGEST]


@pytest.mark.parametrize(
    "image",
    [
        {"image": DIGEST, "archs": ["gfx1100"], "marks": [MARK], "evidence": "documented"},
        {"image": DIGEST, "archs": ["gfx1100"], "marks": [MARK], "evidence": "untested"},
        {"image": "lab/vllm:guarded", "archs": ["gfx1100"], "marks": [MARK]},
        {"image": DIGEST, "archs": ["gfx1100"]},
        {"image": DIGEST, "archs": ["gfx906"], "marks": [MARK]},
        {"image": DIGEST, "archs": ["gfx1101", "gfx1102"], "marks": [MARK]},
    ],
    ids=["documented", "untested", "tag", "no-mark", "gfx906", "neighbours"],
)
@pytest.mark.parametrize("asked_for", [False, True], ids=["chosen", "asked-for"])
def test_nothing_less_promotes_it(image: dict[str, Any], asked_for: bool) -> None:
    wish = {"image": image["image"]} if asked_for else {}
    answer = ask_shipped(FABLE, XTX, with_image(**image), allow_experimental=True, **wish)
    assert {"candidate", "forbidden_here"} <= codes(answer)


@pytest.mark.parametrize("model", [FABLE, CANARY])
@pytest.mark.parametrize("image", [None, MTP_IMAGE, "mine/vllm:1", "mine/vllm@sha256:" + "c" * 64])
def test_what_was_shown_on_gfx906_says_nothing_of_gfx1100(model: str, image: str | None) -> None:
    """The same mark, by the canary's own digest: its test was run on another arch."""
    found = codes(ask_shipped(model, XTX, image=image, allow_experimental=True))
    assert "forbidden_here" in found
    assert ("candidate" if model == FABLE else "certificate_arch") in found


# -- what a variant is for


@pytest.mark.parametrize("arch", ["gfx906", "gfx1101", "gfx1102", "sm_90"])
def test_a_variant_for_one_arch_runs_on_no_other(arch: str) -> None:
    vendor: Vendor = "nvidia" if arch.startswith("sm") else "amd"
    guarded = with_image(image=DIGEST, archs=[arch], marks=[MARK])
    answer = ask_shipped(FABLE, with_cards(card(0, arch, vendor=vendor)), guarded)
    problem = next(one for one in refused(answer).problems if one.code == "variant_arch")
    assert "gfx1100" in problem.message
    assert arch in problem.message
    assert "flexlab recipes show" in problem.hint


def test_another_variant_of_the_same_model_serves_the_other_arch() -> None:
    chosen = ask_shipped("video-gen", with_cards(card(0, "sm_90", vendor="nvidia"))).items[0]
    assert chosen.variant == "resident"
    assert "gfx1100" in because(chosen, "not variant gfx1100")
    assert ask_shipped("video-gen", XTX).items[0].variant == "gfx1100"


def test_a_setting_that_a_variant_forbids_is_refused_with_its_own_reason() -> None:
    wish = {"speculative_config": '{"method":"mtp","num_speculative_tokens":1}'}
    guarded = with_image(image=DIGEST, archs=["gfx1100"], marks=[MARK])
    answer = ask_shipped(FABLE, XTX, guarded, settings=wish)
    problem = next(one for one in refused(answer).problems if one.code == "forbidden_setting")
    assert "14 of the 15" in problem.message
    assert problem.hint == "leave out --set speculative_config"
    # The engine's other settings stay free.
    assert ask_shipped(FABLE, XTX, guarded, settings={"max_num_seqs": "2"}).items


# -- contracts


def test_the_canary_is_the_pair_of_digest_and_contract() -> None:
    (chosen,) = ask_shipped(CANARY, VII).items
    (admission,) = chosen.admissions
    assert (chosen.image, admission.admitted) == (MTP_IMAGE, True)
    assert admission.contract == getattr(shipped().resolve(CANARY).variants[0], "contract", None)
    assert {problem.code for problem in chosen.problems} == {"image_private"}


@pytest.mark.parametrize("contract", [None, "0" * 64])
def test_weights_of_another_graft_or_of_none_are_refused(contract: str | None) -> None:
    answer = ask_shipped(changed(CANARY, contract=contract), VII)
    assert codes(answer) == {"certificate_contract"}
    assert (contract or "no contract") in refused(answer).message


def test_a_feature_that_was_certified_without_a_contract_is_not_for_weights_with_one() -> None:
    wishes: dict[str, Any] = {
        "backend": "llamacpp",
        "settings": {"slot_save_path": "/models/.flexlab/slots/a"},
    }
    assert ask_shipped("qwen3-8b", VII, **wishes).items
    assert codes(ask_shipped(changed("qwen3-8b", contract="0" * 64), VII, **wishes)) == {
        "certificate_contract"
    }


# -- the age of an engine


def test_an_image_that_is_too_old_is_passed_over_with_the_reason() -> None:
    old = with_image(image="lab/vllm:0.8.4", archs=["gfx1100"], build="0.8.4")
    chosen = ask_shipped("qwen3-8b", XTX, old, backend="vllm").items[0]
    assert chosen.image == "vllm/vllm-openai-rocm:v0.19.0"
    told = because(chosen, "not lab/vllm:0.8.4")
    assert "0.8.4" in told
    assert "0.8.5" in told


def test_an_old_image_that_is_asked_for_is_refused_rather_than_tried() -> None:
    old = with_image(image="lab/vllm:0.8.4", archs=["gfx1100"], build="0.8.4")
    answer = ask_shipped("qwen3-8b", XTX, old, backend="vllm", image="lab/vllm:0.8.4")
    assert codes(answer) == {"engine_too_old"}


@pytest.mark.parametrize(
    ("build", "runs"),
    [("0.8.4", False), ("0.8.5", True), ("0.10.0", True), ("v0.9", True), (None, True)],
)
def test_ages_are_compared_as_numbers_and_unknown_is_not_old(build: str | None, runs: bool) -> None:
    built = {} if build is None else {"build": build}
    known = with_image(image="lab/vllm:x", archs=["gfx1100"], **built)
    answer = ask_shipped("qwen3-8b", XTX, known, variant="bf16", image="lab/vllm:x")
    assert bool(answer.items) == runs


def test_where_every_image_is_too_old_the_model_says_what_it_needs() -> None:
    """Ollama left gfx906 behind after 0.12: what is newer cannot be loaded there."""
    models = shipped().resolve("qwen3-8b").variants
    at = next(n for n, one in enumerate(models) if one.backend == "ollama")
    assert ask_shipped(changed("qwen3-8b", at), VII).items
    answer = ask_shipped(changed("qwen3-8b", at, engine_min="0.13.0"), VII)
    assert codes(answer) == {"engine_too_old"}
    assert "0.13.0" in refused(answer).message
