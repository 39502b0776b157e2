"""What NVIDIA's driver says of its cards, whichever way it was asked (NVML, nvidia-smi, a file)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexlab.spec.machine import GpuReading, MigSlice

# NVML's return codes, which are nvidia-smi's exit codes too (NVIDIA, NVML API reference).
UNINITIALIZED = 1
NOT_SUPPORTED = 3
NO_PERMISSION = 4
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
RESET_REQUIRED = 16
VERSION_MISMATCH = 18
UNKNOWN_ERROR = 999

# Bits of NVML's clock event reasons. Left out: an idle card, and clocks that somebody has set.
_THROTTLE = {
    0x04: "power",  # software power cap
    0x08: "hardware",  # the umbrella over the two of hardware below
    0x10: "other",  # held to the clocks of other cards (sync boost)
    0x20: "thermal",  # software
    0x40: "thermal",  # hardware
    0x80: "power",  # power brake, asserted by the system
}
_HARDWARE, _HARDWARE_NAMED = 0x08, 0x40 | 0x80
REASON_BITS = {
    "sw_power_cap": 0x04,
    "hw_slowdown": 0x08,
    "sync_boost": 0x10,
    "sw_thermal_slowdown": 0x20,
    "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80,
}
"""The same bits by the names that nvidia-smi gives them."""


class Process(NamedTuple):
    """A process that has a context on a card."""

    pid: int
    name: str | None = None
    vram_bytes: int | None = None
    gi: int | None = None
    """GPU instance id, where the card is in MIG mode."""
    slice_uuid: str | None = None


class DriverCard(NamedTuple):
    """One card, as far as the driver tells it; None where it does not."""

    number: int
    """The driver's own, which changes between boots; -1: it named the slot only."""
    name: str | None = None
    uuid: str | None = None
    slot: str | None = None
    pci_id: str | None = None
    arch: str | None = None
    minor: int | None = None
    """N of /dev/nvidiaN."""
    is_mig: bool = False
    slices: tuple[MigSlice, ...] = ()
    numbers: Mapping[str, float] = {}
    """Under the names of GpuReading."""
    throttle: tuple[str, ...] = ()
    fault: int | None = None
    """GPU_IS_LOST or RESET_REQUIRED; None while the card works."""
    processes: tuple[Process, ...] = ()

    def reading(self) -> GpuReading:
        """Its sensors, and the memory of its MIG slices."""
        slices = {
            f"mig:{part.uuid}:vram_used_bytes": float(part.vram_used_bytes)
            for part in self.slices
            if part.vram_used_bytes is not None
        }
        return GpuReading(numbers={**self.numbers, **slices}, throttle=self.throttle)

    def filled_from(self, other: DriverCard) -> DriverCard:
        """With `other`'s values where this one has none."""
        return self._replace(
            name=self.name or other.name,
            arch=self.arch or other.arch,
            uuid=self.uuid or other.uuid,
            slot=self.slot or other.slot,
            pci_id=self.pci_id or other.pci_id,
            minor=other.minor if self.minor is None else self.minor,
            numbers={**other.numbers, **self.numbers},
        )


class Answer(NamedTuple):
    """All cards that the driver shows, or why it shows none or not all of them."""

    cards: tuple[DriverCard, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    fault: int | None = None
    """A return code of NVML."""


def throttle_words(bits: int) -> tuple[str, ...]:
    """NVML's clock event reasons as GpuReading's words, sorted, each once."""
    if bits & _HARDWARE_NAMED:
        bits &= ~_HARDWARE
    return tuple(sorted({word for bit, word in _THROTTLE.items() if bits & bit}))


def made_mig_uuid(card_uuid: str, gi: int, ci: int) -> str:
    """A slice's id in the form that drivers before 470 gave it, which later ones still take."""
    return f"MIG-{card_uuid}/{gi}/{ci}"
