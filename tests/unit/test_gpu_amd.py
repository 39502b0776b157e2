"""AMD GPUs: three views of the kernel joined, and what a card says while it works."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpu_checks import codes
from gpu_trees import APU, GIB, MIB, Tree

from flexlab.gpus import amd, amd_memory, tables
from flexlab.gpus.bus import read_bus
from flexlab.gpus.source import Found, Source
from flexlab.spec.machine import Gpu, GpuReading

MI300X_VF = 0x74B5
DEVICE = "sys/class/drm/card0/device"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


def found(tree: Tree) -> Found:
    return amd.find(tree.root, read_bus(tree.root))


def gpus(tree: Tree) -> list[Gpu]:
    return found(tree).gpus


def sources(tree: Tree) -> dict[str, Source]:
    return {source.gpu_id: source for source in amd.sources(tree.root, gpus(tree))}


def reading(tree: Tree) -> GpuReading:
    (source,) = sources(tree).values()
    return source.read()


# -- views that are missing


def test_kfd_alone_tells_a_card(tree: Tree) -> None:
    """A container without /sys/class/drm and /sys/bus."""
    tree.kfd("0000:03:00.0", 0x744C, node=1, gfx=110000, minor=128, bank=24 * GIB, unique_id=255)
    (gpu,) = gpus(tree)
    assert (gpu.id, gpu.pci_id, gpu.arch) == ("0000:03:00.0", "1002:744c", "gfx1100")
    assert (gpu.render_minor, gpu.card, gpu.driver) == (128, None, "amdgpu")
    assert (gpu.vram_total_bytes, gpu.uuid) == (24 * GIB, "GPU-00000000000000ff")
    assert amd.sources(tree.root, [gpu]) == []


def test_drm_alone_tells_a_card(tree: Tree) -> None:
    tree.amd(node=None)
    shutil.rmtree(tree.root / "sys/bus")
    (gpu,) = gpus(tree)
    assert (gpu.id, gpu.card, gpu.render_minor) == ("0000:03:00.0", "card0", 128)
    assert gpu.vram_total_bytes == 24560 * MIB


def test_the_bus_alone_tells_a_card(tree: Tree) -> None:
    (gpu,) = gpus(tree.pci("0000:03:00.0", 0x1002, 0x744C, revision=0xC8, driver="amdgpu"))
    assert (gpu.id, gpu.card, gpu.kfd_node, gpu.is_apu) == ("0000:03:00.0", None, None, False)
    assert codes(gpu) == {"no_kfd", "memory_assumed"}


@pytest.mark.parametrize("addressless", [("card0", "card1"), ("card1",)])
def test_twins_without_an_address_are_two(tree: Tree, addressless: tuple[str, ...]) -> None:
    """A recording of /sys/class/drm alone, without (or with one) uevent."""
    tree.drm("0000:03:00.0", 0x1002, 0x744C, card=0, minor=None, driver="amdgpu")
    tree.drm("0000:43:00.0", 0x1002, 0x744C, card=1, minor=None, driver="amdgpu")
    shutil.rmtree(tree.root / "sys/bus", ignore_errors=True)
    for card in addressless:
        (tree.root / "sys/class/drm" / card / "device/uevent").unlink()
    twins = gpus(tree)
    assert [gpu.card for gpu in twins] == ["card0", "card1"]
    assert len({gpu.id for gpu in twins}) == 2
    assert all(gpu.pci_id == "1002:744c" for gpu in twins)


def test_a_render_node_joins_what_tells_no_slot(tree: Tree) -> None:
    tree.amd(minor=130)
    for node in ("card0", "renderD130"):
        (tree.root / "sys/class/drm" / node / "device/uevent").unlink()
    (gpu,) = gpus(tree)
    assert (gpu.id, gpu.render_minor, gpu.kfd_node) == ("0000:03:00.0", 130, 1)


# -- one card, several nodes


def test_partitions_have_their_own_memory_and_their_cards_sensors(tree: Tree) -> None:
    tree.amd_partitioned("0000:05:00.0", parts=3, first_node=1, first_minor=128, unique_id=7)
    device = tree.drm(
        "0000:05:00.0", 0x1002, 0x74A1, card=4, minor=128, kind=0x120000, driver="amdgpu"
    )
    tree.write(f"{device}/mem_info_vram_total", 192 * GIB)
    tree.write(f"{device}/hwmon/hwmon9/name", "amdgpu")
    tree.write(f"{device}/hwmon/hwmon9/power1_average", 550_000_000)
    parts = gpus(tree)
    assert [gpu.id for gpu in parts] == ["0000:05:00.0#1", "0000:05:00.1#2", "0000:05:00.2#3"]
    assert [gpu.vram_total_bytes for gpu in parts] == [24 * GIB] * 3
    for source in sources(tree).values():
        numbers = source.read().numbers
        assert numbers["power_w"] == 550.0
        assert "vram_total_bytes" not in numbers


@pytest.mark.parametrize("view", ["sys/bus", "sys/class/drm"])
def test_partitions_find_their_cards_sensors_in_either_view(tree: Tree, view: str) -> None:
    tree.amd_partitioned("0000:05:00.0", parts=2, first_node=1, first_minor=128, unique_id=7)
    tree.drm("0000:05:00.0", 0x1002, 0x74A1, card=4, minor=128, kind=0x120000, driver="amdgpu")
    shutil.rmtree(tree.root / view)
    assert sources(tree).keys() == {"0000:05:00.0#1", "0000:05:00.1#2"}


def test_two_nodes_of_one_slot_are_told_by_their_node(tree: Tree) -> None:
    for number in (4, 5):
        tree.kfd("0000:05:00.0", 0x74A1, node=number, gfx=90402, bank=96 * GIB)
    assert [gpu.id for gpu in gpus(tree)] == ["0000:05:00.0#4", "0000:05:00.0#5"]


def test_virtual_functions_in_a_guest_are_no_partitions(tree: Tree) -> None:
    """Each is a PCI function of its own, with its own memory."""
    for function in (0, 1):
        tree.amd(
            f"0000:05:00.{function}", MI300X_VF, card=function, minor=128 + function,
            node=1 + function, gfx=90402, vram=190 * GIB, kind=0x120000,
        )  # fmt: skip
    guests = gpus(tree)
    assert [gpu.id for gpu in guests] == ["0000:05:00.0", "0000:05:00.1"]
    assert [gpu.vram_total_bytes for gpu in guests] == [190 * GIB] * 2
    assert [source.read().numbers["vram_total_bytes"] for source in sources(tree).values()] == [
        190 * GIB, 190 * GIB,
    ]  # fmt: skip


# -- memory and kind


@pytest.mark.parametrize(
    ("gfx", "is_apu"), [(110501, True), (100306, True), (90012, True), (120001, False)]
)
def test_an_architecture_that_one_kind_has_tells_an_unknown_card(
    tree: Tree, gfx: int, is_apu: bool
) -> None:
    tree.kfd("0000:c4:00.0", 0xFEED, node=1, gfx=gfx, bank=16 * GIB)
    (gpu,) = gpus(tree)
    assert gpu.is_apu is is_apu
    assert (gpu.gtt_total_bytes, gpu.vram_total_bytes) == (
        (16 * GIB, None) if is_apu else (None, 16 * GIB)
    )


def test_memory_of_an_unknown_kind_is_unknown(tree: Tree) -> None:
    """Its KFD bank may be VRAM, or what an APU may map."""
    tree.kfd("0000:c4:00.0", 0xFEED, node=1, gfx=140000, bank=16 * GIB)
    (gpu,) = gpus(tree)
    assert (gpu.is_apu, gpu.vram_total_bytes, gpu.gtt_total_bytes) == (None, None, None)
    assert "memory_unknown" in codes(gpu)


def test_architectures_and_the_table_of_cards_agree() -> None:
    for line in tables._table("amd").splitlines():
        columns = line.split("\t")
        if line.startswith("#") or len(columns) != 6:
            continue
        arch, kind = columns[2], columns[4]
        assert kind != "dgpu" or arch not in amd_memory._APU_ARCHS, line
        assert kind != "apu" or arch not in amd_memory._CARD_ARCHS or arch == "gfx942", line
    assert not amd_memory._APU_ARCHS & amd_memory._CARD_ARCHS


# -- who may use it


def test_a_container_may_use_what_was_passed_to_it(tree: Tree) -> None:
    tree.amd().amd("0000:43:00.0", card=1, minor=129, node=2)
    tree.dev("/dev/kfd", "/dev/dri/renderD129")
    first, second = gpus(tree)
    assert (first.usable, codes(first)) == (False, {"render_denied"})
    assert "--device /dev/dri/renderD128" in first.problems[0].hint
    assert (second.usable, codes(second)) == (True, set())


def test_without_dev_kfd_a_card_is_for_vulkan(tree: Tree) -> None:
    (gpu,) = gpus(tree.amd().dev("/dev/dri/renderD128"))
    assert (gpu.usable, codes(gpu)) == (True, {"no_kfd"})


def test_no_render_node_at_all_speaks_against_no_card(tree: Tree) -> None:
    (gpu,) = gpus(tree.amd().dev("/dev/kfd", "/dev/null"))
    assert (gpu.usable, codes(gpu)) == (True, set())


def test_the_nodes_of_a_card_come_with_their_group(tree: Tree) -> None:
    (gpu,) = gpus(tree.amd().dev("/dev/kfd", "/dev/dri/renderD128"))
    gid = (tree.root / "dev/kfd").stat().st_gid
    assert [(node.path, node.gid) for node in gpu.nodes] == [
        ("/dev/kfd", gid), ("/dev/dri/renderD128", gid),
    ]  # fmt: skip


def test_a_display_adapter_is_a_finding_beside_a_card(tree: Tree) -> None:
    tree.pci("0000:01:00.0", 0x1002, 0x6758, driver="radeon").amd()
    assert [gpu.id for gpu in gpus(tree)] == ["0000:03:00.0"]
    assert [finding.code for finding in found(tree).findings] == ["not_compute"]


# -- live readings


def test_what_a_card_says_while_it_works(tree: Tree) -> None:
    tree.amd(busy=97, watts=310, vram_used=20 * GIB).write(f"{DEVICE}/mem_busy_percent", 40)
    assert reading(tree).numbers == {
        "vram_total_bytes": 24560 * MIB, "vram_used_bytes": 20 * GIB, "gtt_total_bytes": 16 * GIB,
        "gtt_used_bytes": 100 * MIB, "busy_percent": 97, "memory_busy_percent": 40,
        "temp_edge_c": 53.0, "temp_junction_c": 61.0, "power_w": 310.0, "fan_rpm": 0,
    }  # fmt: skip


def test_nothing_used_is_a_reading_and_no_memory_is_not(tree: Tree) -> None:
    numbers = reading(tree.amd(vram=0, vram_used=0, gtt=None, gtt_used=None)).numbers
    assert numbers["vram_used_bytes"] == 0
    assert "vram_total_bytes" not in numbers
    assert "gtt_total_bytes" not in numbers


@pytest.mark.parametrize("status", ["suspended", "suspending"])
def test_a_card_that_sleeps_is_not_read(tree: Tree, status: str) -> None:
    tree.amd()
    (source,) = sources(tree).values()
    assert source.read().numbers
    tree.write(f"{DEVICE}/power/runtime_status", status)
    assert source.read() == GpuReading(asleep=True)
    tree.write(f"{DEVICE}/power/runtime_status", "active")
    assert source.read().numbers["temp_edge_c"] == 53.0


def test_sensors_are_found_again_after_a_reset(tree: Tree) -> None:
    tree.amd()
    (source,) = sources(tree).values()
    source.read()
    sensors = tree.root / DEVICE / "hwmon"
    (sensors / "hwmon0").rename(sensors / "hwmon7")
    assert source.read().numbers["power_w"] == 68.0


def test_a_card_without_amdgpu_has_no_source(tree: Tree) -> None:
    tree.pci("0000:01:00.0", 0x1002, 0x67DF, driver="radeon")
    tree.pci("0000:02:00.0", 0x1002, 0x67DF)
    assert sources(tree) == {}


def test_an_apu_has_its_readings_too(tree: Tree) -> None:
    numbers = reading(tree.amd(**APU)).numbers
    assert (numbers["vram_total_bytes"], numbers["gtt_total_bytes"]) == (512 * MIB, 31 * GIB)
