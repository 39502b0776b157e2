"""vLLM: settings as users type them, words as its server takes them, shares never rounded up."""

from __future__ import annotations

import contextlib
import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import backend_recipe

from flexlab import backends
from flexlab.backends.base import PLACEHOLDERS, Site, parse_settings
from flexlab.backends.memory_share import chosen_share, granted_share
from flexlab.backends.vllm import Vllm, VllmSettings
from flexlab.core.errors import UsageError
from flexlab.core.units import GIB
from flexlab.spec.plan import HOST, PORT

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)  # fmt: skip


def parse(**wishes: str) -> VllmSettings:
    return parse_settings("vllm", VllmSettings(), wishes)


def site(**changed: Any) -> Site:
    fields: dict[str, Any] = {
        "model_path": "/models/qwen", "served_name": "qwen", "gpus": 1,
        "claim_bytes": 20 * GIB, "total_bytes": 24 * GIB,
    }  # fmt: skip
    return Site(**{**fields, **changed})


def argv(settings: VllmSettings, **changed: Any) -> tuple[str, ...]:
    return Vllm().argv(settings, site(**changed))


def option(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def test_it_is_told_what_it_serves_and_under_which_name() -> None:
    words = argv(VllmSettings(context_size=8192))
    assert words[0] == "/models/qwen"
    assert option(words, "--served-model-name") == "qwen"
    assert option(words, "--max-model-len") == "8192"
    assert (option(words, "--host"), option(words, "--port")) == (HOST, PORT)


def test_no_page_may_ask_it_and_no_key_stands_where_others_can_read_it() -> None:
    assert option(argv(VllmSettings()), "--allowed-origins") == "[]"
    assert "--api-key" not in argv(VllmSettings())
    assert "VLLM_API_KEY" not in Vllm().env(VllmSettings(), site())


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("max_model_len", "context_size"), ("--max-model-len", "context_size"),
        ("maxModelLen", "context_size"), ("num_ctx", "context_size"), ("parallel", "max_num_seqs"),
        ("gpuMemoryUtilization", "gpu_memory_utilization"), ("enforce-eager", "enforce_eager"),
        ("quantisation", "quantization"), ("hfOverrides", "hf_overrides"),
        ("cache_type_k", "kv_cache_dtype"), ("tool_parser", "tool_call_parser"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        parse(**{typed: "1"})


def test_code_of_strangers_is_never_offered() -> None:
    with pytest.raises(UsageError, match="no setting 'trust_remote_code'"):
        parse(trust_remote_code="true")
    for name in ("hf_overrides", "speculative_config", "mm_processor_kwargs"):
        for key in ("trust_remote_code", "auto_map"):
            with pytest.raises(UsageError, match="code of strangers"):
                parse(**{name: json.dumps({"a": [{key: True}]})})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("context_size", "4k"), ("context_size", "0"), ("gpu_memory_utilization", "0"),
        ("gpu_memory_utilization", "1.01"), ("gpu_memory_utilization", "NaN"),
        ("gpu_memory_utilization", "90%"), ("enforce_eager", "yes"), ("dtype", "fp16"),
        ("quantization", "GPTQ"), ("quantization", "--x"), ("attention_backend", "triton"),
        ("hf_overrides", "[1]"), ("hf_overrides", "{'a': 1}"), ("hf_overrides", '{"a":NaN}'),
        ("hf_overrides", "1"), ("block_size", "17"), ("chat_template", "--trust-remote-code"),
        ("chat_template", HOST),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_or_size_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**{name: text})
    assert name in caught.value.message
    assert caught.value.hint


def test_settings_that_need_each_other_are_judged_together() -> None:
    for alone, needed in (
        ({"tool_call_parser": "hermes"}, "enable_tool_calling"), ({"pooling": "cls"}, "embeddings"),
        ({"max_lora_rank": "16"}, "max_loras"),
        ({"lora_modules": '{"a":"/models/a"}'}, "max_loras"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=needed):
            parse(**alone)


@pytest.mark.parametrize(
    "path",
    ["/etc/a", "/models/../etc", "/models", "/models//a", "models/a", "/models/a,b", "/models/a=b"],
)  # fmt: skip
def test_adapters_lie_below_models(path: str) -> None:
    with pytest.raises(UsageError, match="adapter"):
        parse(max_loras="1", lora_modules=json.dumps({"a": path}))


def test_adapters_are_served_under_their_own_names() -> None:
    modules = '{"sql": "/models/l/sql", "fr": "/models/l/fr"}'
    words = argv(parse(max_loras="2", lora_modules=modules))
    assert "--enable-lora" in words
    assert words[words.index("--lora-modules") + 1 :] == ("sql=/models/l/sql", "fr=/models/l/fr")


def test_what_the_mtp_canary_was_proved_with_can_be_said() -> None:
    words = argv(
        parse(
            dtype="half", quantization="gptq", enforce_eager="true", max_num_seqs="1",
            attention_backend="TRITON_ATTN", max_num_batched_tokens="256", context_size="32768",
            gpu_memory_utilization="0.80",
            speculative_config='{"method": "mtp", "num_speculative_tokens": 1}',
            hf_overrides='{"architectures":["Qwen3_5ForCausalLM"],"rope_parameters":{"a":0.25}}',
        ), claim_bytes=15 * GIB, total_bytes=16 * GIB,
    )  # fmt: skip
    assert "--enforce-eager" in words
    for name, value in {
        "--dtype": "half", "--quantization": "gptq", "--max-num-seqs": "1",
        "--attention-backend": "TRITON_ATTN", "--max-num-batched-tokens": "256",
        "--gpu-memory-utilization": "0.80", "--max-model-len": "32768",
        "--speculative-config": '{"method":"mtp","num_speculative_tokens":1}',
    }.items():  # fmt: skip
        assert option(words, name) == value
    assert json.loads(option(words, "--hf-overrides"))["rope_parameters"] == {"a": 0.25}


def test_tool_calling_always_names_a_parser() -> None:
    words = argv(VllmSettings(enable_tool_calling=True))
    assert "--enable-auto-tool-choice" in words
    assert option(words, "--tool-call-parser") == "hermes"
    named = argv(VllmSettings(enable_tool_calling=True, tool_call_parser="mistral"))
    assert option(named, "--tool-call-parser") == "mistral"
    assert "--tool-call-parser" not in argv(VllmSettings())


def test_embeddings_are_served_by_a_server_of_their_own_kind() -> None:
    words = argv(VllmSettings(embeddings=True, pooling="cls"))
    assert option(words, "--runner") == "pooling"
    assert json.loads(option(words, "--pooler-config")) == {"pooling_type": "CLS"}


def test_switches_can_be_turned_off_as_well() -> None:
    assert "--no-enable-prefix-caching" in argv(VllmSettings(enable_prefix_caching=False))
    assert "--enable-prefix-caching" in argv(VllmSettings(enable_prefix_caching=True))
    assert "prefix-caching" not in " ".join(argv(VllmSettings()))


@pytest.mark.parametrize(
    ("build", "by_variable"),
    [("0.11.2", True), ("v0.12.0", True), ("0.6.3.post1", True), ("0.13.0", False),
     ("0.21.0", False), ("1.0", False), (None, False), ("nightly", False)],
)  # fmt: skip
def test_old_builds_are_told_the_attention_backend_by_a_variable(
    build: str | None, by_variable: bool
) -> None:
    chosen, where = VllmSettings(attention_backend="TRITON_ATTN"), site(build=build)
    named = {"VLLM_ATTENTION_BACKEND": "TRITON_ATTN"} if by_variable else {}
    assert Vllm().env(chosen, where) == named
    assert ("--attention-backend" in Vllm().argv(chosen, where)) is not by_variable


def test_several_cards_share_one_model() -> None:
    assert option(argv(VllmSettings(), gpus=2), "--tensor-parallel-size") == "2"
    assert "--tensor-parallel-size" not in argv(VllmSettings(), gpus=1)


def test_its_share_is_what_it_was_granted_unless_somebody_chose() -> None:
    share = "--gpu-memory-utilization"
    assert option(argv(VllmSettings()), share) == "0.83"
    assert option(argv(VllmSettings(gpu_memory_utilization=0.9)), share) == "0.90"
    assert share not in argv(VllmSettings(), claim_bytes=None)
    assert share not in argv(VllmSettings(), gpus=0)


@given(st.integers(1, 2**50), st.integers(1, 2**50))
def test_a_granted_share_is_never_more_than_was_granted(granted: int, total: int) -> None:
    text = granted_share(granted, total)
    assert text is not None
    share, exact = Fraction(text), min(Fraction(granted, total), Fraction(1))
    assert 0 < share <= exact
    digits = len(text.partition(".")[2])
    assert digits >= 2
    assert exact - share < Fraction(1, 10**digits)
    assert digits == 2 or exact < Fraction(1, 100)


@given(st.floats(0, 1, exclude_min=True))
def test_a_chosen_share_is_passed_on_exactly(share: float) -> None:
    assert float(chosen_share(share)) == share


@given(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3))
def test_json_settings_reach_the_engine_as_one_plain_word(value: dict[str, object]) -> None:
    word = option(argv(parse(hf_overrides=json.dumps(value, indent=1))), "--hf-overrides")
    assert json.loads(word) == value
    assert word.isascii()
    assert word.isprintable()


@given(
    st.dictionaries(
        st.sampled_from(sorted(VllmSettings.model_fields)),
        st.sampled_from(sorted(PLACEHOLDERS)) | st.text(max_size=8), max_size=3,
    )
)  # fmt: skip
def test_no_text_is_a_traceback_or_stands_for_a_host_or_a_port(wishes: dict[str, str]) -> None:
    with contextlib.suppress(UsageError):
        words = argv(parse_settings("vllm", VllmSettings(), wishes))
        assert [word for word in words if word in PLACEHOLDERS] == [HOST, PORT]


CHANGED: dict[str, Any] = {
    "context_size": 1, "max_num_seqs": 2, "max_num_batched_tokens": 3,
    "gpu_memory_utilization": 0.5, "dtype": "half", "quantization": "awq",
    "kv_cache_dtype": "fp8", "attention_backend": "FLASH_ATTN", "enforce_eager": True,
    "enable_prefix_caching": False, "block_size": 32, "num_gpu_blocks_override": 4,
    "cpu_offload_gb": 1.5, "disable_hybrid_kv_cache_manager": True, "hf_overrides": "{}",
    "speculative_config": "{}", "limit_mm_per_prompt": "{}", "mm_processor_kwargs": "{}",
    "enable_tool_calling": True, "reasoning_parser": "qwen3", "chat_template": "{{ x }}",
    "max_loras": 1, "embeddings": True,
}  # fmt: skip


def test_every_setting_reaches_the_engine() -> None:
    need_others = {"tool_call_parser", "max_lora_rank", "lora_modules", "pooling"}
    assert set(CHANGED) | need_others | {"dedicated"} == set(VllmSettings.model_fields)
    plain = argv(VllmSettings())
    for name, value in CHANGED.items():
        assert argv(VllmSettings(**{name: value})) != plain, name


def test_ready_is_healthy_and_nothing_else() -> None:
    assert Vllm().judge_ready(200, b"") == "ready"
    assert Vllm().judge_ready(503, b"") == "failed"


def test_the_shipped_patterns_are_of_use() -> None:
    log = "ValueError: No available memory for the cache blocks. Try increasing ...\n"
    found = Vllm().explain(log, backend_recipe("vllm").patterns)
    assert found is not None
    assert found.code == "no_room_for_cache"


def test_it_is_found_by_its_name() -> None:
    assert backends.get("vllm").settings_type is VllmSettings
