"""How much memory an AMD GPU has, and whether it is an APU: no single file says either."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from flexlab.core.units import MIB
from flexlab.gpus.files import list_names, read_count, read_text
from flexlab.gpus.kfd import Node
from flexlab.gpus.problems import memory_assumed, memory_unknown
from flexlab.gpus.tables import Card
from flexlab.spec.machine import Problem

_FIRMWARE_BYTES = 16 * MIB
"""What a card since Vega keeps to itself: 16368 of 16384 MiB (RX 6900 XT), 65520 of 65536 (MI210).
Polaris and older report all of it."""
_ALL_OF_IT = ("gfx6", "gfx7", "gfx8")

_APU_ARCHS = frozenset({
    "gfx700", "gfx703", "gfx705", "gfx801", "gfx810", "gfx902", "gfx909", "gfx90c", "gfx1013",
    "gfx1033", "gfx1035", "gfx1036", "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
})  # fmt: skip
_CARD_ARCHS = frozenset({
    "gfx701", "gfx702", "gfx704", "gfx802", "gfx803", "gfx805", "gfx900", "gfx904", "gfx906",
    "gfx908", "gfx90a", "gfx942", "gfx950", "gfx1010", "gfx1011", "gfx1012", "gfx1030", "gfx1031",
    "gfx1032", "gfx1034", "gfx1100", "gfx1101", "gfx1102", "gfx1200", "gfx1201",
})  # fmt: skip
"""LLVM's user guide for the AMDGPU backend, table of processors, column dGPU/APU. MI300A, the one
APU among the gfx942, is known by its id."""


class Memory(NamedTuple):
    """None: unknown."""

    is_apu: bool | None
    vram_bytes: int | None
    gtt_bytes: int | None
    problems: tuple[Problem, ...]


def read(folder: Path | None, node: Node | None, card: Card, *, is_partition: bool) -> Memory:
    """The memory of the GPU whose sysfs folder, KFD node and table row these are.

    None of these files wakes a sleeping card: unlike sensors, the kernel knows totals and labels by
    heart (amdgpu_vram_mgr.c, amdgpu_gtt_mgr.c, amdgpu_pm.c).
    """
    is_apu = _is_apu(folder, node, card)
    # A partition's card reports the whole card's memory.
    own = None if is_partition else folder
    vram = _size(own, "mem_info_vram_total")
    gtt = _size(own, "mem_info_gtt_total")
    bank = node.bank_bytes if node else None
    if is_apu:
        # Its KFD bank is the GTT limit, not the carve-out.
        gtt = gtt or bank
    elif is_apu is False or is_partition:
        vram = vram or bank
    if vram is not None or is_partition or card.vram_bytes is None:
        problems = () if vram or (is_apu and gtt) else (memory_unknown(),)
        return Memory(is_apu, vram, gtt, problems)
    sold = card.vram_bytes
    keeps = is_apu or (card.arch or "").startswith(_ALL_OF_IT)
    return Memory(is_apu, sold if keeps else sold - _FIRMWARE_BYTES, gtt, (memory_assumed(),))


def _size(folder: Path | None, name: str) -> int | None:
    """0 is what guests of a virtual function read: unknown."""
    return (read_count(folder / name) or None) if folder else None


def _is_apu(folder: Path | None, node: Node | None, card: Card) -> bool | None:
    """By the table; else by an architecture, or signs, that only one kind has.

    The northbridge's voltage (`vddnb`) is measured on APUs only, the maker of the VRAM chips and
    the board's number are known of cards only, CPU cores stand in the node of old APUs only.
    A GTT as large as the VRAM is no sign: Polaris and Vega cards have that too.
    """
    if card.is_apu is not None:
        return card.is_apu
    if node is not None and (node.has_cpu or node.arch in _APU_ARCHS):
        return True
    if node is not None and node.arch in _CARD_ARCHS:
        return False
    if folder is None:
        return None
    if any(os.path.exists(folder / name) for name in ("mem_info_vram_vendor", "board_info")):
        return False
    for name in list_names(folder / "hwmon"):
        if (read_text(folder / "hwmon" / name / "in1_label") or "").strip() == "vddnb":
            return True
    return None
