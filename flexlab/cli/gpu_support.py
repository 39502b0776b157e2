"""What each backend can do on a GPU, as far as the recipes say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flexlab.spec.machine import Gpu
from flexlab.spec.plan import Support

if TYPE_CHECKING:
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.recipes.gpu_schema import GpuSupport


class BackendSupport(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one GPU."""

    backend: str
    support: Support
    because: str
    """The note where there is one, else the reason; with the evidence."""


def backend_support(catalogue: Catalogue, gpu: Gpu) -> list[BackendSupport]:
    """One answer for each backend recipe. Raises RecipeError when the arch's recipe is wrong."""
    recipe = catalogue.gpu(gpu.arch)
    nothing = f"nothing is known of it on {gpu.arch or 'a card of unknown arch'}"
    return [
        _answer(backend.name, recipe.support_of(backend.name) if recipe else None, nothing)
        for backend in catalogue.backends()
    ]


def _answer(backend: str, stated: GpuSupport | None, nothing: str) -> BackendSupport:
    if stated is None:
        return BackendSupport(backend=backend, support="unknown", because=nothing)
    told = (stated.note or stated.reason).removesuffix(".")
    return BackendSupport(
        backend=backend, support=stated.level, because=f"{told} ({stated.evidence})"
    )
