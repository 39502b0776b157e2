"""MLC-LLM: settings as users type them, words as `mlc_llm serve` takes them."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import backend_recipe

from flexlab import backends
from flexlab.backends.base import PLACEHOLDERS, Site, parse_settings
from flexlab.backends.mlc import Mlc, MlcSettings
from flexlab.core.errors import UsageError
from flexlab.core.units import GIB
from flexlab.spec.plan import HOST, PORT

LIBRARY = "/models/Model-q4f32_1-MLC/lib_cuda_maxwell.so"


def parse(**wishes: str) -> MlcSettings:
    return parse_settings("mlc", MlcSettings(), wishes)


def site(**changed: Any) -> Site:
    return Site(**{"model_path": "/models/qwen-MLC", "served_name": "qwen", "gpus": 1, **changed})


def argv(settings: MlcSettings, **changed: Any) -> tuple[str, ...]:
    return Mlc().argv(settings, site(**changed))


def option(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def overrides(words: tuple[str, ...]) -> dict[str, str]:
    if "--overrides" not in words:
        return {}
    return dict(part.split("=") for part in option(words, "--overrides").split(";"))


def test_the_model_follows_the_subcommand() -> None:
    words = argv(MlcSettings())
    assert words[:2] == ("serve", "/models/qwen-MLC")
    assert option(words, "--mode") == "server"
    assert (option(words, "--host"), option(words, "--port")) == (HOST, PORT)
    assert option(words, "--allow-origins") == "[]"


def test_the_block_of_the_compatibility_reference_in_the_engines_own_keys() -> None:
    wanted = {
        "max_num_sequence": "2", "max_total_seq_length": "131072", "gpu_memory_utilization": "0.85",
    }  # fmt: skip
    words = argv(parse(mode="server", **wanted))
    assert option(words, "--overrides") == ";".join(f"{k}={v}" for k, v in wanted.items())


def test_five_gigabytes_of_a_card_of_six_are_said_in_both_ways() -> None:
    chosen = parse(model_lib_path=LIBRARY, gpu_memory_bytes="5000000000")
    where = site(claim_bytes=4 * GIB, total_bytes=6 * GIB)
    words = Mlc().argv(chosen, where)
    assert option(words, "--model-lib") == LIBRARY
    assert overrides(words)["gpu_memory_utilization"] == "0.77"
    assert Mlc().env(chosen, where) == {
        "MLC_GPU_SIZE_BYTES": "5000000000",
        "MLC_JIT_POLICY": "OFF",
    }


def test_a_chosen_share_beats_bytes_and_the_grant() -> None:
    where = {"claim_bytes": 12 * GIB, "total_bytes": 24 * GIB}
    share = "gpu_memory_utilization"
    assert overrides(argv(MlcSettings(), **where))[share] == "0.50"
    assert overrides(argv(MlcSettings(gpu_memory_bytes=6 * GIB), **where))[share] == "0.25"
    both = MlcSettings(gpu_memory_bytes=6 * GIB, gpu_memory_utilization=0.9)
    assert overrides(argv(both, **where))[share] == "0.90"
    assert share not in overrides(argv(MlcSettings(gpu_memory_bytes=6 * GIB)))


@given(st.integers(1, 2**53), st.integers(1, 2**53))
def test_a_share_of_bytes_is_never_rounded_up(wanted: int, total: int) -> None:
    words = argv(MlcSettings(gpu_memory_bytes=wanted), total_bytes=total)
    share = Fraction(overrides(words)["gpu_memory_utilization"])
    assert 0 < share <= min(Fraction(1), Fraction(wanted, total))


def test_compiling_is_off_with_a_library_unless_somebody_asks_for_it() -> None:
    assert "MLC_JIT_POLICY" not in Mlc().env(MlcSettings(), site())
    assert Mlc().env(parse(jit_policy="READONLY"), site())["MLC_JIT_POLICY"] == "READONLY"
    chosen = parse(model_lib_path=LIBRARY, jit_policy="REDO")
    assert Mlc().env(chosen, site())["MLC_JIT_POLICY"] == "REDO"


@pytest.mark.parametrize(
    "path",
    ["/etc/lib.so", "/models/../etc/lib.so", "/models/a/../lib.so", "/models", "/models/",
     "models/lib.so", "/models//lib.so", "/modelsx/lib.so", "/models/a\nb.so", "", "{host}"],
)  # fmt: skip
def test_a_library_lies_below_models(path: str) -> None:
    with pytest.raises(UsageError, match="model_lib_path"):
        parse(model_lib_path=path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mode", "fast"), ("jit_policy", "off"), ("jit_policy", "false"),
        ("max_num_sequence", "0"), ("gpu_memory_utilization", "1.2"),
        ("gpu_memory_utilization", "0"), ("gpu_memory_bytes", "5e9"), ("gpu_memory_bytes", "5GB"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_or_size_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        parse(**{name: text})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("context_window_size", "context_size"), ("max_model_len", "context_size"),
        ("modelLibPath", "model_lib_path"), ("model_lib", "model_lib_path"),
        ("jitPolicy", "jit_policy"), ("maxNumSequence", "max_num_sequence"),
        ("max_num_seqs", "max_num_sequence"), ("MLC_GPU_SIZE_BYTES", "gpu_memory_bytes"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        parse(**{typed: "1"})


@given(
    st.dictionaries(
        st.sampled_from(sorted(MlcSettings.model_fields)),
        st.sampled_from(sorted(PLACEHOLDERS)) | st.text(max_size=8), max_size=3,
    )
)  # fmt: skip
def test_no_text_is_a_traceback_or_stands_for_a_host_or_a_port(wishes: dict[str, str]) -> None:
    with contextlib.suppress(UsageError):
        words = argv(parse_settings("mlc", MlcSettings(), wishes))
        assert [word for word in words if word in PLACEHOLDERS] == [HOST, PORT]


def test_every_number_is_one_of_the_engines_own_keys() -> None:
    chosen = MlcSettings(
        context_size=1, max_num_sequence=2, max_total_seq_length=3, prefill_chunk_size=4,
        sliding_window_size=5, attention_sink_size=0, gpu_memory_utilization=0.5,
    )  # fmt: skip
    assert overrides(argv(chosen, gpus=2)) == {
        "context_window_size": "1", "max_num_sequence": "2", "max_total_seq_length": "3",
        "prefill_chunk_size": "4", "sliding_window_size": "5", "attention_sink_size": "0",
        "gpu_memory_utilization": "0.50", "tensor_parallel_shards": "2",
    }  # fmt: skip


def test_ready_is_listing_its_model() -> None:
    assert Mlc().judge_ready(200, b"{}") == "ready"
    assert Mlc().judge_ready(500, b"") == "failed"


def test_the_shipped_patterns_are_of_use() -> None:
    found = Mlc().explain("ValueError: Insufficient GPU memory\n", backend_recipe("mlc").patterns)
    assert found is not None
    assert found.code == "out_of_memory"


def test_it_is_found_by_its_name() -> None:
    assert backends.get("mlc").settings_type is MlcSettings
