"""Live readings of NVIDIA cards, and who holds their memory.

By NVML; where that cannot be loaded by nvidia-smi, which is then shared by all cards. Below another
root than `/` by the recorded file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path

from flexlab.gpus import bus, nvidia_smi, tegra
from flexlab.gpus.files import fields, read_text
from flexlab.gpus.nvidia_card import (
    FUNCTION_NOT_FOUND,
    LIBRARY_NOT_FOUND,
    Answer,
    DriverCard,
    Process,
)
from flexlab.gpus.presence import RECORDINGS
from flexlab.gpus.source import Source
from flexlab.spec.machine import Gpu, GpuReading, Holder

SYSTEM = Path("/")
"""The running system, where drivers may be asked."""
WITHOUT_LIBRARY = frozenset({LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND})
"""What NVML says where nvidia-smi may know more: it may have a library that we do not find."""


def sources(root: Path, gpus: Sequence[Gpu]) -> list[Source]:
    """One for each NVIDIA card that has sensors to read."""
    readable = [gpu for gpu in gpus if gpu.vendor == "nvidia" and _is_readable(gpu)]
    if root == SYSTEM:
        return [_Card(root, gpu, _ask_driver) for gpu in readable]
    recording = recording_of(root)
    if recording.answer() is None:
        return [_Card(root, gpu, _no_driver) for gpu in readable if gpu.unified]
    return [_Card(root, gpu, recording.read) for gpu in readable]


def holders(root: Path, gpus: Sequence[Gpu]) -> list[Holder]:
    """The processes on each card, as the driver names them; sizes may be unknown (WSL2)."""
    readable = [gpu for gpu in gpus if gpu.vendor == "nvidia" and _is_readable(gpu)]
    if root != SYSTEM:
        answer = recording_of(root).answer()
        return [holder for gpu in readable for holder in _held(gpu, _processes(answer, gpu))]
    found: list[Holder] = []
    for gpu in readable:
        if not is_asleep(root, gpu.pci_slot):
            found += _held(gpu, _ask_processes(gpu))
    return found


def is_asleep(root: Path, slot: str | None) -> bool:
    """Powered down by the kernel: any question to the driver would wake it."""
    return slot is not None and bus.is_asleep(root / "sys/bus/pci/devices" / slot)


def ram_numbers(root: Path) -> dict[str, float]:
    """Unified memory: the machine's RAM, of which what is available counts as free."""
    found = fields(read_text(root / "proc/meminfo"))
    total, available = found.get("MemTotal"), found.get("MemAvailable")
    numbers: dict[str, float] = {}
    if total:
        numbers["vram_total_bytes"] = total * 1024
        if available is not None:
            numbers["vram_used_bytes"] = max(0, total - available) * 1024
    return numbers


class Recording:
    """A recorded nvidia-smi.xml or .csv below a root; parsed anew when a file changes.

    To be had from `recording_of`: the search, readings and holders share one.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stamp: tuple[object, ...] = ()
        self._answer: Answer | None = None

    def answer(self) -> Answer | None:
        """What the files say together; None where they hold no card."""
        stamp = tuple(_stamp(self._root / name) for name in RECORDINGS)
        if stamp != self._stamp:
            texts = [read_text(self._root / name) for name in RECORDINGS]
            answers = [answer for answer in map(nvidia_smi.parse, texts) if answer is not None]
            self._answer, self._stamp = _together(answers), stamp
        return self._answer

    def read(self, gpu: Gpu) -> GpuReading:
        """One card's sensors. Raises OSError."""
        return _reading(self.answer(), gpu)


@lru_cache(maxsize=16)
def recording_of(root: Path) -> Recording:
    """The one of this root."""
    return Recording(root)


def card_of(answer: Answer | None, gpu: Gpu) -> DriverCard | None:
    """What an answer has about this card: by slot, by UUID, or because there is only one."""
    cards = answer.cards if answer is not None else ()
    for card in cards:
        if gpu.pci_slot is not None and card.slot == gpu.pci_slot:
            return card
    for card in cards:
        if gpu.uuid is not None and card.uuid == gpu.uuid and None in (card.slot, gpu.pci_slot):
            return card
    alone = len(cards) == 1 and None in (cards[0].slot, gpu.pci_slot)
    return cards[0] if alone and None in (cards[0].uuid, gpu.uuid) else None


class _Card:
    """The Source of one card."""

    def __init__(self, root: Path, gpu: Gpu, ask: Callable[[Gpu], GpuReading]) -> None:
        self.gpu_id = gpu.id
        self._root = root
        self._gpu = gpu
        self._ask = ask
        self._is_tegra = gpu.pci_slot is None and gpu.unified and tegra.chip_of(root) is not None

    def read(self) -> GpuReading:
        """Everything readable now. Raises OSError when the driver has lost the card."""
        if self._root == SYSTEM and is_asleep(self._root, self._gpu.pci_slot):
            return GpuReading(asleep=True)
        told = self._told()
        if not self._gpu.unified:
            return told
        numbers = {name: n for name, n in told.numbers.items() if not name.startswith("vram_")}
        numbers |= ram_numbers(self._root)
        if self._is_tegra:
            numbers |= tegra.numbers(self._root)
        return GpuReading(numbers=numbers, throttle=told.throttle)

    def _told(self) -> GpuReading:
        try:
            return self._ask(self._gpu)
        except OSError:
            if self._is_tegra:
                return GpuReading()  # its driver often has nothing to ask
            raise


def _is_readable(gpu: Gpu) -> bool:
    return gpu.usable or any(problem.code == "mig_empty" for problem in gpu.problems)


def _no_driver(_gpu: Gpu) -> GpuReading:
    return GpuReading()


def _ask_driver(gpu: Gpu) -> GpuReading:
    from flexlab.gpus import nvml

    try:
        return nvml.read(gpu.pci_slot, gpu.uuid)
    except nvml.Unusable as error:
        if error.code not in WITHOUT_LIBRARY:
            raise OSError(str(error)) from error
    from flexlab.gpus.nvidia_tool import SHARED

    return _reading(SHARED.get(), gpu)


def _ask_processes(gpu: Gpu) -> Iterable[Process]:
    from flexlab.gpus import nvml

    try:
        return nvml.processes(gpu.pci_slot, gpu.uuid)
    except OSError:
        return ()
    except nvml.Unusable as error:
        if error.code not in WITHOUT_LIBRARY:
            return ()
    from flexlab.gpus.nvidia_tool import SHARED

    try:
        return _processes(SHARED.get(), gpu)
    except OSError:
        return ()


def _reading(answer: Answer | None, gpu: Gpu) -> GpuReading:
    card = card_of(answer, gpu)
    if card is None:
        raise OSError("nvidia-smi does not show this GPU any more")
    if card.fault is not None:
        raise OSError("nvidia-smi says that this GPU is lost or has to be reset")
    return card.reading()


def _processes(answer: Answer | None, gpu: Gpu) -> tuple[Process, ...]:
    card = card_of(answer, gpu)
    return card.processes if card is not None else ()


def _held(gpu: Gpu, processes: Iterable[Process]) -> list[Holder]:
    """As holders of this card, or of the slice that a process is in."""
    return [
        Holder(
            gpu=_place(gpu, process),
            pid=process.pid,
            name=process.name,
            vram_bytes=process.vram_bytes,
        )
        for process in processes
    ]


def _place(gpu: Gpu, process: Process) -> str:
    if process.slice_uuid is not None:
        return process.slice_uuid
    inside = [part.uuid for part in gpu.mig if process.gi is not None and part.gi == process.gi]
    # Several compute instances may share a GPU instance: then it could be any of them.
    return inside[0] if len(inside) == 1 else gpu.id


def _together(answers: list[Answer]) -> Answer | None:
    """The first, completed by the second: XML has no compute capability, CSV may have one."""
    if len(answers) < 2:
        return answers[0] if answers else None
    first, second = answers
    cards = []
    for card in first.cards:
        same = [other for other in second.cards if _is_same(card, other)]
        cards.append(card.filled_from(same[0]) if len(same) == 1 else card)
    return first._replace(
        cards=tuple(cards),
        driver_version=first.driver_version or second.driver_version,
        cuda_version=first.cuda_version or second.cuda_version,
    )


def _is_same(card: DriverCard, other: DriverCard) -> bool:
    pairs = [(card.slot, other.slot), (card.uuid, other.uuid)]
    known = [first == second for first, second in pairs if first and second]
    return bool(known) and all(known)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size
