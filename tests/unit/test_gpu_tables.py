"""What a PCI id or a product name says about a card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flexlab.gpus.tables as tables
from flexlab.core.units import GIB
from flexlab.gpus.tables import UNKNOWN, card_for, is_integrated_nvidia, nvidia_card_by_name
from flexlab.spec.machine import Vendor

NOWHERE = Path("/nonexistent")
DATA = Path(tables.__file__).parent / "data"
ARCH = {
    "amd": r"gfx[0-9]{1,2}[0-9a-f]{2}",
    "nvidia": r"sm_[0-9]{2,3}",
    "intel": r"xe-lp|xe-hpg|xe2",
}


def rows(vendor: str) -> list[list[str]]:
    lines = (DATA / f"{vendor}.tsv").read_text().splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


@pytest.mark.parametrize("vendor", ARCH)
def test_every_row_is_well_formed_and_stands_once(vendor: str) -> None:
    found = rows(vendor)
    for row in found:
        device, revision, arch, mib, kind, name = row
        assert re.fullmatch("[0-9a-f]{4}", device), row
        assert re.fullmatch("-|[0-9a-f]{2}", revision), row
        assert re.fullmatch(f"-|{ARCH[vendor]}", arch), row
        assert re.fullmatch(r"-|[1-9][0-9]*\??", mib), row
        assert kind in ("apu", "dgpu", "display"), row
        assert name == name.strip() != "", row
        assert kind != "display" or (arch, mib) == ("-", "-"), row
        assert not mib.endswith("?") or revision == "-", row
    places = [(row[0], row[1]) for row in found]
    assert len(set(places)) == len(places)
    # Revisions say more about a device that the table has.
    assert {row[0] for row in found} == {row[0] for row in found if row[1] == "-"}


@pytest.mark.parametrize("vendor", [*ARCH, "nvidia-names"])
def test_every_table_names_its_sources_and_their_day(vendor: str) -> None:
    head = (DATA / f"{vendor}.tsv").read_text().splitlines()[0]
    assert re.match(r"# pci\.ids: 20[0-9]{2}\.[0-9]{2}\.[0-9]{2}", head)


@pytest.mark.parametrize(
    ("vendor", "pci_id", "revision", "arch", "gib", "model"),
    [
        ("amd", "1002:744c", "c8", "gfx1100", 24, "7900 XTX"),
        ("amd", "1002:744c", "cc", "gfx1100", 20, "7900 XT"),
        ("amd", "1002:66af", "c1", "gfx906", 16, "VII"),
        ("amd", "1002:7550", "c2", "gfx1201", 12, "9070 GRE"),
        ("amd", "1002:738c", "01", "gfx908", 32, "MI100"),
        ("amd", "1002:75a0", "00", "gfx950", 288, "MI350X"),
        ("nvidia", "10de:17c8", "a1", "sm_52", 6, "980 Ti"),
        ("nvidia", "10de:15f8", None, "sm_60", 16, "P100"),
        ("nvidia", "10de:1b38", None, "sm_61", 24, "P40"),
        ("nvidia", "10de:20b2", "a1", "sm_80", 80, "A100"),
        ("nvidia", "10de:2204", "a1", "sm_86", 24, "3090"),
        ("nvidia", "10de:2684", "a1", "sm_89", 24, "4090"),
        ("nvidia", "10de:3182", None, "sm_103", None, "B300"),
        ("nvidia", "10de:2b85", "a1", "sm_120", 32, "5090"),
        ("intel", "8086:56a5", "05", "xe-hpg", 6, "A380"),
        ("intel", "8086:e20b", "00", "xe2", 12, "B580"),
    ],
)
def test_a_discrete_card(
    vendor: Vendor, pci_id: str, revision: str | None, arch: str, gib: int | None, model: str
) -> None:
    card = card_for(NOWHERE, vendor, pci_id, revision)
    assert (card.arch, card.is_apu, card.compute) == (arch, False, True)
    assert card.vram_bytes == (None if gib is None else gib * GIB)
    assert not card.vram_assumed
    assert model in (card.name or "")


@pytest.mark.parametrize(
    ("vendor", "pci_id", "arch"),
    [
        ("amd", "1002:9874", "gfx801"),
        ("amd", "1002:15dd", "gfx902"),
        ("amd", "1002:15d8", "gfx902"),
        ("amd", "1002:1636", "gfx90c"),
        ("amd", "1002:164c", "gfx90c"),
        ("amd", "1002:1638", "gfx90c"),
        ("amd", "1002:15e7", "gfx90c"),
        ("amd", "1002:163f", "gfx1033"),
        ("amd", "1002:1681", "gfx1035"),
        ("amd", "1002:164e", "gfx1036"),
        ("amd", "1002:13c0", "gfx1036"),
        ("amd", "1002:1506", "gfx1036"),
        ("amd", "1002:15bf", "gfx1103"),
        ("amd", "1002:1900", "gfx1103"),
        ("amd", "1002:150e", "gfx1150"),
        ("amd", "1002:1586", "gfx1151"),
        ("amd", "1002:1114", "gfx1152"),
        ("amd", "1002:1902", "gfx1153"),
        ("nvidia", "10de:2e12", "sm_121"),
        ("nvidia", "10de:2b00", "sm_110"),
        ("intel", "8086:9a49", "xe-lp"),
        ("intel", "8086:64a0", "xe2"),
        ("intel", "8086:9b41", None),
        ("intel", "8086:7d55", None),
    ],
)
def test_a_gpu_that_shares_its_memory_with_the_processor(
    vendor: Vendor, pci_id: str, arch: str | None
) -> None:
    card = card_for(NOWHERE, vendor, pci_id, None)
    assert (card.arch, card.is_apu, card.compute) == (arch, True, True)


@pytest.mark.parametrize(
    ("vendor", "pci_id"),
    [("amd", "1002:6758"), ("nvidia", "10de:0dc4"), ("intel", "8086:0102"), ("amd", "1002:9901")],
)
def test_a_display_adapter_without_compute(vendor: Vendor, pci_id: str) -> None:
    card = card_for(NOWHERE, vendor, pci_id, "00")
    assert not card.compute
    assert card.arch is None


@pytest.mark.parametrize("pci_id", ["1002:6617", "1002:6818", "1002:665c", "1002:98e4"])
def test_a_chip_that_rocm_never_drove_has_no_arch_but_computes(pci_id: str) -> None:
    card = card_for(NOWHERE, "amd", pci_id, "00")
    assert card.arch is None
    assert card.compute


def test_memory_that_differs_between_products_of_one_id_is_marked_without_a_revision() -> None:
    assert card_for(NOWHERE, "amd", "1002:744c", None).vram_assumed
    assert not card_for(NOWHERE, "amd", "1002:73bf", None).vram_assumed  # 16 GiB, all of them
    assert card_for(NOWHERE, "amd", "1002:67df", "e7").vram_bytes is None  # sold with 4 and 8 GiB


@pytest.mark.parametrize("revision", ["C8", " c8\n"])
def test_a_revision_is_read_as_the_kernel_or_a_tool_prints_it(revision: str) -> None:
    wanted = card_for(NOWHERE, "amd", "1002:744c", "c8")
    assert card_for(NOWHERE, "amd", "1002:744C", revision) == wanted


@pytest.mark.parametrize(
    ("vendor", "pci_id", "name"),
    [
        ("amd", "1002:ffff", "AMD GPU 1002:ffff"),
        ("nvidia", "10de:ffff", "NVIDIA GPU 10de:ffff"),
        ("intel", "8086:ffff", "Intel GPU 8086:ffff"),
        ("amd", None, "AMD GPU"),
        ("amd", "10de:2204", "AMD GPU"),
    ],
)
def test_an_unknown_card_is_still_a_usable_gpu(
    vendor: Vendor, pci_id: str | None, name: str
) -> None:
    assert card_for(NOWHERE, vendor, pci_id, "c8") == UNKNOWN._replace(name=name)


IDS = st.none() | st.text() | st.from_regex(r"1002:[0-9a-fA-F]{0,5}", fullmatch=True)


@given(st.sampled_from(sorted(ARCH)), IDS, st.none() | st.text(max_size=4))
def test_no_id_and_no_revision_raises(
    vendor: Vendor, pci_id: str | None, revision: str | None
) -> None:
    card = card_for(NOWHERE, vendor, pci_id, revision)
    assert card.name
    assert card.vram_bytes != 0


@pytest.mark.parametrize(
    ("name", "arch", "gib"),
    [
        ("NVIDIA GeForce RTX 3090", "sm_86", 24),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "sm_89", 16),
        ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", "sm_86", None),
        ("GeForce GTX 1070 Ti", "sm_61", 8),
        ("GeForce GTX 1060 6GB", "sm_61", 6),
        ("NVIDIA GeForce GTX 1650 with Max-Q Design", "sm_75", None),
        ("NVIDIA GeForce RTX 3080", "sm_86", None),  # 10 and 12 GiB
        ("Tesla T4", "sm_75", 16),
        ("Tesla P100-PCIE-16GB", "sm_60", 16),
        ("Quadro P2000", "sm_61", 5),
        ("Quadro RTX 8000", "sm_75", None),
        ("NVIDIA A10G", "sm_86", 24),
        ("NVIDIA A100-SXM4-80GB", "sm_80", 80),
        ("NVIDIA A100 80GB PCIe", "sm_80", 80),
        ("NVIDIA H100 80GB HBM3", "sm_90", 80),
        ("NVIDIA RTX 6000 Ada Generation", "sm_89", 48),
        ("NVIDIA RTX A6000", "sm_86", 48),
        ("NVIDIA GB10", "sm_121", None),
        ("Orin (nvgpu)", "sm_87", None),
        ("GeForce GTX 860M", None, None),  # Kepler or Maxwell
    ],
)
def test_a_card_by_the_name_that_its_driver_gives(
    name: str, arch: str | None, gib: int | None
) -> None:
    card = nvidia_card_by_name(name)
    assert (card.arch, card.vram_bytes) == (arch, None if gib is None else gib * GIB)


def test_products_of_similar_names_are_told_apart() -> None:
    sizes = {
        name: nvidia_card_by_name(f"NVIDIA GeForce RTX {name}").vram_bytes
        for name in ("4070", "4070 Ti", "4070 Ti SUPER", "4070 Laptop GPU")
    }
    assert sizes == {
        "4070": 12 * GIB,
        "4070 Ti": 12 * GIB,
        "4070 Ti SUPER": 16 * GIB,
        "4070 Laptop GPU": 8 * GIB,
    }


@pytest.mark.parametrize(
    "name", ["", "  ", "NVIDIA", "Graphics Device", "GeForce RTX 3080 Foo", "RTX", "\t\n-", "# pci"]
)
def test_a_name_of_no_product_is_unknown(name: str) -> None:
    assert nvidia_card_by_name(name) == UNKNOWN


@given(st.text())
def test_no_name_raises(name: str) -> None:
    nvidia_card_by_name(name)
    is_integrated_nvidia(name, name)


@pytest.mark.parametrize(
    ("name", "pci_id", "integrated"),
    [
        ("NVIDIA GB10", None, True),
        ("NVIDIA GB10", "10de:2e12", True),
        ("Graphics Device", "10de:2e12", True),
        ("Orin (nvgpu)", None, True),
        ("NVIDIA Thor", None, True),
        ("Xavier (nvgpu)", None, True),
        ("NVIDIA GeForce RTX 3090", None, False),
        ("NVIDIA GB10", "10de:2204", False),
        ("Graphics Device", None, False),
    ],
)
def test_only_known_products_are_integrated(
    name: str, pci_id: str | None, integrated: bool
) -> None:
    assert is_integrated_nvidia(name, pci_id) is integrated
