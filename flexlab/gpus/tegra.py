"""The GPU inside a Jetson (Tegra): known from the device tree, it shares the board's RAM.

It is no PCI device. NVML is absent up to JetPack 5; on JetPack 6 nvidia-smi knows its name and
little else (vllm-project/vllm#9728, Chen-zexi/vllm-cli#11), so sensors come from sysfs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from flexlab.gpus.access import NodeAccess, look
from flexlab.gpus.files import count, list_names, read_text

# Compute capabilities per system on chip: developer.nvidia.com/cuda-gpus, Jetson products.
_CHIPS = {
    "tegra124": ("Tegra K1", "sm_32"),
    "tegra210": ("Tegra X1", "sm_53"),
    "tegra186": ("Tegra X2", "sm_62"),
    "tegra194": ("Xavier", "sm_72"),
    "tegra234": ("Orin", "sm_87"),
    "tegra264": ("Thor", "sm_110"),
}
_COMPATIBLE = re.compile(r"nvidia,(tegra[0-9]+)")
_NODES = ("/dev/nvmap", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-gpu")
_ZONES = {"tj": "tj-therm", "gpu": "gpu-therm"}
"""What we call a temperature -> how its thermal zone's type begins, whatever the JetPack."""
_GPU_DEVICE = re.compile(r"[0-9a-f]+\.(gpu|ga10b|gv11b|gp10b|gm20b)|gpu\.0")
_VALID_C = (-60.0, 150.0)
"""A zone that is powered down says -256 C."""


class Chip(NamedTuple):
    """The system on chip; name and arch are None for one that we do not know."""

    id: str
    name: str | None
    arch: str | None


def chip_of(root: Path) -> Chip | None:
    """By the board's device tree; None where this is no Tegra."""
    # The entries of `compatible` are separated by NUL bytes, which read_text leaves out.
    text = read_text(root / "proc/device-tree/compatible") or ""
    found = _COMPATIBLE.findall(text)
    if not found:
        return None
    name, arch = _CHIPS.get(found[-1], (None, None))
    return Chip(found[-1], name, arch)


def nodes(root: Path) -> list[NodeAccess]:
    """The files in /dev that NVIDIA's driver for it makes, as far as they are there."""
    return [access for access in (look(root, path) for path in _NODES) if access.exists]


def has_driver(root: Path) -> bool | None:
    """None: the root has no /dev that could tell."""
    if not os.path.isdir(root / "dev"):
        return None
    return bool(nodes(root))


def numbers(root: Path) -> dict[str, float]:
    """Its sensors, under the names of GpuReading."""
    return dict(_sensors(root))


def _sensors(root: Path) -> Iterator[tuple[str, float]]:
    zones = root / "sys/class/thermal"
    for zone in list_names(zones):
        kind = (read_text(zones / zone / "type") or "").strip().lower()
        for name, start in _ZONES.items():
            celsius = _celsius(zones / zone / "temp") if kind.startswith(start) else None
            if celsius is not None:
                yield f"temp_{name}_c", celsius
    for folder in _gpu_folders(root):
        load = count(read_text(folder / "device/load"))
        if load is not None and load <= 1000:
            yield "busy_percent", load / 10  # per mille
        frequency = count(read_text(folder / "cur_freq"))
        if frequency:
            yield "clock_core_mhz", frequency / 1e6


def _gpu_folders(root: Path) -> list[Path]:
    folder = root / "sys/class/devfreq"
    return [folder / name for name in list_names(folder) if _GPU_DEVICE.fullmatch(name)]


def _celsius(path: Path) -> float | None:
    text = (read_text(path) or "").strip()
    degrees = count(text.removeprefix("-"))
    if degrees is None:
        return None
    celsius = (-degrees if text.startswith("-") else degrees) / 1000
    return celsius if _VALID_C[0] < celsius < _VALID_C[1] else None
