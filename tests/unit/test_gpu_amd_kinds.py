"""What an AMD GPU is, how much memory is its own, and why somebody may not use it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gpu_checks import REPOSITORY, codes
from gpu_trees import APU, GIB, MIB, Tree

from flexlab.gpus import amd
from flexlab.gpus.bus import read_bus
from flexlab.spec.machine import Gpu

UNKNOWN_ID = 0xFEED
UNKNOWN_GFX = 140000
MI300X = 0x74A1
DEVICE = "sys/class/drm/card0/device"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


def gpus(tree: Tree) -> list[Gpu]:
    return amd.find(tree.root, read_bus(tree.root)).gpus


def only(tree: Tree) -> Gpu:
    (gpu,) = gpus(tree)
    return gpu


def bare(tree: Tree, **files: Any) -> Tree:
    """A card that no table knows, with these files in its folder and nothing else."""
    slot = "0000:03:00.0"
    tree.pci(slot, 0x1002, UNKNOWN_ID, driver="amdgpu")
    folder = tree.drm(slot, 0x1002, UNKNOWN_ID, card=0, minor=128, driver="amdgpu")
    for name, value in files.items():
        tree.write(f"{folder}/{name}", value)
    return tree


# -- an APU or a card


@pytest.mark.parametrize(
    ("files", "is_apu"),
    [
        ({"hwmon/hwmon2/in1_label": "vddnb"}, True),
        ({"hwmon/hwmon2/in0_label": "vddgfx"}, None),
        ({"mem_info_vram_vendor": "samsung"}, False),
        ({"mem_info_vram_vendor": "unknown"}, False),
        ({"board_info": "type : oam"}, False),
        # A small carve-out beside a large GTT, or two of one size, prove nothing.
        ({"mem_info_vram_total": 4 * GIB, "mem_info_gtt_total": 32 * GIB}, None),
        ({"mem_info_vram_total": 8 * GIB, "mem_info_gtt_total": 8 * GIB}, None),
    ],
)
def test_signs_of_its_kind_tell_an_unknown_gpu(
    tree: Tree, files: dict[str, Any], is_apu: bool | None
) -> None:
    gpu = only(bare(tree, **files))
    assert gpu.is_apu is is_apu
    assert gpu.unified is (is_apu is True)
    assert gpu.usable


def test_what_the_table_says_goes_before_the_signs(tree: Tree) -> None:
    """Some boards fill a file in that only cards have."""
    tree.amd(**APU).write(f"{DEVICE}/board_info", "type : unknown")
    assert only(tree).is_apu is True


def test_cores_in_its_node_tell_an_apu(tree: Tree) -> None:
    tree.kfd("0000:00:01.0", UNKNOWN_ID, node=0, gfx=None, cpu_cores=4, bank=8 * GIB)
    gpu = only(tree)
    assert (gpu.is_apu, gpu.gtt_total_bytes, gpu.vram_total_bytes) == (True, 8 * GIB, None)


# -- memory


def test_an_apus_bank_is_what_it_may_map_and_not_its_memory(tree: Tree) -> None:
    """Phoenix and Strix Point: the KFD bank equals mem_info_gtt_total."""
    tree.amd(**(APU | {"vram": None, "gtt": None}))
    tree.kfd("0000:03:00.0", 0x164E, node=1, gfx=100306, bank=31 * GIB)
    gpu = only(tree)
    assert (gpu.gtt_total_bytes, gpu.vram_total_bytes) == (31 * GIB, None)


def test_what_an_apu_may_map_is_its_own_word_before_the_banks(tree: Tree) -> None:
    tree.amd(**APU).kfd("0000:03:00.0", 0x164E, node=1, gfx=100306, bank=8 * GIB)
    gpu = only(tree)
    assert (gpu.gtt_total_bytes, gpu.vram_total_bytes) == (31 * GIB, 512 * MIB)


@pytest.mark.parametrize("told", [None, 0, "", "N/A", b"\0" * 4096])
def test_a_cards_memory_is_the_banks_where_its_driver_says_nothing(tree: Tree, told: Any) -> None:
    """An SR-IOV guest, whose files are missing or 0 (ollama/ollama#6304)."""
    slot = "0000:63:00.0"
    tree.amd(slot, 0x740F, revision=2, gfx=90010, vram=None, vram_used=None, gtt=64 * GIB)
    tree.kfd(slot, 0x740F, node=1, gfx=90010, bank=64 * GIB - 16 * MIB)
    if told is not None:
        tree.write(f"{DEVICE}/mem_info_vram_total", told)
    gpu = only(tree)
    assert (gpu.is_apu, gpu.vram_total_bytes) == (False, 64 * GIB - 16 * MIB)
    assert codes(gpu) == set()


def test_a_cards_memory_is_never_what_it_may_map(tree: Tree) -> None:
    gpu = only(bare(tree, mem_info_gtt_total=32 * GIB, mem_info_vram_vendor="hynix"))
    assert (gpu.vram_total_bytes, gpu.gtt_total_bytes) == (None, 32 * GIB)
    assert "memory_unknown" in codes(gpu)


def test_memory_by_product_is_said_to_be_assumed(tree: Tree) -> None:
    tree.pci("0000:03:00.0", 0x1002, 0x744C, revision=0xC8, driver="amdgpu")
    gpu = only(tree)
    assert gpu.vram_total_bytes == 24 * GIB - 16 * MIB  # the firmware's part is not the user's
    assert "memory_assumed" in codes(gpu)


def test_memory_that_the_driver_says_is_not_assumed(tree: Tree) -> None:
    gpu = only(tree.amd(vram=20 * GIB))
    assert (gpu.vram_total_bytes, codes(gpu)) == (20 * GIB, set())


# -- partitions


def divided(tree: Tree, *functions: int, mode: str | None = "CPX") -> Tree:
    """An MI300X in eight parts, of which KFD shows those of these functions."""
    slot = "0000:05:00.0"
    tree.pci(slot, 0x1002, MI300X, kind=0x120000, driver="amdgpu")
    card = tree.drm(slot, 0x1002, MI300X, card=0, minor=128, kind=0x120000, driver="amdgpu")
    for folder in (f"sys/bus/pci/devices/{slot}", card):
        tree.write(f"{folder}/mem_info_vram_total", 192 * GIB)
        tree.write(f"{folder}/mem_info_vram_used", 100 * GIB)
        tree.write(f"{folder}/gpu_busy_percent", 50)
        if mode is not None:
            tree.write(f"{folder}/current_compute_partition", mode)
    for function in functions:
        tree.kfd(
            f"0000:05:00.{function}", MI300X, node=2 + function, gfx=90402, simds=152,
            minor=128 + function, bank=24 * GIB,
        )  # fmt: skip
    return tree


@pytest.mark.parametrize(("function", "mode"), [(0, "CPX"), (3, "CPX"), (3, None)])
def test_the_one_partition_that_a_container_was_given_is_not_the_card(
    tree: Tree, function: int, mode: str | None
) -> None:
    gpu = only(divided(tree, function, mode=mode))
    assert gpu.id == f"0000:05:00.{function}#{2 + function}"
    assert (gpu.vram_total_bytes, gpu.cu_count) == (24 * GIB, 38)
    assert gpu.render_minor == 128 + function
    (source,) = amd.sources(tree.root, [gpu])
    assert source.read().numbers == {"busy_percent": 50}


def test_an_undivided_card_is_the_card(tree: Tree) -> None:
    gpu = only(divided(tree, 0, mode="SPX"))
    assert (gpu.id, gpu.vram_total_bytes) == ("0000:05:00.0", 192 * GIB)


def test_partitions_whose_kernel_gives_them_one_function_are_told_by_their_node(
    tree: Tree,
) -> None:
    """Newer kernels write the partition into the location's upper bits."""
    divided(tree)
    for part in range(3):
        location = part << 28 | 0x0500
        folder = f"sys/class/kfd/kfd/topology/nodes/{2 + part}"
        lines = f"simd_count 152\nsimd_per_cu 4\ngfx_target_version 90402\nlocation_id {location}"
        tree.write(f"{folder}/properties", f"{lines}\ndrm_render_minor {128 + part}")
        tree.write(f"{folder}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {24 * GIB}")
    parts = gpus(tree)
    assert [gpu.id for gpu in parts] == [f"0000:05:00.0#{node}" for node in (2, 3, 4)]
    assert [gpu.render_minor for gpu in parts] == [128, 129, 130]
    assert {gpu.vram_total_bytes for gpu in parts} == {24 * GIB}


def test_a_partition_whose_bank_is_unreadable_has_not_the_cards_memory(tree: Tree) -> None:
    divided(tree, 0, 1)
    shutil.rmtree(tree.root / "sys/class/kfd/kfd/topology/nodes/2/mem_banks")
    first, second = gpus(tree)
    assert (first.vram_total_bytes, second.vram_total_bytes) == (None, 24 * GIB)
    assert codes(first) == {"memory_unknown"}


# -- who is there


def test_a_node_without_a_domain_is_the_card_of_its_slot(tree: Tree) -> None:
    """The MI25's kernel knew neither domains nor target versions."""
    slot = "0000:63:00.0"
    tree.pci(slot, 0x1002, 0x6860, driver="amdgpu")
    lines = f"simd_count 256\nsimd_per_cu 4\nvendor_id 4098\ndevice_id {0x6860}"
    tree.write(
        "sys/class/kfd/kfd/topology/nodes/1/properties",
        f"{lines}\nlocation_id {0x6300}\ndrm_render_minor 128",
    )
    gpu = only(tree)
    assert (gpu.id, gpu.arch, gpu.cu_count, gpu.kfd_node) == (slot, "gfx900", 64, 1)


def test_an_architecture_that_nobody_knows_is_said(tree: Tree) -> None:
    gpu = only(bare(tree, mem_info_vram_total=8 * GIB))
    assert (gpu.arch, gpu.usable) == (None, True)
    assert codes(gpu) == {"no_kfd", "arch_unknown"}


@pytest.mark.parametrize("driver", ["pci-stub", "nouveau"])
def test_a_card_of_another_driver_names_it(tree: Tree, driver: str) -> None:
    gpu = only(tree.pci("0000:01:00.0", 0x1002, 0x67DF, driver=driver))
    assert (gpu.usable, gpu.driver) == (False, driver)
    (problem,) = [one for one in gpu.problems if one.code == "no_driver"]
    assert driver in problem.hint


def test_a_card_whose_driver_cannot_be_told_is_usable(tree: Tree) -> None:
    tree.pci("0000:01:00.0", 0x1002, 0x67DF)
    (tree.root / "sys/bus/pci/devices/0000:01:00.0/uevent").unlink()
    gpu = only(tree)
    assert (gpu.driver, gpu.usable) == (None, True)


def test_nul_padding_is_no_content(tree: Tree) -> None:
    before = gpus(tree.amd().amd("0000:12:00.0", card=1, minor=129, node=2, **APU))
    for path in tree.root.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().ljust(4096, b"\0"))
    assert gpus(tree) == before


# -- who may use it


def found_by_nobody(root: Path) -> list[dict[str, Any]]:
    """GPUs as a user sees them who owns nothing: root may open everything, so it cannot try."""
    for folder in root.parents[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    words = drop if os.geteuid() == 0 else []
    if subprocess.run([*words, "test", "-r", __file__], check=False).returncode:
        pytest.skip("nobody but root may read the repository")
    code = (
        "import sys, pathlib, msgspec; from flexlab.gpus import amd, bus;"
        "root = pathlib.Path(sys.argv[1]);"
        "print(msgspec.json.encode(amd.find(root, bus.read_bus(root)).gpus).decode())"
    )
    run = subprocess.run(
        [*words, sys.executable, "-c", code, os.fspath(root)],
        capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)}, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    found: list[dict[str, Any]] = json.loads(run.stdout)
    return found


def owned(path: Path, gid: int, mode: int) -> None:
    if os.geteuid():
        pytest.skip("only root may give a file to another group")
    os.chown(path, 0, gid)
    path.chmod(mode)


def test_closed_nodes_name_the_groups_that_may_open_them(tree: Tree) -> None:
    tree.amd().dev("/dev/kfd", "/dev/dri/renderD128")
    owned(tree.root / "dev/kfd", 105, 0o660)
    owned(tree.root / "dev/dri/renderD128", 44, 0o660)
    (gpu,) = found_by_nobody(tree.root)
    assert gpu["usable"] is False
    kfd, render = gpu["problems"]
    assert (kfd["code"], render["code"]) == ("kfd_denied", "render_denied")
    # Numbers: this root's groups are not the running system's.
    assert "usermod -aG 105 " in kfd["hint"]
    assert "usermod -aG 44 " in render["hint"]
    assert [node["gid"] for node in gpu["nodes"]] == [105, 44]


@pytest.mark.parametrize(("gid", "mode"), [(0, 0o660), (105, 0o600), (105, 0o640)])
def test_nobody_is_sent_into_a_group_that_does_not_help(tree: Tree, gid: int, mode: int) -> None:
    tree.amd().dev("/dev/kfd", "/dev/dri/renderD128")
    owned(tree.root / "dev/kfd", gid, mode)
    (gpu,) = found_by_nobody(tree.root)
    (problem,) = gpu["problems"]
    assert problem["code"] == "kfd_denied"
    assert "usermod" not in problem["hint"]
    assert f"gid {gid}" in problem["hint"]
    assert "udev" in problem["hint"]


def test_a_folder_that_is_closed_closes_the_nodes_in_it(tree: Tree) -> None:
    tree.amd().dev("/dev/kfd", "/dev/dri/renderD128")
    owned(tree.root / "dev/dri", 0, 0o700)
    (gpu,) = found_by_nobody(tree.root)
    assert [problem["code"] for problem in gpu["problems"]] == ["render_denied"]
    assert gpu["nodes"][1].get("gid") is None


def test_closed_nodes_of_one_card_leave_the_other(tree: Tree) -> None:
    tree.amd(node=None).amd("0000:43:00.0", card=1, minor=129, node=None)
    tree.dev("/dev/dri/renderD128", "/dev/dri/renderD129")
    owned(tree.root / "dev/dri/renderD128", 44, 0o660)
    first, second = found_by_nobody(tree.root)
    assert first["usable"] is False
    assert second.get("usable", True) is True


def test_a_root_without_dev_says_nothing_of_access(tree: Tree) -> None:
    gpu = only(tree.amd())
    assert (gpu.usable, gpu.problems) == (True, ())
    assert [node.gid for node in gpu.nodes] == [None, None]
