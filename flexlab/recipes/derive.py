"""A recipe for a source that has none: `hf://ORG/REPO/FILE.gguf`, `file:///...`, a path."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
from collections.abc import Container

from flexlab.core.errors import UsageError
from flexlab.core.text import clean_line
from flexlab.recipes.schema import LlamaCppVariant, ModelRecipe, WeightFile
from flexlab.spec.source import (
    FileSource,
    HfSource,
    PypiSource,
    Source,
    file_source,
    is_source,
    parse_source,
)

_ORG_REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_FIRST_SHARD = re.compile(r"(.*)-00001-of-(\d{5})(\.gguf)", re.IGNORECASE)
_NAME_MAX = 80


def means_source(word: str) -> bool:
    """Whether a word means a source or a path, right or wrong, rather than a model's name."""
    return is_source(word) or "/" in word or word.startswith("~") or word.endswith(".gguf")


def source_of(word: str) -> Source:
    """The source that a word means; a path counts from the working folder.

    Raises UsageError: malformed, no such file, or nothing that a recipe can be derived for.
    """
    source = parse_source(word) if is_source(word) else file_source(word)
    shown = clean_line(word)
    if isinstance(source, FileSource) and not os.path.exists(source.path):
        raise UsageError(f"there is no file {clean_line(source.path)}", _hint_for_missing(word))
    if source.format == "pickle":
        raise UsageError(
            f"{shown} is a pickle file, which can run any code when it is loaded",
            "name a .gguf file of the same model",
        )
    if isinstance(source, PypiSource):
        raise UsageError(
            f"{shown} needs a recipe that states its sha256",
            "flexlab recipes show smollm2-135m shows such a recipe",
        )
    if source.format != "gguf" or (isinstance(source, HfSource) and not source.is_file):
        raise UsageError(
            f"{shown} is not one GGUF file, and nothing else runs without a recipe yet",
            "name the file: hf://ORG/REPO/FILE.gguf or /path/to/FILE.gguf",
        )
    return source


def derive(source: Source, taken: Container[str] = ()) -> ModelRecipe:
    """A recipe that says no more than is known: the file, and that nobody has tried it.

    A name that is `taken` gets a few digits of the source's hash, always the same ones.
    """
    name = source.name[:_NAME_MAX].rstrip("._-")
    if name in taken:
        name += "-" + hashlib.sha256(source.uri.encode()).hexdigest()[:6]
    variant = LlamaCppVariant(
        name="derived",
        backend="llamacpp",
        weights=tuple(WeightFile(source=uri) for uri in _with_shards(source.uri)),
        devices=("cpu",),
        evidence="untested",
        reason="derived from the source; nobody has tried this model with FlexLab",
        source=source.uri,
        date=datetime.date.today().isoformat(),
    )
    return ModelRecipe(
        name=name,
        description=f"Derived from {source.uri}.",
        license="unknown",
        capabilities=("chat", "completions"),
        variants=(variant,),
    )


def _with_shards(uri: str) -> list[str]:
    """All files of a model that was split; llama.cpp opens the first and looks for the others."""
    match = _FIRST_SHARD.fullmatch(uri)
    if match is None:
        return [uri]
    before, count, after = match.groups()
    return [f"{before}-{at:05d}-of-{count}{after}" for at in range(1, int(count) + 1)]


def _hint_for_missing(word: str) -> str:
    if not is_source(word) and _ORG_REPO.fullmatch(word):
        return f"for a repository on Hugging Face write hf://{word}/FILE.gguf"
    return "name an existing .gguf file, hf://ORG/REPO/FILE.gguf, or a model of flexlab recipes"
