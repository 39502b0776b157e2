"""What each backend can do on a GPU, as far as the recipes say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from flexlab.spec.machine import Gpu

if TYPE_CHECKING:
    from flexlab.recipes.catalogue import Catalogue

Support = Literal["unknown"]
"""GPU recipes bring the other words: how far a backend goes on an arch, and by what evidence."""


class BackendSupport(msgspec.Struct, frozen=True, kw_only=True):
    """One backend on one GPU."""

    backend: str
    support: Support
    because: str


def backend_support(catalogue: Catalogue, gpu: Gpu) -> list[BackendSupport]:
    """One answer for each backend recipe. Without a GPU recipe nothing is claimed."""
    arch = gpu.arch or "a card of unknown arch"
    return [
        BackendSupport(
            backend=backend.name, support="unknown", because=f"no GPU recipe for {arch} yet"
        )
        for backend in catalogue.backends()
    ]
