"""Who holds a GPU's memory, by which name, and how busy each keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gpu_processes import process, told
from gpu_trees import APU, GIB, MIB, Tree
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gpus import nvidia
from flexlab.gpus.holders import Scan, scan
from flexlab.gpus.inventory import find_gpus
from flexlab.spec.machine import Gpu, Holder

SLOT = "0000:03:00.0"
SECOND = "0000:43:00.0"
NS = 1_000_000_000


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine").amd(SLOT).amd(SECOND, card=1, minor=129, node=2)


def look(tree: Tree, previous: Scan | None = None, at: float = 1000.0) -> Scan:
    return scan(tree.root, find_gpus(tree.root)[0], previous=previous, clock=lambda: at)


def held(tree: Tree, previous: Scan | None = None) -> dict[tuple[str, int], Holder]:
    found = look(tree, previous).holders
    by_place = {(holder.gpu, holder.pid): holder for holder in found}
    assert len(by_place) == len(found)
    return by_place


def kfd(tree: Tree, pid: int, **vram: object) -> None:
    """What KFD counts for a process, in bytes; node 1 is `vram_1001`, node 2 `vram_1002`."""
    for name, size in vram.items():
        tree.write(f"sys/class/kfd/kfd/proc/{pid}/{name}", size)


# -- by fdinfo


def test_a_process_holds_what_its_files_say_on_each_card(tree: Tree) -> None:
    first = told(SLOT, 1, memory_vram="8 MiB", memory_gtt="1 MiB")
    second = told(SLOT, 2, memory_vram="4 MiB")
    process(tree.root, 40, {4: first, 5: second, 6: told(SECOND, 3, memory_vram="2 MiB")})
    found = held(tree)
    assert set(found) == {(SLOT, 40), (SECOND, 40)}
    assert (found[SLOT, 40].vram_bytes, found[SLOT, 40].gtt_bytes) == (12 * MIB, MIB)
    assert (found[SECOND, 40].vram_bytes, found[SECOND, 40].gtt_bytes) == (2 * MIB, None)


def test_memory_that_the_kernel_does_not_count_is_unknown(tree: Tree) -> None:
    process(tree.root, 40, {4: told(SLOT, 1, engine_gfx="5 ns")})
    holder = held(tree)[SLOT, 40]
    assert (holder.vram_bytes, holder.gtt_bytes, holder.busy_percent) == (None, None, None)


def test_what_an_apu_maps_is_told_beside_its_carve_out(tmp_path: Path) -> None:
    tree = Tree(tmp_path).amd(SLOT, **APU)
    process(tree.root, 40, {4: told(SLOT, 1, memory_vram="5 MiB", memory_gtt="24576 MiB")})
    holder = held(tree)[SLOT, 40]
    assert (holder.vram_bytes, holder.gtt_bytes) == (5 * MIB, 24 * GIB)


def test_a_card_that_is_no_gpu_of_ours_has_no_holders(tree: Tree) -> None:
    process(tree.root, 40, {4: told("0000:02:00.0", 1, "ast", memory_vram="8 MiB")})
    assert held(tree) == {}


def test_the_scan_says_what_it_did_not_see(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    process(tree.root, 40, {4: told(SLOT, 1)})
    assert (look(tree).complete, look(tree).unreadable) == (True, 0)
    real = os.listdir

    def listdir(path: str | Path) -> list[str]:
        if str(path).endswith("/fd"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert (look(tree).holders, look(tree).unreadable) == ((), 1)


# -- names


def test_a_name_from_outside_cannot_steer_a_terminal(tree: Tree) -> None:
    process(tree.root, 40, {4: told(SLOT, 1)}, name="evil\x1b[31m\nname")
    assert held(tree)[SLOT, 40].name == "evil name"


CONTAINER = "3f2a" * 16


@pytest.mark.parametrize(
    ("lines", "cgroup"),
    [
        (f"0::/system.slice/docker-{CONTAINER}.scope", f"/system.slice/docker-{CONTAINER}.scope"),
        (f"12:pids:/docker/{CONTAINER}\n3:cpu,cpuacct:/\n0::/", f"/docker/{CONTAINER}"),
        (f"1:name=systemd:/docker/{CONTAINER}\n2:cpu:/", f"/docker/{CONTAINER}"),
        ("0::/", "/"),
        ("", None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_the_control_group_tells_containers_apart(
    tree: Tree, lines: str | None, cgroup: str | None
) -> None:
    process(tree.root, 40, {4: told(SLOT, 1)}, cgroup=lines)
    assert held(tree)[SLOT, 40].cgroup == cgroup


# -- KFD


def test_kfd_counts_by_card(tree: Tree) -> None:
    process(tree.root, 40)
    kfd(tree, 40, vram_1001=3 * GIB, vram_1002=0)
    found = held(tree)
    assert set(found) == {(SLOT, 40)}
    assert (found[SLOT, 40].vram_bytes, found[SLOT, 40].name) == (3 * GIB, "llama-server")


@pytest.mark.parametrize(("drm_mib", "kfd_mib"), [(700, 2000), (2000, 700)])
def test_what_both_count_is_counted_once(tree: Tree, drm_mib: int, kfd_mib: int) -> None:
    process(tree.root, 40, {4: told(SLOT, 1, memory_vram=f"{drm_mib} MiB")})
    kfd(tree, 40, vram_1001=kfd_mib * MIB)
    assert held(tree)[SLOT, 40].vram_bytes == 2000 * MIB


def test_a_process_that_cannot_be_looked_at_holds_memory_all_the_same(tree: Tree) -> None:
    """KFD's list can be read by everybody, and /proc be hidden (hidepid)."""
    kfd(tree, 40, vram_1001=GIB)
    holder = held(tree)[SLOT, 40]
    assert (holder.name, holder.cgroup, holder.vram_bytes) == (None, None, GIB)


def test_garbage_in_kfds_list_costs_itself_only(tree: Tree) -> None:
    kfd(tree, 40, vram_1001="many", vram_1002=GIB, vram_77=GIB)
    tree.write("sys/class/kfd/kfd/proc/²/vram_1001", GIB)
    assert set(held(tree)) == {(SECOND, 40)}


def test_each_partition_has_its_own_holders(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    tree.amd_partitioned(SLOT, parts=2, first_node=1, first_minor=128, unique_id=5)
    kfd(tree, 40, vram_1002=GIB)
    assert set(held(tree)) == {("0000:03:00.1#2", 40)}


def test_in_a_container_the_hosts_numbers_name_nobody(tree: Tree) -> None:
    """KFD's list has the host's pids there too: 40 is another process."""
    process(tree.root, 40, {4: told(SLOT, 1, memory_vram="1 MiB")})
    kfd(tree, 40, vram_1001=3 * GIB)
    spaces = tree.root / "proc/self/ns"
    spaces.mkdir(parents=True)
    (spaces / "pid").symlink_to("pid:[4026532199]")
    assert held(tree)[SLOT, 40].vram_bytes == MIB
    (spaces / "pid").unlink()
    (spaces / "pid").symlink_to("pid:[4026531836]")
    assert held(tree)[SLOT, 40].vram_bytes == 3 * GIB


# -- NVIDIA


@pytest.fixture
def mixed(tree: Tree) -> Tree:
    tree.pci("0000:01:00.0", 0x10DE, 0x2684, driver="nvidia")
    process(tree.root, 40, {4: told(SLOT, 1, memory_vram="8 MiB")})
    process(tree.root, 41, {4: told("0000:01:00.0", 1, "nvidia-drm")}, name="python3")
    return tree


def test_nvidias_driver_names_its_own_holders(mixed: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Holder(gpu="0000:01:00.0", pid=41, name="/usr/bin/python3", vram_bytes=GIB)
    others = Holder(gpu="0000:01:00.0", pid=0, vram_bytes=2 * GIB)
    monkeypatch.setattr(nvidia, "holders", lambda root, gpus: [ours, others, others])
    found = look(mixed)
    cards = [holder for holder in found.holders if holder.gpu == "0000:01:00.0"]
    # Two processes of other containers are two holders: neither hides the other.
    assert [holder.vram_bytes for holder in cards] == [GIB, 2 * GIB, 2 * GIB]
    assert [holder.name for holder in cards] == ["python3", None, None]
    assert cards[0].cgroup == "/user.slice"
    assert found.complete


def test_a_driver_that_fails_hides_no_other_cards_holders(
    mixed: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_root: Path, _gpus: list[Gpu]) -> list[Holder]:
        raise RuntimeError("a binding that fits no driver")

    monkeypatch.setattr(nvidia, "holders", fail)
    found = look(mixed)
    assert [(holder.gpu, holder.pid) for holder in found.holders] == [(SLOT, 40)]
    assert not found.complete


def test_nvidias_driver_is_not_asked_where_there_is_none(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_root: Path, _gpus: list[Gpu]) -> list[Holder]:
        raise AssertionError("asked")

    monkeypatch.setattr(nvidia, "holders", fail)
    assert look(tree).complete


# -- rates


def busy_after(
    tree: Tree, seconds: float, before: dict[str, str], after: dict[str, str]
) -> float | None:
    """How busy pid 40 was, told by two scans `seconds` apart that saw these counters."""
    process(tree.root, 40, {4: told(SLOT, 1, **before)})
    first = look(tree)
    assert all(holder.busy_percent is None for holder in first.holders)
    process(tree.root, 40, {4: told(SLOT, 1, **after)})
    return rate(tree, first, seconds)


def rate(tree: Tree, first: Scan, seconds: float, pid: int = 40) -> float | None:
    """What is told `seconds` after the first scan."""
    found = look(tree, first, first.at + seconds).holders
    return {holder.pid: holder.busy_percent for holder in found}[pid]


def test_busy_is_the_work_since_the_last_scan(tree: Tree) -> None:
    before, after = {"engine_gfx": f"{5 * NS} ns"}, {"engine_gfx": f"{6 * NS} ns"}
    assert busy_after(tree, 4.0, before, after) == 25.0


def test_busy_is_that_of_the_busiest_engine(tree: Tree) -> None:
    """Engines work side by side; their sum means nothing."""
    before = {"engine_gfx": "0 ns", "engine_compute": "0 ns"}
    after = {"engine_gfx": f"{NS} ns", "engine_compute": f"{2 * NS} ns"}
    assert busy_after(tree, 4.0, before, after) == 50.0


def test_busy_by_cycles_needs_no_clock_of_ours(tree: Tree) -> None:
    before = {"cycles_ccs": "100", "total_cycles_ccs": "1000"}
    after = {"cycles_ccs": "400", "total_cycles_ccs": "2000"}
    assert busy_after(tree, 4.0, before, after) == 30.0


def test_an_engine_that_is_listed_from_its_first_work_on_was_idle(tree: Tree) -> None:
    after = {"engine_compute": f"{3 * NS} ns"}
    assert busy_after(tree, 4.0, {}, after) == 75.0


def test_idle_is_nothing_and_not_unknown(tree: Tree) -> None:
    same = {"engine_gfx": "70 ns", "cycles_rcs": "7", "total_cycles_rcs": "70"}
    assert busy_after(tree, 4.0, same, same) == 0.0


@pytest.mark.parametrize("after", [{"engine_gfx": "1 ns"}, {}])
def test_a_counter_that_began_anew_says_nothing(tree: Tree, after: dict[str, str]) -> None:
    assert busy_after(tree, 4.0, {"engine_gfx": f"{5 * NS} ns"}, after) is None


def test_cycles_that_began_anew_say_nothing(tree: Tree) -> None:
    before = {"cycles_rcs": "900", "total_cycles_rcs": "1000"}
    for mine, whole in (("5", "2000"), ("950", "10"), ("950", "1000")):
        after = {"cycles_rcs": mine, "total_cycles_rcs": whole}
        assert busy_after(tree, 4.0, before, after) is None


def test_another_process_with_the_same_number_has_no_past(tree: Tree) -> None:
    """Its file of the card is another client."""
    process(tree.root, 40, {4: told(SLOT, 1, engine_gfx="5 ns")})
    first = look(tree)
    process(tree.root, 40, {4: told(SLOT, 2, engine_gfx=f"{90 * NS} ns")}, name="other")
    assert rate(tree, first, 4.0) is None


def test_the_same_client_number_of_another_card_is_another_client(tree: Tree) -> None:
    process(tree.root, 40, {4: told(SLOT, 1, engine_gfx="5 ns")})
    first = look(tree)
    process(tree.root, 40, {4: told(SECOND, 1, engine_gfx=f"{NS} ns")})
    assert rate(tree, first, 4.0) is None


def test_files_of_one_process_work_together_up_to_all_of_a_card(tree: Tree) -> None:
    def files(ns: int) -> dict[int, str]:
        return {number: told(SLOT, number, engine_gfx=f"{ns} ns") for number in (4, 5)}

    process(tree.root, 40, files(0))
    first = look(tree)
    process(tree.root, 40, files(NS))
    assert rate(tree, first, 8.0) == 25.0
    assert rate(tree, first, 1.0) == 100.0


def test_two_processes_have_their_own_rates(tree: Tree) -> None:
    def put(first_ns: int, second_ns: int) -> None:
        process(tree.root, 40, {4: told(SLOT, 1, engine_gfx=f"{first_ns} ns")})
        process(tree.root, 41, {4: told(SLOT, 2, engine_gfx=f"{second_ns} ns")})

    put(0, 0)
    first = look(tree)
    put(NS, 3 * NS)
    assert rate(tree, first, 4.0) == 25.0
    assert rate(tree, first, 4.0, pid=41) == 75.0


# -- anything


@given(st.lists(st.integers(0, 2**64), min_size=2, max_size=5), st.floats(0, 1e6), st.booleans())
def test_a_rate_is_unknown_or_between_none_and_all(
    tmp_path_factory: pytest.TempPathFactory, counters: list[int], apart_s: float, cycles: bool
) -> None:
    tree = Tree(tmp_path_factory.mktemp("machine")).intel(SLOT)
    previous: Scan | None = None
    for number, counter in enumerate(counters):
        values = {"cycles_rcs": counter, "total_cycles_rcs": counters[-1 - number]}
        text = told(SLOT, 1, **(values if cycles else {"engine_rcs": f"{counter} ns"}))
        process(tree.root, 40, {4: text})
        found = look(tree, previous, number * apart_s)
        rates = [holder.busy_percent for holder in found.holders]
        assert len(rates) == 1
        assert rates[0] is None or 0.0 <= rates[0] <= 100.0
        previous = found


def test_this_machine_is_scanned() -> None:
    gpu = Gpu(
        index=0, id="none", pool="", vendor="amd", arch=None, name="", pci_slot="ffff:ff:1f.7"
    )
    assert scan(Path("/"), [gpu]).holders == ()
