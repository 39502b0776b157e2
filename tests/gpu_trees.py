"""Machines as file trees: what kernels and drivers show of hardware that is not here.

Every value is public knowledge about such a card, written down for a test; none is a recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30
MIB = 2**20

FLAGS = "fpu sse2 sse4_2 avx avx2 fma f16c bmi2"


class Tree:
    """Writes what is asked for below a folder; each call adds one device."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def write(self, path: str, content: object) -> Path:
        """One file, with its folders."""
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            target.write_bytes(content)
        else:
            target.write_text(f"{content}\n")
        return target

    # -- the host

    def cpu(self, *, arm: bool = False, threads: int = 8) -> Tree:
        """An x86-64 (or arm64) CPU."""
        if arm:
            lines = "processor\t: {}\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\n"
        else:
            lines = "processor\t: {}\nvendor_id\t: AuthenticAMD\nmodel name\t: Test\n"
            lines += f"flags\t\t: {FLAGS}\n"
        self.write("proc/cpuinfo", "\n".join(lines.format(n) for n in range(threads)))
        return self

    def ram(self, total: int = 64 * GIB, available: int = 60 * GIB) -> Tree:
        """/proc/meminfo, in bytes."""
        lines = f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB"
        self.write("proc/meminfo", lines)
        return self

    def dev(self, *paths: str, mode: int = 0o666) -> Tree:
        """Plain files in /dev: enough for who may open them."""
        for path in paths:
            self.write(path.lstrip("/"), "").chmod(mode)
        return self

    # -- devices

    def pci(
        self,
        slot: str,
        vendor: int,
        device: int,
        *,
        revision: int = 0,
        kind: int = 0x030000,
        driver: str | None = None,
    ) -> Tree:
        """A function on the PCI bus."""
        self._function(f"sys/bus/pci/devices/{slot}", slot, vendor, device, revision, kind, driver)
        return self

    def drm(
        self,
        slot: str,
        vendor: int,
        device: int,
        *,
        card: int,
        minor: int | None,
        revision: int = 0,
        kind: int = 0x030000,
        driver: str,
    ) -> str:
        """Card and render node of a function; the path of the card's device folder."""
        nodes = [f"card{card}"] + ([] if minor is None else [f"renderD{minor}"])
        for node in nodes:
            folder = f"sys/class/drm/{node}/device"
            self._function(folder, slot, vendor, device, revision, kind, driver)
        return f"sys/class/drm/card{card}/device"

    def _function(
        self,
        folder: str,
        slot: str,
        vendor: int,
        device: int,
        revision: int,
        kind: int,
        driver: str | None,
    ) -> None:
        lines = [f"DRIVER={driver}"] if driver else []
        lines += [f"PCI_ID={vendor:04X}:{device:04X}", f"PCI_SLOT_NAME={slot}"]
        values = {
            "vendor": f"0x{vendor:04x}",
            "device": f"0x{device:04x}",
            "revision": f"0x{revision:02x}",
            "class": f"0x{kind:06x}",
            "uevent": "\n".join(lines),
        }
        for name, value in values.items():
            self.write(f"{folder}/{name}", value)

    def amd(
        self,
        slot: str = "0000:03:00.0",
        device: int = 0x744C,
        *,
        revision: int = 0xC8,
        card: int = 0,
        minor: int = 128,
        node: int | None = 1,
        gfx: int | None = 110000,
        simds: int = 192,
        vram: int | None = 24560 * MIB,
        vram_used: int | None = 1 * GIB,
        gtt: int | None = 16 * GIB,
        gtt_used: int | None = 100 * MIB,
        apu: bool = False,
        unique_id: int = 0,
        busy: int | None = 3,
        watts: int | None = 68,
        kind: int = 0x030000,
        driver: str = "amdgpu",
    ) -> Tree:
        """A card (or an APU's GPU) with PCI, DRM and, with `node`, KFD."""
        self.pci(slot, 0x1002, device, revision=revision, kind=kind, driver=driver)
        folder = self.drm(
            slot, 0x1002, device, card=card, minor=minor, revision=revision, kind=kind,
            driver=driver,
        )  # fmt: skip
        values: dict[str, object | None] = {
            "mem_info_vram_total": vram,
            "mem_info_vram_used": vram_used,
            "mem_info_gtt_total": gtt,
            "mem_info_gtt_used": gtt_used,
            "gpu_busy_percent": busy,
            "mem_info_vram_vendor": None if apu else "hynix",
            "power/runtime_status": "active",
        }
        sensors: dict[str, object | None] = {
            "name": "amdgpu",
            "temp1_input": 53000,
            "temp1_label": "edge",
            "in1_label": "vddnb" if apu else None,
            "power1_average": None if watts is None else watts * 1_000_000,
        }
        if not apu:
            sensors |= {"temp2_input": 61000, "temp2_label": "junction", "fan1_input": 0}
        self._all(folder, values)
        self._all(f"{folder}/hwmon/hwmon{card}", sensors)
        if node is not None:
            bank = gtt if apu else vram
            self.kfd(
                slot, device, node=node, gfx=gfx, simds=simds, minor=minor, bank=bank,
                unique_id=unique_id,
            )  # fmt: skip
        return self

    def _all(self, folder: str, values: Mapping[str, object | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self.write(f"{folder}/{name}", value)

    def kfd_cpu(self, node: int = 0) -> Tree:
        """A node without a GPU."""
        folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
        self.write(f"{folder}/properties", "cpu_cores_count 8\nsimd_count 0\ndrm_render_minor 0")
        self.write(f"{folder}/gpu_id", 0)
        return self

    def kfd(
        self,
        slot: str,
        device: int,
        *,
        node: int,
        gfx: int | None,
        simds: int = 192,
        minor: int | None = None,
        bank: int | None = None,
        unique_id: int = 0,
        cpu_cores: int = 0,
    ) -> Tree:
        """A GPU node of the KFD topology; old APUs have `cpu_cores` in the same node."""
        domain, bus, rest = slot.split(":")
        place, function = rest.split(".")
        location = int(bus, 16) << 8 | int(place, 16) << 3 | int(function)
        lines = [
            f"cpu_cores_count {cpu_cores}",
            f"simd_count {simds}",
            f"simd_per_cu {4 if gfx is None or gfx < 100000 else 2}",
            "vendor_id 4098",
            f"device_id {device}",
            f"location_id {location}",
            f"domain {int(domain, 16)}",
            f"unique_id {unique_id}",
        ]
        lines += [] if gfx is None else [f"gfx_target_version {gfx}"]
        lines += [] if minor is None else [f"drm_render_minor {minor}"]
        folder = f"sys/class/kfd/kfd/topology/nodes/{node}"
        self.write(f"{folder}/properties", "\n".join(lines))
        self.write(f"{folder}/gpu_id", 1000 + node)
        if bank is not None:
            self.write(
                f"{folder}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {bank}\nwidth 384"
            )
        return self

    def amd_partitioned(
        self, slot: str, *, parts: int, first_node: int, first_minor: int, unique_id: int
    ) -> Tree:
        """An MI300X in CPX mode: one PCI card, `parts` KFD nodes with render nodes of their own."""
        self.pci(slot, 0x1002, 0x74A1, kind=0x120000, driver="amdgpu")
        address = slot.rpartition(".")[0]
        for part in range(parts):
            self.kfd(
                f"{address}.{part}", 0x74A1, node=first_node + part, gfx=90402, simds=152,
                minor=first_minor + part, bank=24 * GIB, unique_id=unique_id,
            )  # fmt: skip
        return self

    def intel(
        self,
        slot: str = "0000:0b:00.0",
        device: int = 0x56A5,
        *,
        card: int = 1,
        minor: int = 128,
        driver: str = "xe",
    ) -> Tree:
        """An Intel GPU: an Arc A380, or what `device` says."""
        self.pci(slot, 0x8086, device, driver=driver)
        folder = self.drm(slot, 0x8086, device, card=card, minor=minor, driver=driver)
        self._all(
            f"{folder}/hwmon/hwmon{card}",
            {"name": driver, "temp2_input": 54000, "temp2_label": "pkg", "energy2_input": 1000},
        )
        return self

    def nvidia_csv(self, *rows: Mapping[str, str]) -> Tree:
        """A recorded `nvidia-smi --query-gpu … --format=csv`; each row has the same columns."""
        columns = list(rows[0])
        lines = [", ".join(columns), *(", ".join(row[name] for name in columns) for row in rows)]
        self.write("nvidia-smi.csv", "\n".join(lines))
        return self

    def nvidia_smi_xml(self, *cards: str) -> Tree:
        """A recorded `nvidia-smi -q -x`; see nvidia_xml_card."""
        head = "<driver_version>570.86.10</driver_version><cuda_version>12.8</cuda_version>"
        log = f"<nvidia_smi_log>{head}{''.join(cards)}</nvidia_smi_log>"
        self.write("nvidia-smi.xml", f'<?xml version="1.0" ?>\n{log}')
        return self

    def nvidia_proc(self, slot: str, *, name: str = "NVIDIA GeForce RTX 3090") -> Tree:
        """What NVIDIA's kernel module shows of a card, also in containers without /sys."""
        version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.10  Release Build"
        self.write("proc/driver/nvidia/version", version)
        told = f"Model: \t\t {name}\nDevice Minor: \t 0\nGPU Excluded:\t No"
        self.write(f"proc/driver/nvidia/gpus/{slot}/information", told)
        return self

    def wsl(self) -> Tree:
        """Windows' kernel and its one device for GPUs of any vendor."""
        self.write("proc/version", "Linux version 6.6.87.2-microsoft-standard-WSL2")
        return self.dev("/dev/dxg")

    def tegra(self, chip: str = "tegra234", board: str = "NVIDIA Jetson AGX Orin") -> Tree:
        """A Jetson's device tree, whose strings end with NUL."""
        self.write("proc/device-tree/model", f"{board}\0".encode())
        self.write("proc/device-tree/compatible", f"nvidia,p3737\0nvidia,{chip}\0".encode())
        return self


def nvidia_row(slot: str = "00000000:01:00.0", **changes: str) -> dict[str, str]:
    """One row for an RTX 3090; `changes` replace values by column, `_` standing for `.`."""
    row = {
        "index": "0",
        "name": "NVIDIA GeForce RTX 3090",
        "uuid": f"GPU-{slot.replace(':', '').replace('.', '')}",
        "memory.total [MiB]": "24576",
        "memory.used [MiB]": "1508",
        "utilization.gpu [%]": "3",
        "power.draw [W]": "31.20",
        "temperature.gpu": "41",
        "compute_cap": "8.6",
        "driver_version": "570.86.10",
        "pci.bus_id": slot,
    }
    words = {"memory_total": "memory.total [MiB]", "memory_used": "memory.used [MiB]"}
    return row | {words.get(name, name): value for name, value in changes.items()}


def nvidia_xml_card(
    slot: str = "00000000:01:00.0",
    *,
    name: str = "NVIDIA A100-SXM4-80GB",
    device: int = 0x20B2,
    memory: tuple[str, str] = ("81920 MiB", "30000 MiB"),
    mig: Sequence[tuple[str, str]] | None = None,
) -> str:
    """One `<gpu>`. `memory` is total and used; with `mig` (of each slice) it is in MIG mode."""
    slices = "".join(
        f"<mig_device><index>{at}</index><gpu_instance_id>{at + 1}</gpu_instance_id>"
        f"<compute_instance_id>0</compute_instance_id>{_xml_memory(part)}</mig_device>"
        for at, part in enumerate(mig or ())
    )
    mode = "Disabled" if mig is None else "Enabled"
    # The slices come before the card's own memory, as in the program's output.
    return (
        f'<gpu id="{slot}"><product_name>{name}</product_name>'
        f"<mig_mode><current_mig>{mode}</current_mig></mig_mode>"
        f"<mig_devices>{slices}</mig_devices><uuid>GPU-{slot.replace(':', '-')}</uuid>"
        f"<pci><pci_bus_id>{slot}</pci_bus_id><pci_device_id>{device:04X}10DE</pci_device_id></pci>"
        f"{_xml_memory(memory)}</gpu>"
    )


def _xml_memory(memory: tuple[str, str]) -> str:
    total, used = memory
    return f"<fb_memory_usage><total>{total}</total><used>{used}</used></fb_memory_usage>"


APU: dict[str, Any] = {
    "device": 0x164E,
    "revision": 0xC1,
    "gfx": 100306,
    "simds": 4,
    "vram": 512 * MIB,
    "vram_used": 20 * MIB,
    "gtt": 31 * GIB,
    "apu": True,
    "watts": None,
}
"""A Raphael iGPU: its GTT limit is larger than the VRAM of most cards."""
