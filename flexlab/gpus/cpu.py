"""The CPU as a device: its name, its flags, and how much of it this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from flexlab.core.text import clean_line
from flexlab.gpus import cgroup
from flexlab.gpus.files import count, read_count, read_text
from flexlab.spec.machine import Cpu

# (implementer, part) of MIDR_EL1. Arm's own cores, and the others seen in homelabs and clouds:
# arm64 kernels print numbers where x86 prints a model name.
_ARM_CORES = {
    (0x41, 0xD03): "Cortex-A53", (0x41, 0xD04): "Cortex-A35", (0x41, 0xD05): "Cortex-A55",
    (0x41, 0xD07): "Cortex-A57", (0x41, 0xD08): "Cortex-A72", (0x41, 0xD09): "Cortex-A73",
    (0x41, 0xD0A): "Cortex-A75", (0x41, 0xD0B): "Cortex-A76", (0x41, 0xD0C): "Neoverse-N1",
    (0x41, 0xD0D): "Cortex-A77", (0x41, 0xD40): "Neoverse-V1", (0x41, 0xD41): "Cortex-A78",
    (0x41, 0xD42): "Cortex-A78AE", (0x41, 0xD44): "Cortex-X1", (0x41, 0xD49): "Neoverse-N2",
    (0x41, 0xD4F): "Neoverse-V2", (0x41, 0xD80): "Cortex-A520", (0x41, 0xD81): "Cortex-A720",
    (0x41, 0xD85): "Cortex-X925", (0x41, 0xD87): "Cortex-A725", (0xC0, 0xAC3): "Ampere-1",
}  # fmt: skip


class CpuInfo:
    """/proc/cpuinfo, read once; `key: value` lines in one block per thread."""

    def __init__(self, root: Path) -> None:
        self._values: dict[str, list[str]] = {}
        for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
            key, separator, value = line.partition(":")
            if separator:
                self._values.setdefault(key.strip(), []).append(value.strip())

    def first(self, *keys: str) -> str | None:
        """The first value that is not empty, of the first of `keys` that has one."""
        return next((value for key in keys for value in self._values.get(key, ()) if value), None)

    def all(self, key: str) -> list[str]:
        """Every thread's value."""
        return self._values.get(key, [])

    @property
    def platform(self) -> str | None:
        """By the form of the file: x86 says `flags`, arm64 says `Features` with asimd."""
        if self.all("flags") and self.all("vendor_id"):
            return "linux/amd64"
        return "linux/arm64" if "asimd" in flags(self) else None


def read_cpu(root: Path = Path("/"), info: CpuInfo | None = None) -> Cpu:
    """The CPU below `root`; affinity is this process's, so it counts for the real root only."""
    info = info or CpuInfo(root)
    # `processor` also is the model's name in the files of 32-bit Arm kernels.
    listed = sum(count(value) is not None for value in info.all("processor"))
    return Cpu(
        name=_name(root, info),
        threads_total=listed or None,
        threads_usable=_usable_threads(root, listed or None),
        flags=flags(info),
    )


def flags(info: CpuInfo) -> frozenset[str]:
    """What every thread can do (`flags` on x86, `Features` on arm64)."""
    lines = {line for key in ("flags", "Features") for line in info.all(key)}
    sets = [frozenset(line.split()) for line in lines]
    return frozenset.intersection(*sets) if sets else frozenset()


def quota_threads(root: Path = Path("/")) -> float | None:
    """CPUs that the tightest control group allows (1.5 = one and a half); None without a limit."""
    limits = [limit for limit in map(_quota, cgroup.groups(root, "cpu")) if limit is not None]
    return min(limits, default=None)


def _usable_threads(root: Path, total: int | None) -> int | None:
    bounds: list[int] = [] if total is None else [total]
    if root == Path("/") and hasattr(os, "sched_getaffinity"):
        bounds = [len(os.sched_getaffinity(0))]
    quota = quota_threads(root)
    if quota is not None:
        # Rounded down: one thread more than the quota pays for makes all of them wait for it.
        bounds.append(int(quota))
    return max(1, min(bounds)) if bounds else None


def _quota(group: cgroup.Group) -> float | None:
    if group.version == 2:
        words = (read_text(group.folder / "cpu.max") or "").split()
        quota, period = (count(word) for word in words) if len(words) == 2 else (None, None)
    else:
        quota = read_count(group.folder / "cpu.cfs_quota_us")  # -1: no limit
        period = read_count(group.folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _name(root: Path, info: CpuInfo) -> str | None:
    name = info.first("model name") if info.all("vendor_id") else None
    name = name or _arm_cores(info) or info.first("Model", "Hardware", "model name", "cpu model")
    name = name or read_text(root / "proc/device-tree/model")
    return clean_line(name or "") or None


def _arm_cores(info: CpuInfo) -> str | None:
    pairs = zip(info.all("CPU implementer"), info.all("CPU part"), strict=False)
    names = [_ARM_CORES.get((_hex(who), _hex(part))) for who, part in dict.fromkeys(pairs)]
    return " + ".join(_known(names)) or None


def _known(names: Iterable[str | None]) -> list[str]:
    return [name for name in names if name]


def _hex(text: str) -> int:
    try:
        return int(text, 16)
    except ValueError:
        return -1
