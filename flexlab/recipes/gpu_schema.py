"""What a GPU recipe may say: what an arch needs, what it must never get, and what runs on it.

As in the other recipes, every block carries its evidence. A recipe that `extends` another has all
of its blocks; its own come after them, and a later word on the same thing wins.
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from flexlab.core.fields import Bytes
from flexlab.core.validate import WrongAt
from flexlab.recipes.fields import (
    Arch,
    EnvName,
    Evidenced,
    Name,
    RegularExpression,
    Sentence,
    Strict,
    Version,
)
from flexlab.spec.machine import Vendor
from flexlab.spec.plan import Support

DEVICES = "{devices}"
"""In a variable's value: the numbers of the devices that an engine is given, counted from 0."""
BLOCKS = ("environment", "support", "defaults", "rules")
"""Keys whose blocks a recipe adds to its parent's."""


class GpuEnvironment(Evidenced):
    """Variables for engines on this arch."""

    backends: tuple[Name, ...] = ()
    """Those that get them; none named: all."""

    variables: dict[EnvName, str] = Field(default_factory=dict)
    never: tuple[EnvName, ...] = ()
    """Never set, and actively cleared where an image bakes them in."""

    rocm_min: Version | None = None
    rocm_below: Version | None = None
    """Only with images whose ROCm is within these bounds."""


class GpuSupport(Evidenced):
    """How well engines run on this arch."""

    backends: tuple[Name, ...] = Field(min_length=1)
    level: Support
    note: Sentence | None = None
    """What a refusal or a plan says beside the level."""


class GpuDefaults(Evidenced):
    """Settings of an engine that this arch needs unless the variant or the user says otherwise."""

    backend: Name
    settings: dict[str, bool | int | float | str] = Field(min_length=1)


class GpuRule(Evidenced):
    """What must not be run on this arch with a backend, though the backend runs there."""

    backend: Name
    quantization: RegularExpression | None = None
    """Of the variant or the setting of that name, searched without regard to case."""

    model: RegularExpression | None = None
    """Of the model's name; unset: any."""

    mark: Name | None = None
    """An image that bears this mark (by a test on its digest) is allowed to."""

    message: Sentence
    hint: Sentence


class GpuReserve(Evidenced):
    """Memory of the card that is never planned with."""

    bytes: Bytes


class GpuRecipe(Strict):
    """An arch, or a few that need exactly the same."""

    name: Name
    archs: tuple[Arch, ...] = ()
    """None: only there to be extended."""

    vendor: Vendor | None = None
    """None for the CPU."""

    extends: Name | None = None
    description: Sentence
    """The cards that people know."""

    memory_reserve: GpuReserve | None = None
    environment: tuple[GpuEnvironment, ...] = ()
    support: tuple[GpuSupport, ...] = ()
    defaults: tuple[GpuDefaults, ...] = ()
    rules: tuple[GpuRule, ...] = ()

    @model_validator(mode="after")
    def _is_not_its_own_parent(self) -> Self:
        if self.extends == self.name:
            raise WrongAt(("extends",), f"{self.name} cannot extend itself")
        return self

    def extending(self, parent: GpuRecipe) -> GpuRecipe:
        """This recipe with its parent's blocks before its own."""
        both = {name: (*getattr(parent, name), *getattr(self, name)) for name in BLOCKS}
        return self.model_copy(
            update={
                "extends": None,
                "vendor": self.vendor or parent.vendor,
                "memory_reserve": self.memory_reserve or parent.memory_reserve,
                **both,
            }
        )

    def support_of(self, backend: str) -> GpuSupport | None:
        """The last word on a backend; None: nothing is known."""
        return next((s for s in reversed(self.support) if backend in s.backends), None)
