"""What `flexlab doctor` looks at where a machine has GPUs, or should have.

Each check speaks only where it concerns the machine, and asks nothing outside `root`.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from flexlab.cli.finding import Finding, Level
from flexlab.cli.gpu_rows import name_gpus, problems_of
from flexlab.core.text import counted
from flexlab.core.units import show_bytes
from flexlab.gpus.access import look
from flexlab.gpus.bus import read_bus
from flexlab.gpus.drivers import branch, floors_of
from flexlab.gpus.files import list_names, read_text
from flexlab.gpus.presence import is_tegra
from flexlab.spec.machine import RAM_POOL, Machine

NOTES = ("asleep", "other_platform")
"""Problems of a usable card that ask for no act."""
TOOLKIT = ("nvidia-ctk", "nvidia-container-runtime", "nvidia-container-runtime-hook")
TOOLKIT_FOLDERS = ("usr/bin", "usr/local/bin", "usr/local/nvidia/toolkit", "bin")
CDI_FOLDERS = ("etc/cdi", "var/run/cdi", "run/cdi")
WSL_LIBRARIES = "usr/lib/wsl/lib"


def examine_gpus(root: Path, machine: Machine) -> Iterator[Finding]:
    """All findings about GPUs, the cards themselves first."""
    yield from _usable(machine)
    yield from _problems(machine)
    yield from _unrecognised(root, machine)
    yield from _nodes(root, machine)
    yield from _nvidia_driver(root, machine)
    yield from _nvidia_containers(root, machine)
    yield from _wsl(root, machine)
    yield from _shared_memory(machine)


def _usable(machine: Machine) -> Iterator[Finding]:
    usable = [gpu for gpu in machine.gpus if gpu.usable]
    if usable:
        kinds = Counter(f"{gpu.name} ({gpu.arch or 'arch unknown'})" for gpu in usable)
        names = (name if number == 1 else f"{number} x {name}" for name, number in kinds.items())
        text = f"{counted(len(usable), 'GPU')} can be used: {', '.join(names)}"
        yield Finding(subject="gpu", level="ok", text=text)
    elif not machine.gpus and not machine.findings:
        text = "none of AMD, NVIDIA or Intel on the bus"
        yield Finding(subject="gpu", level="ok", text=text)


def _problems(machine: Machine) -> Iterator[Finding]:
    """What keeps a card from being used, or is to be known of it; and what is no GPU of ours."""
    for having, problem in problems_of(machine.gpus):
        note = problem.code in NOTES and all(gpu.usable for gpu in having)
        yield Finding(
            subject="gpu",
            level="ok" if note else "warn",
            text=f"{name_gpus(having)}: {problem.message}",
            mend=None if note else problem.hint,
        )
    for found in machine.findings:
        yield Finding(subject="gpu", level="warn", text=found.message, mend=found.hint)


def _unrecognised(root: Path, machine: Machine) -> Iterator[Finding]:
    """Display devices of which nothing else is said: detection must account for every one."""
    known = {gpu.pci_slot for gpu in machine.gpus}
    said = " ".join(found.message for found in machine.findings)
    for device in read_bus(root).pci:
        if device.slot not in known and str(device.slot) not in said:
            yield Finding(
                subject="gpu",
                level="warn",
                text=f"PCI {device.slot} ({device.pci_id}) is a display device that was not "
                "recognised as a GPU",
                mend=f"lspci -nnk -s {device.slot} shows what it is and which driver has it",
            )


def _nodes(root: Path, machine: Machine) -> Iterator[Finding]:
    """The files in /dev; those that cannot be opened are a problem of their card already."""
    paths = dict.fromkeys(node.path for gpu in machine.gpus for node in gpu.nodes)
    seen = [look(root, path) for path in paths]
    open_ = [access.node.path for access in seen if access.allowed]
    if open_:
        text = f"{', '.join(open_)} can be opened"
        yield Finding(subject="device nodes", level="ok", text=text)
    denied = {access.node.gid for access in seen if access.allowed is False}
    if root == Path("/"):
        yield from _stale_login({gid for gid in denied if gid is not None})


def _stale_login(gids: set[int]) -> Iterator[Finding]:
    """Groups that this user has been given and this login does not know of yet."""
    # Only where access is denied: with a directory service these are questions to the network.
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.getuid())
        given = set(os.getgrouplist(user.pw_name, user.pw_gid))
        missing = sorted(gids & given - {*os.getgroups(), os.getegid()})
        names = ", ".join(grp.getgrgid(gid).gr_name for gid in missing)
    except (KeyError, OSError):
        return
    if missing:
        yield Finding(
            subject="groups",
            level="warn",
            text=f"{user.pw_name} is in {names}, but this login began before that",
            mend="log out and in again, then flexlab down --daemon, so that its next start counts",
        )


def _nvidia_driver(root: Path, machine: Machine) -> Iterator[Finding]:
    """Which images the driver is new enough for; Jetsons count their drivers differently."""
    if is_tegra(root):
        return
    pairs = [
        (gpu.driver_version, gpu.arch)
        for gpu in machine.gpus
        if gpu.vendor == "nvidia" and gpu.driver_version and gpu.arch
    ]
    for version, arch in dict.fromkeys(pairs):
        yield from _judged_driver(str(version), str(arch))


def _judged_driver(version: str, arch: str) -> Iterator[Finding]:
    have, floors = branch(version), floors_of(arch)
    if have is None:
        return
    runs = " and ".join(str(floor.cuda) for floor in floors if have >= floor.driver)
    newer = ", ".join(
        f"CUDA {each.cuda} needs {each.driver}" for each in floors if each.driver > have
    )
    level: Level = "ok" if runs else "warn"
    mend = None
    if runs:
        text = f"{version} runs images of CUDA {runs} on {arch}"
        text += f"; {newer} or newer" if newer else ""
    elif newer:
        text = f"{version} is too old for {arch}: {newer} or newer"
        mend = f"install NVIDIA's driver {floors[0].driver} or newer, then reboot"
    else:
        text = f"images of CUDA 12 and 13 hold nothing for {arch}"
        mend = "engines that use Vulkan may still run on it"
    yield Finding(subject="nvidia driver", level=level, text=text, mend=mend)


def _nvidia_containers(root: Path, machine: Machine) -> Iterator[Finding]:
    """NVIDIA's container toolkit, and specifications of the Container Device Interface (CDI)."""
    folders = [folder for folder in (*TOOLKIT_FOLDERS, *CDI_FOLDERS) if (root / folder).is_dir()]
    if not folders or not any(gpu.vendor == "nvidia" and gpu.usable for gpu in machine.gpus):
        return
    tool, specs = _toolkit(root), _cdi_specs(root)
    parts = [f"toolkit {tool}"] if tool else []
    parts += [f"CDI {', '.join(specs)}"] if specs else []
    yield Finding(
        subject="nvidia containers",
        level="ok" if parts else "warn",
        text="; ".join(parts) or "no NVIDIA container toolkit and no CDI specification was found",
        mend=None
        if parts
        else "install the package nvidia-container-toolkit of NVIDIA's repository; models that "
        "need no container are not concerned",
    )


def _toolkit(root: Path) -> str | None:
    """The first of its programs, as a path below `root`."""
    if root == Path("/"):
        return next(filter(None, map(shutil.which, TOOLKIT)), None)
    found = (Path("/", folder, name) for folder in TOOLKIT_FOLDERS for name in TOOLKIT)
    return next((str(path) for path in found if (root / path.relative_to("/")).is_file()), None)


def _cdi_specs(root: Path) -> list[str]:
    """Files that describe NVIDIA's GPUs to a container engine; /run and /var/run are often one."""
    specs: dict[str, str] = {}
    for folder in CDI_FOLDERS:
        for name in list_names(root / folder):
            file = root / folder / name
            if name.endswith((".yaml", ".yml", ".json")) and _is_nvidia_spec(file):
                specs.setdefault(os.path.realpath(file), f"/{folder}/{name}")
    return list(specs.values())


def _is_nvidia_spec(file: Path) -> bool:
    return "nvidia.com/gpu" in (read_text(file) or "")


def _wsl(root: Path, machine: Machine) -> Iterator[Finding]:
    if not machine.wsl:
        return
    if (root / "dev").is_dir() and not os.path.exists(root / "dev/dxg"):
        yield Finding(
            subject="wsl",
            level="warn",
            text="WSL2 without /dev/dxg: Windows passes no GPU on",
            mend="install the Windows driver of the GPU, then in PowerShell: wsl --update && "
            "wsl --shutdown",
        )
        return
    libraries = [name for name in list_names(root / WSL_LIBRARIES) if "libnvidia-ml" in name]
    nvidia = f", NVIDIA's libraries in /{WSL_LIBRARIES}" if libraries else ""
    text = f"WSL2{nvidia}; sensors and other users' processes may not be readable"
    yield Finding(subject="wsl", level="ok", text=text)


def _shared_memory(machine: Machine) -> Iterator[Finding]:
    """How much of the RAM an APU may map is a kernel parameter: half of it, if nothing is set."""
    for gpu in machine.gpus:
        if gpu.vendor == "amd" and gpu.pool == RAM_POOL and gpu.gtt_total_bytes is not None:
            text = (
                f"{name_gpus([gpu])} may map {show_bytes(gpu.gtt_total_bytes)} of the RAM "
                "(GTT; the kernel parameter ttm.pages_limit changes it)"
            )
            yield Finding(subject="shared memory", level="ok", text=text)
