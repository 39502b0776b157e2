"""An AMD card's readings while files fail, while it sleeps, and what its metrics table says."""

from __future__ import annotations

import errno
import os
import struct
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from gpu_trees import Tree
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gpus import amd
from flexlab.gpus.amd_readings import AmdSource, is_asleep, throttling
from flexlab.gpus.bus import read_bus

DEVICE = "sys/class/drm/card0/device"
SENSORS = f"{DEVICE}/hwmon/hwmon0"
WORDS = {"power", "current", "thermal", "other"}


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


def source(tree: Tree) -> AmdSource:
    return AmdSource("0000:03:00.0", tree.root / DEVICE, own_memory=True)


class Opened:
    """What was opened, and whose opening fails with which error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self.failing: dict[str, int] = {}
        self._open = os.open
        monkeypatch.setattr("flexlab.gpus.files.os.open", self)

    def __call__(self, path: Any, *rest: Any, **more: Any) -> int:
        name = Path(path).name
        self.names.append(name)
        if code := self.failing.get(name):
            raise OSError(code, os.strerror(code))
        return self._open(path, *rest, **more)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    return Opened(monkeypatch)


# -- a card that sleeps


def is_sensor(name: str) -> bool:
    """What asks the chip or its firmware, and so wakes it."""
    return name.endswith(("_input", "_average", "busy_percent", "_used")) or name in (
        "gpu_metrics", "pwm1", "power1_cap",
    )  # fmt: skip


def sleeping(tree: Tree) -> Tree:
    tree.amd().write(f"{DEVICE}/gpu_metrics", b"\0" * 120)
    tree.write(f"{DEVICE}/power/runtime_status", "suspended")
    return tree


def test_a_sleeping_card_is_found_without_its_sensors(tree: Tree, opened: Opened) -> None:
    (gpu,) = amd.find(sleeping(tree).root, read_bus(tree.root)).gpus
    assert gpu.asleep
    assert not [name for name in opened.names if is_sensor(name)]


def test_a_sleeping_card_is_asked_one_thing(tree: Tree, opened: Opened) -> None:
    asked = source(sleeping(tree))
    opened.names.clear()
    reading = asked.read()
    assert (reading.asleep, reading.numbers, reading.throttle) == (True, {}, ())
    assert opened.names == ["runtime_status"]


def test_a_card_that_fell_asleep_is_left_alone(tree: Tree, opened: Opened) -> None:
    asked = source(tree.amd())
    asked.read()
    assert [name for name in opened.names if is_sensor(name)]
    sleeping(tree)
    opened.names.clear()
    asked.read()
    assert opened.names == ["runtime_status"]


@pytest.mark.parametrize(
    ("status", "asleep"),
    [
        ("suspended", True),
        ("suspended\0\0", True),
        ("active", False),
        ("unsupported", False),  # a desktop card that never sleeps
        ("", False),
        (None, False),
    ],
)
def test_only_a_card_that_says_so_sleeps(tree: Tree, status: str | None, asleep: bool) -> None:
    if status is not None:
        tree.write("power/runtime_status", status)
    assert is_asleep(tree.root) is asleep


# -- readings that fail


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EOPNOTSUPP, errno.EPERM, errno.ENODEV])
@pytest.mark.parametrize(
    ("file", "reading"),
    [
        ("gpu_busy_percent", "busy_percent"),
        ("mem_info_vram_used", "vram_used_bytes"),
        ("mem_info_gtt_total", "gtt_total_bytes"),
        ("temp1_input", "temp_edge_c"),
        ("power1_average", "power_w"),
        ("fan1_input", "fan_rpm"),
    ],
)
def test_a_file_that_fails_costs_its_own_reading(
    tree: Tree, opened: Opened, file: str, reading: str, code: int
) -> None:
    asked = source(tree.amd())
    before = asked.read().numbers
    opened.failing[file] = code
    assert asked.read().numbers == {name: v for name, v in before.items() if name != reading}
    opened.failing.clear()
    assert asked.read().numbers == before


def test_a_card_that_is_gone_says_nothing(tree: Tree) -> None:
    assert source(tree).read().numbers == {}


def test_sensors_that_come_late_are_found(tree: Tree) -> None:
    tree.write(f"{DEVICE}/gpu_busy_percent", 7)
    asked = source(tree)
    assert asked.read().numbers == {"busy_percent": 7}
    tree.write(f"{SENSORS}/name", "amdgpu")
    tree.write(f"{SENSORS}/power1_average", 30_000_000)
    assert asked.read().numbers == {"busy_percent": 7, "power_w": 30.0}


@pytest.mark.parametrize(("told", "busy"), [(0, 0), (100, 100), (101, None), (65535, None)])
def test_a_load_above_100_percent_is_not_known(tree: Tree, told: int, busy: int | None) -> None:
    tree.write(f"{DEVICE}/gpu_busy_percent", told).with_name("mem_busy_percent").write_text(
        f"{told}\n"
    )
    numbers = source(tree).read().numbers
    assert numbers.get("busy_percent") == busy
    assert numbers.get("memory_busy_percent") == busy


# -- why it is slow


def metrics_v1_3(bits: int) -> bytes:
    """struct gpu_metrics_v1_3 of the kernel's kgd_pp_interface.h, field by field."""
    fields = struct.Struct(
        "<HBB"  # common header
        "6H"  # temperatures: edge, hotspot, mem, vrgfx, vrsoc, vrmem
        "3H"  # average activity: gfx, umc, mm
        "H"  # average socket power
        "2Q"  # energy accumulator, system clock counter
        "7H7H"  # average and current clocks
        "I"  # throttle_status, whose bits differ by chip
        "4H"  # fan speed, PCIe width and speed, padding
        "2I"  # activity accumulators
        "4H"  # HBM temperatures
        "Q"  # firmware timestamp
        "3HH"  # voltages, padding
        "Q"  # indep_throttle_status
    )
    assert fields.size == 120
    before = [45] * 10 + [1, 2] + [500] * 14 + [0xFFFF_FFFF] + [0xFFFF] * 4 + [7] * 2 + [50] * 4
    return fields.pack(fields.size, 1, 3, *before, 9, *[800] * 3, 0, bits)


def reasons(tmp_path: Path, table: bytes) -> tuple[str, ...]:
    path = tmp_path / "gpu_metrics"
    path.write_bytes(table)
    return throttling(path)


def bits_of(numbers: Iterable[int]) -> int:
    return sum(1 << number for number in numbers)


@pytest.mark.parametrize(
    ("bits", "word"),
    [
        (range(8), "power"),  # PPT0 … SPPT_APU
        (range(16, 24), "current"),  # TDC_GFX … APCC
        (range(32, 48), "thermal"),  # TEMP_GPU … PROCHOT_GFX
        (range(56, 58), "other"),  # PPM, FIT
    ],
)
def test_every_bit_of_a_group_is_its_word(tmp_path: Path, bits: range, word: str) -> None:
    for bit in bits:
        assert reasons(tmp_path, metrics_v1_3(1 << bit)) == (word,)
    assert reasons(tmp_path, metrics_v1_3(bits_of(bits))) == (word,)


def test_several_reasons_are_all_said(tmp_path: Path) -> None:
    assert set(reasons(tmp_path, metrics_v1_3(bits_of([1, 17, 36, 57])))) == WORDS


def test_a_card_at_full_speed_has_no_reason(tmp_path: Path) -> None:
    assert reasons(tmp_path, metrics_v1_3(0)) == ()


def test_a_table_that_is_cut_short_gives_no_reason(tmp_path: Path) -> None:
    whole = metrics_v1_3(1)
    for length in range(len(whole)):
        assert reasons(tmp_path, whole[:length]) == ()


@pytest.mark.parametrize("form", [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 0), (255, 255)])
def test_a_table_of_another_form_is_not_read_as_this_one(
    tmp_path: Path, form: tuple[int, int]
) -> None:
    table = bytearray(metrics_v1_3(1))
    table[2:4] = bytes(form)
    assert reasons(tmp_path, bytes(table)) == ()


def test_a_table_in_a_padded_file_is_read(tmp_path: Path) -> None:
    assert reasons(tmp_path, metrics_v1_3(1).ljust(4096, b"\0")) == ("power",)


def test_no_table_is_no_reason(tmp_path: Path) -> None:
    assert throttling(tmp_path / "gpu_metrics") == ()


@given(st.integers(0, 2**64 - 1), st.integers(0, 140), st.binary(max_size=40))
def test_no_bytes_raise(bits: int, kept: int, more: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = metrics_v1_3(bits)[:kept] + more
        found = reasons(Path(folder), table)
    assert set(found) <= WORDS
    assert len(found) == len(set(found))
