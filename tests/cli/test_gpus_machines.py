"""Whole machines below --sysroot: what `gpus` and `doctor` make of their files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import ROOT, Flexlab, command, environment

RECORDED = ROOT.parent / "shared" / "fixtures" / "gpu"
SLOT = "0000:03:00.0"
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
KFD_NODE = """simd_count 192
simd_per_cu 2
gfx_target_version 110000
vendor_id 4098
device_id 29772
location_id 768
domain 0
drm_render_minor 128
"""


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def write_radeon(root: Path) -> None:
    """An RX 7900 XTX with its driver, as sysfs shows it."""
    ids = {"vendor": "0x1002", "device": "0x744c", "class": "0x030000", "revision": "0xc8"}
    ids["uevent"] = f"DRIVER=amdgpu\nPCI_ID=1002:744C\nPCI_SLOT_NAME={SLOT}\n"
    for folder in (
        f"sys/bus/pci/devices/{SLOT}",
        "sys/class/drm/card1/device",
        "sys/class/drm/renderD128/device",
    ):
        write(root, {f"{folder}/{name}": text for name, text in ids.items()})
    nodes = "sys/class/kfd/kfd/topology/nodes"
    write(
        root,
        {
            "sys/class/drm/card1/device/mem_info_vram_total": "25753026560",
            "sys/class/drm/card1/device/mem_info_vram_used": "1610612736",
            f"{nodes}/0/properties": "cpu_cores_count 16\nsimd_count 0\n",
            f"{nodes}/0/gpu_id": "0",
            f"{nodes}/1/properties": KFD_NODE,
            f"{nodes}/1/gpu_id": "4660",
        },
    )


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A root that every user can look into; pytest's own folders are for their owner alone."""
    folder = Path(tempfile.mkdtemp(prefix="flexlab-root-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_a_radeon_is_shown_from_its_files_alone(flexlab_here: Flexlab, tmp_path: Path) -> None:
    write_radeon(tmp_path)
    shown = flexlab_here("gpus", "--sysroot", str(tmp_path), COLUMNS="120")
    row = shown.stdout.splitlines()[1]
    assert row.startswith("0*")
    for words in ("7900 XTX", "gfx1100", "1.5/24.0G", "best"):
        assert words in row
    detail = flexlab_here("gpus", SLOT, "--sysroot", str(tmp_path)).stdout
    assert "gfx1100, 96 compute units" in detail


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_node_that_may_not_be_opened_names_its_group(open_root: Path) -> None:
    write_radeon(open_root)
    write(open_root, {"dev/kfd": "", "dev/dri/renderD128": ""})
    for node in ("dev/kfd", "dev/dri/renderD128"):
        os.chown(open_root / node, 0, 44105)
        (open_root / node).chmod(0o660)
    told = {}
    for verb in ("gpus", "doctor"):
        words = command(verb, "--sysroot", str(open_root), "--json")
        done = subprocess.run(
            [*NOBODY, *words], capture_output=True, text=True, env=environment(), cwd="/"
        )
        assert done.returncode == 0, done.stderr
        told[verb] = json.loads(done.stdout)
    [gpu] = told["gpus"]["gpus"]
    assert gpu["usable"] is False
    assert gpu["problems"][0]["code"] == "kfd_denied"
    assert "44105" in gpu["problems"][0]["hint"]
    mends = [f["mend"] for f in told["doctor"]["findings"] if f["level"] == "warn"]
    assert gpu["problems"][0]["hint"] in mends


def test_a_recorded_nvidia_smi_is_a_machine(flexlab_here: Flexlab, tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "nvidia-smi.csv": "index, name, uuid, pci.bus_id, memory.total [MiB], "
            "memory.used [MiB], utilization.gpu [%], temperature.gpu, power.draw [W], "
            "compute_cap, driver_version\n"
            "0, NVIDIA GeForce GTX 980 Ti, GPU-1, 00000000:01:00.0, 6144 MiB, 100 MiB, 3 %, "
            "40, 20.00 W, 5.2, 550.90\n"
        },
    )
    [gpu] = json.loads(flexlab_here("gpus", "--sysroot", str(tmp_path), "--json").stdout)["gpus"]
    assert (gpu["arch"], gpu["vram_total_bytes"]) == ("sm_52", 6144 * 1024**2)
    said = flexlab_here("doctor", "--sysroot", str(tmp_path)).stdout
    assert "550.90 is too old for sm_52: CUDA 12 needs 570 or newer" in said


def recorded() -> list[Path]:
    return sorted(file.parent for file in RECORDED.glob("*/expected.json"))


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"{RECORDED} is not there")
def test_every_recorded_machine_is_shown_in_any_width(flexlab_here: Flexlab) -> None:
    for machine in recorded():
        for columns in ("40", "80"):
            shown = flexlab_here("gpus", "--sysroot", str(machine), COLUMNS=columns)
            assert shown.returncode == 0, (machine, shown.stderr)
            table = shown.stdout.split("\n\n")[0].splitlines()
            assert max(map(len, table)) <= int(columns), machine
            assert table[-1].startswith("cpu"), machine


@pytest.mark.skipif(not RECORDED.is_dir(), reason=f"{RECORDED} is not there")
def test_doctor_accounts_for_every_display_device_of_every_recorded_machine(
    flexlab_here: Flexlab,
) -> None:
    for machine in recorded():
        shown = flexlab_here("doctor", "--sysroot", str(machine), "--json")
        told = json.loads(shown.stdout)["findings"]
        assert not [f for f in told if "not recognised as a GPU" in f["text"]], machine
        want = json.loads((machine / "expected.json").read_text())["gpus"]
        assert any(f["subject"] == "gpu" for f in told) or not want, machine
