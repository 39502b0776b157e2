"""What detection says of machines that other tools get wrong, each built from public facts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_trees import APU, GIB, MIB, Tree, nvidia_row

from flexlab.gpus.inventory import detect
from flexlab.spec.machine import RAM_POOL, Gpu, Machine

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine").cpu().ram()


def only(machine: Machine) -> Gpu:
    assert len(machine.gpus) == 1
    return machine.gpus[0]


def codes(gpu: Gpu) -> set[str]:
    return {problem.code for problem in gpu.problems}


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


def test_memory_that_the_driver_hides_is_what_kfd_says(tree: Tree) -> None:
    """Taken for an integrated GPU of 0 bytes by others (ollama/ollama#6304)."""
    tree.amd(device=0x740F, gfx=90010, vram=None, vram_used=None, gtt=None)
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


def test_a_node_that_may_not_be_opened_names_its_group(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    tree = Tree(tmp_path / "machine").cpu().ram().amd()
    tree.dev("/dev/kfd", mode=0o660).dev("/dev/dri/renderD128")
    # Root may open everything, so somebody else has to look.
    code = (
        "import sys, pathlib, msgspec; from flexlab.gpus.inventory import detect;"
        "print(msgspec.json.encode(detect(pathlib.Path(sys.argv[1])).gpus).decode())"
    )
    for folder in (tmp_path, *tmp_path.parents[:-2]):
        folder.chmod(folder.stat().st_mode | 0o055)
    words = [sys.executable, "-c", code, str(tree.root)]
    drop = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    run = subprocess.run(
        [*drop, *words], capture_output=True, text=True, env={"PYTHONPATH": str(REPOSITORY)},
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    (gpu,) = json.loads(run.stdout)
    gid = (tree.root / "dev/kfd").stat().st_gid
    assert gpu["usable"] is False
    assert [problem["code"] for problem in gpu["problems"]] == ["kfd_denied"]
    assert f"gid {gid}" in gpu["problems"][0]["hint"]


def test_a_root_without_dev_says_nothing_of_access(tree: Tree) -> None:
    gpu = only(detect(tree.amd().root))
    assert gpu.usable
    assert [node.gid for node in gpu.nodes] == [None, None]


def test_an_arm_machine_says_what_runs_there(tmp_path: Path) -> None:
    machine = detect(Tree(tmp_path).cpu(arm=True).ram().amd().root)
    assert machine.platform == "linux/arm64"
    assert only(machine).usable
    assert "other_platform" in codes(only(machine))


def test_an_amd_igpu_without_memory_files_does_not_hide_an_nvidia_card(tree: Tree) -> None:
    tree.amd("0000:12:00.0", card=0, **(APU | {"vram": None, "vram_used": None, "gtt": None}))
    tree.nvidia_csv(nvidia_row())
    nvidia, amd = detect(tree.root).gpus
    assert (nvidia.vendor, nvidia.best) == ("nvidia", True)
    assert amd.vendor == "amd"
    assert amd.pool_total_bytes is None


# -- NVIDIA


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


# -- robustness


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
