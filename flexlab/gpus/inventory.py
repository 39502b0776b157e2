"""Everything that was detected, at one moment. This version plans with the CPU only."""

from __future__ import annotations

import os
import socket
from collections import Counter
from pathlib import Path

from flexlab.core.text import clean_line
from flexlab.gpus.cpu import CpuInfo, read_cpu
from flexlab.gpus.files import list_names, read_text
from flexlab.gpus.memory import sample_ram
from flexlab.spec.machine import Machine, Problem

_VENDORS = {"0x1002": "AMD", "0x10de": "NVIDIA", "0x8086": "Intel"}
_DISPLAY_CLASSES = ("0x0300", "0x0302", "0x0380")
_ACCELERATOR_CLASS = "0x1200"
"""How an Instinct MI300 calls itself; an Intel device of this class is an NPU."""
_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64", "arm64": "linux/arm64"}


def detect(
    root: Path = Path("/"),
    *,
    ram_reserve_bytes: int | None = None,
    ram_budget_bytes: int | None = None,
) -> Machine:
    """The machine below `root` (another one than `/` is a recorded or a test machine).

    Never raises; what cannot be read is None. The two sizes are the settings of the same names.
    """
    root = Path(root)
    info = CpuInfo(root)
    pool = sample_ram(root, reserve_bytes=ram_reserve_bytes, budget_bytes=ram_budget_bytes)
    return Machine(
        hostname=_hostname(root),
        platform=_platform(root, info),
        cpu=read_cpu(root, info),
        pools=(pool,),
        findings=_unused_gpus(root),
    )


def _hostname(root: Path) -> str:
    if root == Path("/"):
        return socket.gethostname()
    return clean_line(read_text(root / "etc/hostname") or "")


def _platform(root: Path, info: CpuInfo) -> str | None:
    if root != Path("/"):
        return info.platform
    uname = os.uname()
    return _PLATFORMS.get(uname.machine) if uname.sysname == "Linux" else None


def _unused_gpus(root: Path) -> tuple[Problem, ...]:
    folder = root / "sys/bus/pci/devices"
    vendors = Counter(filter(None, (_gpu_vendor(folder / slot) for slot in list_names(folder))))
    if not vendors:
        return ()
    found = ", ".join(f"{amount} {vendor}" for vendor, amount in sorted(vendors.items()))
    noun = "GPU is" if vendors.total() == 1 else "GPUs are"
    problem = Problem(
        code="gpu_unused",
        message=f"{found} {noun} here, but this version runs models on the CPU only",
        hint="nothing to do: models run on the CPU",
    )
    return (problem,)


def _gpu_vendor(device: Path) -> str | None:
    """The vendor's name if this PCI device is a GPU that the host could use."""
    kind = (read_text(device / "class") or "").strip()
    if not kind.startswith((*_DISPLAY_CLASSES, _ACCELERATOR_CLASS)):
        return None
    vendor = _VENDORS.get((read_text(device / "vendor") or "").strip())
    if kind.startswith(_ACCELERATOR_CLASS) and vendor != "AMD":
        return None
    # Bound to vfio-pci, it belongs to a virtual machine.
    passed_on = "DRIVER=vfio-pci" in (read_text(device / "uevent") or "")
    return None if passed_on else vendor
