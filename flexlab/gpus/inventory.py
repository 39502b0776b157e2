"""Everything that was detected, at one moment.

Static facts come first (who is there, what it is, whether it may be used), then one reading of
each card under a deadline of its own: a card whose driver hangs costs its values, never the others.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from flexlab.core.text import clean_line
from flexlab.gpus import pools, presence, problems
from flexlab.gpus.bus import Bus, read_bus
from flexlab.gpus.cpu import CpuInfo, read_cpu
from flexlab.gpus.files import read_text
from flexlab.gpus.memory import sample_ram
from flexlab.gpus.patience import Outcome, Patience
from flexlab.gpus.source import Found, Source
from flexlab.gpus.tables import VENDOR_NAMES, card_for
from flexlab.spec.machine import Gpu, GpuReading, GpuSample, Machine, MigSlice, Problem, Vendor

FIND_DEADLINE_S = 8.0
"""One vendor's static facts. nvidia-smi alone, the slowest way, may take 5 s."""
READ_DEADLINE_S = 2.0
"""One card's readings; a healthy one answers in a few milliseconds."""

_PLATFORMS = {"x86_64": "linux/amd64", "aarch64": "linux/arm64", "arm64": "linux/arm64"}
_SLOT = re.compile(r"([0-9a-f]+):([0-9a-f]+):([0-9a-f]+)\.([0-9a-f]+)")


def detect(
    root: Path = Path("/"),
    *,
    ram_reserve_bytes: int | None = None,
    ram_budget_bytes: int | None = None,
    silence: str | None = None,
) -> Machine:
    """The machine below `root` (another one than `/` is a recorded or a test machine).

    Never raises; what cannot be read is None. The two sizes are the settings of the same names.
    With `silence` (why the drivers give no answer) no driver is asked: the cards are the bus's.
    """
    root = Path(root)
    info = CpuInfo(root)
    platform = _platform(root, info)
    ram = sample_ram(root, reserve_bytes=ram_reserve_bytes, budget_bytes=ram_budget_bytes)
    if silence is None:
        gpus, findings = find_gpus(root)
        readings = _read_once(sources(root, gpus))
    else:
        bus = read_bus(root)
        findings, readings = [], {}
        silent = [_silent(root, bus, vendor, silence) for vendor in VENDOR_NAMES]
        gpus = _numbered(list(chain.from_iterable(silent)))
    read = [with_reading(gpu, readings.get(gpu.id)) for gpu in gpus]
    pooled = pools.assign([_judged(gpu, platform) for gpu in read], ram)
    return Machine(
        hostname=_hostname(root),
        platform=platform,
        cpu=read_cpu(root, info),
        gpus=tuple(_with_best(pooled.gpus)),
        pools=(ram, *pooled.pools),
        findings=(*findings, *_unseen(root, pooled.gpus)),
        wsl=presence.is_wsl(root),
        board=_board(root),
    )


def find_gpus(root: Path) -> tuple[list[Gpu], list[Problem]]:
    """Every GPU below `root` with its static facts, numbered by PCI slot, and what is none."""
    bus = read_bus(root)
    searches = _searches(root, bus)
    found = Patience(FIND_DEADLINE_S).collect(searches) if searches else {}
    gpus: list[Gpu] = []
    findings: list[Problem] = []
    for vendor, outcome in found.items():
        if isinstance(outcome.value, Found):
            gpus += outcome.value.gpus
            findings += outcome.value.findings
        else:
            gpus += _silent(root, bus, vendor, _why_silent(outcome))
    return _numbered(gpus), findings


def _numbered(gpus: list[Gpu]) -> list[Gpu]:
    ordered = sorted(gpus, key=_position)
    return [replace(gpu, index=index) for index, gpu in enumerate(ordered)]


def sources(root: Path, gpus: Sequence[Gpu]) -> list[Source]:
    """What gives live readings of `gpus`."""
    # A vendor's readers are imported where there is such a card.
    found: list[Source] = []
    if any(gpu.vendor == "amd" for gpu in gpus):
        from flexlab.gpus import amd

        found += amd.sources(root, gpus)
    if any(gpu.vendor == "nvidia" for gpu in gpus):
        from flexlab.gpus import nvidia

        found += nvidia.sources(root, gpus)
    if any(gpu.vendor == "intel" for gpu in gpus):
        from flexlab.gpus import intel

        found += intel.sources(root, gpus)
    return found


def with_reading(gpu: Gpu, reading: GpuReading | None) -> Gpu:
    """`gpu` with the values of one reading; what the reading lacks stays as it was."""
    if reading is None:
        return gpu
    numbers = reading.numbers
    temps = {
        name[len("temp_") : -len("_c")]: value
        for name, value in numbers.items()
        if name.startswith("temp_") and name.endswith("_c")
    }
    return replace(
        gpu,
        vram_total_bytes=_whole(numbers, "vram_total_bytes", gpu.vram_total_bytes),
        vram_used_bytes=_whole(numbers, "vram_used_bytes", gpu.vram_used_bytes),
        vram_reserved_bytes=_whole(numbers, "vram_reserved_bytes", gpu.vram_reserved_bytes),
        gtt_total_bytes=_whole(numbers, "gtt_total_bytes", gpu.gtt_total_bytes),
        gtt_used_bytes=_whole(numbers, "gtt_used_bytes", gpu.gtt_used_bytes),
        busy_percent=numbers.get("busy_percent", gpu.busy_percent),
        power_w=numbers.get("power_w", gpu.power_w),
        temps_c=temps or gpu.temps_c,
        asleep=reading.asleep or gpu.asleep,
        mig=tuple(_slice_with(part, numbers) for part in gpu.mig),
    )


def with_sample(gpu: Gpu, part: GpuSample | None) -> Gpu:
    """`gpu` as a tick of the hardware helper tells it; where a card gave no answer, as it was."""
    if part is None:
        return gpu
    numbers = {name: aged.value for name, aged in part.values.items()}
    reading = GpuReading(numbers=numbers, asleep=part.asleep)
    return with_reading(gpu if part.stale else _unread(gpu, part.asleep), reading)


def _unread(gpu: Gpu, asleep: bool) -> Gpu:
    """Without the values that detection read: what a card no longer tells is unknown."""
    others = tuple(problem for problem in gpu.problems if problem.code != "asleep")
    return replace(
        gpu,
        vram_used_bytes=None,
        gtt_used_bytes=None,
        busy_percent=None,
        power_w=None,
        temps_c={},
        mig=tuple(replace(part, vram_used_bytes=None) for part in gpu.mig),
        asleep=asleep,
        problems=(*others, problems.asleep()) if asleep else others,
    )


def _slice_with(part: MigSlice, numbers: Mapping[str, float]) -> MigSlice:
    used = _whole(numbers, f"mig:{part.uuid}:vram_used_bytes", part.vram_used_bytes)
    return replace(part, vram_used_bytes=used)


def _whole(numbers: Mapping[str, float], name: str, otherwise: int | None) -> int | None:
    return int(numbers[name]) if name in numbers else otherwise


def vendors_here(root: Path, bus: Bus) -> list[Vendor]:
    """Of which there is a sign. Asks no driver."""
    here: list[Vendor] = []
    if _any(bus.of("amd")) or os.path.isdir(os.path.join(root, "sys/class/kfd/kfd")):
        here.append("amd")
    if _any(bus.of("intel")):
        here.append("intel")
    if _any(bus.of("nvidia")) or presence.nvidia_without_bus(root):
        here.append("nvidia")
    return here


def _searches(root: Path, bus: Bus) -> dict[Vendor, Callable[[], Found]]:
    """The vendors of which there is a sign, each with its readers."""
    searches: dict[Vendor, Callable[[], Found]] = {}
    here = vendors_here(root, bus)
    if "amd" in here:
        from flexlab.gpus import amd

        searches["amd"] = lambda: amd.find(root, bus)
    if "intel" in here:
        from flexlab.gpus import intel

        searches["intel"] = lambda: intel.find(root, bus)
    if "nvidia" in here:
        from flexlab.gpus import nvidia

        searches["nvidia"] = lambda: nvidia.find(root, bus)
    return searches


def _any(bus: Bus) -> bool:
    return bool(bus.pci or bus.drm)


def _why_silent(outcome: Outcome[Found]) -> str:
    if outcome.hung:
        return f"took longer than {FIND_DEADLINE_S:.0f} s"
    return f"failed ({outcome.error})"


def _silent(root: Path, bus: Bus, vendor: Vendor, why: str) -> list[Gpu]:
    """A vendor whose readers hang or fail: its cards are still on the bus, and are shown."""
    problem = problems.not_answering(f"asking the {VENDOR_NAMES[vendor]} driver {why}")
    here = bus.of(vendor)
    devices = {device.slot: device for device in (*here.pci, *(n.device for n in here.drm))}
    silent = []
    for slot, device in devices.items():
        if slot is None:
            continue
        card = card_for(root, vendor, device.pci_id, device.revision)
        if card.compute:
            silent.append(
                Gpu(
                    index=0,
                    id=slot,
                    pool="",
                    vendor=vendor,
                    arch=card.arch,
                    name=card.name or f"{VENDOR_NAMES[vendor]} GPU",
                    pci_id=device.pci_id,
                    pci_slot=slot,
                    driver=device.driver,
                    is_apu=card.is_apu,
                    usable=False,
                    problems=(problem,),
                )
            )
    return silent


def _read_once(found: Sequence[Source]) -> dict[str, GpuReading]:
    if not found:
        return {}
    outcomes = Patience(READ_DEADLINE_S).collect({source.gpu_id: source.read for source in found})
    return {
        gpu_id: outcome.value for gpu_id, outcome in outcomes.items() if outcome.value is not None
    }


def _judged(gpu: Gpu, platform: str | None) -> Gpu:
    """Adds what is odd about a card that can be used all the same."""
    odd = []
    if gpu.usable and platform == "linux/arm64":
        odd.append(
            Problem(
                code="other_platform",
                message="this is an arm64 machine: images built for amd64 only do not run here",
                hint="flexlab plan MODEL says which backends have an arm64 image",
            )
        )
    return replace(gpu, problems=(*gpu.problems, *odd)) if odd else gpu


def _with_best(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Marks the one that a model for a single GPU would get."""
    best = max((gpu for gpu in gpus if gpu.usable), key=_rank, default=None)
    return [replace(gpu, best=gpu is best) for gpu in gpus]


def _rank(gpu: Gpu) -> tuple[bool, bool, int, int]:
    """Its own memory before shared memory, whatever their sizes (an iGPU's GTT may be larger than
    a card's VRAM and is far slower); then a known arch, the most memory, the lowest index."""
    slices = [part.vram_total_bytes or 0 for part in gpu.mig]
    memory = max(slices) if slices else gpu.pool_total_bytes or 0
    return (not gpu.is_apu and not gpu.unified, gpu.arch is not None, memory, -gpu.index)


def _position(gpu: Gpu) -> tuple[Literal[0, 1], tuple[int, ...], int, str]:
    """By PCI slot, then KFD node; what has no slot comes last, by id."""
    match = _SLOT.fullmatch(gpu.pci_slot or "")
    slot = tuple(int(part, 16) for part in match.groups()) if match else ()
    return (0 if match else 1, slot, gpu.kfd_node or 0, gpu.id)


def _unseen(root: Path, gpus: Sequence[Gpu]) -> list[Problem]:
    """Under WSL2 /dev/dxg is there for any vendor's GPU; only NVIDIA's answers without more."""
    if gpus or not presence.is_wsl(root) or not os.path.exists(root / "dev/dxg"):
        return []
    problem = Problem(
        code="wsl_gpu_unknown",
        message="WSL2 shows a GPU (/dev/dxg), but nothing here says which one",
        hint="NVIDIA: install the Windows driver, then `wsl --shutdown`; AMD under WSL2 has no KFD",
    )
    return [problem]


def _hostname(root: Path) -> str:
    if root == Path("/"):
        return socket.gethostname()
    return clean_line(read_text(root / "etc/hostname") or "")


def _platform(root: Path, info: CpuInfo) -> str | None:
    if root != Path("/"):
        return info.platform or _platform_of_board(root)
    uname = os.uname()
    return _PLATFORMS.get(uname.machine) if uname.sysname == "Linux" else None


def _platform_of_board(root: Path) -> str | None:
    """Tegra is arm64, also where nobody recorded the processor."""
    compatible = read_text(root / "proc/device-tree/compatible") or ""
    return "linux/arm64" if "nvidia,tegra" in compatible else None


def _board(root: Path) -> str | None:
    """The device tree's name (Jetson, SBCs), else the firmware's (DGX Spark, desktops)."""
    name = read_text(root / "proc/device-tree/model")
    if not name:
        firmware = root / "sys/devices/virtual/dmi/id"
        parts = (read_text(firmware / part) for part in ("sys_vendor", "product_name"))
        name = " ".join(part.strip() for part in parts if part)
    return clean_line(name) or None
