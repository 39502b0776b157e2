"""The words by which people name weights without a recipe: a source, a path, or neither.

Looks at the disk but reads no recipe and loads no pydantic, so that a command line may ask first.
"""

from __future__ import annotations

import os
import re

from flexlab.core.errors import UsageError
from flexlab.core.near import near
from flexlab.core.text import clean_line
from flexlab.spec.source import (
    FileSource,
    HfSource,
    PypiSource,
    Source,
    file_source,
    is_source,
    parse_source,
    weight_format,
)

_GGUF_MAGIC = b"GGUF"
_ORG_REPO = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_PATH_STARTS = ("/", "./", "../", "~")
_NEAR_FILES_MAX = 3
_FOLDER_MAX = 1000
"""Entries of a folder that are looked at for files that were meant."""


def means_source(word: str) -> bool:
    """Whether a word means a source or a path, right or wrong, rather than a model's name."""
    if is_source(word) or "/" in word or word in (".", "..") or word.startswith("~"):
        return True
    return weight_format(word) != "other"


def means_path(word: str) -> bool:
    """Whether a word means a path of this machine: by its form, or since such a file is here.

    What could be a model's name as well (`org/name`) is a path only where something is there.
    """
    if is_source(word) or not means_source(word):
        return False
    if word in (".", "..") or word.startswith(_PATH_STARTS) or word.endswith("/"):
        return True
    return weight_format(word) == "gguf" or os.path.exists(word)


def source_of(word: str) -> Source:
    """The source that a word means; a path counts from the working folder.

    Raises UsageError: malformed, no such file, or nothing that a recipe can be derived for.
    """
    source = parse_source(word) if is_source(word) else file_source(word)
    shown = clean_line(word)
    if isinstance(source, FileSource):
        _check_file(source.path, word)
        if is_gguf_file(source):
            return source
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


def is_gguf_file(source: Source) -> bool:
    """A file of this machine that is GGUF by its first bytes, whatever its name ends in."""
    return isinstance(source, FileSource) and _is_gguf(source.path)


def _is_gguf(path: str) -> bool:
    try:
        if not os.path.isfile(path):  # a pipe would let us wait for ever
            return False
        with open(path, "rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return False


def _check_file(path: str, word: str) -> None:
    """Raises UsageError for a folder and for what is not there."""
    shown = clean_line(word if _ORG_REPO.fullmatch(word) else path)
    if os.path.isdir(path):
        files = _gguf_files(path)
        inside = f": {', '.join(files)}" if files else "; this one holds none"
        raise UsageError(f"{shown} is a folder", f"name a .gguf file in it{inside}")
    if not os.path.exists(path):
        raise UsageError(f"there is no file {shown}", _hint_for_missing(word, path))


def _hint_for_missing(word: str, path: str) -> str:
    if not is_source(word) and _ORG_REPO.fullmatch(word):
        return f"for a repository on Hugging Face write hf://{word}/FILE.gguf"
    folder, name = os.path.split(path)
    if close := near(name, _gguf_files(folder, _FOLDER_MAX)):
        return f"did you mean {' or '.join(close)}? It is in {clean_line(folder)}"
    return "name an existing .gguf file, hf://ORG/REPO/FILE.gguf, or a model of flexlab recipes"


def _gguf_files(folder: str, limit: int = _NEAR_FILES_MAX) -> list[str]:
    """Names of GGUF files in a folder, clean enough to be shown."""
    try:
        with os.scandir(folder) as entries:
            some = [entry.name for _, entry in zip(range(_FOLDER_MAX), entries, strict=False)]
    except (OSError, ValueError):
        return []
    names = sorted(clean_line(name) for name in some if name.lower().endswith(".gguf"))
    return names[:limit]
