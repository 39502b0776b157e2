"""Why an AMD GPU cannot be used, or what it cannot do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from flexlab.gpus import kfd
from flexlab.gpus.access import NodeAccess
from flexlab.gpus.bus import Device
from flexlab.gpus.files import list_names
from flexlab.gpus.problems import denied, no_driver, passed_on
from flexlab.gpus.tables import Card
from flexlab.spec.machine import Problem

KFD = "/dev/kfd"


def unusable(
    root: Path,
    driver: str | None,
    device: Device | None,
    seen: Sequence[NodeAccess],
) -> list[Problem]:
    """Why nothing can run on it; empty where nothing speaks against it."""
    if driver == "vfio-pci":
        return [passed_on()]
    if driver == "radeon":
        return [
            Problem(
                code="radeon_driver",
                message="the old radeon driver has this card: it gives no compute",
                hint="GCN 1/2: boot with radeon.si_support=0 amdgpu.si_support=1 "
                "(or radeon.cik_support=0 amdgpu.cik_support=1) for Vulkan",
            )
        ]
    if driver is None and device is not None and device.unbound:
        return [no_driver("AMD", "sudo modprobe amdgpu; dmesg | grep amdgpu says why it fails")]
    if driver not in (None, "amdgpu"):
        return [no_driver("AMD", f"unbind it from {driver}: amdgpu has to drive it")]
    return [denied(root, one) for one in seen if one.allowed is False] or _withheld(root, seen)


def _withheld(root: Path, seen: Sequence[NodeAccess]) -> list[Problem]:
    """A container sees all GPUs in sysfs, and in /dev those that were passed to it.

    Without any render node there is no saying what is missing: such a container starts models
    through the host's runtime.
    """
    if not any(name.startswith("renderD") for name in list_names(root / "dev/dri")):
        return []
    return [
        Problem(
            code="render_denied",
            message=f"found, but there is no {one.node.path} here: only other GPUs were passed on",
            hint=f"start this container with --device {one.node.path} as well",
        )
        for one in seen
        if one.exists is False and one.node.path != KFD
    ]


def limits(
    card: Card, driver: str | None, node: kfd.Node | None, seen: Sequence[NodeAccess]
) -> Iterator[Problem]:
    """What a usable card cannot do, or what was assumed about it."""
    if driver == "amdgpu" and node is None:
        yield Problem(
            code="no_kfd",
            message="the kernel shows no KFD node for this card: ROCm cannot use it, Vulkan can",
            hint="a kernel with CONFIG_HSA_AMD, or a Vulkan backend; GCN 1 and 2 never had ROCm",
        )
    if any(one.exists is False and one.node.path == KFD for one in seen):
        yield Problem(
            code="no_kfd",
            message=f"there is no {KFD} here: ROCm cannot use it, Vulkan can",
            hint=f"start this container with --device {KFD} as well; on a host: modprobe amdgpu",
        )
    if (node is None or node.arch is None) and card.arch is None:
        yield Problem(
            code="arch_unknown",
            message="neither the kernel nor our table says which architecture this is",
            hint="a newer kernel says it (gfx_target_version); Vulkan works without",
        )
