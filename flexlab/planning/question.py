"""What planning is asked: a model, a machine, what is known of the software, and wishes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from flexlab.planning.fit import ModelShape
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import AnyVariant
from flexlab.spec.machine import Machine, Problem
from flexlab.spec.plan import Facts, RuntimeName, Wishes


class Locate(Protocol):
    """Where a recipe, or one of its keys, stands (file:line)."""

    def __call__(
        self, recipe: ModelRecipe | BackendRecipe | GpuRecipe, *path: str | int
    ) -> str: ...


def by_name(recipe: ModelRecipe | BackendRecipe | GpuRecipe, *path: str | int) -> str:
    """Where nobody knows the file."""
    if isinstance(recipe, ModelRecipe):
        return f"recipe {recipe.name}"
    return f"GPU recipe {recipe.name}" if isinstance(recipe, GpuRecipe) else recipe.name


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the answer depends on."""

    recipe: ModelRecipe
    machine: Machine
    facts: Facts
    wishes: Wishes
    backend_recipe: Callable[[str], BackendRecipe]
    where: str
    """Where the model's recipe stands, if that is told once for all of it; else empty."""
    runtime: RuntimeName
    runtime_source: str
    runtime_because: str
    shapes: Mapping[str, ModelShape]
    gpu_recipe: Callable[[str | None], GpuRecipe | None]
    """By arch; None where none is known."""
    certificates: Callable[[str], Sequence[Certificate]]
    """By backend."""
    broken: Mapping[str, Problem]
    """Installed weights that no engine could load, by source."""
    locate: Locate = by_name

    def where_of(self, variant: AnyVariant) -> str:
        """Where a variant stands."""
        names = [one.name for one in self.recipe.variants]
        at = names.index(variant.name)
        return self.where or self.locate(self.recipe, "variants", at)
