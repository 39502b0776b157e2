"""Whole machines with NVIDIA cards, also beside others, each built from public facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_checks import codes, only
from gpu_trees import APU, GIB, MIB, Tree, nvidia_row, nvidia_xml_card

from flexlab.gpus.inventory import detect
from flexlab.spec.machine import RAM_POOL


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine").cpu().ram()


def test_an_amd_igpu_without_memory_files_does_not_hide_an_nvidia_card(tree: Tree) -> None:
    tree.amd("0000:12:00.0", card=0, **(APU | {"vram": None, "vram_used": None, "gtt": None}))
    tree.nvidia_csv(nvidia_row())
    nvidia, amd = detect(tree.root).gpus
    assert (nvidia.vendor, nvidia.best) == ("nvidia", True)
    assert amd.vendor == "amd"
    assert amd.pool_total_bytes is None


def test_an_nvidia_card_by_its_own_words(tree: Tree) -> None:
    gpu = only(detect(tree.nvidia_csv(nvidia_row()).root))
    assert (gpu.id, gpu.arch, gpu.driver_version) == ("0000:01:00.0", "sm_86", "570.86.10")
    assert (gpu.vram_total_bytes, gpu.vram_used_bytes) == (24 * GIB, 1508 * MIB)
    assert (gpu.busy_percent, gpu.power_w) == (3, 31.2)


@pytest.mark.parametrize("nothing", ["[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", ""])
def test_what_nvidia_smi_cannot_say_is_unknown(tree: Tree, nothing: str) -> None:
    row = nvidia_row(memory_total=nothing, memory_used=nothing)
    gpu = only(detect(tree.nvidia_csv(row).root))
    assert gpu.vram_used_bytes is None
    assert gpu.vram_total_bytes != 0
    assert gpu.unified is False  # a card that is lost has not become unified


def test_gb10_and_jetson_share_the_hosts_memory(tree: Tree) -> None:
    row = nvidia_row(name="NVIDIA GB10", memory_total="[N/A]", memory_used="[N/A]")
    machine = detect(tree.nvidia_csv(row | {"compute_cap": "12.1"}).root)
    gpu = only(machine)
    assert (gpu.unified, gpu.pool) == (True, RAM_POOL)
    ram = machine.pools[0]
    assert ram.total_bytes
    assert gpu.pool_total_bytes == ram.total_bytes - ram.reserve_bytes


def test_a_card_in_mig_mode_is_one_row_whose_pools_are_its_slices(tree: Tree) -> None:
    slices = [("19968 MiB", "1024 MiB"), ("9856 MiB", "10 MiB")]
    machine = detect(tree.nvidia_smi_xml(nvidia_xml_card(mig=slices)).root)
    gpu = only(machine)
    assert gpu.usable
    assert (gpu.vram_total_bytes, gpu.vram_used_bytes) == (81920 * MIB, 30000 * MIB)
    assert [(part.gi, part.vram_total_bytes) for part in gpu.mig] == [
        (1, 19968 * MIB), (2, 9856 * MIB),
    ]  # fmt: skip
    assert {pool.id: pool.total_bytes for pool in machine.pools[1:]} == {
        part.uuid: part.vram_total_bytes for part in gpu.mig
    }


def test_a_card_in_mig_mode_without_slices_is_not_usable_and_not_best(tree: Tree) -> None:
    small = nvidia_xml_card("00000000:02:00.0", memory=("8192 MiB", "1 MiB"))
    empty, other = detect(tree.nvidia_smi_xml(nvidia_xml_card(mig=()), small).root).gpus
    assert (empty.usable, codes(empty)) == (False, {"mig_empty"})
    assert other.best


def test_a_large_card_cut_into_small_slices_is_not_the_best(tree: Tree) -> None:
    cut = nvidia_xml_card(mig=[("9856 MiB", "0 MiB")] * 7)
    whole = nvidia_xml_card("00000000:02:00.0", memory=("24576 MiB", "1 MiB"))
    assert [gpu.best for gpu in detect(tree.nvidia_smi_xml(cut, whole).root).gpus] == [False, True]


def test_a_jetson_is_a_gpu_by_its_device_tree(tmp_path: Path) -> None:
    machine = detect(Tree(tmp_path).cpu(arm=True).ram().tegra().root)
    gpu = only(machine)
    assert (gpu.arch, gpu.pool, gpu.unified, gpu.best) == ("sm_87", RAM_POOL, True, True)
    assert (machine.platform, machine.board) == ("linux/arm64", "NVIDIA Jetson AGX Orin")


def test_under_wsl_a_card_needs_no_bus(tree: Tree) -> None:
    machine = detect(tree.wsl().nvidia_csv(nvidia_row()).root)
    gpu = only(machine)
    assert (machine.wsl, gpu.usable, gpu.pci_slot) == (True, True, None)
    assert gpu.id.startswith("GPU-")  # the slot is one of Windows


def test_under_wsl_a_gpu_of_unknown_make_is_said(tree: Tree) -> None:
    machine = detect(tree.wsl().root)
    assert machine.gpus == ()
    assert [finding.code for finding in machine.findings] == ["wsl_gpu_unknown"]


def test_a_container_that_shows_only_nvidias_driver_has_the_card(tree: Tree) -> None:
    """No /sys/class/drm, no PCI bus (mudler/LocalAI#5063)."""
    gpu = only(detect(tree.nvidia_proc("0000:01:00.0").root))
    assert (gpu.id, gpu.arch, gpu.driver_version) == ("0000:01:00.0", "sm_86", "570.86.10")


def test_a_card_without_its_driver_does_not_hide_the_one_that_has_it(tree: Tree) -> None:
    tree.pci("0000:01:00.0", 0x10DE, 0x2684).pci("0000:02:00.0", 0x10DE, 0x17C8, driver="nouveau")
    bare, nouveau, amd = detect(tree.amd().root).gpus
    assert (codes(bare), codes(nouveau)) == ({"no_driver"}, {"nouveau_driver"})
    assert [gpu.usable for gpu in (bare, nouveau, amd)] == [False, False, True]
    assert amd.best
