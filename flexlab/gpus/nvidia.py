"""NVIDIA cards: what the driver shows, joined with what is on the PCI bus.

The driver is asked by NVML, else by nvidia-smi; below another root than `/` a recorded nvidia-smi
stands for it. A card on the bus that it does not show is a card all the same, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from flexlab.gpus import nvidia_problems as problems
from flexlab.gpus import tegra
from flexlab.gpus.access import NodeAccess, look
from flexlab.gpus.bus import Bus, plain_slot
from flexlab.gpus.files import count, list_names, read_text
from flexlab.gpus.nvidia_card import Answer, DriverCard
from flexlab.gpus.nvidia_live import (
    SYSTEM,
    WITHOUT_LIBRARY,
    Recording,
    holders,
    is_asleep,
    ram_numbers,
    sources,
)
from flexlab.gpus.presence import is_wsl
from flexlab.gpus.source import Found
from flexlab.gpus.tables import card_for, is_integrated_nvidia, nvidia_card_by_name
from flexlab.spec.machine import Gpu, Problem

__all__ = ["find", "holders", "sources"]

_DRIVER_FOLDER = "proc/driver/nvidia"
_VERSION = re.compile(r"Kernel Module(?: for \w+)?\s+([0-9]+(?:\.[0-9]+)+)")
_UUID = re.compile(r"GPU-[0-9a-fA-F-]{36}")
_GENERIC_NAME = "graphics device"
"""How a driver calls a card that is newer than itself."""


class _Place(NamedTuple):
    """A card on the bus, as the kernel has it; None where it does not say."""

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

    @property
    def driver_may_be_nvidia(self) -> bool:
        """Unknown counts where DRM has the card, for which some driver has to be there."""
        in_drm = self.card is not None or self.render_minor is not None
        return self.driver == "nvidia" or (self.driver is None and in_drm)


class _Machine(NamedTuple):
    """What all cards share."""

    root: Path
    answer: Answer | None
    """None: nobody was asked."""
    loaded_version: str | None
    chip: tegra.Chip | None
    wsl: bool


def find(root: Path, bus: Bus) -> Found:
    """Every NVIDIA card below `root`; display adapters that CUDA never drove are findings."""
    places = _places(root, bus.of("nvidia"))
    findings = []
    for place in list(places.values()):
        if not card_for(root, "nvidia", place.pci_id, place.revision).compute:
            findings.append(_not_compute(root, places.pop(place.slot)))
    machine = _Machine(
        root=root,
        answer=_ask(root, places.values()),
        loaded_version=_loaded_version(root),
        chip=tegra.chip_of(root),
        wsl=is_wsl(root),
    )
    gpus: dict[str, Gpu] = {}
    for card, found in _joined(machine, places):
        gpu = _gpu(machine, card, found)
        gpus.setdefault(gpu.id, gpu)
    if not gpus and machine.answer is not None and machine.answer.fault is not None:
        findings.append(problems.for_fault(machine.answer.fault, machine.loaded_version))
    return Found(list(gpus.values()), findings)


def _ask(root: Path, places: Iterable[_Place]) -> Answer | None:
    """What the driver shows; None where there is no sign of it, or where all cards sleep."""
    if root != SYSTEM:
        return Recording(root).answer()
    known = list(places)
    driven = [place.slot for place in known if place.driver_may_be_nvidia]
    if known and (not driven or all(is_asleep(root, slot) for slot in driven)):
        return None
    from flexlab.gpus import nvml

    try:
        return nvml.ask(driven)
    except nvml.Unusable as error:
        if error.code not in WITHOUT_LIBRARY:
            return Answer(fault=error.code)
    from flexlab.gpus import nvidia_tool

    answer = nvidia_tool.ask()
    if answer.cards:
        nvidia_tool.SHARED.put(answer)
    return answer


def _joined(
    machine: _Machine, places: Mapping[str, _Place]
) -> list[tuple[DriverCard | None, _Place | None]]:
    """Cards with their places, by slot, else by UUID, else because one of each is left."""
    cards = list(machine.answer.cards) if machine.answer is not None else []
    left = dict(places)
    by_uuid = {place.uuid: place.slot for place in places.values() if place.uuid}
    joined: list[tuple[DriverCard | None, _Place | None]] = []
    homeless = []
    for card in cards:
        slot = card.slot or by_uuid.get(card.uuid or "")
        place = left.pop(slot, None) if slot else None
        if place is None and card.slot is None:
            homeless.append(card)
        else:
            joined.append((card, place))
    if len(homeless) == len(left) == 1 and machine.chip is None:
        joined.append((homeless.pop(), left.pop(next(iter(left)))))
    joined += [(card, None) for card in homeless]
    joined += [(None, place) for place in left.values()]
    if machine.chip is not None and not cards:
        joined.append((None, None))  # the GPU inside it, which needs no NVML
    return joined


def _gpu(machine: _Machine, card: DriverCard | None, place: _Place | None) -> Gpu:
    """One row. Neither: the GPU inside a Tegra."""
    shown = card or DriverCard(number=0)
    place = place or _Place(slot="")
    slot = place.slot or (None if machine.wsl else shown.slot)
    pci_id = shown.pci_id or place.pci_id
    table = card_for(machine.root, "nvidia", pci_id, place.revision)
    inside = machine.chip if slot is None else None
    told = _specific(shown.name) or _specific(place.model)
    by_name = nvidia_card_by_name(told) if told else table
    name = told or (_chip_name(inside) if inside else None) or table.name or "NVIDIA GPU"
    unified = inside is not None or _is_integrated(told, pci_id)
    arch = shown.arch or table.arch or by_name.arch or (inside.arch if inside else None)
    if unified:
        total = ram_numbers(machine.root).get("vram_total_bytes")
    elif card is not None:
        total = shown.numbers.get("vram_total_bytes")
    else:
        total = table.vram_bytes
    uuid = shown.uuid or place.uuid
    access = _nodes(machine, shown.minor if place.minor is None else place.minor, inside)
    asleep = not shown.numbers and is_asleep(machine.root, slot)
    blocking = _blocking(machine, card, place if place.slot else None, access)
    odd = []
    if not blocking:
        odd += [problems.asleep()] if asleep else []
        odd += [problems.arch_unknown(name)] if arch is None else []
        assumed = card is None and not unified and table.vram_assumed
        odd += [problems.memory_unknown(assumed)] if total is None or assumed else []
    driven = card is not None or place.driver == "nvidia"
    version = (machine.answer and machine.answer.driver_version) or machine.loaded_version
    return Gpu(
        index=0,
        id=slot or uuid or (f"{inside.id}-gpu" if inside else f"nvidia-{shown.number}"),
        pool="",
        vendor="nvidia",
        arch=arch,
        name=name,
        pci_id=pci_id,
        pci_slot=slot,
        card=place.card,
        render_minor=place.render_minor,
        is_apu=unified or (False if total is not None else table.is_apu),
        driver=place.driver or _driver_name(machine, inside, card),
        vram_total_bytes=None if total is None else int(total),
        mig=shown.slices,
        usable=not blocking,
        problems=(*blocking, *odd),
        unified=unified,
        uuid=uuid,
        revision=place.revision,
        driver_version=version if driven or inside else None,
        cuda_version=machine.answer.cuda_version if machine.answer and driven else None,
        asleep=asleep,
        nodes=tuple(each.node for each in access),
    )


def _blocking(
    machine: _Machine,
    card: DriverCard | None,
    place: _Place | None,
    access: Iterable[NodeAccess],
) -> list[Problem]:
    """What keeps a card from being used; the first is the reason of the others."""
    if card is None and place is not None:
        problem = _why_not_shown(machine, place)
        if problem is not None:
            return [problem]
    elif card is None:
        driver = tegra.has_driver(machine.root)
        if driver is False:
            return [problems.no_tegra_driver()]
    elif card.fault is not None:
        return [problems.for_card(card.fault)]
    elif card.is_mig and not card.slices:
        return [problems.mig_empty(card.slot)]
    return [problems.denied(machine.root, each) for each in access if each.allowed is False]


def _why_not_shown(machine: _Machine, place: _Place) -> Problem | None:
    """None where nobody was asked and the card looks as it should."""
    if place.excluded:
        return problems.excluded()
    if not place.driver_may_be_nvidia:
        return problems.for_driver(place.driver)
    answer = machine.answer
    if answer is None:
        return None
    if answer.fault is None or (answer.cards and answer.fault not in problems.OF_ONE_CARD):
        return problems.not_shown()
    return problems.for_fault(answer.fault, machine.loaded_version)


def _not_compute(root: Path, place: _Place) -> Problem:
    name = card_for(root, "nvidia", place.pci_id, place.revision).name
    return Problem(
        code="not_compute",
        message=f"{name} (PCI {place.slot}, {place.pci_id}) is a display adapter: no CUDA that is "
        "still in use drives it",
        hint="nothing to do: it shows pictures only",
    )


def _places(root: Path, here: Bus) -> dict[str, _Place]:
    """Everything of NVIDIA's on the bus, by slot, from PCI, DRM and the driver's own folder."""
    found: dict[str, _Place] = {}
    nodes = {node.device.slot: node for node in here.drm}
    for device in (*here.pci, *(node.device for node in here.drm)):
        if device.slot is None:
            continue
        known = found.get(device.slot, _Place(device.slot))
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
            found[slot] = _with_information(found.get(slot, _Place(slot)), text)
    return found


def _with_information(place: _Place, text: str) -> _Place:
    """With what the driver wrote about the card: `Model: \t\t NVIDIA GeForce …`."""
    pairs = (line.partition(":") for line in text.splitlines())
    told = {key.strip(): value.strip() for key, _, value in pairs}
    uuid = _UUID.fullmatch(told.get("GPU UUID", ""))  # question marks before it is known
    return place._replace(
        driver=place.driver or "nvidia",
        model=told.get("Model") or None,
        uuid=uuid[0] if uuid else None,
        minor=count(told.get("Device Minor")),
        excluded=told.get("GPU Excluded", told.get("GPU Blacklisted")) == "Yes",
    )


def _loaded_version(root: Path) -> str | None:
    match = _VERSION.search(read_text(root / _DRIVER_FOLDER / "version") or "")
    return match[1] if match else None


def _nodes(machine: _Machine, minor: int | None, inside: tegra.Chip | None) -> list[NodeAccess]:
    """The files in /dev that the card needs; those that are made when first used may be missing."""
    if inside is not None:
        return tegra.nodes(machine.root)
    if machine.wsl:
        paths = ["/dev/dxg"]
    else:
        paths = ["/dev/nvidiactl", "/dev/nvidia-uvm"]
        paths = paths if minor is None else [f"/dev/nvidia{minor}", *paths]
    return [access for path in paths if (access := look(machine.root, path)).exists is not False]


def _specific(name: str | None) -> str | None:
    """None for a name that says nothing."""
    return None if name is None or _GENERIC_NAME in name.lower() else name


def _is_integrated(name: str | None, pci_id: str | None) -> bool:
    """By known products, and never because its memory cannot be read (wookayin/gpustat#179)."""
    # nvgpu is the driver of the GPUs inside Tegras.
    return is_integrated_nvidia(name or "", pci_id) or "(nvgpu)" in (name or "")


def _chip_name(chip: tegra.Chip) -> str:
    return f"NVIDIA {chip.name} (nvgpu)" if chip.name else f"NVIDIA {chip.id} (nvgpu)"


def _driver_name(
    machine: _Machine, inside: tegra.Chip | None, card: DriverCard | None
) -> str | None:
    if inside is not None:
        return "nvgpu"
    if card is None:
        return None
    return "dxgkrnl" if machine.wsl else "nvidia"
