"""Where NVIDIA cards sit: the PCI bus, DRM and the driver's own folder in /proc, by slot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from flexlab.core.text import clean_line
from flexlab.gpus.bus import Bus, plain_slot
from flexlab.gpus.files import count, list_names, read_text

_DRIVER_FOLDER = "proc/driver/nvidia"
_VERSION = re.compile(r"Kernel Module(?: for \w+)?\s+([0-9]+(?:\.[0-9]+)+)")
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{36}")


class Place(NamedTuple):
    """A card as the kernel has it; None where it does not say."""

    slot: str
    pci_id: str | None = None
    revision: str | None = None
    driver: str | None = None
    card: str | None = None
    render_minor: int | None = None
    model: str | None = None
    uuid: str | None = None
    minor: int | None = None
    excluded: bool = False
    """The driver leaves it alone (NVreg_ExcludedGpus)."""

    @property
    def may_be_driven(self) -> bool:
        """By NVIDIA's driver. Where that is unknown, DRM has the card, so some driver is there."""
        in_drm = self.card is not None or self.render_minor is not None
        return self.driver == "nvidia" or (self.driver is None and in_drm)


def read_places(root: Path, here: Bus) -> dict[str, Place]:
    """By slot. A container may lack the bus or DRM, and has the driver's folder all the same."""
    found: dict[str, Place] = {}
    nodes = {node.device.slot: node for node in here.drm}
    for device in (*here.pci, *(node.device for node in here.drm)):
        if device.slot is None:
            continue
        known = found.get(device.slot, Place(device.slot))
        node = nodes.get(device.slot)
        found[device.slot] = known._replace(
            pci_id=known.pci_id or device.pci_id,
            revision=known.revision or device.revision,
            driver=known.driver or device.driver,
            card=node.card if node else None,
            render_minor=node.render_minor if node else None,
        )
    folder = root / _DRIVER_FOLDER / "gpus"
    for name in list_names(folder):
        slot = plain_slot(name)
        if slot is not None:
            text = read_text(folder / name / "information") or ""
            found[slot] = _with_information(found.get(slot, Place(slot)), text)
    return found


def loaded_version(root: Path) -> str | None:
    """Of the kernel module; the library may be another one after an update."""
    match = _VERSION.search(read_text(root / _DRIVER_FOLDER / "version") or "")
    return match[1] if match else None


def _with_information(place: Place, text: str) -> Place:
    """With what the driver wrote about the card: `Model: \t\t NVIDIA GeForce …`."""
    pairs = (line.partition(":") for line in text.splitlines())
    told = {key.strip(): value.strip() for key, _, value in pairs}
    uuid = _UUID.fullmatch(told.get("GPU UUID", ""))  # question marks before it is known
    return place._replace(
        driver=place.driver or "nvidia",
        model=clean_line(told.get("Model", ""))[:120] or None,
        uuid=uuid[0] if uuid else None,
        minor=count(told.get("Device Minor")),
        excluded=told.get("GPU Excluded", told.get("GPU Blacklisted")) == "Yes",
    )
