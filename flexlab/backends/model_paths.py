"""Paths below the folder that holds the models inside a container, judged word by word."""

from __future__ import annotations

import posixpath
from typing import Annotated

from pydantic import AfterValidator, StringConstraints
from pydantic_core import PydanticCustomError

MODELS_DIR = "/models"
PATH_MAX_CHARS = 4096
OUTSIDE = "path_outside_models"
"""Type of the error for a path that would lead elsewhere."""


def is_below(path: str, folder: str) -> bool:
    """Below, word by word: a path with a step up or an empty step is none, wherever it leads."""
    inside = path.startswith(folder.rstrip("/") + "/") and posixpath.normpath(path) == path
    return inside and path.isprintable()


def below_models(path: str) -> str:
    """The path, unless it is relative, has a step up or an empty step, or leads elsewhere."""
    if not path.isprintable():
        raise PydanticCustomError(OUTSIDE, "a path holds characters that nobody can see")
    if not is_below(path, MODELS_DIR):
        raise PydanticCustomError(
            OUTSIDE, "a path must lie below /models, without steps up and without a last slash"
        )
    return path


def paths_below_models(text: str) -> str:
    """One or more of them, joined by commas."""
    for path in text.split(","):
        below_models(path)
    return text


_Text = Annotated[str, StringConstraints(max_length=PATH_MAX_CHARS)]
ModelPath = Annotated[_Text, AfterValidator(below_models)]
ModelPaths = Annotated[_Text, AfterValidator(paths_below_models)]
