"""A card's sensors: each counts where it is fitted, and says nothing where it is not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from gpu_trees import Tree

from flexlab.gpus import hwmon


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A card's device folder."""
    return Tree(tmp_path / "device")


def sensors(
    tree: Tree, folder: str = "hwmon3", *, name: str | None = "amdgpu", **files: Any
) -> Tree:
    for file, value in ({"name": name} | files).items():
        if value is not None:
            tree.write(f"hwmon/{folder}/{file}", value)
    return tree


def values(tree: Tree) -> dict[str, float]:
    found = hwmon.find(tree.root, "amdgpu")
    assert found is not None
    return hwmon.read(found)


def test_temperatures_have_the_names_of_their_labels(tree: Tree) -> None:
    sensors(
        tree, temp1_input=53000, temp1_label="edge", temp2_input=61500, temp2_label="junction",
        temp3_input=70000, temp3_label="mem",
    )  # fmt: skip
    assert values(tree) == {"temp_edge_c": 53.0, "temp_junction_c": 61.5, "temp_mem_c": 70.0}


def test_a_temperature_without_a_label_has_its_sensors_name(tree: Tree) -> None:
    assert values(sensors(tree, temp1_input=41000)) == {"temp_temp1_c": 41.0}


def test_limits_of_a_sensor_are_no_readings(tree: Tree) -> None:
    sensors(tree, temp1_label="edge", temp1_crit=100000, temp1_emergency=105000, temp1_crit_hyst=0)
    assert values(tree) == {}


def test_zero_degrees_is_an_empty_place(tree: Tree) -> None:
    """RX 5500 XT: the memory's sensor is listed and reads 0."""
    sensors(tree, temp1_input=45000, temp1_label="edge", temp3_input=0, temp3_label="mem")
    assert values(tree) == {"temp_edge_c": 45.0}


@pytest.mark.parametrize(
    ("files", "watts"),
    [
        ({"power1_average": 68_000_000, "power1_input": 90_000_000}, 68.0),
        ({"power1_input": 90_500_000}, 90.5),
        ({"power1_average": b"", "power1_input": 90_000_000}, 90.0),
        ({"power1_average": "N/A", "power1_input": 90_000_000}, 90.0),
        ({"power1_label": "PPT"}, None),  # GCN 1: a label and no value
        ({"power1_average": b"\0" * 16}, None),
    ],
)
def test_the_average_power_comes_before_the_momentary(
    tree: Tree, files: dict[str, Any], watts: float | None
) -> None:
    assert values(sensors(tree, **files)).get("power_w") == watts


def test_the_other_power_is_read_while_the_average_fails(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensors(tree, power1_average=68_000_000, power1_input=90_000_000)
    found = hwmon.find(tree.root, "amdgpu")
    assert found is not None
    open_file = os.open

    def busy(path: Any, *rest: Any, **more: Any) -> int:
        if os.fspath(path).endswith("power1_average"):
            raise OSError("busy")
        return open_file(path, *rest, **more)

    monkeypatch.setattr("flexlab.gpus.files.os.open", busy)
    assert hwmon.read(found) == {"power_w": 90.0}


@pytest.mark.parametrize(("cap", "watts"), [(300_000_000, 300.0), (0, None), ("", None)])
def test_a_power_limit_of_nothing_is_unknown(tree: Tree, cap: object, watts: float | None) -> None:
    assert values(sensors(tree, power1_cap=cap)).get("power_limit_w") == watts


def test_a_fan_that_stands_still_is_a_reading(tree: Tree) -> None:
    assert values(sensors(tree, fan1_input=0, pwm1=0)) == {"fan_rpm": 0, "fan_percent": 0.0}


@pytest.mark.parametrize(("duty", "percent"), [(255, 100.0), (51, 20.0), (256, None), (-1, None)])
def test_a_fans_duty_is_a_share_of_255(tree: Tree, duty: int, percent: float | None) -> None:
    assert values(sensors(tree, pwm1=duty)).get("fan_percent") == percent


def test_clocks_are_told_by_their_labels(tree: Tree) -> None:
    sensors(
        tree, freq1_input=2_219_000_000, freq1_label="sclk", freq2_input=96_000_000,
        freq2_label="mclk", freq3_input=1, freq3_label="other", freq4_input=2,
    )  # fmt: skip
    assert values(tree) == {"clock_core_mhz": 2219.0, "clock_memory_mhz": 96.0}


def test_the_folder_is_told_by_its_name_and_not_its_number(tree: Tree) -> None:
    sensors(tree, "hwmon0", name="fancontroller", temp1_input=20000)
    sensors(tree, "hwmon7", temp1_input=53000, temp1_label="edge")
    assert values(tree) == {"temp_edge_c": 53.0}


def test_a_folder_without_a_name_counts_where_it_is_the_only_one(tree: Tree) -> None:
    sensors(tree, "hwmon1", name=None, temp1_input=53000)
    assert values(tree) == {"temp_temp1_c": 53.0}
    sensors(tree, "hwmon2", name=None, temp1_input=20000)
    assert hwmon.find(tree.root, "amdgpu") is None


def test_anothers_sensors_are_not_the_cards(tree: Tree) -> None:
    assert hwmon.find(sensors(tree, name="nct6775", temp1_input=20000).root, "amdgpu") is None


def test_no_sensors_is_an_answer(tree: Tree) -> None:
    assert hwmon.find(tree.root, "amdgpu") is None


def test_nul_padding_is_no_content(tree: Tree) -> None:
    sensors(tree, name="amdgpu", temp1_input=53000, temp1_label="edge", power1_average=1_000_000)
    before = values(tree)
    for path in tree.root.rglob("hwmon3/*"):
        path.write_bytes(path.read_bytes().ljust(4096, b"\0"))
    assert values(tree) == before == {"temp_edge_c": 53.0, "power_w": 1.0}
