"""AMD GPUs by sysfs alone: PCI says who is there, KFD what ROCm can use, DRM the rest.

The three views are joined by PCI slot, and KFD's `drm_render_minor` where a slot says nothing.
Any of them may be missing: a container without /sys/class/drm, a kernel without KFD, a recording.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from flexlab.gpus import access, amd_memory, kfd
from flexlab.gpus.amd_problems import KFD, limits, unusable
from flexlab.gpus.amd_readings import AmdSource
from flexlab.gpus.bus import Bus, Device, DrmNode, is_asleep, joined
from flexlab.gpus.files import read_text
from flexlab.gpus.problems import asleep, not_compute
from flexlab.gpus.source import Found, Source
from flexlab.gpus.tables import Card, card_for
from flexlab.spec.machine import Gpu

_DIVIDED = ("DPX", "TPX", "QPX", "CPX")
"""Compute partition modes with more than one partition; SPX is the whole card."""


class Parts(NamedTuple):
    """The views of one GPU; a partition has no PCI function of its own."""

    slot: str | None
    device: Device | None
    drm: DrmNode | None
    node: kfd.Node | None
    is_partition: bool = False

    @property
    def folder(self) -> Path | None:
        """Where the card's own files are: DRM's view has the sensors too."""
        if self.drm is not None and self.drm.card is not None:
            return self.drm.device.folder
        return self.device.folder if self.device else None


def find(root: Path, bus: Bus) -> Found:
    """Every AMD GPU below `root`, and the display adapters that are none."""
    found = Found([], [])
    for parts in _joined(bus.of("amd"), kfd.read_nodes(root)):
        device = parts.device
        card = card_for(root, "amd", _pci_id(parts), device.revision if device else None)
        if not card.compute and parts.node is None:
            found.findings.append(not_compute(card.name, parts.slot))
        else:
            found.gpus.append(_gpu(root, parts, card))
    return Found(list(_distinct(found.gpus)), found.findings)


def sources(root: Path, gpus: Sequence[Gpu]) -> list[Source]:
    """Live readings of every AMD GPU whose card shows files."""
    found: list[Source] = []
    cards = {_address(gpu.pci_slot): gpu.card for gpu in gpus if gpu.pci_slot and gpu.card}
    for gpu in gpus:
        folder = _sensor_folder(root, gpu, cards)
        if gpu.vendor == "amd" and folder is not None and gpu.driver == "amdgpu":
            found.append(AmdSource(gpu.id, folder, own_memory="#" not in gpu.id))
    return found


def _sensor_folder(root: Path, gpu: Gpu, cards: Mapping[str, str]) -> Path | None:
    """The card's device folder. Partitions have the sensors of their card, whose address is theirs.

    `cards`: names in DRM by address.
    """
    address = _address(gpu.pci_slot) if gpu.pci_slot else None
    card = gpu.card or (cards.get(address) if address and "#" in gpu.id else None)
    if card is not None:
        return root / "sys/class/drm" / card / "device"
    for slot in (gpu.pci_slot, f"{address}.0") if address else ():
        folder = root / "sys/bus/pci/devices" / str(slot)
        if folder.is_dir():
            return folder
    return None


def _joined(bus: Bus, nodes: Sequence[kfd.Node]) -> Iterator[Parts]:
    devices = {device.slot: device for device in bus.pci}
    drm_by_slot = {node.device.slot: node for node in bus.drm if node.device.slot}
    drm_by_minor = {node.render_minor: node for node in bus.drm if node.render_minor is not None}
    taken: set[str | None] = set()
    partitioned = _partitioned(nodes, {*devices, *drm_by_slot})
    for node in nodes:
        by_minor = drm_by_minor.get(node.render_minor or 0)
        slot = node.slot or (by_minor.device.slot if by_minor else None)
        if slot is None:
            continue  # without an address it cannot be told from the cards of the bus
        drm = drm_by_slot.get(slot) or (by_minor if by_minor and not by_minor.device.slot else None)
        card_slot = slot if slot in devices or slot in drm_by_slot else f"{_address(slot)}.0"
        taken |= {slot, card_slot}
        device = joined(devices.get(card_slot), drm or drm_by_slot.get(card_slot))
        part = _address(slot) in partitioned or _is_divided(device)
        yield Parts(slot, device, drm, node, is_partition=part)
    for known in sorted({*devices, *drm_by_slot} - taken, key=str):
        drm = drm_by_slot.get(known) if known else None
        yield Parts(known, joined(devices.get(known), drm), drm, None)
    if not devices and not nodes and all(node.card for node in drm_by_slot.values()):
        # A card that tells no address is one only where nothing else is there that it could be.
        yield from (Parts(None, n.device, n, None) for n in bus.drm if not n.device.slot and n.card)


def _partitioned(nodes: Sequence[kfd.Node], functions: Set[str | None]) -> set[str]:
    """Addresses whose nodes are partitions of one card, not functions of their own on the bus.

    Virtual functions that are passed to a guest may share an address, too. A container may be
    allowed to read a single partition's node.
    """
    slots_at: defaultdict[str, list[str]] = defaultdict(list)
    for node in nodes:
        if node.slot:
            slots_at[_address(node.slot)].append(node.slot)
    return {
        address
        for address, slots in slots_at.items()
        if (len(slots) > 1 and not (len(set(slots)) == len(slots) and functions >= set(slots)))
        or (f"{address}.0" in functions and not functions >= set(slots))
    }


def _is_divided(device: Device | None) -> bool:
    """The card says that it works as several GPUs, also where only one of them is shown."""
    mode = read_text(device.folder / "current_compute_partition") if device else None
    return (mode or "").strip() in _DIVIDED


def _address(slot: str) -> str:
    """The slot without its function: the same for all partitions of a card."""
    return slot.rpartition(".")[0]


def _pci_id(parts: Parts) -> str | None:
    device = parts.device
    return (device.pci_id if device else None) or (parts.node.pci_id if parts.node else None)


def _gpu(root: Path, parts: Parts, card: Card) -> Gpu:
    node, drm, device = parts.node, parts.drm, parts.device
    # Only amdgpu makes KFD nodes.
    driver = (device.driver if device else None) or ("amdgpu" if node else None)
    minor = node.render_minor if node and node.render_minor else drm.render_minor if drm else None
    memory = amd_memory.read(parts.folder, node, card, is_partition=parts.is_partition)
    sleeping = driver == "amdgpu" and parts.folder is not None and is_asleep(parts.folder)
    seen = [access.look(root, path) for path in _paths(node, minor)]
    wrong = unusable(root, driver, device, seen)
    odd = [*limits(card, driver, node, seen), *memory.problems, *([asleep()] if sleeping else [])]
    return Gpu(
        index=0,
        id=_id(parts, card),
        pool="",
        vendor="amd",
        # A kernel that names no target is older than the name: then the id has to do.
        arch=(node.arch if node else None) or card.arch,
        name=card.name or "AMD GPU",
        pci_id=_pci_id(parts),
        pci_slot=parts.slot,
        card=drm.card if drm else None,
        render_minor=minor,
        kfd_node=node.number if node else None,
        hip_index=node.hip_index if node else None,
        cu_count=node.cu_count if node else None,
        is_apu=memory.is_apu,
        driver=driver,
        vram_total_bytes=memory.vram_bytes,
        gtt_total_bytes=memory.gtt_bytes,
        usable=not wrong,
        problems=(*wrong, *odd),
        unified=bool(memory.is_apu),
        uuid=f"GPU-{node.unique_id:016x}" if node and node.unique_id else None,
        revision=device.revision if device else None,
        asleep=sleeping,
        nodes=tuple(one.node for one in seen),
    )


def _distinct(gpus: Iterable[Gpu]) -> Iterator[Gpu]:
    """Twins without an address have one name; the second gets a number."""
    seen: Counter[str] = Counter()
    for gpu in gpus:
        seen[gpu.id] += 1
        yield gpu if seen[gpu.id] == 1 else replace(gpu, id=f"{gpu.id} {seen[gpu.id]}")


def _id(parts: Parts, card: Card) -> str:
    if parts.slot is None:
        # Nothing gives an address: at least it is not a number that changes between boots.
        return f"amd:{card.name or 'GPU'}"
    if parts.is_partition and parts.node is not None:
        return f"{parts.slot}#{parts.node.number}"
    return parts.slot


def _paths(node: kfd.Node | None, minor: int | None) -> list[str]:
    render = [] if minor is None else [f"/dev/dri/renderD{minor}"]
    return [KFD, *render] if node else render
