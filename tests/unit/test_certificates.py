"""Certificates fail closed: one differing word, and the feature is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.planning.certificates import bound_image, judge
from flexlab.recipes.catalogue import Catalogue
from flexlab.recipes.certificate_schema import Certificate
from flexlab.spec.plan import Admission

CERTIFICATES = {one.name: one for one in Catalogue.load().certificates()}
SLOTS = CERTIFICATES["gfx906-llamacpp-slots"]
NGRAM = CERTIFICATES["gfx906-llamacpp-ngram"]
MTP = CERTIFICATES["gfx906-vllm-mtp"]

GOOD: dict[str, dict[str, object]] = {
    SLOTS.name: {"slot_save_path": "/models/.flexlab/slots/qwen3-8b", "dedicated": True},
    NGRAM.name: {
        "spec_type": "ngram-simple", "draft_max": 16, "draft_min": 1, "dedicated": True,
    },
    MTP.name: {
        "dtype": "half", "quantization": "gptq", "enforce_eager": True,
        "attention_backend": "TRITON_ATTN", "max_num_seqs": 1, "max_num_batched_tokens": 256,
        "gpu_memory_utilization": 0.8, "context_size": 16384, "dedicated": True,
        "speculative_config": '{"num_speculative_tokens": 1, "method": "mtp"}',
        "hf_overrides": '{"architectures": ["Qwen3_5ForCausalLM"], "rope_parameters": '
        '{"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}}',
    },
}  # fmt: skip
ALL = [SLOTS, NGRAM, MTP]


def ask(certificate: Certificate, known: list[Certificate] | None = None, **more: Any) -> Admission:
    settings = GOOD[certificate.name] | more.pop("settings", {})
    facts: dict[str, Any] = {
        "arch": "gfx906", "image": certificate.image, "on_cpu": False,
        "contract": certificate.contract, **more,
    }  # fmt: skip
    (answer,) = judge(certificate.backend, settings, certificates=known or [certificate], **facts)
    return answer


@pytest.mark.parametrize("certificate", ALL, ids=lambda one: one.name)
def test_what_was_run_is_admitted(certificate: Certificate) -> None:
    answer = ask(certificate, ALL)
    assert answer.admitted
    assert answer.certificate == certificate.name
    assert answer.limits == certificate.limits
    assert answer.problems == ()


def test_the_pair_of_the_canary_names_its_contract() -> None:
    assert (ask(MTP).contract or "").startswith("64189493708ff203")


def test_features_that_are_not_used_ask_for_nothing() -> None:
    settings = {"context_size": 4096, "slot_save_path": None, "draft_max": None}
    facts: dict[str, Any] = {"arch": "gfx1100", "image": "any:tag", "on_cpu": False}
    assert judge("llamacpp", settings, certificates=ALL, **facts) == []


@pytest.mark.parametrize(
    ("certificate", "more", "code", "says"),
    [
        (SLOTS, {"image": SLOTS.image.partition("@")[0]}, "certificate_tag", "digest"),
        (SLOTS, {"image": None}, "certificate_tag", "digest"),
        (SLOTS, {"image": "ghcr.io/x@sha256:" + "ab" * 32}, "certificate_digest", "artifact"),
        (SLOTS, {"arch": "gfx1100"}, "certificate_arch", "gfx906"),
        (SLOTS, {"settings": {"dedicated": False}}, "certificate_envelope", "dedicated"),
        (NGRAM, {"settings": {"draft_max": 8}}, "certificate_envelope", "16"),
        (NGRAM, {"settings": {"draft_max": None}}, "certificate_envelope", "16"),
        (MTP, {"settings": {"gpu_memory_utilization": 0.9}}, "certificate_envelope", "0.80"),
        (MTP, {"settings": {"enforce_eager": False}}, "certificate_envelope", "true"),
        (MTP, {"settings": {"max_num_batched_tokens": 512}}, "certificate_envelope", "256"),
        (MTP, {"settings": {"context_size": 32769}}, "certificate_envelope", "32768"),
        (MTP, {"contract": None}, "certificate_contract", "6418949370"),
        (MTP, {"contract": "0" * 64}, "certificate_contract", "000000"),
        (SLOTS, {"contract": "0" * 64}, "certificate_contract", "000000"),
        (MTP, {"settings": {"hf_overrides": None}}, "certificate_envelope", "rope_parameters"),
    ],
)
def test_what_differs_is_refused_and_named(
    certificate: Certificate, more: dict[str, Any], code: str, says: str
) -> None:
    answer = ask(certificate, ALL, **more)
    assert not answer.admitted
    assert [problem.code for problem in answer.problems] == [code]
    assert says in answer.problems[0].message
    assert answer.problems[0].hint


ESCAPES = [
    "/models/../etc/slots", "/models", "/models/", "/etc", "models/slots", "", "/modelsx/a",
    "/models/a/../../etc", "//etc/models", "/models/\0",
]  # fmt: skip


@pytest.mark.parametrize("path", ESCAPES)
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_path_that_leaves_the_models_is_refused(path: str, on_cpu: bool) -> None:
    assert not ask(SLOTS, settings={"slot_save_path": path}, on_cpu=on_cpu).admitted


@given(st.lists(st.sampled_from(["..", ".", "a", "models", ""]), max_size=6))
def test_no_path_with_a_step_up_is_below_the_models(words: list[str]) -> None:
    path = "/models/" + "/".join(words)
    if ".." in words:
        assert not ask(SLOTS, settings={"slot_save_path": path}).admitted


def test_on_the_cpu_no_certificate_is_needed_and_its_bounds_hold() -> None:
    free = {"arch": "cpu", "image": "ghcr.io/any:tag", "on_cpu": True}
    assert ask(NGRAM, **free).admitted
    assert ask(NGRAM, settings={"dedicated": False}, **free).admitted is True
    assert not ask(NGRAM, settings={"draft_max": 8}, **free).admitted
    assert not ask(NGRAM, settings={"spec_type": "draft-mtp"}, **free).admitted


def test_the_bound_image_is_that_of_the_arch() -> None:
    settings = GOOD[SLOTS.name]
    assert bound_image("llamacpp", settings, "gfx906", ALL) == SLOTS.image
    assert bound_image("llamacpp", settings, "gfx1100", ALL) is None
    assert bound_image("llamacpp", {}, "gfx906", ALL) is None


def damaged(certificate: Certificate, **changes: object) -> Certificate:
    """As nobody's file can be: built past the schema."""
    fields = {name: getattr(certificate, name) for name in type(certificate).model_fields}
    return Certificate.model_construct(**(fields | changes))


DAMAGES: list[dict[str, object]] = [
    {"image": ""}, {"image": "a:b"}, {"since": ""}, {"since": "2026-13-01"}, {"since": None},
    {"proof": ""}, {"proof": " "}, {"evidence": "documented"}, {"evidence": None}, {"source": ""},
    {"reason": ""}, {"archs": ()}, {"archs": ("gfx1100",)}, {"name": ""},
]  # fmt: skip


@given(st.sampled_from(ALL), st.sampled_from(DAMAGES))
def test_a_certificate_that_lacks_anything_proves_nothing(
    certificate: Certificate, changes: dict[str, object]
) -> None:
    assert not ask(certificate, [damaged(certificate, **changes)]).admitted


@given(st.sampled_from(ALL), st.integers(0, 63), st.sampled_from("0123456789abcdef"))
def test_one_digit_of_a_digest_is_another_artifact(
    certificate: Certificate, at: int, digit: str
) -> None:
    name, digest = certificate.image.split("@sha256:")
    other = f"{name}@sha256:{digest[:at]}{digit}{digest[at + 1 :]}"
    same = other == certificate.image
    assert ask(certificate, image=other).admitted == same
    changed = damaged(certificate, image=other)
    assert ask(certificate, [changed], image=certificate.image).admitted == same


@given(st.sampled_from(ALL), st.data())
def test_no_setting_of_the_envelope_may_be_left_out(
    certificate: Certificate, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(certificate.envelope)))
    others = [one for one in certificate.asks if one != name]
    if not others and name in certificate.asks:
        return  # then the feature is not in use at all
    assert not ask(certificate, settings={name: None}).admitted


@pytest.mark.parametrize("name", ["image", "since", "proof", "evidence", "archs", "envelope"])
def test_a_file_without_it_is_no_certificate(name: str) -> None:
    fields = MTP.model_dump(exclude_unset=True)
    del fields[name]
    with pytest.raises(ValueError, match=name):
        Certificate.model_validate(fields)
