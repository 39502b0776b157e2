"""NVIDIA cards: what the driver shows, joined with what is on the PCI bus.

The driver is asked by NVML, else by nvidia-smi; below another root than `/` a recorded nvidia-smi
stands for it. A card on the bus that it does not show is a card all the same, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flexlab.gpus import nvidia_problems, problems, tegra
from flexlab.gpus.access import NodeAccess, look
from flexlab.gpus.bus import Bus
from flexlab.gpus.nvidia_card import Answer, DriverCard
from flexlab.gpus.nvidia_live import (
    SYSTEM,
    WITHOUT_LIBRARY,
    holders,
    is_asleep,
    ram_numbers,
    recording_of,
    sources,
)
from flexlab.gpus.nvidia_places import Place, loaded_version, read_places
from flexlab.gpus.presence import is_wsl
from flexlab.gpus.source import Found
from flexlab.gpus.tables import Card, card_for, is_integrated_nvidia, nvidia_card_by_name
from flexlab.spec.machine import Gpu, Problem

__all__ = ["find", "holders", "sources"]

_GENERIC_NAME = "graphics device"
"""How a driver calls a card that is newer than itself."""
_TEGRA_DRIVER = "nvgpu"


class _Machine(NamedTuple):
    """What all cards share."""

    root: Path
    answer: Answer | None
    """What the driver shows; None: it was not asked."""
    loaded_version: str | None
    chip: tegra.Chip | None
    wsl: bool


class _Part(NamedTuple):
    """One card: what the driver shows of it, and where it sits. Neither: the GPU in a Tegra."""

    card: DriverCard | None
    place: Place | None


class _Product(NamedTuple):
    """What it is."""

    name: str
    arch: str | None
    pci_id: str | None
    unified: bool
    """Without memory of its own."""
    table: Card


def find(root: Path, bus: Bus) -> Found:
    """Every NVIDIA card below `root`; display adapters that no CUDA drives are findings."""
    places = read_places(root, bus.of("nvidia"))
    findings = []
    for slot, place in list(places.items()):
        table = card_for(root, "nvidia", place.pci_id, place.revision)
        if not table.compute:
            findings.append(problems.not_compute(table.name, slot))
            del places[slot]
    answer = _ask(root, places.values())
    machine = _Machine(root, answer, loaded_version(root), tegra.chip_of(root), is_wsl(root))
    gpus: dict[str, Gpu] = {}
    for part in _parts(machine, places):
        gpu = _gpu(machine, part)
        gpus.setdefault(gpu.id, gpu)
    if not gpus and answer is not None and answer.fault is not None:
        findings.append(nvidia_problems.for_fault(answer.fault, machine.loaded_version))
    return Found(list(gpus.values()), findings)


def _ask(root: Path, places: Iterable[Place]) -> Answer | None:
    """What the driver shows; None where it has no card, or where all its cards sleep."""
    if root != SYSTEM:
        return recording_of(root).answer()
    known = list(places)
    driven = [place.slot for place in known if place.may_be_driven]
    if known and all(is_asleep(root, slot) for slot in driven):
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


def _parts(machine: _Machine, places: Mapping[str, Place]) -> Iterator[_Part]:
    """Cards with their places by slot, else by UUID, else because one of each is left."""
    cards = machine.answer.cards if machine.answer is not None else ()
    left = dict(places)
    by_uuid = {place.uuid: place.slot for place in places.values() if place.uuid is not None}
    homeless = []
    for card in cards:
        slot = card.slot or by_uuid.get(card.uuid or "")
        place = left.pop(slot, None) if slot else None
        if place is None and card.slot is None:
            homeless.append(card)
        else:
            yield _Part(card, place)
    if len(homeless) == len(left) == 1 and machine.chip is None:
        yield _Part(homeless.pop(), left.popitem()[1])
    for card in homeless:
        yield _Part(card, None)
    for place in left.values():
        yield _Part(None, place)
    if machine.chip is not None and not cards:
        yield _Part(None, None)


def _gpu(machine: _Machine, part: _Part) -> Gpu:
    place = part.place or Place(slot="")
    shown = part.card or DriverCard(number=0)
    # The slot that NVML names under WSL2 is one of Windows.
    slot = place.slot or (None if machine.wsl else shown.slot)
    inside = machine.chip if slot is None else None
    product = _product(machine, shown, place, inside)
    total = _memory_bytes(machine, part, product)
    uuid = shown.uuid or place.uuid
    access = _nodes(machine, part, inside)
    asleep = not shown.numbers and is_asleep(machine.root, slot)
    wrong = _wrong(machine, part, access)
    told = machine.answer if part.card is not None else None
    driver = place.driver or _driver(machine, part, inside)
    version = told.driver_version if told is not None else None
    if version is None and driver in ("nvidia", _TEGRA_DRIVER):
        version = machine.loaded_version
    return Gpu(
        index=0,
        id=slot or uuid or (f"{inside.id}-gpu" if inside else f"nvidia-{shown.number}"),
        pool="",
        vendor="nvidia",
        arch=product.arch,
        name=product.name,
        pci_id=product.pci_id,
        pci_slot=slot,
        card=place.card,
        render_minor=place.render_minor,
        is_apu=product.unified or (False if total is not None else product.table.is_apu),
        driver=driver,
        vram_total_bytes=total,
        mig=shown.slices,
        usable=not wrong,
        problems=(*wrong, *([] if wrong else _odd(part, product, total, asleep))),
        unified=product.unified,
        uuid=uuid,
        revision=place.revision,
        driver_version=version,
        cuda_version=told.cuda_version if told is not None else None,
        asleep=asleep,
        nodes=tuple(each.node for each in access),
    )


def _product(
    machine: _Machine, shown: DriverCard, place: Place, inside: tegra.Chip | None
) -> _Product:
    """The driver knows best, then our table by PCI id, then by name."""
    pci_id = shown.pci_id or place.pci_id
    table = card_for(machine.root, "nvidia", pci_id, place.revision)
    told = _specific(shown.name) or _specific(place.model)
    by_name = nvidia_card_by_name(told) if told else table
    chip_name = f"NVIDIA {inside.name or inside.id} ({_TEGRA_DRIVER})" if inside else None
    # By known products, and never because memory cannot be read (wookayin/gpustat#179).
    integrated = is_integrated_nvidia(told or "", pci_id) or _TEGRA_DRIVER in (told or "")
    return _Product(
        name=told or chip_name or table.name or "NVIDIA GPU",
        arch=shown.arch or table.arch or by_name.arch or (inside.arch if inside else None),
        pci_id=pci_id,
        unified=integrated or inside is not None,
        table=table,
    )


def _memory_bytes(machine: _Machine, part: _Part, product: _Product) -> int | None:
    """The driver's word where it shows the card, our table's only where it does not."""
    if product.unified:
        total = ram_numbers(machine.root).get("vram_total_bytes")
    elif part.card is not None:
        total = part.card.numbers.get("vram_total_bytes")
    else:
        total = product.table.vram_bytes
    return None if total is None else int(total)


def _wrong(machine: _Machine, part: _Part, access: Sequence[NodeAccess]) -> list[Problem]:
    """What keeps the card from being used: the deepest reason only."""
    card, reason = part.card, None
    if card is None and part.place is not None:
        reason = _why_not_shown(machine, part.place)
    elif card is None:
        if tegra.has_driver(machine.root) is False:
            reason = nvidia_problems.no_tegra_driver()
    elif card.fault is not None:
        reason = nvidia_problems.for_card(card.fault)
    elif card.is_mig and not card.slices:
        reason = nvidia_problems.mig_empty(card.slot)
    if reason is not None:
        return [reason]
    return [problems.denied(machine.root, each) for each in access if each.allowed is False]


def _why_not_shown(machine: _Machine, place: Place) -> Problem | None:
    """None where the driver was not asked and nothing speaks against the card."""
    if place.excluded:
        return nvidia_problems.excluded()
    if not place.may_be_driven:
        return nvidia_problems.for_driver(place.driver)
    answer = machine.answer
    if answer is None:
        return None
    of_one_card = answer.fault in nvidia_problems.OF_ONE_CARD
    if answer.fault is None or (answer.cards and not of_one_card):
        return nvidia_problems.not_shown()
    return nvidia_problems.for_fault(answer.fault, machine.loaded_version)


def _odd(part: _Part, product: _Product, total: int | None, asleep: bool) -> Iterator[Problem]:
    """What a user may want to know of a card that can be used."""
    if asleep:
        yield problems.asleep()
    if product.arch is None:
        yield nvidia_problems.arch_unknown(product.name)
    if total is None:
        yield problems.memory_unknown()
    elif part.card is None and not product.unified and product.table.vram_assumed:
        yield problems.memory_assumed()


def _nodes(machine: _Machine, part: _Part, inside: tegra.Chip | None) -> list[NodeAccess]:
    """The files in /dev that it needs; those that are made at their first use may be missing."""
    card, place = part
    if inside is not None:
        return tegra.nodes(machine.root)
    if machine.wsl:
        paths = ["/dev/dxg"]
    elif card is None and place is not None and not place.may_be_driven:
        paths = []
    else:
        minor = place.minor if place is not None else None
        minor = card.minor if minor is None and card is not None else minor
        own = [] if minor is None else [f"/dev/nvidia{minor}"]
        paths = [*own, "/dev/nvidiactl", "/dev/nvidia-uvm"]
    return [access for path in paths if (access := look(machine.root, path)).exists is not False]


def _driver(machine: _Machine, part: _Part, inside: tegra.Chip | None) -> str | None:
    """Which driver it must be where the kernel does not say it."""
    if inside is not None:
        return _TEGRA_DRIVER
    if part.card is None:
        return None
    return "dxgkrnl" if machine.wsl else "nvidia"


def _specific(name: str | None) -> str | None:
    """None for a name that says nothing."""
    return None if name is None or _GENERIC_NAME in name.lower() else name
