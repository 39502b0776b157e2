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

import pytest
from gpu_trees import APU, GIB, Tree, nvidia_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexlab.gpus import files
from flexlab.gpus.inventory import detect
from flexlab.spec.machine import RAM_POOL, Gpu, Machine

FEW = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)

AMD_CARDS: list[dict[str, Any]] = [
    {},
    {"device": 0x66AF, "gfx": 90006, "simds": 240, "vram": 16 * GIB, "gtt": 16 * GIB},
    {"device": 0x67DF, "gfx": 80003, "simds": 144, "vram": 8 * GIB, "node": None},
    APU,
    APU | {"device": 0x1586, "gfx": 110501, "vram": 96 * GIB, "gtt": 16 * GIB},
]

kinds = st.sampled_from(["amd0", "amd1", "amd2", "amd3", "amd4", "intel", "arc", "nvidia"])
machines = st.lists(kinds, min_size=1, max_size=4)


@contextmanager
def built(cards: list[str], shift: int = 0) -> Iterator[Tree]:
    """A machine with these cards; `shift` moves card, render and node numbers."""
    folder = Path(tempfile.mkdtemp())
    try:
        tree = Tree(folder).cpu().ram().kfd_cpu()
        rows = []
        for at, kind in enumerate(cards):
            slot, number = f"0000:{at + 3:02x}:00.0", at + shift
            if kind.startswith("amd"):
                facts = {"node": number + 1} | AMD_CARDS[int(kind[3])]
                tree.amd(slot, card=number, minor=128 + number, **facts)
            elif kind == "nvidia":
                rows.append(nvidia_row(f"00000000:{slot[5:]}"))
            else:
                device = 0x56A5 if kind == "arc" else 0x9A49
                tree.intel(slot, device, card=number, minor=128 + number)
        if rows:
            tree.nvidia_csv(*rows)
        yield tree
    finally:
        shutil.rmtree(folder)


def by_id(machine: Machine) -> dict[str, Gpu]:
    return {gpu.id: gpu for gpu in machine.gpus}


def numbers(gpu: Gpu) -> dict[str, Any]:
    """What is measured or counted of a GPU."""
    names = (
        "vram_total_bytes", "vram_used_bytes", "gtt_total_bytes", "gtt_used_bytes",
        "pool_total_bytes", "pool_free_bytes", "cu_count", "busy_percent", "power_w",
    )  # fmt: skip
    return {name: getattr(gpu, name) for name in names}


def without(gpu: Gpu, *names: str) -> dict[str, Any]:
    return {name: getattr(gpu, name) for name in gpu.__struct_fields__ if name not in names}


@FEW
@given(machines)
def test_every_machine_is_told_coherently(cards: list[str]) -> None:
    with built(cards) as tree:
        machine = detect(tree.root)
    ids = [gpu.id for gpu in machine.gpus]
    assert len(ids) == len(set(ids)) == len(cards)
    assert [gpu.index for gpu in machine.gpus] == list(range(len(cards)))
    pools = {pool.id for pool in machine.pools}
    assert {gpu.pool for gpu in machine.gpus} <= pools
    best = [gpu for gpu in machine.gpus if gpu.best]
    assert len(best) == any(gpu.usable for gpu in machine.gpus)
    own_memory = [gpu for gpu in machine.gpus if gpu.usable and gpu.is_apu is False]
    if own_memory:
        assert best[0] in own_memory
    for gpu in machine.gpus:
        assert all(value is None or value >= 0 for value in numbers(gpu).values())
        if gpu.pool == RAM_POOL:
            assert gpu.unified


@FEW
@given(machines, st.integers(1, 9))
def test_renumbering_changes_numbers_and_nothing_else(cards: list[str], shift: int) -> None:
    with built(cards) as tree:
        before = by_id(detect(tree.root))
    with built(cards, shift) as tree:
        after = by_id(detect(tree.root))
    renumbered = ("card", "render_minor", "kfd_node", "nodes")
    for gpu_id, gpu in before.items():
        assert without(after[gpu_id], *renumbered) == without(gpu, *renumbered)


DAMAGES = [
    b"", b"\0" * 64, b"garbage\n", b"-5\n", b"99999999999999999999999999\n", b"\xff\xfe", None,
    errno.EACCES, errno.EPERM, errno.EIO, errno.EBUSY,
]  # fmt: skip


@contextmanager
def damaged(path: Path, how: bytes | int | None) -> Iterator[None]:
    """`path` with other content, missing (None), or failing with an errno when it is opened."""
    if isinstance(how, int):
        real = os.open

        def fail(name: Any, *rest: Any, **more: Any) -> int:
            if os.fspath(name) == os.fspath(path):
                raise OSError(how, os.strerror(how), os.fspath(path))
            return real(name, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(files.os, "open", fail)
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


def files_of(tree: Tree) -> list[Path]:
    # The memory of the host is every shared pool's; its damage has a test of its own.
    return sorted(p for p in tree.root.rglob("*") if p.is_file() and p.parent.name != "proc")


def owner(path: Path, gpus: dict[str, Gpu]) -> set[str]:
    """The GPUs that this file says something about."""
    words = set(path.parts)
    numbered = {word for word in words if word.isdigit()}
    return {
        gpu.id
        for gpu in gpus.values()
        if words & {gpu.id, gpu.card, f"renderD{gpu.render_minor}"}
        or str(gpu.kfd_node) in numbered
        or (gpu.vendor == "nvidia" and path.name.startswith("nvidia-smi"))
    }


@FEW
@given(machines, st.data(), st.sampled_from(DAMAGES))
def test_a_damaged_file_costs_its_card_only_and_is_never_zero(
    cards: list[str], data: st.DataObject, how: bytes | int | None
) -> None:
    with built(cards) as tree:
        before = by_id(detect(tree.root))
        path = data.draw(st.sampled_from(files_of(tree)))
        with damaged(path, how):
            after = by_id(detect(tree.root))
    touched = owner(path, before)
    # An unreadable KFD node is not there for ROCm either, so those behind it move up.
    moved = ("hip_index", "index", "best")
    for gpu_id in before.keys() - touched:
        assert without(after[gpu_id], *moved) == without(before[gpu_id], *moved)
    assert len(after) <= len(before), "a damaged file made a card"
    for gpu_id in touched & after.keys():
        for name, value in numbers(after[gpu_id]).items():
            assert value != 0 or numbers(before[gpu_id])[name] == 0, f"{name} became 0"


@FEW
@given(machines, st.sampled_from(["sys/class/drm", "sys/class/kfd", "sys/bus"]))
def test_a_view_that_is_missing_invents_no_card(cards: list[str], view: str) -> None:
    with built(cards) as tree:
        before = by_id(detect(tree.root))
        shutil.rmtree(tree.root / view, ignore_errors=True)
        after = by_id(detect(tree.root))
    assert after.keys() <= before.keys()
    if view != "sys/bus":
        assert after.keys() == before.keys()


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
