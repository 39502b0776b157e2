"""Signs of NVIDIA hardware where the PCI bus shows none.

NVML is loaded, or nvidia-smi started, only behind such a sign: on a machine without NVIDIA that
would cost 200 ms and prove nothing (a leftover nvidia-smi binary is no GPU).
"""

from __future__ import annotations

import os
from pathlib import Path

from flexlab.gpus.files import read_text

RECORDINGS = ("nvidia-smi.xml", "nvidia-smi.csv")


def nvidia_without_bus(root: Path) -> bool:
    """WSL2, Jetson, a container without /sys/bus/pci, or a recorded nvidia-smi below a sysroot."""
    if root != Path("/") and any(os.path.isfile(root / name) for name in RECORDINGS):
        return True
    if os.path.isdir(root / "proc/driver/nvidia"):
        return True
    return has_wsl_gpu(root) or is_tegra(root)


def has_wsl_gpu(root: Path) -> bool:
    """WSL2 has no display device on its bus: /dev/dxg and Windows' own NVML are the signs."""
    library = root / "usr/lib/wsl/lib/libnvidia-ml.so.1"
    return is_wsl(root) and os.path.exists(root / "dev/dxg") and os.path.exists(library)


def is_wsl(root: Path) -> bool:
    """Whether this Linux runs under Windows."""
    return "microsoft" in (read_text(root / "proc/version") or "").lower()


def is_tegra(root: Path) -> bool:
    """A Jetson or another Tegra board, by its device tree."""
    return "nvidia,tegra" in (read_text(root / "proc/device-tree/compatible") or "")
