"""The KFD topology as ROCm sees it, on trees that older, newer and stricter kernels show."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from gpu_trees import GIB, Tree
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gpus import kfd

NODES = "sys/class/kfd/kfd/topology/nodes"


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "machine")


def properties(tree: Tree, node: int, **values: object) -> Tree:
    """A GPU node with just these lines (and that it has SIMDs)."""
    lines = {"simd_count": 192, **values}
    tree.write(f"{NODES}/{node}/properties", "\n".join(f"{k} {v}" for k, v in lines.items()))
    return tree


def bank(tree: Tree, node: int, number: int, **values: object) -> Tree:
    lines = "\n".join(f"{k} {v}" for k, v in values.items())
    tree.write(f"{NODES}/{node}/mem_banks/{number}/properties", lines)
    return tree


def only(tree: Tree) -> kfd.Node:
    (node,) = kfd.read_nodes(tree.root)
    return node


def test_nodes_come_in_the_order_of_their_numbers(tree: Tree) -> None:
    for number in (10, 9, 2, 33, 1):
        tree.kfd(f"0000:{number:02x}:00.0", 0x74A2, node=number, gfx=90402)
    nodes = kfd.read_nodes(tree.root)
    assert [node.number for node in nodes] == [1, 2, 9, 10, 33]
    assert [node.hip_index for node in nodes] == [0, 1, 2, 3, 4]


def test_what_is_no_number_is_no_node(tree: Tree) -> None:
    for name in ("power", "-1", "1a", "²"):  # ² is a digit to isdigit(), not to int()
        tree.write(f"{NODES}/{name}/properties", "simd_count 8")
    assert kfd.read_nodes(tree.root) == []


def test_a_node_of_cores_alone_is_no_gpu_and_takes_no_index(tree: Tree) -> None:
    tree.kfd_cpu(0).kfd_cpu(1).kfd("0000:63:00.0", 0x740F, node=2, gfx=90010)
    assert (only(tree).number, only(tree).hip_index) == (2, 0)


def test_cores_in_a_gpus_node_do_not_hide_it(tree: Tree) -> None:
    """Carrizo shows one node with four cores and 32 SIMDs."""
    tree.kfd("0000:00:01.0", 0x9874, node=0, gfx=None, simds=32, cpu_cores=4)
    assert (only(tree).has_cpu, only(tree).cu_count) == (True, 8)


def test_another_makers_node_is_not_ours(tree: Tree) -> None:
    properties(tree, 1, vendor_id=0x10DE)
    properties(tree, 2, vendor_id=0x1002)
    assert only(tree).number == 2


@pytest.mark.parametrize(
    ("version", "name"),
    [(90010, "gfx90a"), (90012, "gfx90c"), (90402, "gfx942"), (110501, "gfx1151")],
)
def test_steppings_are_hexadecimal(tree: Tree, version: int, name: str) -> None:
    assert only(properties(tree, 1, gfx_target_version=version)).arch == name


def test_the_target_version_is_a_line_and_not_a_file(tree: Tree) -> None:
    """A file of that name says nothing (ROCm/rocm-cli#343)."""
    properties(tree, 1, gfx_target_version=90402).write(f"{NODES}/1/gfx_target_version", 90403)
    assert only(tree).arch == "gfx942"


@pytest.mark.parametrize("value", [0, 999, 90099, "gfx906", "", -1])
def test_a_target_version_of_nothing_is_unknown(tree: Tree, value: object) -> None:
    assert only(properties(tree, 1, gfx_target_version=value)).arch is None


@pytest.mark.parametrize(
    ("simds", "per_unit", "version", "units"),
    [
        (240, 4, 90006, 60),  # Radeon VII: 64 are on the die
        (56, 2, 110002, 28),  # W7500: 32 are on the die
    ],
)
def test_compute_units_that_are_fused_off_do_not_count(
    tree: Tree, simds: int, per_unit: int, version: int, units: int
) -> None:
    properties(
        tree, 1, simd_count=simds, simd_per_cu=per_unit, gfx_target_version=version,
        array_count=4, cu_per_simd_array=16,
    )  # fmt: skip
    assert only(tree).cu_count == units


@pytest.mark.parametrize("lines", [{}, {"simd_per_cu": 0}, {"simd_per_cu": "x"}])
def test_compute_units_are_not_guessed_where_generations_differ(
    tree: Tree, lines: dict[str, Any]
) -> None:
    properties(tree, 1, simd_count=192, gfx_target_version=110000, **lines)
    properties(tree, 2, simd_count=256, gfx_target_version=90000, **lines)
    assert [node.cu_count for node in kfd.read_nodes(tree.root)] == [None, 64]


def test_a_count_of_units_is_never_zero(tree: Tree) -> None:
    assert only(properties(tree, 1, simd_count=2, simd_per_cu=4)).cu_count is None


@pytest.mark.parametrize(
    ("location", "domain", "slot"),
    [
        (0x0300, 0, "0000:03:00.0"),
        (0x6300, 1, "0001:63:00.0"),
        (0x0508, 0, "0000:05:01.0"),
        (0x0507, 0, "0000:05:00.7"),
        (0x0300, 0x10000, "10000:03:00.0"),
        # Newer kernels write a partition's number into the upper bits.
        (0x3000_0500, 0, "0000:05:00.0"),
    ],
)
def test_a_location_is_a_pci_slot(tree: Tree, location: int, domain: int, slot: str) -> None:
    assert only(properties(tree, 1, location_id=location, domain=domain)).slot == slot


def test_an_old_kernel_has_one_domain(tree: Tree) -> None:
    assert only(properties(tree, 1, location_id=0x0300)).slot == "0000:03:00.0"


def test_without_a_location_there_is_no_slot(tree: Tree) -> None:
    assert only(properties(tree, 1, domain=1)).slot is None


def test_zeros_that_mean_nothing_are_unknown(tree: Tree) -> None:
    node = only(properties(tree, 1, drm_render_minor=0, unique_id=0, device_id=0))
    assert (node.render_minor, node.unique_id, node.pci_id, node.gpu_id) == (None,) * 4


def test_an_id_of_64_bits_is_read_whole(tree: Tree) -> None:
    assert only(properties(tree, 1, unique_id=2**64 - 1)).unique_id == 2**64 - 1


def test_a_device_id_is_decimal(tree: Tree) -> None:
    assert only(properties(tree, 1, device_id=29772)).pci_id == "1002:744c"


def test_memory_is_the_frame_buffer_only(tree: Tree) -> None:
    """Not system memory (0), nor the scratch areas (3 and up)."""
    properties(tree, 1)
    for number, (heap, size) in enumerate([(0, 64 * GIB), (1, 16 * GIB), (3, 64), (4, 128)]):
        bank(tree, 1, number, heap_type=heap, size_in_bytes=size)
    assert only(tree).bank_bytes == 16 * GIB


def test_memory_that_the_cpu_does_not_see_counts(tree: Tree) -> None:
    bank(properties(tree, 1), 1, 0, heap_type=2, size_in_bytes=16 * GIB)
    assert only(tree).bank_bytes == 16 * GIB


def test_the_size_in_the_properties_is_no_memory(tree: Tree) -> None:
    """Kernels since 2019 say 0 there; the banks know it."""
    assert only(properties(tree, 1, local_mem_size=8 * GIB)).bank_bytes is None


def test_an_empty_bank_is_unknown(tree: Tree) -> None:
    bank(properties(tree, 1), 1, 0, heap_type=1, size_in_bytes=0)
    assert only(tree).bank_bytes is None


def test_nul_padding_is_no_content(tree: Tree) -> None:
    tree.kfd("0000:03:00.0", 0x744C, node=1, gfx=110000, minor=128, bank=24 * GIB)
    before = kfd.read_nodes(tree.root)
    for path in tree.root.rglob("properties"):
        path.write_bytes(path.read_bytes().ljust(4096, b"\0"))
    assert kfd.read_nodes(tree.root) == before


@pytest.mark.parametrize("code", [errno.EPERM, errno.EACCES, errno.EIO])
def test_a_node_that_may_not_be_read_is_none_and_takes_no_index(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """What a container's device cgroup says of a GPU that was not passed to it."""
    tree.kfd("0000:03:00.0", 0x740F, node=1, gfx=90010)
    tree.kfd("0000:26:00.0", 0x740F, node=2, gfx=90010)
    closed = os.fspath(tree.root / NODES / "1")
    open_file = os.open

    def guarded(path: Any, *rest: Any, **more: Any) -> int:
        if os.fspath(path).startswith(f"{closed}/"):
            raise OSError(code, os.strerror(code))
        return open_file(path, *rest, **more)

    monkeypatch.setattr("flexlab.gpus.files.os.open", guarded)
    node = only(tree)
    assert (node.number, node.slot, node.hip_index) == (2, "0000:26:00.0", 0)


KEYS = (
    "simd_count", "simd_per_cu", "vendor_id", "device_id", "location_id", "domain", "unique_id",
    "gfx_target_version", "drm_render_minor", "cpu_cores_count", "heap_type", "size_in_bytes",
)  # fmt: skip
VALUES = st.one_of(
    st.integers(-1, 2**64).map(str), st.sampled_from(["4098", "1", "2", "4"]), st.text(max_size=8)
)
LINES = st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=16)
TEXTS = st.one_of(
    LINES.map(lambda lines: "\n".join(f"{k} {v}" for k, v in lines).encode("utf-8", "replace")),
    st.binary(max_size=200),
)


@given(TEXTS, TEXTS, TEXTS)
def test_no_text_raises_or_moves_another_node(node: bytes, number: bytes, memory: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        tree.kfd("0000:03:00.0", 0x744C, node=1, gfx=110000, minor=128, bank=24 * GIB)
        (before,) = kfd.read_nodes(tree.root)
        tree.write(f"{NODES}/2/properties", node)
        tree.write(f"{NODES}/2/gpu_id", number)
        tree.write(f"{NODES}/2/mem_banks/0/properties", memory)
        first, *others = kfd.read_nodes(tree.root)
        assert first == before
        for other in others:
            assert 0 not in (other.cu_count, other.render_minor, other.unique_id, other.bank_bytes)
            assert other.pci_id is None or len(other.pci_id) == len("1002:744c")
