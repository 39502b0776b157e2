"""Every setting of the llama.cpp backend, as words that the embedded engine must understand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from flexlab.backends.base import Site
from flexlab.backends.llamacpp import LlamaCpp, LlamaCppSettings
from flexlab.engines.llamacpp import parameters, run
from flexlab.engines.llamacpp_options import Options, parse
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT

PLACES = {HOST: "127.0.0.1", PORT: "8123", API_KEY_FILE: "/dev/fd/9"}
TEXTS = {
    "chat_template": "chatml",
    "mmproj": "/models/projector.gguf",
    "lora": "/models/one.gguf,/models/two.gguf",
    "slot_save_path": "/models/slots",
    "device": "Vulkan0,Vulkan1",
    "tensor_split": "3,1",
}
"""For the settings whose form does not say which values there are."""
COMPANIONS: Mapping[str, Mapping[str, object]] = {
    "draft_max": {"spec_type": "ngram-simple"},
    "draft_min": {"spec_type": "ngram-simple"},
    "pooling": {"embeddings": True},
}
"""What a setting cannot be chosen without."""
PROVED: Mapping[str, tuple[object, ...]] = {
    "spec_type": ("ngram-simple",),
    "draft_max": (1, 16),
}
"""Of these planning lets nothing else through, on the CPU either."""


def values(name: str, form: Mapping[str, Any]) -> Iterator[object]:
    """All of a choice, the ends of a range, one text."""
    if "anyOf" in form:
        for one in form["anyOf"]:
            yield from values(name, one)
    elif "const" in form or "enum" in form:
        yield from form.get("enum", [form.get("const")])
    elif form["type"] == "boolean":
        yield from (True, False)
    elif form["type"] == "integer":
        yield from (form["minimum"], form["maximum"])
    elif form["type"] == "string":
        yield TEXTS[name]


def choices() -> Iterator[Any]:
    for name, form in LlamaCppSettings.model_json_schema()["properties"].items():
        for value in PROVED.get(name) or values(name, form):
            yield pytest.param({name: value, **COMPANIONS.get(name, {})}, id=f"{name}={value}")


def understood(chosen: Mapping[str, object]) -> Options:
    settings = LlamaCppSettings.model_validate(chosen)
    site = Site(model_path="/m.gguf", served_name="m", threads=2)
    return parse([PLACES.get(word, word) for word in LlamaCpp().argv(settings, site)])


@pytest.mark.parametrize("chosen", choices())
def test_every_setting_is_understood(chosen: dict[str, object]) -> None:
    assert understood(chosen).model == "/m.gguf"


@pytest.mark.parametrize("chosen", choices())
def test_every_setting_has_a_place_in_the_engine(chosen: dict[str, object]) -> None:
    library = pytest.importorskip("xllamacpp", reason="needs the extra `embedded`")
    assert parameters(understood(chosen), [], library).model.path == "/m.gguf"


class TestWhatTheEngineIsTold:
    def told(self, **chosen: object) -> Any:
        library = pytest.importorskip("xllamacpp", reason="needs the extra `embedded`")
        return parameters(understood(chosen), [], library)

    def test_files_beside_the_model(self) -> None:
        told = self.told(mmproj="/models/p.gguf", lora="/models/a.gguf,/models/b.gguf")
        assert told.mmproj.path == "/models/p.gguf"
        adapters = [(one.path, one.scale) for one in told.lora_adapters]
        assert adapters == [("/models/a.gguf", 1.0), ("/models/b.gguf", 1.0)]

    def test_answers_and_reasoning(self) -> None:
        told = self.told(max_tokens=77, reasoning_format="deepseek-legacy", reasoning_budget=0)
        assert told.n_predict == 77
        assert told.reasoning_format.name == "COMMON_REASONING_FORMAT_DEEPSEEK_LEGACY"
        assert told.sampling.reasoning_budget_tokens == 0

    def test_reranking(self) -> None:
        told = self.told(reranking=True)
        assert told.embedding
        assert told.pooling_type.name == "LLAMA_POOLING_TYPE_RANK"

    def test_a_slot_folder_ends_with_a_slash(self) -> None:
        assert self.told(slot_save_path="/models/slots").slot_save_path == "/models/slots/"

    def test_no_speculation_unless_asked_for(self) -> None:
        (kind,) = self.told().speculative.types
        assert kind.name == "COMMON_SPECULATIVE_TYPE_NONE"

    @pytest.mark.parametrize("most", [None, 1, 4, 16, 48, 1024])
    @pytest.mark.parametrize("fewest", [None, 0, 1, 20, 1024])
    def test_drafts_stay_within_what_was_asked_for(
        self, most: int | None, fewest: int | None
    ) -> None:
        if most is not None and fewest is not None and fewest > most:
            return  # refused before
        told = self.told(spec_type="ngram-simple", draft_max=most, draft_min=fewest).speculative
        (kind,) = told.types
        assert kind.name == "COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE"
        ngram = told.ngram_simple
        assert ngram.size_m == most or most is None
        assert ngram.size_n >= (fewest or 0)
        assert 1 <= ngram.size_n <= ngram.size_m  # else nothing is ever drafted


def test_a_snapshot_needs_a_folder_that_can_be_written_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF\x03\0\0\0")
    words = ["--model", str(model), "--slot-save-path", str(tmp_path / "none")]
    assert run(words) == 2
    assert f"no folder {tmp_path}/none/" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--mmproj", "--lora"])
def test_a_second_file_that_is_missing_is_named(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF\x03\0\0\0")
    assert run(["--model", str(model), word, "/none.gguf"]) == 90
    assert "file /none.gguf" in capsys.readouterr().err
