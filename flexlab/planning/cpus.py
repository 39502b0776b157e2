"""What a CPU can do, against what a build was compiled for. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from flexlab.spec.machine import Cpu

UNKNOWN_ARCH = "cpu"
_ARCHS = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}


def arch_of(platform: str | None) -> str:
    """`x86_64`, `aarch64`, or `cpu` where the platform could not be read."""
    return _ARCHS.get(platform or "", UNKNOWN_ARCH)


def missing_flags(
    required: Mapping[str, tuple[str, ...]], cpu: Cpu | None, platform: str | None
) -> list[str]:
    """Those of `required` for this platform that the CPU lacks.

    No flags at all: /proc/cpuinfo could not be read, and unknown is not missing.
    """
    if cpu is None or not cpu.flags:
        return []
    return [flag for flag in required.get(arch_of(platform), ()) if flag not in cpu.flags]


def called(cpu: Cpu) -> str:
    """`this CPU (Xeon L5640)`."""
    return f"this CPU ({cpu.name or 'model unknown'})"
