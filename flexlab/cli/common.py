"""What several verbs share: their Typer settings, options, and names made from words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flexlab.core.errors import UsageError
from flexlab.spec.source import file_source

JsonOption = Annotated[bool, typer.Option("--json", help="Answer as JSON, in a stable shape.")]


def verb_app(help_text: str | None = None) -> typer.Typer:
    """A Typer application with the settings that keep start-up quick and errors ours."""
    return typer.Typer(
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def model_word(word: str) -> str:
    """A model as the daemon understands it: a path to a GGUF file becomes a file:// URI.

    The daemon has another working folder, so a relative path would mean another file there.
    """
    if "://" in word or not word.lower().endswith(".gguf"):
        return word
    source = file_source(word)
    if not Path(source.path).is_file():
        raise UsageError(f"no file {source.path}", "give a path to a .gguf, or a model's name")
    return source.uri


def key_values(words: list[str]) -> dict[str, str]:
    """`--set key=value`, repeated. The backend's settings judge keys and values."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set wants key=value, not {word!r}", "such as --set parallel=2")
        pairs[key.strip()] = value
    return pairs


def need_words(words: list[str], what: str, usage: str) -> None:
    """Raises UsageError with the usage line where the words that a verb needs are missing."""
    if not words:
        raise UsageError(f"{what} is missing\nusage: {usage}", "flexlab recipes lists models")
