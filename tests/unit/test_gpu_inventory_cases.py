"""What detection says of machines that other tools get wrong, each built from public facts."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_checks import codes, detect_as_nobody, only
from gpu_trees import APU, GIB, MIB, Tree

from flexlab.gpus.inventory import detect
from flexlab.spec.machine import RAM_POOL


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine").cpu().ram()


# -- who is who


def test_a_card_is_told_by_its_kernel(tree: Tree) -> None:
    gpu = only(detect(tree.kfd_cpu().amd(unique_id=0xAB).root))
    assert (gpu.id, gpu.arch, gpu.cu_count) == ("0000:03:00.0", "gfx1100", 96)
    assert (gpu.card, gpu.render_minor, gpu.kfd_node, gpu.hip_index) == ("card0", 128, 1, 0)
    assert gpu.uuid == "GPU-00000000000000ab"
    assert "7900 XTX" in gpu.name
    assert gpu.usable
    assert gpu.best
    assert gpu.is_apu is False


def test_the_cpus_node_does_not_count_in_the_hip_index(tree: Tree) -> None:
    tree.kfd_cpu(0).amd(node=1).amd("0000:12:00.0", card=1, minor=129, node=2, **APU)
    big, small = detect(tree.root).gpus
    assert (big.hip_index, small.hip_index) == (0, 1)


def test_card_numbers_and_kfd_order_may_be_crossed(tree: Tree) -> None:
    tree.amd("0000:43:00.0", card=2, minor=130, node=1).amd(
        "0000:03:00.0", card=5, minor=129, node=2
    )
    first, second = detect(tree.root).gpus
    assert (first.id, first.card, first.kfd_node, first.hip_index) == (
        "0000:03:00.0", "card5", 2, 1,
    )  # fmt: skip
    assert (second.id, second.card, second.kfd_node) == ("0000:43:00.0", "card2", 1)


def test_node_ten_comes_after_node_nine(tree: Tree) -> None:
    for number in range(1, 12):
        tree.kfd(f"0000:{number:02x}:00.0", 0x740F, node=number, gfx=90010, bank=64 * GIB)
    order = {gpu.kfd_node: gpu.hip_index for gpu in detect(tree.root).gpus}
    assert order == {number: number - 1 for number in range(1, 12)}


@pytest.mark.parametrize(
    ("version", "name"), [(110501, "gfx1151"), (90012, "gfx90c"), (90402, "gfx942")]
)
def test_steppings_are_hexadecimal(tree: Tree, version: int, name: str) -> None:
    assert only(detect(tree.amd(gfx=version).root)).arch == name


def test_a_kernel_without_target_versions_leaves_it_to_the_pci_id(tree: Tree) -> None:
    gpu = only(detect(tree.amd(device=0x6860, revision=0, gfx=None).root))
    assert gpu.arch == "gfx900"


def test_a_card_of_tomorrow_is_still_a_usable_gpu(tree: Tree) -> None:
    gpu = only(detect(tree.amd(device=0xFEED, gfx=130000).root))
    assert gpu.arch == "gfx1300"
    assert gpu.usable
    assert gpu.name == "AMD GPU 1002:feed"


def test_a_graphics_chip_of_the_board_comes_before_the_card_in_drm(tree: Tree) -> None:
    """card0 and a first render node may be something else's (mudler/LocalAI#10941)."""
    tree.pci("0000:02:00.0", 0x1A03, 0x2000, driver="ast")
    tree.drm("0000:02:00.0", 0x1A03, 0x2000, card=0, minor=None, driver="ast")
    gpu = only(detect(tree.intel(device=0x56A6, card=1, minor=128).root))
    assert (gpu.vendor, gpu.card, gpu.render_minor) == ("intel", "card1", 128)
    assert gpu.vram_total_bytes == 4 * GIB


def test_connectors_and_gaps_are_no_cards(tree: Tree) -> None:
    tree.amd(card=3, minor=130).write("sys/class/drm/card3-DP-1/status", "connected")
    assert only(detect(tree.root)).card == "card3"


def test_an_old_apu_is_a_gpu_although_cpu_cores_are_in_its_node(tree: Tree) -> None:
    """Carrizo: one node for both, and a kernel that names no target."""
    tree.pci("0000:00:01.0", 0x1002, 0x9874, driver="amdgpu")
    tree.kfd("0000:00:01.0", 0x9874, node=0, gfx=None, simds=32, minor=128, cpu_cores=4)
    gpu = only(detect(tree.root))
    assert (gpu.kfd_node, gpu.cu_count, gpu.is_apu) == (0, 8, True)


def test_cards_of_one_bus_number_in_two_domains_are_two(tree: Tree) -> None:
    tree.amd("0001:03:00.0", card=0, minor=128, node=1).amd(card=1, minor=129, node=2)
    first, second = detect(tree.root).gpus
    assert (first.id, first.kfd_node) == ("0000:03:00.0", 2)
    assert (second.id, second.kfd_node) == ("0001:03:00.0", 1)


def test_each_card_has_its_own_architecture_beside_another(tree: Tree) -> None:
    """An external RDNA 4 card beside a Strix Halo (ROCm/legacy-rocm-build#5696)."""
    tree.amd(**(APU | {"device": 0x1586, "gfx": 110501}))
    tree.amd("0000:65:00.0", 0x7550, gfx=120001, card=1, minor=129, node=2)
    assert [gpu.arch for gpu in detect(tree.root).gpus] == ["gfx1151", "gfx1201"]


def test_vendors_are_told_by_the_vendor_file(tree: Tree) -> None:
    tree.amd().intel("0000:0b:00.0", card=3, minor=131)
    assert [gpu.vendor for gpu in detect(tree.root).gpus] == ["amd", "intel"]


def test_without_the_drm_folder_a_card_is_there_all_the_same(tmp_path: Path) -> None:
    tree = Tree(tmp_path).cpu().ram().pci("0000:03:00.0", 0x1002, 0x744C, driver="amdgpu")
    gpu = only(detect(tree.kfd("0000:03:00.0", 0x744C, node=1, gfx=110000, minor=128).root))
    assert (gpu.render_minor, gpu.card) == (128, None)


def test_a_display_adapter_of_old_is_a_finding(tree: Tree) -> None:
    machine = detect(tree.pci("0000:01:00.0", 0x1002, 0x6758, driver="radeon").root)
    assert machine.gpus == ()
    assert [finding.code for finding in machine.findings] == ["not_compute"]


# -- memory


def test_mapped_ram_is_never_added_to_a_cards_own_memory(tree: Tree) -> None:
    gpu = only(detect(tree.amd(vram=24 * GIB, gtt=24 * GIB).root))
    assert gpu.pool_total_bytes == 24 * GIB
    assert gpu.pool == gpu.id


def test_mappable_ram_as_large_as_its_memory_makes_no_card_an_apu(tree: Tree) -> None:
    gpu = only(detect(tree.amd(device=0xFEED, vram=4 * GIB, gtt=32 * GIB).root))
    assert (gpu.is_apu, gpu.pool_total_bytes) == (False, 4 * GIB)


def test_an_apu_of_tomorrow_is_told_by_its_northbridge(tree: Tree) -> None:
    gpu = only(detect(tree.amd(**(APU | {"device": 0xFEED})).root))
    assert (gpu.is_apu, gpu.pool) == (True, RAM_POOL)


@pytest.mark.parametrize(("first", "second", "best"), [(24, 16, 0), (16, 24, 1), (16, 16, 0)])
def test_the_best_card_has_the_most_memory(tree: Tree, first: int, second: int, best: int) -> None:
    tree.amd(vram=first * GIB).amd("0000:43:00.0", card=1, minor=129, node=2, vram=second * GIB)
    assert [gpu.best for gpu in detect(tree.root).gpus].index(True) == best


def test_an_integrated_gpu_alone_is_the_best(tree: Tree) -> None:
    assert only(detect(tree.amd(**APU).root)).best


def test_an_integrated_gpu_is_never_the_best_beside_a_card(tree: Tree) -> None:
    tree.amd(vram=8 * GIB).amd("0000:12:00.0", card=1, minor=129, node=2, **APU)
    card, integrated = detect(tree.root).gpus
    assert (integrated.gtt_total_bytes or 0) > (card.vram_total_bytes or 0) > 0
    assert (card.best, integrated.best) == (True, False)
    assert integrated.pool == RAM_POOL


def test_strix_halo_has_what_it_may_map_and_no_alarm(tmp_path: Path) -> None:
    tree = Tree(tmp_path).cpu().ram(128 * GIB, 100 * GIB)
    tree.amd(
        device=0x1586, revision=0xC1, gfx=110501, simds=80, apu=True, vram=512 * MIB,
        vram_used=480 * MIB, gtt=120 * GIB, gtt_used=0, watts=84,
    )  # fmt: skip
    machine = detect(tree.root)
    gpu = only(machine)
    assert gpu.pool == RAM_POOL
    assert gpu.pool_total_bytes == 120 * GIB  # below RAM less its reserve
    assert gpu.pool_free_bytes == 100 * GIB - machine.pools[0].reserve_bytes
    assert gpu.usable
    assert codes(gpu) == set()


def test_mapped_ram_is_bound_by_the_ram_itself(tmp_path: Path) -> None:
    tree = Tree(tmp_path).cpu().ram(32 * GIB, 30 * GIB)
    machine = detect(tree.amd(**(APU | {"gtt": 130 * GIB, "device": 0x1586})).root)
    ram = machine.pools[0]
    assert ram.total_bytes
    assert only(machine).pool_total_bytes == ram.total_bytes - ram.reserve_bytes


@pytest.mark.parametrize(("carved", "mapped"), [(96, 16), (16, 8)])
def test_a_carve_out_as_large_as_what_may_be_mapped_is_the_pool(
    tree: Tree, carved: int, mapped: int
) -> None:
    tree.amd(
        device=0x1586, revision=0xC1, gfx=110501, apu=True, vram=carved * GIB,
        vram_used=5 * GIB, gtt=mapped * GIB,
    )  # fmt: skip
    gpu = only(detect(tree.root))
    assert gpu.pool == gpu.id
    assert (gpu.pool_total_bytes, gpu.pool_free_bytes) == (carved * GIB, (carved - 5) * GIB)


@pytest.mark.parametrize("hidden", [None, 0])
def test_memory_that_the_driver_hides_is_what_kfd_says(tree: Tree, hidden: int | None) -> None:
    """Taken for an integrated GPU of 0 bytes by others (ollama/ollama#6304, #12602)."""
    tree.amd(device=0x740F, gfx=90010, vram=hidden, vram_used=None, gtt=hidden)
    tree.kfd("0000:03:00.0", 0x740F, node=1, gfx=90010, minor=128, bank=64 * GIB)
    gpu = only(detect(tree.root))
    assert gpu.vram_total_bytes == 64 * GIB
    assert gpu.vram_used_bytes is None
    assert gpu.pool_free_bytes is None
    assert gpu.is_apu is False


def test_memory_that_nobody_knows_is_unknown_and_said(tree: Tree) -> None:
    gpu = only(detect(tree.amd(device=0xFEED, vram=None, vram_used=None, node=None).root))
    assert gpu.vram_total_bytes is None
    assert "memory_unknown" in codes(gpu)


def test_partitions_are_devices_with_a_share_of_their_card(tree: Tree) -> None:
    tree.amd_partitioned("0000:05:00.0", parts=4, first_node=1, first_minor=128, unique_id=7)
    tree.amd_partitioned("0000:15:00.0", parts=4, first_node=5, first_minor=136, unique_id=8)
    gpus = detect(tree.root).gpus
    assert len({gpu.id for gpu in gpus}) == 8
    assert gpus[1].id == "0000:05:00.1#2"
    assert {gpu.vram_total_bytes for gpu in gpus} == {24 * GIB}
    assert {gpu.pool for gpu in gpus} == {gpu.id for gpu in gpus}


# -- usable or not, and why


@pytest.mark.parametrize(
    ("driver", "code"), [("radeon", "radeon_driver"), ("vfio-pci", "vfio"), ("", "no_driver")]
)
def test_a_card_without_its_driver_is_seen_and_not_usable(
    tmp_path: Path, driver: str, code: str
) -> None:
    tree = Tree(tmp_path).cpu().ram().pci("0000:01:00.0", 0x1002, 0x67DF, driver=driver or None)
    gpu = only(detect(tree.root))
    assert not gpu.usable
    assert codes(gpu) >= {code}
    assert all(problem.message and problem.hint for problem in gpu.problems)


def test_a_card_without_kfd_is_for_vulkan(tree: Tree) -> None:
    gpu = only(detect(tree.amd(node=None).root))
    assert gpu.usable
    assert codes(gpu) == {"no_kfd"}


@pytest.mark.parametrize(
    ("node", "code"), [("/dev/kfd", "kfd_denied"), ("/dev/dri/renderD128", "render_denied")]
)
def test_a_node_that_may_not_be_opened_names_its_group(
    tmp_path: Path, node: str, code: str
) -> None:
    tree = Tree(tmp_path / "machine").cpu().ram().amd()
    tree.amd("0000:43:00.0", card=1, minor=129, node=None)
    tree.dev("/dev/kfd", "/dev/dri/renderD128", "/dev/dri/renderD129").dev(node, mode=0)
    denied, other = detect_as_nobody(tree.root)[0].gpus
    gid = (tree.root / node.lstrip("/")).stat().st_gid
    assert not denied.usable
    assert [problem.code for problem in denied.problems] == [code]
    assert f"gid {gid}" in denied.problems[0].hint
    assert (other.usable, other.best) == (True, True)


def test_a_node_that_a_container_may_not_read_counts_in_no_index(tmp_path: Path) -> None:
    """The device cgroup denies the files of KFD nodes that were not passed on."""
    tree = Tree(tmp_path / "machine").cpu().ram().kfd_cpu().amd()
    tree.amd("0000:43:00.0", card=1, minor=129, node=2)
    (tree.root / "sys/class/kfd/kfd/topology/nodes/1/properties").chmod(0)
    first, second = detect_as_nobody(tree.root)[0].gpus
    assert (first.kfd_node, first.hip_index) == (None, None)
    assert (second.kfd_node, second.hip_index) == (2, 0)


def test_a_card_of_a_virtual_machine_leaves_the_host_the_other(tree: Tree) -> None:
    tree.pci("0000:03:00.0", 0x1002, 0x744C, revision=0xC8, driver="vfio-pci")
    tree.amd("0000:43:00.0", 0x747E, card=0, vram=16 * GIB)
    passed_on, own = detect(tree.root).gpus
    assert (passed_on.usable, passed_on.best) == (False, False)
    assert (own.usable, own.best) == (True, True)


def test_a_sleeping_card_is_left_alone_and_usable(tree: Tree) -> None:
    tree.amd().write("sys/class/drm/card0/device/power/runtime_status", "suspended")
    gpu = only(detect(tree.root))
    assert (gpu.usable, gpu.asleep, codes(gpu)) == (True, True, {"asleep"})
    assert (gpu.busy_percent, gpu.power_w, gpu.temps_c) == (None, None, {})
    assert gpu.vram_total_bytes == 24560 * MIB


def test_a_root_without_dev_says_nothing_of_access(tree: Tree) -> None:
    gpu = only(detect(tree.amd().root))
    assert gpu.usable
    assert [node.gid for node in gpu.nodes] == [None, None]


def test_an_arm_machine_says_what_runs_there(tmp_path: Path) -> None:
    machine = detect(Tree(tmp_path).cpu(arm=True).ram().amd().root)
    assert machine.platform == "linux/arm64"
    assert only(machine).usable
    assert "other_platform" in codes(only(machine))


# -- robustness


def test_a_sensor_that_is_not_fitted_says_nothing(tree: Tree) -> None:
    """0 degrees is an empty place (RX 5500 XT); GCN 1 has a label for power and no value."""
    tree.amd(watts=None, busy=None).write("sys/class/drm/card0/device/hwmon/hwmon0/temp2_input", 0)
    gpu = only(detect(tree.root))
    assert gpu.temps_c == {"edge": 53.0}
    assert (gpu.power_w, gpu.busy_percent) == (None, None)


def test_padding_changes_nothing(tree: Tree) -> None:
    before = detect(tree.amd().root).gpus
    for path in tree.root.rglob("sys/**/uevent"):
        path.write_bytes(path.read_bytes().ljust(4096, b"\0"))
    assert detect(tree.root).gpus == before


def test_no_gpu_is_an_answer(tree: Tree) -> None:
    machine = detect(tree.root)
    assert machine.gpus == ()
    assert [pool.id for pool in machine.pools] == [RAM_POOL]


def test_an_empty_root_is_an_answer(tmp_path: Path) -> None:
    machine = detect(tmp_path)
    assert machine.gpus == ()
    assert machine.platform is None
    assert machine.pools[0].total_bytes is None
