"""One folder of recipe files, shipped and the user's: found by name, read when asked for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

from flexlab.core.errors import RecipeError
from flexlab.core.validate import judge, named
from flexlab.core.yaml import Document, KeyPath, load, report
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.schema import ModelRecipe, contradictions

Origin = Literal["shipped", "user"]
R = TypeVar("R", ModelRecipe, BackendRecipe, Certificate, GpuRecipe)


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """A file whose stem is a recipe's name."""

    path: Path
    origin: Origin

    @property
    def shown(self) -> str:
        """Short for those that FlexLab ships: the same on every machine."""
        if self.origin == "user":
            return str(self.path)
        return f"recipes/{self.path.parent.name}/{self.path.name}"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A recipe file (or a part of one) that is not used, and why; the others are."""

    file: Path
    text: str

    def __str__(self) -> str:
        return self.text


def read(kind: type[R], file: RecipeFile) -> tuple[R, Document]:
    """One recipe. Raises RecipeError with all that is wrong in the file."""
    document = load(file.path, RecipeError, name=file.shown)
    recipe, flaws = judge(kind, document, {"origin": file.origin})
    if kind is ModelRecipe:  # its own validator runs only once everything else is right
        flaws += [
            document.flaw(path, named(path, text)) for path, text in contradictions(document.data)
        ]
    if recipe is not None and recipe.name != file.path.stem:
        text = f"name: {recipe.name!r} is not the file's name, {file.path.stem!r}; rename one"
        flaws.append(document.flaw(("name",), text))
    if recipe is None or flaws:
        raise RecipeError(
            report(file.shown, flaws), f"flexlab recipes check {shlex.quote(str(file.path))}"
        )
    return recipe, document


class Shelf(Generic[R]):
    """The recipes of one kind by name; a file of the user's stands before a shipped one."""

    def __init__(self, kind: type[R], folder: str, shipped: Path, user: Path) -> None:
        self._kind: type[R] = kind
        self._read: dict[str, tuple[R, Document] | RecipeError] = {}
        self._stray: list[Skipped] = []
        self.files: dict[str, RecipeFile] = {}
        self.overridden: set[str] = set()
        """Names for which a shipped recipe exists, but the user's counts."""
        places: tuple[tuple[Path, Origin], ...] = ((shipped, "shipped"), (user, "user"))
        for place, origin in places:
            for path in self._yaml_files(place / folder):
                if origin == "user" and path.stem in self.files:
                    self.overridden.add(path.stem)
                self.files[path.stem] = RecipeFile(path, origin)

    def get(self, name: str) -> R:
        """The recipe of this name, one of `files`. Raises RecipeError when it is wrong."""
        found = self._entry(name)
        if isinstance(found, RecipeError):
            raise found
        return found[0]

    def all(self) -> Iterator[R]:
        """Those that are right, by name."""
        for name in sorted(self.files):
            found = self._entry(name)
            if not isinstance(found, RecipeError):
                yield found[0]

    def mentioning(self, word: str) -> Iterator[R]:
        """Those that are right and whose file has this word: a user's first, then by name.

        Looking for a word is a hundredth of reading a recipe, so that one plan reads few of them.
        """
        whole = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w-])")
        names = sorted(self.files, key=lambda name: (self.files[name].origin != "user", name))
        for name in names:
            if name not in self._read and not whole.search(_text_of(self.files[name].path)):
                continue
            found = self._entry(name)
            if not isinstance(found, RecipeError):
                yield found[0]

    def problems(self) -> list[Skipped]:
        """Files that are wrong. Reads them all."""
        broken = [
            Skipped(self.files[name].path, found.message)
            for name in sorted(self.files)
            if isinstance(found := self._entry(name), RecipeError)
        ]
        return self._stray + broken

    def where(self, name: str, path: KeyPath) -> str:
        """`file:line` of a key of this recipe."""
        found = self._entry(name)
        shown = self.files[name].shown
        return shown if isinstance(found, RecipeError) else found[1].where(path)

    def _entry(self, name: str) -> tuple[R, Document] | RecipeError:
        if name not in self._read:
            try:
                self._read[name] = read(self._kind, self.files[name])
            except RecipeError as failure:
                self._read[name] = failure
        return self._read[name]

    def _yaml_files(self, folder: Path) -> list[Path]:
        try:
            with os.scandir(folder) as entries:
                paths = sorted(Path(entry.path) for entry in entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as failure:
            why = f"{folder}: cannot be read: {failure.strerror}"
            self._stray.append(Skipped(folder, why))
            return []
        visible = [path for path in paths if not path.name.startswith(".")]
        for path in visible:
            if path.suffix == ".yml":
                text = f"{path}: not read; recipes end in .yaml"
                self._stray.append(Skipped(path, text))
        return [path for path in visible if path.suffix == ".yaml"]


def _text_of(path: Path) -> str:
    """Empty where it cannot be read: reading it as a recipe says why."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
