"""Ollama: settings as users type them, its variables, and the steps to a loaded model."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import backend_recipe

from flexlab import backends
from flexlab.backends.base import PLACEHOLDERS, Site, parse_settings
from flexlab.backends.ollama import Ollama, OllamaSettings
from flexlab.core.errors import UsageError


def parse(**wishes: str) -> OllamaSettings:
    return parse_settings("ollama", OllamaSettings(), wishes)


def site(**changed: Any) -> Site:
    return Site(**{"model_path": "qwen3:8b", "served_name": "qwen3-8b", "gpus": 1, **changed})


def env(settings: OllamaSettings, **where: Any) -> dict[str, str]:
    return Ollama().env(settings, site(**where))


def test_its_words_are_the_subcommand_alone() -> None:
    assert Ollama().argv(parse(context_size="8192"), site()) == ("serve",)


def test_settings_become_variables_and_each_is_text() -> None:
    found = env(parse(context_size="8192", parallel="2", cache_type="q8_0", flash_attention="on"))
    assert found == {
        "OLLAMA_HOST": "0.0.0.0",
        "OLLAMA_CONTEXT_LENGTH": "8192",
        "OLLAMA_NUM_PARALLEL": "2",
        "OLLAMA_KV_CACHE_TYPE": "q8_0",
        "OLLAMA_FLASH_ATTENTION": "1",
    }
    assert all(isinstance(value, str) for value in found.values())


def test_the_recipe_keeps_one_model_loaded_until_it_is_stopped() -> None:
    known = backend_recipe("ollama").env
    assert (known["OLLAMA_KEEP_ALIVE"], known["OLLAMA_MAX_LOADED_MODELS"]) == ("-1", "1")
    assert not set(known) & set(env(OllamaSettings(flash_attention="on"), gpus=2))


def test_a_small_cache_brings_the_attention_that_it_needs() -> None:
    assert "OLLAMA_FLASH_ATTENTION" not in env(OllamaSettings())
    assert env(OllamaSettings(cache_type="q4_0"))["OLLAMA_FLASH_ATTENTION"] == "1"
    assert env(OllamaSettings(flash_attention="off"))["OLLAMA_FLASH_ATTENTION"] == "0"
    with pytest.raises(UsageError, match="flash_attention"):
        parse(cache_type="q8_0", flash_attention="off")


def test_several_gpus_are_all_used() -> None:
    assert env(OllamaSettings(), gpus=2)["OLLAMA_SCHED_SPREAD"] == "1"
    assert "OLLAMA_SCHED_SPREAD" not in env(OllamaSettings(), gpus=1)


def test_after_its_start_the_model_is_pulled_named_and_loaded() -> None:
    pull, copy, warm = Ollama().after_start(OllamaSettings(), site())
    assert (pull.kind, pull.path, pull.body["model"]) == ("pull", "/api/pull", "qwen3:8b")
    assert pull.streams
    assert (copy.kind, copy.path) == ("copy", "/api/copy")
    assert copy.body == {"source": "qwen3:8b", "destination": "qwen3-8b"}
    assert (warm.kind, warm.path) == ("warm", "/api/generate")
    assert (warm.body["model"], warm.body["keep_alive"]) == ("qwen3-8b", -1)


def test_a_chosen_name_beats_the_recipes_and_an_equal_name_is_not_copied() -> None:
    steps = Ollama().after_start(parse(model="hf.co/org/repo-GGUF:Q4_K_M"), site())
    assert steps[0].body["model"] == "hf.co/org/repo-GGUF:Q4_K_M"
    same = Ollama().after_start(parse(model="qwen3-8b:latest"), site())
    assert [step.kind for step in same] == ["pull", "warm"]


def test_a_model_that_cannot_chat_is_loaded_by_an_embedding() -> None:
    warm = Ollama().after_start(parse(embeddings="true"), site())[-1]
    assert (warm.path, warm.body["input"]) == ("/api/embed", "")


@pytest.mark.parametrize("path", ["", "/models/a.gguf", "./a.gguf", "hf://org/repo"])
def test_without_a_name_in_its_library_there_is_nothing_to_pull(path: str) -> None:
    with pytest.raises(UsageError, match="library"):
        Ollama().after_start(OllamaSettings(), site(model_path=path))


@pytest.mark.parametrize(
    ("status", "body", "meaning"),
    [
        (200, b'{"models":[{"name":"qwen3-8b:latest"}]}', "ready"),
        (200, b'{"models":[]}', "loading"),
        (200, b'{"models":null}', "loading"),
        (200, b"Ollama is running", "failed"),
        (200, b"[]", "failed"),
        (503, b"", "loading"),
        (404, b"", "failed"),
    ],
)
def test_answering_without_a_model_is_not_ready(status: int, body: bytes, meaning: str) -> None:
    assert Ollama().judge_ready(status, body) == meaning


def test_the_ready_question_is_one_whose_answer_lists_models() -> None:
    assert backend_recipe("ollama").ready.path in ("/api/ps", "/api/tags")


@given(st.integers(100, 599), st.binary(max_size=40))
def test_no_answer_is_a_traceback(status: int, body: bytes) -> None:
    assert Ollama().judge_ready(status, body) in ("ready", "loading", "failed")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("context_size", "0"), ("context_size", "4k"), ("cache_type", "f32"), ("parallel", "0"),
        ("model", "../qwen"), ("model", "qwen3:8b\n"), ("model", "{host}"), ("model", "-x"),
        ("model", "http://x/y"), ("flash_attention", "true"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_or_size_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        parse(**{name: text})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("num_ctx", "context_size"), ("OLLAMA_NUM_PARALLEL", "parallel"), ("np", "parallel"),
        ("cache_type_k", "cache_type"), ("flash_attn", "flash_attention"), ("tag", "model"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        parse(**{typed: "1"})


@given(
    st.dictionaries(
        st.sampled_from(sorted(OllamaSettings.model_fields)),
        st.sampled_from(sorted(PLACEHOLDERS)) | st.text(max_size=8), max_size=3,
    )
)  # fmt: skip
def test_no_text_is_a_traceback_or_a_placeholder(wishes: dict[str, str]) -> None:
    with contextlib.suppress(UsageError):
        found = env(parse_settings("ollama", OllamaSettings(), wishes))
        assert not PLACEHOLDERS & set(found.values())


def test_the_shipped_patterns_are_of_use() -> None:
    log = "Error: model requires more system memory (8.0 GiB) than is available (2.0 GiB)\n"
    found = Ollama().explain(log, backend_recipe("ollama").patterns)
    assert found is not None
    assert found.code == "out_of_memory"


def test_it_is_found_by_its_name() -> None:
    assert backends.get("ollama").settings_type is OllamaSettings
