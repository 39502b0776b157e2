"""A recipe for a source that has none: `hf://ORG/REPO/FILE.gguf`, `file:///...`."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Container

from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import LlamaCppVariant, WeightFile
from flexlab.recipes.words import is_gguf_file
from flexlab.spec.source import Source

_FIRST_SHARD = re.compile(r"(.*)-00001-of-(\d{5})(\.gguf)", re.IGNORECASE)
_NAME_MAX = 80


def derive(source: Source, taken: Container[str] = ()) -> ModelRecipe:
    """A recipe that says no more than is known: the file, and that nobody has tried it.

    A name that is `taken` gets a few digits of the source's hash, always the same ones.
    """
    name = source.name[:_NAME_MAX].rstrip("._-")
    if name in taken:
        name += "-" + hashlib.sha256(source.uri.encode()).hexdigest()[:6]
    # Only a file of this machine can be known by its bytes; elsewhere the name must say it.
    told = "gguf" if source.format != "gguf" and is_gguf_file(source) else None
    variant = LlamaCppVariant(
        name="derived",
        backend="llamacpp",
        weights=tuple(WeightFile(source=uri, format=told) for uri in _with_shards(source.uri)),
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
