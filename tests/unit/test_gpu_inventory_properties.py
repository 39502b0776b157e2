"""What holds of detection on any machine, and on any damaged one."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gpu_checks import detect_as_nobody, owners, without
from gpu_trees import APU, GIB, Tree, nvidia_row, nvidia_xml_card
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexlab.gpus.inventory import detect
from flexlab.spec.machine import RAM_POOL, Gpu, Machine

FEW = settings(
    max_examples=45, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

AMD_CARDS: dict[str, dict[str, Any]] = {
    "rdna3": {},
    "vega20": {"device": 0x66AF, "gfx": 90006, "simds": 240, "vram": 16 * GIB, "gtt": 16 * GIB},
    "polaris": {"device": 0x67DF, "gfx": 80003, "simds": 144, "vram": 8 * GIB, "node": None},
    "raphael": APU,
    "carved": APU | {"device": 0x1586, "gfx": 110501, "vram": 96 * GIB, "gtt": 16 * GIB},
}
PARTS = 4
kinds = st.sampled_from(
    [*AMD_CARDS, "partitioned", "amd bare", "xe-lp", "arc", "nvidia", "mig", "nvidia bare"]
)
machines = st.lists(kinds, min_size=1, max_size=4)
SHARED_VIEWS = ("sys/class/drm", "sys/class/kfd", "sys/bus")


@contextmanager
def built(cards: list[str], shift: int = 0) -> Iterator[Tree]:
    """A machine with these cards; `shift` moves card, render and node numbers."""
    folder = Path(tempfile.mkdtemp())
    try:
        tree = Tree(folder).cpu().ram().kfd_cpu()
        for at, kind in enumerate(cards):
            _add(tree, kind, f"0000:{at + 3:02x}:00.0", at + shift, 1 + at * PARTS + shift)
        _add_nvidia(tree, cards)
        yield tree
    finally:
        shutil.rmtree(folder)


def _add(tree: Tree, kind: str, slot: str, card: int, node: int) -> None:
    minor = 127 + node
    if kind in AMD_CARDS:
        tree.amd(slot, **({"card": card, "minor": minor, "node": node} | AMD_CARDS[kind]))
    elif kind == "partitioned":
        tree.amd_partitioned(slot, parts=PARTS, first_node=node, first_minor=minor, unique_id=node)
    elif kind == "amd bare":
        tree.pci(slot, 0x1002, 0x744C, revision=0xC8)
    elif kind == "nvidia bare":
        tree.pci(slot, 0x10DE, 0x2684)
    elif kind in ("arc", "xe-lp"):
        tree.intel(slot, 0x56A5 if kind == "arc" else 0x9A49, card=card, minor=minor)


def _add_nvidia(tree: Tree, cards: list[str]) -> None:
    """One recording tells of all cards that NVIDIA's driver has."""
    slots = {f"00000000:{at + 3:02x}:00.0": kind for at, kind in enumerate(cards)}
    if "mig" in cards:
        slices = [("19968 MiB", "1024 MiB"), ("9856 MiB", "10 MiB")]
        told = {"mig": slices, "nvidia": None}
        tree.nvidia_smi_xml(
            *(nvidia_xml_card(slot, mig=told[kind]) for slot, kind in slots.items() if kind in told)
        )
    elif "nvidia" in cards:
        tree.nvidia_csv(*(nvidia_row(slot) for slot, kind in slots.items() if kind == "nvidia"))


def by_id(machine: Machine) -> dict[str, Gpu]:
    return {gpu.id: gpu for gpu in machine.gpus}


def numbers(gpu: Gpu) -> dict[str, Any]:
    """What is measured or counted of a GPU."""
    names = (
        "vram_total_bytes", "vram_used_bytes", "gtt_total_bytes", "gtt_used_bytes",
        "pool_total_bytes", "pool_free_bytes", "cu_count", "busy_percent", "power_w",
    )  # fmt: skip
    slices = {part.uuid: part.vram_total_bytes for part in gpu.mig}
    return {name: getattr(gpu, name) for name in names} | slices


@FEW
@given(machines)
def test_every_machine_is_told_coherently(cards: list[str]) -> None:
    with built(cards) as tree:
        machine = detect(tree.root)
    ids = [gpu.id for gpu in machine.gpus]
    count = sum(PARTS if kind == "partitioned" else 1 for kind in cards)
    assert len(ids) == len(set(ids)) == count
    assert [gpu.index for gpu in machine.gpus] == list(range(count))
    pools = [pool.id for pool in machine.pools]
    assert len(pools) == len(set(pools))
    for gpu in machine.gpus:
        own = {part.uuid for part in gpu.mig} or {gpu.pool}
        assert own <= set(pools)
        assert all(value is None or value >= 0 for value in numbers(gpu).values())
        assert gpu.unified or gpu.pool != RAM_POOL
        assert gpu.usable or gpu.problems
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


@FEW
@given(machines)
def test_the_best_is_one_that_is_usable_and_has_memory_of_its_own(cards: list[str]) -> None:
    with built(cards) as tree:
        gpus = detect(tree.root).gpus
    best = [gpu for gpu in gpus if gpu.best]
    usable = [gpu for gpu in gpus if gpu.usable]
    assert len(best) == bool(usable)
    assert all(gpu.usable for gpu in best)
    own_memory = [gpu for gpu in usable if gpu.is_apu is False and gpu.vram_total_bytes]
    if own_memory:
        assert best[0] in own_memory


@FEW
@given(machines, st.integers(1, 9))
def test_renumbering_changes_numbers_and_nothing_else(cards: list[str], shift: int) -> None:
    with built(cards) as tree:
        before = detect(tree.root).gpus
    with built(cards, shift) as tree:
        after = detect(tree.root).gpus
    for old, new in zip(before, after, strict=True):
        renumbered = ["card", "render_minor", "kfd_node", "nodes"]
        # A partition is told apart by its node, and the unique id here is made from that.
        renumbered += ["id", "pool", "uuid"] if "#" in old.id else []
        assert without(new, *renumbered) == without(old, *renumbered)


DAMAGES = [
    b"", b"\0" * 64, b"garbage\n", b"-5\n", b"99999999999999999999999999\n", b"\xff\xfe", None,
    errno.EACCES, errno.EPERM, errno.EIO, errno.EBUSY,
]  # fmt: skip
"""Other content, a file that is missing, or an errno."""


@contextmanager
def damaged(path: Path, how: bytes | int | None, *, late: bool = False) -> Iterator[None]:
    """An errno comes from opening the file or listing the folder; `late`: from the first read."""
    if isinstance(how, int):
        with pytest.MonkeyPatch.context() as patch:
            _fail(patch, path, how, late=late)
            yield
        return
    kept = path.read_bytes()
    if how is None:
        path.unlink()
    else:
        path.write_bytes(how)
    try:
        yield
    finally:
        path.write_bytes(kept)


def _fail(patch: pytest.MonkeyPatch, path: Path, code: int, *, late: bool) -> None:
    real_open, real_read, real_list = os.open, os.read, os.listdir
    broken: set[int] = set()

    def error() -> OSError:
        return OSError(code, os.strerror(code), os.fspath(path))

    def open_(name: Any, *rest: Any, **more: Any) -> int:
        if os.fspath(name) != os.fspath(path):
            descriptor = real_open(name, *rest, **more)
            broken.discard(descriptor)
            return descriptor
        if not late:
            raise error()
        broken.add(descriptor := real_open(name, *rest, **more))
        return descriptor

    def read(descriptor: int, size: int) -> bytes:
        if descriptor in broken:
            raise error()
        return real_read(descriptor, size)

    def listdir(name: Any = ".") -> list[Any]:
        if name is not None and os.fspath(name) == os.fspath(path):
            raise error()
        return real_list(name)

    patch.setattr(os, "open", open_)
    patch.setattr(os, "read", read)
    patch.setattr(os, "listdir", listdir)


def of_cards(tree: Tree, *, folders: bool = False) -> list[Path]:
    """Files (or folders) below the root but those of the host, whose memory APUs share."""
    return sorted(
        path
        for path in tree.root.rglob("*")
        if path.is_dir() == folders and "proc" not in path.relative_to(tree.root).parts
    )


# An unreadable KFD node is not there for ROCm either, so those behind it move up.
MOVED = ("hip_index", "index", "best")
OTHER_SOURCES = ("vram_total_bytes", "pool_total_bytes", "pool_free_bytes")
"""The card's own file, KFD's bank or the table; for an APU also the RAM instead of a carve-out."""


def assert_only_less_is_known(before: dict[str, Gpu], after: dict[str, Gpu]) -> None:
    for gpu_id, gpu in after.items():
        known = numbers(_before(gpu_id, before))
        for name, value in numbers(gpu).items():
            if name in OTHER_SOURCES:
                assert value is None or value > 0 or known[name] == 0, f"{name} became 0"
            else:
                assert value in (None, known.get(name)), f"{name} became {value}"


def _before(gpu_id: str, before: dict[str, Gpu]) -> Gpu:
    """Without KFD a partitioned card is the one card that PCI shows."""
    of_partitions = (gpu for key, gpu in before.items() if key.startswith(f"{gpu_id}#"))
    found = before.get(gpu_id) or next(of_partitions, None)
    assert found is not None, f"a card was invented: {gpu_id}"
    return found


@FEW
@given(machines, st.data(), st.sampled_from(DAMAGES), st.booleans())
def test_a_damaged_file_costs_its_card_only_and_is_never_zero(
    cards: list[str], data: st.DataObject, how: bytes | int | None, late: bool
) -> None:
    with built(cards) as tree:
        before = by_id(detect(tree.root))
        path = data.draw(st.sampled_from(of_cards(tree)))
        with damaged(path, how, late=late):
            after = by_id(detect(tree.root))
    assert_only_less_is_known(before, after)
    for gpu_id in before.keys() - owners(path, list(before.values())):
        assert without(after[gpu_id], *MOVED) == without(before[gpu_id], *MOVED)


@FEW
@given(machines, st.data(), st.sampled_from([errno.EACCES, errno.EIO, errno.ENOENT]))
def test_a_folder_that_cannot_be_listed_invents_nothing(
    cards: list[str], data: st.DataObject, code: int
) -> None:
    with built(cards) as tree:
        before = by_id(detect(tree.root))
        path = data.draw(st.sampled_from(of_cards(tree, folders=True) or [tree.root]))
        with damaged(path, code):
            after = by_id(detect(tree.root))
        own = owners(path, list(before.values()))
        is_view = any((tree.root / view).is_relative_to(path) for view in SHARED_VIEWS)
    assert_only_less_is_known(before, after)
    if own and not is_view:
        for gpu_id in before.keys() - own:
            assert without(after[gpu_id], *MOVED) == without(before[gpu_id], *MOVED)


@FEW
@given(machines, st.sampled_from(SHARED_VIEWS))
def test_a_view_that_is_missing_invents_no_card(cards: list[str], view: str) -> None:
    with built(cards) as tree:
        before = by_id(detect(tree.root))
        shutil.rmtree(tree.root / view, ignore_errors=True)
        after = by_id(detect(tree.root))
    assert_only_less_is_known(before, after)
    if view == "sys/class/drm":
        assert after.keys() == before.keys()


def test_files_that_nobody_may_read_are_unknown(tmp_path: Path) -> None:
    """By real permissions: every file of one card in turn, beside a card that stays as it is."""
    roots = {}
    for at, name in enumerate(_files_of_the_first(tmp_path / "all")):
        tree = _two_cards(tmp_path / str(at))
        (tree.root / name).chmod(0)
        roots[name] = tree.root
    whole = by_id(detect(tmp_path / "all"))
    for name, machine in zip(roots, detect_as_nobody(*roots.values()), strict=True):
        assert_only_less_is_known(whole, by_id(machine))
        (second,) = (gpu for gpu in machine.gpus if gpu.pci_slot == "0000:43:00.0")
        assert without(second, *MOVED) == without(whole[second.id], *MOVED), name


def _two_cards(root: Path) -> Tree:
    tree = Tree(root).cpu().ram().kfd_cpu().amd()
    return tree.amd("0000:43:00.0", card=1, minor=129, node=2)


def _files_of_the_first(root: Path) -> list[str]:
    tree = _two_cards(root)
    gpus = detect(root).gpus
    paths = [path for path in of_cards(tree) if gpus[0].id in owners(path, gpus)]
    return [str(path.relative_to(root)) for path in paths]


@FEW
@given(machines, st.sampled_from([None, b"", b"garbage", b"MemTotal: lots kB\n"]))
def test_unknown_host_memory_is_unknown(cards: list[str], how: bytes | None) -> None:
    with built(cards) as tree, damaged(tree.root / "proc/meminfo", how):
        machine = detect(tree.root)
    assert machine.pools[0].total_bytes is None
    for gpu in machine.gpus:
        assert gpu.pool_total_bytes != 0
        if gpu.pool == RAM_POOL:
            assert gpu.pool_free_bytes is None
