"""How new a driver has to be for what containers bring along.

The one place for these numbers, each with its source. NVIDIA's driver carries the interface that
a CUDA runtime in an image speaks; an image that is too new for it runs on the CPU in silence
(ggml-org/llama.cpp#22561).
"""

from __future__ import annotations

import re
from typing import NamedTuple

_SM = re.compile(r"sm_([0-9]+)([0-9])")


class Floor(NamedTuple):
    """Images of one CUDA generation on cards of some compute capabilities."""

    cuda: int
    lowest_sm: tuple[int, int]
    highest_sm: tuple[int, int]
    driver: int
    """The oldest driver branch that will do."""
    source: str


NEWEST_SM = (99, 9)
FLOORS = (
    Floor(
        cuda=12,
        lowest_sm=(5, 0),
        highest_sm=(7, 2),
        driver=570,
        source="ollama docs/gpu.mdx and discover/cuda_compat.go: images of CUDA 12.8 hold no "
        "machine code for these cards, and only its own driver branch translates their PTX",
    ),
    Floor(
        cuda=12,
        lowest_sm=(7, 5),
        highest_sm=NEWEST_SM,
        driver=525,
        source="docs.nvidia.com, CUDA compatibility: minor version compatibility of CUDA 12.x",
    ),
    Floor(
        cuda=13,
        lowest_sm=(7, 5),
        highest_sm=NEWEST_SM,
        driver=580,
        source="docs.nvidia.com, CUDA compatibility: minor version compatibility of CUDA 13.x; "
        "vllm-project/vllm#23469: its compiler begins at compute capability 7.5",
    ),
)


def floors_of(arch: str | None) -> tuple[Floor, ...]:
    """What a card of this arch (`sm_86`) can be used with at all; nothing for an unknown one."""
    match = _SM.fullmatch(arch or "")
    if match is None:
        return ()
    sm = (int(match[1]), int(match[2]))
    return tuple(floor for floor in FLOORS if floor.lowest_sm <= sm <= floor.highest_sm)


def branch(driver_version: str | None) -> int | None:
    """`580.95.05` -> 580; None for what is no version of NVIDIA's driver."""
    first, dot, _ = (driver_version or "").partition(".")
    return int(first) if dot and first.isascii() and first.isdigit() and len(first) <= 4 else None
