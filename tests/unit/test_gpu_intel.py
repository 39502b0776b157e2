"""What is said of Intel's GPUs: what they are, how much memory they have, what they do."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from gpu_trees import GIB, MIB, Tree
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gpus import intel, intel_memory
from flexlab.gpus.bus import read_bus
from flexlab.gpus.source import Found, Source
from flexlab.spec.machine import Gpu

HWMON = "sys/class/drm/card1/device/hwmon/hwmon1"
ASLEEP = "sys/class/drm/card1/device/power/runtime_status"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


def find(tree: Tree) -> Found:
    return intel.find(tree.root, read_bus(tree.root))


def only(tree: Tree) -> Gpu:
    (gpu,) = find(tree).gpus
    return gpu


def source(tree: Tree) -> Source:
    (found,) = intel.sources(tree.root, [only(tree)])
    return found


def codes(gpu: Gpu) -> list[str]:
    return [problem.code for problem in gpu.problems]


# -- what it is


@pytest.mark.parametrize(
    ("device", "arch"), [(0x9A49, "xe-lp"), (0x56A5, "xe-hpg"), (0xE20B, "xe2"), (0x9B41, None)]
)
def test_the_architecture_is_said_where_it_has_a_name(
    tree: Tree, device: int, arch: str | None
) -> None:
    assert only(tree.intel(device=device)).arch == arch


def test_a_card_has_memory_of_its_own(tree: Tree) -> None:
    gpu = only(tree.intel(device=0xE20B))
    assert (gpu.is_apu, gpu.unified, gpu.vram_total_bytes) == (False, False, 12 * GIB)
    assert (gpu.usable, gpu.problems) == (True, ())


def test_an_integrated_gpu_has_none(tree: Tree) -> None:
    gpu = only(tree.intel("0000:00:02.0", 0x9A49))
    assert (gpu.is_apu, gpu.unified, gpu.vram_total_bytes) == (True, True, None)
    assert (gpu.usable, gpu.problems) == (True, ())


@pytest.mark.parametrize(
    ("slot", "integrated"),
    [("0000:00:02.0", True), ("0000:00:02.1", True), ("0000:03:00.0", False),
     ("0000:03:02.0", False), ("0001:02:00.0", False)],
)  # fmt: skip
def test_an_unknown_id_is_integrated_where_integrated_graphics_are(
    tree: Tree, slot: str, integrated: bool
) -> None:
    gpu = only(tree.intel(slot, 0xFEED))
    assert (gpu.is_apu, gpu.usable, gpu.arch) == (integrated, True, None)
    assert gpu.name == "Intel GPU 8086:feed"
    assert codes(gpu) == ([] if integrated else ["memory_unknown"])


def test_adapters_without_compute_are_a_finding(tree: Tree) -> None:
    """Old chipsets show a second function for a second monitor."""
    found = find(tree.pci("0000:00:02.0", 0x8086, 0x2A42).pci("0000:00:02.1", 0x8086, 0x2A43))
    assert found.gpus == []
    assert [finding.code for finding in found.findings] == ["not_compute", "not_compute"]


def test_what_the_board_shows_pictures_with_is_no_gpu(tree: Tree) -> None:
    tree.pci("0000:02:00.0", 0x1A03, 0x2000, driver="ast").intel()
    assert only(tree).pci_slot == "0000:0b:00.0"


# -- whether it can be used


@pytest.mark.parametrize(
    ("driver", "code"), [(None, "no_driver"), ("vfio-pci", "vfio"), ("snd_odd", "no_driver")]
)
def test_without_its_driver_it_is_seen_and_not_usable(
    tree: Tree, driver: str | None, code: str
) -> None:
    gpu = only(tree.pci("0000:03:00.0", 0x8086, 0x56A5, driver=driver))
    assert (gpu.usable, codes(gpu), gpu.driver) == (False, [code], driver)
    assert gpu.vram_total_bytes == 6 * GIB
    assert intel.sources(tree.root, [gpu]) == []


def test_a_sleeping_card_is_usable_and_says_so(tree: Tree) -> None:
    tree.intel().write(ASLEEP, "suspended")
    gpu = only(tree)
    assert (gpu.usable, gpu.asleep, codes(gpu)) == (True, True, ["asleep"])


# -- how much memory


@pytest.mark.parametrize("name", ["lmem_total_bytes", "prelim_lmem_total_bytes"])
def test_a_driver_that_tells_the_memory_in_sysfs_is_believed(tree: Tree, name: str) -> None:
    tree.intel(driver="i915").write(f"sys/class/drm/card1/{name}", 6064 * MIB)
    assert only(tree).vram_total_bytes == 6064 * MIB


def test_products_that_differ_in_memory_are_unknown(tree: Tree) -> None:
    gpu = only(tree.intel(device=0x56A0))  # Arc A770: 8 or 16 GiB
    assert (gpu.vram_total_bytes, codes(gpu)) == (None, ["memory_unknown"])


def test_another_root_is_never_asked_by_its_device_nodes(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a device node was opened")

    monkeypatch.setattr(intel_memory, "read_total", refuse)
    assert only(tree.intel().dev("/dev/dri/renderD128")).usable


SYSTEM, CARD = 0, 1
Region = tuple[int, int]
"""Class and bytes."""
REFUSED = -22


class Kernel:
    """Answers as xe or i915 do: first the size of the answer, then the answer itself."""

    def __init__(self, driver: str, regions: Sequence[Region], *, size: int | None = None) -> None:
        self.number = {"xe": 0xC0286440, "i915": 0xC0106479}[driver]
        self.ask: Callable[[int, int, bytearray], object] = getattr(self, f"_{driver}")
        header = struct.pack("=I4x" if driver == "xe" else "=I12x", len(regions))
        body = [struct.pack("=HHIQQQQ48x", kind, 0, 4096, n, 7, 7, 7) for kind, n in regions]
        self.answer = header + b"".join(body)
        self.size = len(self.answer) if size is None else size

    def _xe(self, _descriptor: int, number: int, question: bytearray) -> int:
        extensions, what, size, place, *rest = struct.unpack("=QIIQQQ", question)
        assert (number, extensions, what, rest) == (self.number, 0, 1, [0, 0])
        if size == 0:
            struct.pack_into("=I", question, 12, self.size)
            return 0
        if size != len(self.answer):
            raise OSError(22, "Invalid argument")
        write_at(place, self.answer)
        return 0

    def _i915(self, _descriptor: int, number: int, question: bytearray) -> int:
        questions, flags, items = struct.unpack("=IIQ", question)
        assert (number, questions, flags) == (self.number, 1, 0)
        what, size, flags, place = struct.unpack("=QiIQ", read_at(items, 24))
        assert (what, flags) == (4, 0)
        if size == 0:
            write_at(items + 8, struct.pack("=i", self.size))
        elif size != len(self.answer):
            write_at(items + 8, struct.pack("=i", REFUSED))
        else:
            write_at(place, self.answer)
        return 0


def write_at(place: int, content: bytes) -> None:
    ctypes.memmove(place, content, len(content))


def read_at(place: int, size: int) -> bytes:
    return ctypes.string_at(place, size)


@pytest.fixture
def node(tmp_path: Path) -> str:
    path = tmp_path / "renderD128"
    path.touch()
    return str(path)


@pytest.mark.parametrize("driver", ["xe", "i915"])
class TestAskingTheDriver:
    def test_a_card_says_its_memory(self, driver: str, node: str) -> None:
        kernel = Kernel(driver, [(SYSTEM, 64 * GIB), (CARD, 16 * GIB)])
        assert intel_memory.read_total(node, driver, kernel.ask) == 16 * GIB

    def test_all_tiles_of_a_card_count(self, driver: str, node: str) -> None:
        kernel = Kernel(driver, [(SYSTEM, 64 * GIB), (CARD, 64 * GIB), (CARD, 64 * GIB)])
        assert intel_memory.read_total(node, driver, kernel.ask) == 128 * GIB

    def test_the_systems_memory_is_not_the_cards(self, driver: str, node: str) -> None:
        kernel = Kernel(driver, [(SYSTEM, 64 * GIB)])
        assert intel_memory.read_total(node, driver, kernel.ask) is None

    @pytest.mark.parametrize("size", [0, 17, 2**31 - 1])
    def test_an_odd_size_is_no_answer(self, driver: str, node: str, size: int) -> None:
        kernel = Kernel(driver, [(CARD, 16 * GIB)], size=size)
        assert intel_memory.read_total(node, driver, kernel.ask) is None

    def test_another_drivers_node_is_no_answer(self, driver: str, node: str) -> None:
        def refuse(_descriptor: int, _number: int, _question: bytearray) -> int:
            raise OSError(25, "Inappropriate ioctl for device")

        assert intel_memory.read_total(node, driver, refuse) is None

    def test_a_file_in_the_place_of_a_node_is_no_answer(self, driver: str, node: str) -> None:
        assert intel_memory.read_total(node, driver) is None

    def test_a_node_that_is_gone_is_no_answer(self, driver: str, tmp_path: Path) -> None:
        assert intel_memory.read_total(str(tmp_path / "gone"), driver) is None


def test_a_refused_answer_of_i915_is_none(node: str) -> None:
    """It stands in the length of the answer, while the call itself succeeds."""
    kernel = Kernel("i915", [(CARD, 16 * GIB)])
    kernel.size = REFUSED
    assert intel_memory.read_total(node, "i915", kernel.ask) is None


@given(st.binary(max_size=400), st.sampled_from(["xe", "i915"]))
def test_no_answer_can_be_read_beyond_its_end(answer: bytes, driver: str) -> None:
    total = intel_memory.total_of(answer, driver)
    assert total is None or total > 0


# -- what it does


def test_temperatures_have_the_names_of_their_sensors(tree: Tree) -> None:
    tree.intel().write(f"{HWMON}/temp3_input", 56000)
    tree.write(f"{HWMON}/temp3_label", "vram")
    numbers = source(tree).read().numbers
    assert (numbers["temp_pkg_c"], numbers["temp_vram_c"]) == (54.0, 56.0)


def test_a_sensor_without_a_name_has_its_number(tree: Tree) -> None:
    tree.intel(driver="i915").write(f"{HWMON}/temp1_input", 55000)
    assert source(tree).read().numbers["temp_temp1_c"] == 55.0


@pytest.mark.parametrize("name", ["gt_act_freq_mhz", "device/tile0/gt0/freq0/act_freq"])
def test_both_drivers_tell_the_clock(tree: Tree, name: str) -> None:
    tree.intel().write(f"sys/class/drm/card1/{name}", 2450)
    assert source(tree).read().numbers["clock_core_mhz"] == 2450


def test_sysfs_says_neither_load_nor_memory(tree: Tree) -> None:
    numbers = source(tree.intel()).read().numbers
    assert not {"busy_percent", "vram_used_bytes", "vram_total_bytes"} & set(numbers)


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def timed(tree: Tree, clock: Clock) -> Source:
    folder = tree.root / "sys/class/drm/card1"
    return intel.IntelSource("0000:0b:00.0", folder, "xe", clock=clock)


def watts(tree: Tree, one: Source, **counters_uj: int) -> float | None:
    for name, micro_j in counters_uj.items():
        tree.write(f"{HWMON}/{name}_input", micro_j)
    return one.read().numbers.get("power_w")


def test_power_is_the_energy_between_two_readings(tree: Tree, clock: Clock) -> None:
    one = timed(tree.intel(), clock)
    assert watts(tree, one, energy1=5_000_000) is None
    clock.now_s += 2
    assert watts(tree, one, energy1=105_000_000) == pytest.approx(50.0)


def test_a_counter_that_stands_still_leaves_it_to_the_next(tree: Tree, clock: Clock) -> None:
    for still in (0, 9_000_000):
        one = timed(tree.intel(), clock)
        assert watts(tree, one, energy1=still, energy2=1_000_000) is None
        clock.now_s += 1
        assert watts(tree, one, energy1=still, energy2=31_000_000) == pytest.approx(30.0)


def test_a_counter_that_went_backwards_says_nothing_once(tree: Tree, clock: Clock) -> None:
    one = timed(tree.intel(), clock)
    watts(tree, one, energy2=2**32 - 1)
    clock.now_s += 1
    assert watts(tree, one, energy2=1_000_000) is None
    clock.now_s += 1
    assert watts(tree, one, energy2=21_000_000) == pytest.approx(20.0)


def test_power_that_is_told_goes_before_the_counter(tree: Tree, clock: Clock) -> None:
    tree.intel().write(f"{HWMON}/power1_input", 44_000_000)
    one = timed(tree, clock)
    watts(tree, one, energy2=1)
    clock.now_s += 1
    assert watts(tree, one, energy2=10_000_000) == 44.0


def test_a_sleeping_card_is_left_alone_and_its_sleep_counts_in_no_rate(
    tree: Tree, clock: Clock
) -> None:
    one = timed(tree.intel(), clock)
    watts(tree, one, energy2=1_000_000)
    tree.write(ASLEEP, "suspended")
    clock.now_s += 600
    asleep = one.read()
    assert (asleep.asleep, asleep.numbers) == (True, {})
    tree.write(ASLEEP, "active")
    assert watts(tree, one, energy2=2_000_000) is None
    clock.now_s += 1
    assert watts(tree, one, energy2=12_000_000) == pytest.approx(10.0)


def test_a_card_that_was_reset_is_read_by_its_new_sensors(tree: Tree) -> None:
    one = source(tree.intel())
    one.read()
    (tree.root / HWMON).rename(tree.root / HWMON.replace("hwmon1", "hwmon7"))
    assert one.read().numbers["temp_pkg_c"] == 54.0


def test_a_card_without_sensors_is_read_all_the_same(tree: Tree) -> None:
    tree.intel("0000:00:02.0", 0x9A49, card=0)
    one = source(tree)
    assert one.gpu_id == "0000:00:02.0"
    assert one.read().asleep is False
