"""What hangs on the PCI bus and what the kernel made of it in DRM, joined by PCI slot.

Card numbers have gaps and change between boots, and renderD128 need not belong to card0
(mudler/LocalAI#10941), so a PCI slot is the only identity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flexlab.gpus.files import list_names, read_text
from flexlab.spec.machine import Vendor

VENDORS: dict[int, Vendor] = {0x1002: "amd", 0x10DE: "nvidia", 0x8086: "intel"}

_DISPLAY_CLASS = 0x03
_ACCELERATOR_CLASS = 0x1200
"""How an Instinct MI300 calls itself; a device of this class by another vendor is an NPU."""
_CARD = re.compile(r"card([0-9]+)")
_RENDER = re.compile(r"renderD([0-9]+)")
_HEX = re.compile(r"(?:0x)?([0-9a-f]{1,16})", re.IGNORECASE)
_MODALIAS = re.compile(r"pci:v([0-9A-F]{8})d([0-9A-F]{8})sv")
_SLOT = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", re.IGNORECASE)


class Device(NamedTuple):
    """A PCI function, from its own folder or from DRM's view of it; None where unreadable."""

    slot: str | None
    vendor: Vendor | None
    pci_id: str | None
    """`1002:744c`, lower case."""
    revision: str | None
    """Two hex digits."""
    kind: int | None
    """PCI class without the programming interface: 0x0300, 0x0302, 0x0380, 0x1200."""
    driver: str | None
    unbound: bool | None
    """The kernel says that no driver has it; None where it says nothing."""
    folder: Path


class DrmNode(NamedTuple):
    """One card with its render node, joined by PCI slot; either number may be missing."""

    card: str | None
    render_minor: int | None
    device: Device


class Bus(NamedTuple):
    """Everything on the bus that could be a GPU of a vendor we know."""

    pci: tuple[Device, ...]
    drm: tuple[DrmNode, ...]

    def of(self, vendor: Vendor) -> Bus:
        """This vendor's part of it."""
        return Bus(
            tuple(device for device in self.pci if device.vendor == vendor),
            tuple(node for node in self.drm if node.device.vendor == vendor),
        )


def read_bus(root: Path) -> Bus:
    """PCI display devices and DRM nodes below `root`, each in order of its slot."""
    pci = tuple(_pci(root))
    return Bus(pci, tuple(_drm(root, pci)))


def plain_slot(text: str | None) -> str | None:
    """`00000000:2D:00.0`, `2d:00.0` -> `0000:2d:00.0`; None for anything else.

    NVML writes a domain of 8 digits in upper case, sysfs one of 4 in lower case.
    """
    match = _SLOT.fullmatch((text or "").strip())
    if match is None:
        return None
    domain = int(match[1] or "0", 16)
    return f"{domain:04x}:{match[2]}:{match[3]}.{match[4]}".lower()


def _pci(root: Path) -> Iterator[Device]:
    folder = root / "sys/bus/pci/devices"
    for name in list_names(folder):
        slot = plain_slot(name)
        if slot is None:
            continue
        # The class first: of some hundred devices, one or two are GPUs.
        kind = _hex(read_text(folder / name / "class"))
        if kind is None or not _maybe_gpu(kind >> 8):
            continue
        device = read_device(folder / name, slot=slot, kind=kind >> 8)
        if device.vendor and (device.kind != _ACCELERATOR_CLASS or device.vendor == "amd"):
            yield device


def _maybe_gpu(kind: int) -> bool:
    return kind >> 8 == _DISPLAY_CLASS or kind == _ACCELERATOR_CLASS


def _drm(root: Path, pci: Sequence[Device]) -> Iterator[DrmNode]:
    """Cards and render nodes that share a PCI slot are one; what has no slot stands alone."""
    folder = root / "sys/class/drm"
    by_slot: dict[str, DrmNode] = {}
    alone: list[DrmNode] = []
    for name in list_names(folder):
        card, render = _CARD.fullmatch(name), _RENDER.fullmatch(name)
        if not card and not render:
            continue  # connectors are card0-DP-1
        node = DrmNode(
            name if card else None,
            int(render[1]) if render else None,
            read_device(folder / name / "device"),
        )
        slot = node.device.slot
        if slot is None:
            alone.append(node)
        else:
            by_slot[slot] = _merged(by_slot.get(slot), node)
    for node in list(alone):
        # A node that tells no slot, where only one function of these ids lacks such a node.
        slot = _only_home(node, pci, by_slot)
        if slot is not None:
            by_slot[slot] = _merged(by_slot.get(slot), node)
            alone.remove(node)
    yield from (by_slot[slot] for slot in sorted(by_slot))
    yield from alone


def _only_home(node: DrmNode, pci: Sequence[Device], by_slot: Mapping[str, DrmNode]) -> str | None:
    devices = [*pci, *(other.device for other in by_slot.values())]
    same = {device.slot for device in devices if device.pci_id == node.device.pci_id}
    homes = [slot for slot in same if slot and _lacks(by_slot.get(slot), node)]
    return homes[0] if node.device.pci_id and len(homes) == 1 else None


def _lacks(home: DrmNode | None, node: DrmNode) -> bool:
    if home is None:
        return True
    return (home.card if node.card else home.render_minor) is None


def _merged(first: DrmNode | None, second: DrmNode) -> DrmNode:
    if first is None:
        return second
    card = first.card or second.card
    minor = first.render_minor if first.render_minor is not None else second.render_minor
    # The card's folder has the sensors; the render node's may be a bare link.
    device = second.device if second.card else first.device
    other = first.device if second.card else second.device
    return DrmNode(card, minor, completed(device, other))


def completed(device: Device, other: Device) -> Device:
    """`device` with what only `other`, another view of the same function, could read."""
    missing = {name for name, value in device._asdict().items() if value is None}
    return device._replace(**{name: getattr(other, name) for name in missing})


def read_device(folder: Path, *, slot: str | None = None, kind: int | None = None) -> Device:
    """The PCI function whose sysfs folder (or link to it) is `folder`."""
    uevent = _uevent(folder)
    driver = uevent.get("DRIVER") or _linked_name(folder / "driver")
    vendor = _hex(read_text(folder / "vendor"))
    model = _hex(read_text(folder / "device"))
    if vendor is None or model is None:
        told = _ids(uevent.get("PCI_ID", "")) or _modalias(read_text(folder / "modalias"))
        if told is not None:
            vendor, model = told
    revision = _hex(read_text(folder / "revision"))
    if kind is None:
        whole = _hex(read_text(folder / "class"))
        kind = None if whole is None else whole >> 8
    slot = slot or plain_slot(uevent.get("PCI_SLOT_NAME")) or _linked_slot(folder)
    return Device(
        slot=slot,
        vendor=VENDORS.get(vendor) if vendor is not None else None,
        pci_id=_pci_id(vendor, model),
        revision=None if revision is None or revision > 0xFF else f"{revision:02x}",
        kind=kind,
        driver=driver,
        unbound=driver is None if uevent else None,
        folder=folder,
    )


def joined(device: Device | None, node: DrmNode | None) -> Device | None:
    """One function from its own folder and from DRM's view; either may be missing."""
    if device is None or node is None:
        return device or (node.device if node else None)
    return completed(device, node.device)


def is_asleep(folder: Path) -> bool:
    """Runtime-suspended, or on the way. Reading this file wakes nobody; reading a sensor does."""
    status = (read_text(folder / "power/runtime_status") or "").strip()
    return status in ("suspended", "suspending")


def _uevent(folder: Path) -> dict[str, str]:
    lines = (read_text(folder / "uevent") or "").splitlines()
    pairs = (line.partition("=") for line in lines)
    return {key: value.strip() for key, separator, value in pairs if separator}


def _pci_id(vendor: int | None, model: int | None) -> str | None:
    if vendor is None or model is None or max(vendor, model) > 0xFFFF:
        return None
    return f"{vendor:04x}:{model:04x}"


def _ids(text: str) -> tuple[int, int] | None:
    vendor, _, model = text.partition(":")
    pair = _hex(vendor), _hex(model)
    return (pair[0], pair[1]) if pair[0] is not None and pair[1] is not None else None


def _modalias(text: str | None) -> tuple[int, int] | None:
    """`pci:v00001002d00006758sv…`: the ids once more, where their own files cannot be read."""
    match = _MODALIAS.match((text or "").strip())
    return (int(match[1], 16), int(match[2], 16)) if match else None


def _linked_slot(folder: Path) -> str | None:
    """A kernel has a link to the PCI folder; recorded trees have a plain folder."""
    return plain_slot(_linked_name(folder))


def _linked_name(link: Path) -> str | None:
    try:
        return Path(link.readlink()).name
    except (OSError, ValueError):
        return None


def _hex(text: str | None) -> int | None:
    match = _HEX.fullmatch((text or "").strip())
    return int(match[1], 16) if match else None
