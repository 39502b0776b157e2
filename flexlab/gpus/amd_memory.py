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


class Memory(NamedTuple):
    """None: unknown."""

    is_apu: bool | None
    vram_bytes: int | None
    gtt_bytes: int | None
    problems: tuple[Problem, ...]


def read(folder: Path | None, node: Node | None, card: Card, *, is_partition: bool) -> Memory:
    """The memory of the GPU whose sysfs folder, KFD node and table row these are."""
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
    """By the table; else by signs that only one kind has.

    The northbridge's voltage (`vddnb`) is measured on APUs only, the maker of the VRAM chips and
    the board's number are known of cards only, CPU cores stand in the node of old APUs only.
    A GTT as large as the VRAM is no sign: Polaris and Vega cards have that too.
    """
    if card.is_apu is not None:
        return card.is_apu
    if node is not None and node.has_cpu:
        return True
    if folder is None:
        return None
    if any(os.path.exists(folder / name) for name in ("mem_info_vram_vendor", "board_info")):
        return False
    for name in list_names(folder / "hwmon"):
        if (read_text(folder / "hwmon" / name / "in1_label") or "").strip() == "vddnb":
            return True
    return None
