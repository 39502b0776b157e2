"""Names in the files that a distribution ships, against those of our tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexlab.gpus.hwdata import product_of
from flexlab.gpus.tables import card_for

HWDATA = "usr/share/hwdata/pci.ids"
MISC = "usr/share/misc/pci.ids"
NEW = "2099.01.01"
OLD = "2001.01.01"
NAVI_31 = "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]"


def pci_ids(root: Path, version: str | None, devices: dict[str, str], place: str = HWDATA) -> None:
    lines = [f"#\tVersion: {version}"] if version else []
    lines += ["0e11  Compaq", "\t744c  Not this one", "1002  AMD"]
    for device, name in devices.items():
        lines += [f"\t{device}  {name}", "\t\t1002 0e3b  A board of it"]
    lines += ["10de  NVIDIA", "\tfffe  G1 [Next vendor]", "C 03  Display controller"]
    file = root / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n")


def name(root: Path, device: str, revision: str | None = None) -> str | None:
    return card_for(root, "amd", f"1002:{device}", revision).name


def test_a_newer_file_names_a_card_and_leaves_its_facts(tmp_path: Path) -> None:
    pci_ids(tmp_path, NEW, {"738c": "Arcturus [Instinct MI100 Plus]"})
    known, card = (card_for(root, "amd", "1002:738c", None) for root in (tmp_path / "x", tmp_path))
    assert card == known._replace(name="Instinct MI100 Plus")


def test_an_older_file_does_not(tmp_path: Path) -> None:
    pci_ids(tmp_path, OLD, {"738c": "Arcturus [Instinct MI100 Plus]"})
    assert name(tmp_path, "738c") == "Instinct MI100"


def test_an_older_file_names_what_our_tables_do_not_have(tmp_path: Path) -> None:
    pci_ids(tmp_path, OLD, {"fffe": "Navi 99 [Radeon RX 1]"})
    assert name(tmp_path, "fffe") == "Radeon RX 1"


def test_the_newest_of_several_files_counts(tmp_path: Path) -> None:
    pci_ids(tmp_path, "2098.01.01", {"738c": "A [Older 1]"})
    pci_ids(tmp_path, NEW, {"738c": "A [Newer 2]"}, MISC)
    assert name(tmp_path, "738c") == "Newer 2"


@pytest.mark.parametrize(
    "line", [NAVI_31, "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M/7900X]"]
)
def test_a_list_of_products_does_not_replace_the_exact_one(tmp_path: Path, line: str) -> None:
    pci_ids(tmp_path, NEW, {"744c": line})
    assert name(tmp_path, "744c", "c8") == "Radeon RX 7900 XTX"


def test_a_newer_name_replaces_an_exact_one_that_it_contradicts(tmp_path: Path) -> None:
    pci_ids(tmp_path, NEW, {"744c": "Navi 31 [Radeon Superb 1]"})
    assert name(tmp_path, "744c", "c8") == "Radeon Superb 1"


def test_devices_of_other_vendors_are_not_taken(tmp_path: Path) -> None:
    pci_ids(tmp_path, NEW, {"7550": "Navi 48 [Radeon RX 1]"})
    assert name(tmp_path, "fffe") == "AMD GPU 1002:fffe"
    assert name(tmp_path, "738c") == "Instinct MI100"


def test_amdgpu_ids_names_revisions_that_our_tables_do_not_have(tmp_path: Path) -> None:
    file = tmp_path / "usr/share/libdrm/amdgpu.ids"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# List\n1.0.0\n744C,\tC8,\tAMD Other\n744C,\tA0,\tAMD Radeon RX 1\n7551,   A1,  AMD R 2\n"
    )
    assert name(tmp_path, "744c", "a0") == "Radeon RX 1"
    assert name(tmp_path, "7551", "a1") == "R 2"
    assert name(tmp_path, "744c", "c8") == "Radeon RX 7900 XTX"


@pytest.mark.parametrize("content", [b"", b"\0" * 4096, b"\xff" * 5000, b"# Version: 2099.01.01"])
def test_a_broken_file_changes_nothing(tmp_path: Path, content: bytes) -> None:
    for place in (HWDATA, "usr/share/libdrm/amdgpu.ids"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(content)
    assert name(tmp_path, "744c", "c8") == "Radeon RX 7900 XTX"
    assert name(tmp_path, "fffe", "00") == "AMD GPU 1002:fffe"


def test_a_folder_in_a_files_place_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / HWDATA).mkdir(parents=True)
    assert name(tmp_path, "744c", "c8") == "Radeon RX 7900 XTX"


def test_a_file_without_a_day_is_not_taken_for_a_newer_one(tmp_path: Path) -> None:
    pci_ids(tmp_path, None, {"738c": "A [Undated 1]"})
    assert name(tmp_path, "738c") == "Instinct MI100"


def test_escape_sequences_in_a_name_do_not_reach_the_terminal(tmp_path: Path) -> None:
    pci_ids(tmp_path, NEW, {"738c": "A [Radeon \x1b[31m1]"})
    assert name(tmp_path, "738c") == "Radeon 1"


@pytest.mark.parametrize(
    ("line", "product"),
    [
        ("GA102 [GeForce RTX 3090]", "GeForce RTX 3090"),
        ("Granite Ridge [Radeon Graphics]", "Radeon Graphics (Granite Ridge)"),
        ("VanGogh [AMD Custom GPU 0405]", "Custom GPU 0405"),
        ("Raphael", "Raphael"),
        ("RV380 [Radeon X550/X600] (Secondary)", "Radeon X550/X600"),
        ("[Odd]", "Odd"),
    ],
)
def test_the_product_in_a_line_of_pci_ids(line: str, product: str) -> None:
    assert product_of(line) == product
