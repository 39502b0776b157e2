"""The KFD topology: which GPUs ROCm sees, in ROCm's own order.

A node is a folder with `properties` (`key value` a line, decimal, unsigned up to 64 bit). Nodes
whose files this process may not read (a container's device cgroup says EPERM) are not there for
ROCm either, and count in no index.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from flexlab.gpus.arch import gfx_name
from flexlab.gpus.files import fields, list_names, read_count, read_text

_AMD = 0x1002
_GCN_SIMD_PER_CU = 4
_RDNA_VERSION = 100_000
"""Since RDNA it is no longer 4, so a kernel has to say it."""
_VRAM_HEAPS = (1, 2)
"""Frame buffer, visible to the CPU or not. 0 is system memory, 3 and up are scratch areas."""


class Node(NamedTuple):
    """One GPU node; None where the kernel is too old to say it."""

    number: int
    hip_index: int
    """Position among the nodes that this process can read: what HIP_VISIBLE_DEVICES counts."""
    gpu_id: int | None
    slot: str | None
    """Partitions of one card differ in the function digit and are no PCI functions of their own."""
    pci_id: str | None
    arch: str | None
    cu_count: int | None
    render_minor: int | None
    unique_id: int | None
    bank_bytes: int | None
    """VRAM of a card or partition; on an APU the GTT limit."""
    has_cpu: bool
    """CPU cores stand in the same node: an APU of the days before separate nodes."""


def read_nodes(root: Path) -> list[Node]:
    """All GPU nodes below `root`, in node order (10 after 9)."""
    folder = root / "sys/class/kfd/kfd/topology/nodes"
    names = (name for name in list_names(folder) if name.isascii() and name.isdigit())
    numbers = sorted(int(name) for name in names)
    nodes: list[Node] = []
    for number in numbers:
        node = _node(folder / str(number), number, hip_index=len(nodes))
        if node is not None:
            nodes.append(node)
    return nodes


def _node(folder: Path, number: int, hip_index: int) -> Node | None:
    found = fields(read_text(folder / "properties"))
    simds, location = found.get("simd_count"), found.get("location_id")
    # By simd_count only: old APUs have CPU cores in the same node.
    if not simds or found.get("vendor_id", _AMD) != _AMD:
        return None
    version, device = found.get("gfx_target_version"), found.get("device_id")
    return Node(
        number=number,
        hip_index=hip_index,
        gpu_id=read_count(folder / "gpu_id") or None,
        slot=None if location is None else _slot(found.get("domain", 0), location),
        pci_id=f"1002:{device:04x}" if device and device <= 0xFFFF else None,
        arch=gfx_name(version) if version else None,
        cu_count=_cu_count(simds, found.get("simd_per_cu"), version),
        render_minor=found.get("drm_render_minor") or None,
        unique_id=found.get("unique_id") or None,
        bank_bytes=_bank_bytes(folder / "mem_banks"),
        has_cpu=bool(found.get("cpu_cores_count")),
    )


def _cu_count(simds: int, per_cu: int | None, version: int | None) -> int | None:
    """Not array_count * cu_per_simd_array, which counts fused-off units."""
    if not per_cu and (version or 0) < _RDNA_VERSION:
        per_cu = _GCN_SIMD_PER_CU
    return simds // per_cu or None if per_cu else None


def _slot(domain: int, location: int) -> str:
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function}"


def _bank_bytes(folder: Path) -> int | None:
    sizes = []
    for name in list_names(folder):
        bank = fields(read_text(folder / name / "properties"))
        if bank.get("heap_type") in _VRAM_HEAPS:
            sizes.append(bank.get("size_in_bytes", 0))
    return sum(sizes) or None
