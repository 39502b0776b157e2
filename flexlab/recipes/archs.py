"""Which GPU recipe an arch belongs to, with all that the recipe extends."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from flexlab.core.errors import RecipeError
from flexlab.core.near import did_you_mean
from flexlab.core.yaml import KeyPath
from flexlab.recipes.gpu_schema import BLOCKS, GpuRecipe
from flexlab.recipes.shelf import Shelf, Skipped


class Archs:
    """Every arch leads to one recipe: a user's before a shipped one, whatever their names.

    A recipe whose parents are wrong is an error for who asks for one of its archs, and for nobody
    else.
    """

    def __init__(self, shelf: Shelf[GpuRecipe]) -> None:
        self._shelf = shelf
        self._found: dict[str, GpuRecipe | RecipeError | None] = {}

    def get(self, arch: str) -> GpuRecipe | None:
        """None where there is no recipe for it. Raises RecipeError when its recipe is wrong."""
        found = self._found.get(arch)
        if found is None and arch not in self._found:
            of_arch = (one for one in self._shelf.mentioning(arch) if arch in one.archs)
            first = next(of_arch, None)
            found = self._found[arch] = self._judged(first) if first is not None else None
        if isinstance(found, RecipeError):
            raise found
        if found is None and arch in self._shelf.files:
            self._shelf.get(arch)  # the file that is named like it cannot be read
        return found

    def all(self) -> list[GpuRecipe]:
        """Those that are right and are of an arch, by name."""
        known = [found for found in self._by_arch.values() if isinstance(found, GpuRecipe)]
        by_name = {recipe.name: recipe for recipe in known}
        return [by_name[name] for name in sorted(by_name)]

    def problems(self) -> list[Skipped]:
        """Wrong parents, and archs that stand in two recipes of the same origin."""
        wrong = dict.fromkeys(
            (recipe.name, whole.message)
            for recipe in self._shelf.all()
            if isinstance(whole := self._judged(recipe), RecipeError)
        )
        found = [Skipped(self._shelf.files[name].path, text) for name, text in wrong]
        return found + list(self._clashes())

    def where(self, recipe: GpuRecipe, path: KeyPath) -> str:
        """`file:line` of a key of a whole recipe: a parent's block stands in the parent's file."""
        line = [*reversed(list(self._ancestors(recipe.name)))]
        at = path[1] if len(path) > 1 and path[0] in BLOCKS else None
        if not isinstance(at, int):
            holder = next((one for one in reversed(line) if _says(one, path)), line[-1])
            return self._shelf.where(holder.name, path)
        for one in line:
            here = len(getattr(one, str(path[0])))
            if at < here:
                return self._shelf.where(one.name, (path[0], at, *path[2:]))
            at -= here
        return self._shelf.where(recipe.name, ("name",))

    def whole(self, recipe: GpuRecipe, where: str, below: tuple[str, ...] = ()) -> GpuRecipe:
        """With its parents' blocks; `where` it says which parent. Raises RecipeError."""
        parent = recipe.extends
        if parent is None:
            return recipe
        if parent in (*below, recipe.name):
            raise RecipeError(f"{where}: {recipe.name} extends itself, by way of {parent}")
        if parent not in self._shelf.files:
            near_ones = did_you_mean(parent, list(self._shelf.files))
            raise RecipeError(f"{where}: there is no GPU recipe {parent!r}{near_ones}")
        above = self._shelf.get(parent)
        there = self._shelf.where(parent, ("extends",))
        return recipe.extending(self.whole(above, there, (*below, recipe.name)))

    @cached_property
    def _by_arch(self) -> dict[str, GpuRecipe | RecipeError]:
        found: dict[str, GpuRecipe | RecipeError] = {}
        files = self._shelf.files
        for recipe in sorted(self._shelf.all(), key=lambda one: files[one.name].origin != "user"):
            whole = self._judged(recipe)
            for arch in recipe.archs:
                found.setdefault(arch, whole)
        return found

    def _judged(self, recipe: GpuRecipe) -> GpuRecipe | RecipeError:
        """With all that it extends, or what is wrong with its parents."""
        try:
            return self.whole(recipe, self._shelf.where(recipe.name, ("extends",)))
        except RecipeError as failure:
            return failure

    def _ancestors(self, name: str) -> Iterator[GpuRecipe]:
        """The recipe itself and its parents as their files have them, the nearest first."""
        recipe: GpuRecipe | None = self._shelf.get(name)
        while recipe is not None:
            yield recipe
            recipe = self._shelf.get(recipe.extends) if recipe.extends else None

    def _clashes(self) -> Iterator[Skipped]:
        owner: dict[tuple[str, str], str] = {}
        for recipe in self._shelf.all():
            file = self._shelf.files[recipe.name]
            for at, arch in enumerate(recipe.archs):
                other = owner.setdefault((file.origin, arch), recipe.name)
                if other != recipe.name or arch in recipe.archs[:at]:
                    where = self._shelf.where(recipe.name, ("archs", at))
                    there = self._shelf.where(other, ("archs",))
                    yield Skipped(file.path, f"{where}: {arch} is also an arch of {there}")


def _says(recipe: GpuRecipe, path: KeyPath) -> bool:
    return bool(path) and path[0] in recipe.model_fields_set
