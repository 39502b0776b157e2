"""On which devices of a machine a model could run, in order of preference. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from flexlab.core.near import did_you_mean
from flexlab.core.text import clean_line
from flexlab.spec.machine import CPU_DEVICE, RAM_POOL, Gpu, Machine, MigSlice, Problem
from flexlab.spec.plan import Support

CPU_ARCH = "cpu"


class Device(NamedTuple):
    """One device that a model could be given whole."""

    id: str
    pool: str
    arch: str | None
    """None: neither kernel nor table knows it."""
    total_bytes: int | None
    gpu: Gpu | None = None
    """None for the CPU."""
    slice: MigSlice | None = None

    @property
    def shown(self) -> str:
        """For people."""
        if self.gpu is None:
            return "the CPU"
        part = f", {self.slice.profile or self.slice.uuid}" if self.slice else ""
        return f"GPU {self.gpu.index}, {self.gpu.name}{part}"


class Choice(NamedTuple):
    """Devices to try, best first, and those that are out from the start with the reason."""

    devices: tuple[Device, ...]
    out: tuple[tuple[Device, Problem], ...]


def shown(cards: Iterable[Device]) -> str:
    """One or more, for people."""
    return " and ".join(card.shown for card in cards)


def cpu_of(machine: Machine) -> Device:
    """The CPU as a device."""
    pool = machine.pool(RAM_POOL)
    total = pool.total_bytes if pool else None
    return Device(CPU_DEVICE, RAM_POOL, CPU_ARCH, total)


def gpu_devices(machine: Machine) -> list[Device]:
    """Every GPU, the best first; a card in MIG mode is its slices."""
    ordered = sorted(machine.gpus, key=lambda gpu: (not gpu.best, not gpu.usable, gpu.index))
    return [device for gpu in ordered for device in _devices_of(gpu)]


def choose(
    machine: Machine,
    wish: str | None,
    *,
    on_cpu: bool,
    stated: Callable[[str | None], Support | None],
) -> Choice:
    """The devices for one variant.

    `on_cpu`: the variant runs on the CPU too; `stated`: what is known of its backend on an arch.
    The CPU is no way round a GPU that is merely refused: it is a candidate only where no usable
    GPU has any stated support for the backend, or when it is asked for.
    """
    everything = gpu_devices(machine)
    if wish is not None:
        if wish.lower() == CPU_DEVICE:
            return Choice((cpu_of(machine),), ())
        everything = [device for device in everything if is_meant(device, wish)]
    usable = [device for device in everything if device.gpu and device.gpu.usable]
    out = tuple(
        (device, problem)
        for device in everything
        if device.gpu and not device.gpu.usable
        for problem in device.gpu.problems[:1]
    )
    known = any(stated(device.arch) is not None for device in usable)
    if wish is None and on_cpu and not known:
        usable.append(cpu_of(machine))
    return Choice(tuple(usable), out)


def together(cards: Iterable[Device], *, alike: bool) -> list[tuple[Device, ...]]:
    """Cards that one model could be split over, as few as possible first, never across vendors.

    `alike`: each card does the same work (tensor parallel), so they are of one arch and size and
    their number is a power of two, which divides the heads of attention; else any of an arch or
    of a vendor, the largest first. Slices of a card and the memory that the CPU shares are never
    joined.
    """
    kinds: dict[tuple[object, ...], list[Device]] = {}
    for card in cards:
        gpu = card.gpu
        if gpu is None or card.slice is not None or not card.total_bytes or card.pool == RAM_POOL:
            continue
        of_arch, alike_in = (gpu.vendor, card.arch), (gpu.vendor, card.arch, card.total_bytes)
        for kind in (alike_in,) if alike else (of_arch, (gpu.vendor,)):
            kinds.setdefault(kind, []).append(card)
    found: dict[tuple[str, ...], tuple[Device, ...]] = {}
    # Cards of one arch come first: another one may need another image or environment.
    for group in sorted(kinds.values(), key=lambda group: len({card.arch for card in group})):
        ordered = group if alike else sorted(group, key=lambda card: -(card.total_bytes or 0))
        counts = (2, 4, 8) if alike else range(2, len(ordered) + 1)
        for count in counts:
            if count <= len(ordered):
                some = tuple(ordered[:count])
                found.setdefault(tuple(card.id for card in some), some)
    return sorted(found.values(), key=len)


def unknown_device(machine: Machine, wish: str | None) -> Problem | None:
    """What is wrong with `--gpu wish`; None where it names a device."""
    if wish is None or wish.lower() == CPU_DEVICE:
        return None
    if any(is_meant(device, wish) for device in gpu_devices(machine)):
        return None
    names = [str(gpu.index) for gpu in machine.gpus] + [gpu.id for gpu in machine.gpus]
    asked = clean_line(wish)
    there = ", ".join(f"{gpu.index} ({gpu.id}, {gpu.name})" for gpu in machine.gpus) or "none"
    return Problem(
        code="unknown_gpu",
        message=f"no GPU {asked!r} here{did_you_mean(asked, names)}; there are: {there}",
        hint="flexlab gpus lists them; --gpu cpu takes the CPU",
    )


def _devices_of(gpu: Gpu) -> Iterable[Device]:
    if not gpu.mig:
        yield Device(gpu.id, gpu.pool, gpu.arch, gpu.pool_total_bytes, gpu)
    for part in gpu.mig:
        yield Device(part.uuid, part.uuid, gpu.arch, part.vram_total_bytes, gpu, part)


def is_meant(device: Device, wish: str) -> bool:
    """Whether `--gpu wish` names this device: by index, id, address or UUID."""
    gpu = device.gpu
    if gpu is None:
        return False
    names = {str(gpu.index), gpu.id, device.id, gpu.pci_slot, gpu.uuid}
    return wish.lower() in {name.lower() for name in names if name}
