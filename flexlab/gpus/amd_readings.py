"""Live readings of one amdgpu card, each file on its own: any of them may be missing."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from flexlab.gpus import hwmon
from flexlab.gpus.bus import is_asleep
from flexlab.gpus.files import read_bytes, read_count
from flexlab.spec.machine import GpuReading

_MEMORY_FILES = {
    "vram_total_bytes": "mem_info_vram_total",
    "vram_used_bytes": "mem_info_vram_used",
    "gtt_total_bytes": "mem_info_gtt_total",
    "gtt_used_bytes": "mem_info_gtt_used",
}
_BUSY_FILES = {"busy_percent": "gpu_busy_percent", "memory_busy_percent": "mem_busy_percent"}

_METRICS_HEADER = struct.Struct("<HBB")
"""Of `gpu_metrics`: size in bytes, format, content revision (kernel, kgd_pp_interface.h)."""
_THROTTLE = struct.Struct("<Q")
_THROTTLE_AT = {(1, 3): 112}
"""Where `indep_throttle_status` stands. Its bits mean the same on every chip; those of the older
`throttle_status` do not."""
_THROTTLE_BITS = (("power", 0, 16), ("current", 16, 32), ("thermal", 32, 56), ("other", 56, 64))
"""Groups of SMU_THROTTLER_* (kernel, amdgpu_smu.h)."""


class AmdSource:
    """Reads a card that is awake, and leaves one that sleeps alone."""

    def __init__(self, gpu_id: str, folder: Path, *, own_memory: bool) -> None:
        """`own_memory`: the card's memory files speak of this GPU (not of all its partitions)."""
        self._gpu_id = gpu_id
        self._folder = folder
        self._sensors: hwmon.Hwmon | None = None
        names = _MEMORY_FILES | _BUSY_FILES if own_memory else _BUSY_FILES
        self._files = [(name, folder / file) for name, file in names.items()]

    @property
    def gpu_id(self) -> str:
        return self._gpu_id

    def read(self) -> GpuReading:
        """See source.Source."""
        if is_asleep(self._folder):
            return GpuReading(asleep=True)
        numbers: dict[str, float] = {}
        for name, path in self._files:
            value = read_count(path)
            if value is None or (value == 0 and name.endswith("total_bytes")):
                continue
            if name.endswith("percent") and value > 100:
                continue  # firmware of some APUs says 65535 for "not known"
            numbers[name] = value
        # Looked up when it is read: a reset card gets a new hwmon number.
        if self._sensors is None or not os.path.isdir(self._sensors.folder):
            self._sensors = hwmon.find(self._folder, "amdgpu")
        if self._sensors is not None:
            numbers |= hwmon.read(self._sensors)
        return GpuReading(numbers=numbers, throttle=throttling(self._folder / "gpu_metrics"))


def throttling(path: Path) -> tuple[str, ...]:
    """Why the card runs slower than it could, where its table of metrics says so plainly."""
    table = read_bytes(path)
    if table is None or len(table) < _METRICS_HEADER.size:
        return ()
    size, layout, content = _METRICS_HEADER.unpack_from(table)
    at = _THROTTLE_AT.get((layout, content))
    if at is None or min(size, len(table)) < at + _THROTTLE.size:
        return ()
    (bits,) = _THROTTLE.unpack_from(table, at)
    if bits == 2**64 - 1:  # the firmware does not fill it
        return ()
    return tuple(
        word for word, low, high in _THROTTLE_BITS if bits >> low & ((1 << (high - low)) - 1)
    )
