"""What tests ask of detection's answers, and detection by somebody who may open nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flexlab.spec.machine import Gpu, Machine

REPOSITORY = Path(__file__).parents[1]


def only(machine: Machine) -> Gpu:
    """The GPU of a machine that has one."""
    (gpu,) = machine.gpus
    return gpu


def codes(gpu: Gpu) -> set[str]:
    """The codes of its problems."""
    return {problem.code for problem in gpu.problems}


def without(gpu: Gpu, *names: str) -> dict[str, Any]:
    """All fields but these."""
    return {name: getattr(gpu, name) for name in gpu.__struct_fields__ if name not in names}


def owners(path: Path, gpus: Sequence[Gpu]) -> set[str]:
    """Ids of the GPUs that the file (or folder) `path` of a machine says something about.

    All partitions of a card share its files, and all NVIDIA cards one recording.
    """
    words = path.parts
    addresses = {word.rpartition(".")[0] for word in words if ":" in word}
    node = words[words.index("nodes") + 1 :][:1] if "nodes" in words else ()
    addresses |= {_address(gpu) for gpu in gpus if (str(gpu.kfd_node),) == node}
    return {
        gpu.id
        for gpu in gpus
        if _address(gpu) in addresses
        or {gpu.card, f"renderD{gpu.render_minor}"} & set(words)
        or (gpu.vendor == "nvidia" and path.name.startswith("nvidia-smi"))
        or (gpu.pci_slot is None and "thermal" in words)  # the board's sensors are a Tegra's
    }


def _address(gpu: Gpu) -> str:
    """The PCI slot without its function."""
    return (gpu.pci_slot or gpu.id).rpartition(".")[0]


def detect_as_nobody(*roots: Path) -> list[Machine]:
    """What detection tells a user who owns nothing: root may open everything, so it cannot try.

    Skips where that user may not even read this repository.
    """
    folders = {folder for root in roots for folder in root.parents[:-2]}
    for folder in folders:
        folder.chmod(folder.stat().st_mode | 0o055)
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    words = drop if os.geteuid() == 0 else []
    if subprocess.run([*words, "test", "-r", __file__], check=False).returncode:
        pytest.skip("nobody but root may read the repository")
    code = (
        "import sys, pathlib, msgspec; from flexlab.gpus.inventory import detect;"
        "machines = [detect(pathlib.Path(root)) for root in sys.argv[1:]];"
        "print(msgspec.json.encode(machines).decode())"
    )
    run = subprocess.run(
        [*words, sys.executable, "-c", code, *map(str, roots)],
        capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return msgspec.json.decode(run.stdout, type=list[Machine])
