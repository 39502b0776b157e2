"""llama.cpp: settings as users type them, words as the engine takes them, answers as it gives."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import backend_recipe
from pydantic import ValidationError

from flexlab import backends
from flexlab.backends.base import PLACEHOLDERS, Site, parse_settings
from flexlab.backends.llamacpp import LlamaCpp, LlamaCppSettings
from flexlab.core.errors import UsageError
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT


def parse(**wishes: str) -> LlamaCppSettings:
    return parse_settings("llamacpp", LlamaCppSettings(), wishes)


def argv(settings: LlamaCppSettings, threads: int | None = 4, **where: Any) -> tuple[str, ...]:
    site = Site(model_path="/models/a b.gguf", served_name="small", threads=threads, **where)
    return LlamaCpp().argv(settings, site)


def option(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def test_values_are_read_as_their_settings_type() -> None:
    found = parse(
        context_size="8192", jinja="false", threads="2", cache_type_k="q8_0", chat_template="123"
    )
    assert (found.context_size, found.jinja, found.threads) == (8192, False, 2)
    assert (found.cache_type_k, found.chat_template) == ("q8_0", "123")


def test_null_unsets_an_optional_setting() -> None:
    base = LlamaCppSettings(threads=3)
    assert parse_settings("llamacpp", base, {"threads": "null"}).threads is None


def test_what_is_not_asked_for_stays_as_the_recipe_has_it() -> None:
    base = LlamaCppSettings(context_size=1024, parallel=3)
    assert parse_settings("llamacpp", base, {"parallel": "2"}).context_size == 1024


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("contextsize", "context_size"), ("contextSize", "context_size"),
        ("context-size", "context_size"), ("--ctx-size", "context_size"), ("n_ctx", "context_size"),
        ("num_ctx", "context_size"), ("ngl", "n_gpu_layers"), ("cache-ram", "cache_ram_mib"),
        ("thread", "threads"), ("flash_attn", "flash_attention"), ("embedding", "embeddings"),
        ("slotSavePath", "slot_save_path"), ("specType", "spec_type"), ("draftMax", "draft_max"),
        ("--spec-draft-n-max", "draft_max"), ("dedicatedDeployment", "dedicated"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        parse(**{typed: "1"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("context_size", "4k"), ("context_size", "4096.0"), ("context_size", "0"),
        ("context_size", ""), ("context_size", "true"), ("context_size", '"4096"'),
        ("jinja", "yes"), ("jinja", "1"), ("jinja", "False"), ("cache_type_k", "q4"),
        ("flash_attention", "true"), ("threads", "-1"), ("parallel", "9" * 40),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_or_size_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        parse(**{name: text})
    assert caught.value.hint


def test_all_wrong_settings_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse(context_size="4k", jinja="yes", nonsense="1")
    for name in ("context_size", "jinja", "nonsense"):
        assert name in caught.value.message


def test_settings_that_need_each_other_are_judged_together() -> None:
    assert parse(embeddings="true", pooling="cls").pooling == "cls"
    with pytest.raises(UsageError, match="flash_attention"):
        parse(flash_attention="off", cache_type_v="q8_0")
    with pytest.raises(UsageError, match="embeddings"):
        parse(pooling="mean")


@pytest.mark.parametrize("value", ["4096", 4096.0, True])
def test_a_recipe_must_state_the_right_type(value: object) -> None:
    with pytest.raises(ValidationError):
        LlamaCppSettings.model_validate({"context_size": value})


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3))
def test_no_text_is_a_traceback(wishes: dict[str, str]) -> None:
    with contextlib.suppress(UsageError):
        assert isinstance(parse_settings("llamacpp", LlamaCppSettings(), wishes), LlamaCppSettings)


def test_context_size_slots_and_layers_are_always_stated() -> None:
    words = argv(LlamaCppSettings(context_size=2048, parallel=4))
    assert option(words, "--ctx-size") == "8192"
    assert option(words, "--parallel") == "4"
    assert option(words, "--n-gpu-layers") == "0"
    assert option(words, "--cache-ram") == "256"


def test_the_users_threads_beat_the_machines_and_unknown_is_left_out() -> None:
    assert option(argv(LlamaCppSettings()), "--threads") == "4"
    assert option(argv(LlamaCppSettings(threads=2)), "--threads") == "2"
    assert "--threads" not in argv(LlamaCppSettings(), threads=None)


def test_embeddings_always_come_with_a_pooling() -> None:
    assert option(argv(LlamaCppSettings(embeddings=True)), "--pooling") == "mean"
    assert "--pooling" not in argv(LlamaCppSettings())


def test_switches_are_words_of_their_own() -> None:
    words = argv(LlamaCppSettings(jinja=False, metrics=False))
    assert "--no-jinja" in words
    assert "--metrics" not in words


CHANGED: dict[str, Any] = {
    "context_size": 1, "parallel": 2, "n_gpu_layers": 3, "threads": 5, "threads_batch": 6,
    "batch_size": 7, "ubatch_size": 8, "flash_attention": "on", "cache_type_k": "q8_0",
    "cache_type_v": "q8_0", "cache_ram_mib": 9, "jinja": False, "chat_template": "chatml",
    "embeddings": True, "metrics": False, "reranking": True, "max_tokens": 10,
    "mmproj": "/models/mmproj.gguf", "lora": "/models/a.gguf,/models/b.gguf",
    "reasoning_format": "deepseek", "reasoning_budget": 0, "n_cpu_moe": 11, "device": "ROCm0,ROCm1",
    "split_mode": "row", "tensor_split": "3,1", "slot_save_path": "/models/.slots",
    "spec_type": "ngram-simple",
}  # fmt: skip
WITH_ANOTHER = {"pooling", "draft_max", "draft_min"}
NO_WORDS = {"dedicated"}


def test_every_setting_reaches_the_engine() -> None:
    assert set(CHANGED) == set(LlamaCppSettings.model_fields) - WITH_ANOTHER - NO_WORDS
    plain = argv(LlamaCppSettings(), gpus=2)
    for name, value in CHANGED.items():
        assert argv(LlamaCppSettings(**{name: value}), gpus=2) != plain, name


@pytest.mark.parametrize(
    ("chosen", "gpus", "layers"),
    [(None, 0, "0"), (20, 0, "0"), (None, 1, "999"), (20, 1, "20"), (0, 1, "0")],
)
def test_layers_are_all_on_a_gpu_and_none_on_the_cpu(
    chosen: int | None, gpus: int, layers: str
) -> None:
    words = argv(LlamaCppSettings(n_gpu_layers=chosen), gpus=gpus)
    assert option(words, "--n-gpu-layers") == layers


def test_a_model_is_spread_by_layers_over_several_gpus_only() -> None:
    assert option(argv(LlamaCppSettings(), gpus=2), "--split-mode") == "layer"
    chosen = LlamaCppSettings(split_mode="row", tensor_split="3,1", device="CUDA0", n_cpu_moe=8)
    one, none = argv(chosen, gpus=1), argv(chosen)
    assert "--split-mode" not in one
    assert (option(one, "--device"), option(one, "--n-cpu-moe")) == ("CUDA0", "8")
    assert not {"--device", "--n-cpu-moe", "--tensor-split"} & set(none)


@pytest.mark.parametrize("build", ["b8173", "8173", "b8953", "b8173-rocm"])
def test_builds_before_the_renaming_get_the_words_that_they_know(build: str) -> None:
    words = argv(parse(spec_type="ngram-simple", draft_max="16", draft_min="1"), build=build)
    assert option(words, "--spec-type") == "ngram-simple"
    assert (option(words, "--draft-max"), option(words, "--draft-min")) == ("16", "1")
    assert not [word for word in words if word.startswith("--spec-draft")]


@pytest.mark.parametrize("build", [None, "", "b8962", "b10288", "b10288-rocm-7.14", "2026.10.1"])
def test_newer_builds_and_moving_tags_get_the_new_words(build: str | None) -> None:
    words = argv(parse(spec_type="ngram-simple", draft_max="16", draft_min="1"), build=build)
    found = option(words, "--spec-draft-n-max"), option(words, "--spec-draft-n-min")
    assert found == ("16", "1")
    assert not [word for word in words if word.startswith("--draft")]


@pytest.mark.parametrize(
    ("wishes", "says"),
    [
        ({"reranking": "true", "embeddings": "true"}, "exclude"), ({"spec_type": "drft"}, "ngram"),
        ({"device": "CUDA0;x"}, "device"), ({"tensor_split": "3,"}, "tensor_split"),
    ],
)  # fmt: skip
def test_what_no_engine_could_do_is_refused(wishes: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(**wishes)


PATH_PARTS = st.sampled_from(["models", "..", ".", "", "etc", "slots", "a b", "\0", "modelsx"])


@given(st.lists(PATH_PARTS, max_size=6).map("/".join))
def test_a_path_is_taken_only_where_every_step_stays_below_models(path: str) -> None:
    steps = path.split("/")
    stays = (
        steps[:2] == ["", "models"]
        and len(steps) > 2
        and not {"", ".", "..", "\0"} & set(steps[2:])
    )
    for name in ("slot_save_path", "mmproj", "lora"):
        if stays:
            assert getattr(parse(**{name: path}), name) == path
        else:
            with pytest.raises(UsageError, match=name):
                parse(**{name: path})


def test_one_of_several_adapters_cannot_lead_elsewhere() -> None:
    with pytest.raises(UsageError, match="lora"):
        parse(lora="/models/a.gguf,/etc/passwd")


@given(
    st.dictionaries(
        st.sampled_from(sorted(LlamaCppSettings.model_fields)),
        st.sampled_from(sorted(PLACEHOLDERS)) | st.text(max_size=8), max_size=3,
    )
)  # fmt: skip
def test_no_setting_stands_for_a_host_a_port_or_a_key(wishes: dict[str, str]) -> None:
    with contextlib.suppress(UsageError):
        words = argv(parse_settings("llamacpp", LlamaCppSettings(), wishes), gpus=2)
        assert [word for word in words if word in PLACEHOLDERS] == [HOST, PORT, API_KEY_FILE]


@pytest.mark.parametrize(
    ("status", "meaning"), [(200, "ready"), (503, "loading"), (500, "failed"), (404, "failed")]
)
def test_what_health_answers_mean(status: int, meaning: str) -> None:
    assert LlamaCpp().judge_ready(status, b"{}") == meaning


class Pattern(msgspec.Struct, frozen=True, kw_only=True):
    match: str
    code: str = "known"
    message: str = "it says: {line}"
    hint: str = "do this"


def test_a_known_line_of_the_log_is_the_cause() -> None:
    log = "loading\nbind failed on 8080\nexiting\x1b[0m\n"
    problem = LlamaCpp().explain(log, [Pattern(match="no such"), Pattern(match="bind failed")])
    assert problem is not None
    assert problem.message == "it says: bind failed on 8080"
    assert LlamaCpp().explain(log, [Pattern(match="no such")]) is None
    assert LlamaCpp().explain("", [Pattern(match=".*x")]) is None


def test_the_more_precise_pattern_wins_over_the_later_line() -> None:
    log = "out of memory\nfailed to load\n"
    found = LlamaCpp().explain(
        log, [Pattern(match="out of memory", code="a"), Pattern(match="failed", code="b")]
    )
    assert found is not None
    assert found.code == "a"


def test_the_shipped_patterns_are_of_use() -> None:
    patterns = backend_recipe("llamacpp").patterns
    found = LlamaCpp().explain("x: failed to read magic\nmain: exiting\n", patterns)
    assert found is not None
    assert found.code == "not_gguf"


def test_an_unknown_backend_names_those_that_exist() -> None:
    assert backends.get("llamacpp").name == "llamacpp"
    with pytest.raises(UsageError) as caught:
        backends.get("nothing")
    assert caught.value.code == "unknown_backend"
    assert "llamacpp" in (caught.value.hint or "")
