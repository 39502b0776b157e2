"""What a vendor's module gives: static facts of its cards, and sources of live readings."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flexlab.spec.machine import Gpu, GpuReading, Problem


class Found(NamedTuple):
    """What one vendor's readers found."""

    gpus: list[Gpu]
    findings: list[Problem]
    """What is on the bus and is no GPU of ours, each with its reason."""


class Source(Protocol):
    """Live readings of one GPU; keeps the counters that rates are made of."""

    @property
    def gpu_id(self) -> str: ...

    def read(self) -> GpuReading:
        """The readings now. May block for ever, may raise: it runs under a deadline."""
        ...
