"""What a container engine can do, out of what it says of itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from flexlab.runtimes.containers.body import GpuWay


class Abilities(NamedTuple):
    """Of one engine."""

    is_podman: bool
    has_nvidia_runtime: bool
    has_cdi: bool
    init: bool
    """It can put a small first process before the program."""
    is_rootless: bool
    cgroups: str | None
    """`1` or `2`; None where it does not say."""

    @property
    def gpu_way(self) -> GpuWay:
        """By its own runtime where it has one, since that needs no file of devices."""
        return "cdi" if self.has_cdi and not self.has_nvidia_runtime else "nvidia"


def of(info: Mapping[str, Any], version: Mapping[str, Any]) -> Abilities:
    """`info` and `version` are the engine's own answers; what it leaves out it cannot do."""
    components = [str(one.get("Name", "")) for one in version.get("Components") or ()]
    is_podman = any("podman" in name.lower() for name in components)
    security = [str(word) for word in info.get("SecurityOptions") or ()]
    cgroups = info.get("CgroupVersion")
    return Abilities(
        is_podman=is_podman,
        has_nvidia_runtime="nvidia" in (info.get("Runtimes") or {}),
        has_cdi=bool(info.get("CDISpecDirs")),
        # podman offers it without having the program that it needs.
        init=bool(info.get("InitBinary")) and not is_podman,
        is_rootless=any("name=rootless" in word for word in security),
        cgroups=str(cgroups) if cgroups else None,
    )
