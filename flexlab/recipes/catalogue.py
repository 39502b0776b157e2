"""All recipes: those that FlexLab ships and the user's, which come first, by name and alias.

A wrong file takes none of the others down; it is an error only for who asks for that recipe.
Files are read when they are needed: one model by its name costs one file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self, TypeVar

from flexlab.core import paths
from flexlab.core.errors import RecipeError, UnknownModel, UsageError
from flexlab.core.near import did_you_mean, near
from flexlab.core.text import clean_line
from flexlab.core.validate import named
from flexlab.core.yaml import KeyPath, dump, load, report
from flexlab.recipes.archs import Archs
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.derive import derive
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.shelf import RecipeFile, Shelf, Skipped, read
from flexlab.recipes.words import means_source, source_of

MODELS, BACKENDS, CERTIFICATES, GPUS = "models", "backends", "certificates", "gpus"
A = TypeVar("A", ModelRecipe, BackendRecipe)
"""What has aliases."""
_BACKEND_KEYS = {"ready", "times", "routes"}


class Catalogue:
    """What `load` found; a picture of that moment, which does not follow later changes."""

    def __init__(self, shipped: Path, user: Path) -> None:
        self._models = Shelf(ModelRecipe, MODELS, shipped, user)
        self._backends = Shelf(BackendRecipe, BACKENDS, shipped, user)
        self._certificates = Shelf(Certificate, CERTIFICATES, shipped, user)
        self._gpus = Shelf(GpuRecipe, GPUS, shipped, user)
        self._archs = Archs(self._gpus)
        self._model_aliases: _Aliases | None = None
        self._backend_aliases: _Aliases | None = None

    @classmethod
    def load(cls, shipped: Path | None = None, user: Path | None = None) -> Self:
        """Look into both folders (by default FlexLab's own and the user's); reads no file yet."""
        return cls(shipped or paths.shipped_dir("recipes"), user or paths.user_recipes_dir())

    def models(self) -> list[ModelRecipe]:
        """Every usable recipe by name, with the aliases that really lead to it."""
        aliases = self._aliases_of_models()
        return [
            recipe.model_copy(update={"aliases": aliases.leading_to(recipe.name)})
            for recipe in self._models.all()
        ]

    def backends(self) -> list[BackendRecipe]:
        """Every usable backend recipe by name."""
        return list(self._backends.all())

    def gpus(self) -> list[GpuRecipe]:
        """Every usable GPU recipe of at least one arch by name, with all that it extends."""
        return self._archs.all()

    def gpu(self, arch: str | None) -> GpuRecipe | None:
        """What is known of an arch, with all that its recipe extends; None where there is none.

        Raises RecipeError when the recipe, or one that it extends, is wrong.
        """
        return self._archs.get(arch) if arch is not None else None

    def certificates(self) -> list[Certificate]:
        """Every complete certificate by name; a wrong file certifies nothing."""
        return list(self._certificates.all())

    def certificates_of(self, backend: str) -> list[Certificate]:
        """Those of one backend; reads no other's."""
        return [one for one in self._certificates.mentioning(backend) if one.backend == backend]

    def resolve(self, name: str, derived: Mapping[str, ModelRecipe] | None = None) -> ModelRecipe:
        """The recipe of a name or an alias; for a source the one that names it, or a derived one.

        `derived` are the recipes that were derived before, by name: the same source gets the same
        one again, another source of the same file name gets a name of its own.
        Raises UnknownModel with near names, RecipeError when the recipe is wrong, UsageError when
        a source is.
        """
        before = derived or {}
        if name in self._models.files:
            return self._models.get(name)
        aliases = self._aliases_of_models()
        if name in aliases.owner:
            return self._models.get(aliases.owner[name])
        known = [*self._models.files, *aliases.owner, *before]
        if name in before:
            return before[name]
        if means_source(name):
            source = source_of(name)
            found = _naming(source.uri, [*self._models.all(), *before.values()])
            return found or derive(source, known)
        hint = "flexlab recipes names the recipe files that are wrong" if self.problems else None
        raise UnknownModel(clean_line(name), near(name, known), hint)

    def backend(self, name: str) -> BackendRecipe:
        """The recipe of an engine. Raises UsageError, or RecipeError when the recipe is wrong."""
        if name in self._backends.files:
            return self._backends.get(name)
        if self._backend_aliases is None:
            self._backend_aliases = _Aliases(self._backends)
        owner = self._backend_aliases.owner
        if name in owner:
            return self._backends.get(owner[name])
        known = list(self._backends.files)
        raise UsageError(
            f"no backend named {clean_line(name)!r}{did_you_mean(name, [*known, *owner])}",
            f"backends: {', '.join(sorted(known))}",
            code="unknown_backend",
        )

    def where(self, recipe: ModelRecipe | BackendRecipe | GpuRecipe, *path: str | int) -> str:
        """`file:line` of a recipe or of one of its keys, or `derived from SOURCE`."""
        key: KeyPath = path or ("name",)
        if isinstance(recipe, GpuRecipe):
            return self._archs.where(recipe, key)
        shelf = self._models if isinstance(recipe, ModelRecipe) else self._backends
        if recipe.name in shelf.files:
            return shelf.where(recipe.name, key)
        if isinstance(recipe, ModelRecipe):
            return f"derived from {recipe.variants[0].weights[0].source}"
        return recipe.name

    def origin(self, recipe: ModelRecipe) -> str:
        """For lists: `shipped`, `user`, `user, instead of the shipped one`, `derived`."""
        file = self._models.files.get(recipe.name)
        if file is None:
            return "derived"
        if recipe.name in self._models.overridden:
            return "user, instead of the shipped one"
        return file.origin

    @property
    def problems(self) -> list[Skipped]:
        """Files, and aliases, that are left out because they are wrong. Reads every file."""
        return [
            *self._models.problems(),
            *self._backends.problems(),
            *self._certificates.problems(),
            *self._gpus.problems(),
            *self._archs.problems(),
            *self._aliases_of_models().clashes,
        ]

    def taken_aliases(self, recipe: ModelRecipe) -> Iterator[tuple[int, str]]:
        """Aliases (by their place) that lead to another recipe, with whose they are.

        A recipe of the same name is the one that this one stands for, and owns nothing here.
        """
        others = [other for other in self._models.all() if other.name != recipe.name]
        for at, alias in enumerate(recipe.aliases):
            for other in others:
                if alias == other.name or alias in other.aliases:
                    what = "the name" if alias == other.name else "an alias"
                    where = self._models.where(other.name, ("name",))
                    yield at, f"{alias!r} is {what} of {other.name} ({where}); choose another one"

    def _aliases_of_models(self) -> _Aliases:
        if self._model_aliases is None:
            self._model_aliases = _Aliases(self._models)
        return self._model_aliases


class _Aliases:
    """Which alias leads where. A name beats an alias; a user's alias beats a shipped one."""

    def __init__(self, shelf: Shelf[A]) -> None:
        self.owner: dict[str, str] = {}
        self.clashes: list[Skipped] = []
        for recipe in sorted(shelf.all(), key=lambda one: shelf.files[one.name].origin != "user"):
            for at, alias in enumerate(recipe.aliases):
                file = shelf.files[recipe.name]
                other = alias if alias in shelf.files else self.owner.get(alias)
                if other is None:
                    self.owner[alias] = recipe.name
                elif other == alias or shelf.files[other].origin == file.origin:
                    what = "is the name" if other == alias else "is also an alias"
                    where = shelf.where(recipe.name, ("aliases", at))
                    text = f"{where}: alias {alias!r} {what} of {shelf.where(other, ('name',))}"
                    self.clashes.append(Skipped(file.path, text))

    def leading_to(self, name: str) -> tuple[str, ...]:
        return tuple(alias for alias, owner in self.owner.items() if owner == name)


def _naming(uri: str, recipes: Iterable[ModelRecipe]) -> ModelRecipe | None:
    """The first recipe with a variant that runs exactly this source."""
    for recipe in recipes:
        firsts = (variant.weights[0] for variant in recipe.variants if variant.weights)
        if any(first.parsed.uri == uri for first in firsts):
            return recipe
    return None


def check_file(file: Path) -> ModelRecipe | BackendRecipe | Certificate | GpuRecipe:
    """Read one recipe file, wherever it lies. Raises RecipeError with all that is wrong.

    Its kind is told by the folder (`models`, `gpus`), else by what it holds. An alias that
    another recipe has is wrong here, though the catalogue can live with it: whoever types it means
    one of the two.
    """
    resolved = file.resolve()
    shipped = paths.shipped_dir("recipes").resolve()
    found = RecipeFile(file, "shipped" if shipped in resolved.parents else "user")
    kind = resolved.parent.name
    if kind == GPUS:
        return _check_gpu(found)
    if kind == CERTIFICATES:
        return read(Certificate, found)[0]
    if kind not in (MODELS, BACKENDS):
        data = load(file, RecipeError).data
        kind = BACKENDS if isinstance(data, dict) and _BACKEND_KEYS & set(data) else MODELS
    if kind == BACKENDS:
        return read(BackendRecipe, found)[0]
    recipe, document = read(ModelRecipe, found)
    taken = [
        document.flaw(path, named(path, text))
        for at, text in Catalogue.load().taken_aliases(recipe)
        for path in [("aliases", at)]
    ]
    if taken:
        raise RecipeError(report(found.shown, taken))
    return recipe


def _check_gpu(file: RecipeFile) -> GpuRecipe:
    recipe, document = read(GpuRecipe, file)
    shelf = Shelf(GpuRecipe, GPUS, paths.shipped_dir("recipes"), paths.user_recipes_dir())
    Archs(shelf).whole(recipe, document.where(("extends",)))
    return recipe


def as_yaml(recipe: ModelRecipe) -> str:
    """The recipe as a file; what is left at its default is left out."""
    return dump(recipe.model_dump(mode="json", by_alias=True, exclude_defaults=True))


def save(recipe: ModelRecipe) -> Path:
    """Keep a (derived) recipe as one of the user's own; never writes over a file.

    Raises RecipeError when there is one already, or when it cannot be written.
    """
    file = paths.user_recipes_dir() / MODELS / f"{recipe.name}.yaml"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as new:
            try:
                new.write(as_yaml(recipe))
                new.flush()
            except OSError:
                os.unlink(file)
                raise
    except FileExistsError:
        raise RecipeError(
            f"{file} is there already and was not changed",
            f"edit it, or remove it: rm {shlex.quote(str(file))}",
        ) from None
    except OSError as failure:
        raise RecipeError(
            f"{file} cannot be written: {failure.strerror}", "flexlab doctor"
        ) from failure
    return file
