"""Intel GPUs by sysfs: PCI and DRM say who is there; sysfs has neither VRAM nor load.

The total of a card's memory is the driver's word, else the table's; who uses it is told by the
processes' fdinfo (see holders). Power is an energy counter, so it is known from the second reading
on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flexlab.gpus import access, hwmon, intel_memory
from flexlab.gpus.bus import Bus, Device, DrmNode, is_asleep, joined
from flexlab.gpus.files import list_names, read_count
from flexlab.gpus.problems import (
    asleep,
    denied,
    memory_unknown,
    no_driver,
    not_compute,
    passed_on,
)
from flexlab.gpus.source import Found, Source
from flexlab.gpus.tables import Card, card_for
from flexlab.spec.machine import Gpu, GpuReading, Problem

DRIVERS = ("i915", "xe")
_MEMORY_FILES = ("lmem_total_bytes", "prelim_lmem_total_bytes")
"""Of the out-of-tree i915 only."""
_CLOCK_FILES = ("gt_act_freq_mhz", "device/tile0/gt0/freq0/act_freq")


def find(root: Path, bus: Bus) -> Found:
    """Every Intel GPU below `root`, and the display adapters that are none."""
    found = Found([], [])
    here = bus.of("intel")
    devices = {device.slot: device for device in here.pci}
    drm = {node.device.slot: node for node in here.drm}
    known = {slot for slot in (*devices, *drm) if slot is not None}
    # A card that tells no address is one only where nothing else is there that it could be.
    for slot in sorted(known) or [None][: sum(1 for node in here.drm if node.card)]:
        node = drm.get(slot)
        device = joined(devices.get(slot), node)
        assert device is not None  # the slot is one of theirs
        card = card_for(root, "intel", device.pci_id, device.revision)
        if card.compute:
            found.gpus.append(_gpu(root, device, node, card))
        else:
            found.findings.append(not_compute(card.name, slot))
    return found


def _gpu(root: Path, device: Device, node: DrmNode | None, card: Card) -> Gpu:
    integrated = card.is_apu if card.is_apu is not None else _on_the_cpu(device.slot)
    minor = node.render_minor if node else None
    seen = [] if minor is None else [access.look(root, f"/dev/dri/renderD{minor}")]
    wrong = _unusable(root, device, seen)
    folder = node.device.folder if node and node.card else device.folder
    sleeping = device.driver in DRIVERS and is_asleep(folder)
    vram = None
    if not integrated:
        asked = [] if wrong or sleeping or root != Path("/") else seen
        vram = _told_memory(root, node) or _asked_memory(device, asked) or card.vram_bytes
    odd = [] if vram or integrated else [memory_unknown()]
    odd += [asleep()] if sleeping else []
    return Gpu(
        index=0,
        id=device.slot or f"intel:{card.name or 'GPU'}",
        pool="",
        vendor="intel",
        arch=card.arch,
        name=card.name or "Intel GPU",
        pci_id=device.pci_id,
        pci_slot=device.slot,
        card=node.card if node else None,
        render_minor=minor,
        is_apu=integrated,
        driver=device.driver,
        vram_total_bytes=vram,
        usable=not wrong,
        problems=(*wrong, *odd),
        unified=bool(integrated),
        revision=device.revision,
        asleep=sleeping,
        nodes=tuple(one.node for one in seen),
    )


def _on_the_cpu(slot: str | None) -> bool | None:
    """Integrated graphics have been device 2 on bus 0 since the i810; other functions than 0 are
    shares of it for virtual machines."""
    return None if slot is None else slot.rpartition(".")[0].endswith(":00:02")


def _told_memory(root: Path, node: DrmNode | None) -> int | None:
    if node is not None and node.card is not None:
        folder = root / "sys/class/drm" / node.card
        for name in _MEMORY_FILES:
            if total := read_count(folder / name):
                return total
    return None


def _asked_memory(device: Device, nodes: Sequence[access.NodeAccess]) -> int | None:
    for one in nodes:
        if one.allowed and device.driver in DRIVERS:
            return intel_memory.read_total(one.node.path, device.driver)
    return None


def _unusable(root: Path, device: Device, seen: Sequence[access.NodeAccess]) -> list[Problem]:
    if device.driver == "vfio-pci":
        return [passed_on()]
    if device.driver not in (None, *DRIVERS):
        return [no_driver("Intel", f"unbind it from {device.driver}: i915 or xe has to drive it")]
    if device.driver is None and device.unbound:
        return [no_driver("Intel", "sudo modprobe xe (or i915); dmesg says why it fails")]
    return [denied(root, one) for one in seen if one.allowed is False]


def sources(root: Path, gpus: Sequence[Gpu]) -> list[Source]:
    """Live readings of every Intel GPU that has a DRM card."""
    return [
        IntelSource(gpu.id, root / "sys/class/drm" / gpu.card, gpu.driver)
        for gpu in gpus
        if gpu.vendor == "intel" and gpu.card is not None and gpu.driver in DRIVERS
    ]


class IntelSource:
    """Keeps the last state of the energy counters, which power is made of."""

    def __init__(
        self,
        gpu_id: str,
        folder: Path,
        driver: str | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: the card's in class/drm; clocks of i915 stand beside the device's link."""
        self._gpu_id = gpu_id
        self._folder = folder
        self._device = folder / "device"
        self._driver = driver
        self._clock = clock
        self._sensors: hwmon.Hwmon | None = None
        self._energy: dict[Path, tuple[float, int]] = {}

    @property
    def gpu_id(self) -> str:
        return self._gpu_id

    def read(self) -> GpuReading:
        """See source.Source."""
        if is_asleep(self._device):
            self._energy.clear()
            return GpuReading(asleep=True)
        numbers: dict[str, float] = {}
        # Looked up when it is read: a reset card gets a new hwmon number.
        if self._sensors is None or not os.path.isdir(self._sensors.folder):
            self._sensors = hwmon.find(self._device, self._driver)
        if self._sensors is not None:
            numbers |= hwmon.read(self._sensors)
            watts = self._watts(self._sensors.folder)
            if watts is not None:
                numbers.setdefault("power_w", watts)
        for name in _CLOCK_FILES:
            clock = read_count(self._folder / name)
            if clock is not None:
                numbers["clock_core_mhz"] = clock
                break
        return GpuReading(numbers=numbers)

    def _watts(self, folder: Path) -> float | None:
        """From the first energy counter that moves: on xe the card's may stand still while the
        package's counts. None at the first reading, and when a counter went backwards."""
        found = None
        for name in list_names(folder):
            if not (name.startswith("energy") and name.endswith("_input")):
                continue
            path = folder / name
            now, micro_j = self._clock(), read_count(path)
            if not micro_j:
                continue
            before = self._energy.get(path)
            self._energy[path] = (now, micro_j)
            if before and now > before[0] and micro_j > before[1] and found is None:
                found = (micro_j - before[1]) / (now - before[0]) / 1_000_000
        return found
