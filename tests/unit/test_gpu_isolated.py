"""Detection in a child: what is told of the cards when that child hangs, dies or talks nonsense."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gpu_checks import codes
from gpu_trees import GIB, Tree
from waiting import until

from flexlab.gpus import inventory, isolated
from flexlab.gpus.bus import read_bus
from flexlab.spec.machine import RAM_POOL

CARD = "0000:03:00.0"
SHORT_S = 0.5
PATIENT_S = 30.0
"""Far above what a child here takes, far below what one that hangs does."""

Child = Callable[[str], Path]


@pytest.fixture
def cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's bus has an AMD and an NVIDIA card."""
    tree = Tree(tmp_path / "machine").amd(CARD).pci("0000:41:00.0", 0x10DE, 0x2684, driver="nvidia")
    for module in (isolated, inventory):
        monkeypatch.setattr(module, "read_bus", lambda _root: read_bus(tree.root))


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Child:
    """The lines of a shell script that runs in the child's place; a file that has its pid."""
    script, note = tmp_path / "child", tmp_path / "pid"

    def become(lines: str) -> Path:
        script.write_text(f"#!/bin/sh\necho $$ >'{note}'\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return note

    return become


def told(deadline_s: float) -> str:
    """What is said of both cards, which are there and not usable."""
    begun = time.monotonic()
    machine = isolated.detect(deadline_s=deadline_s)
    assert time.monotonic() - begun < deadline_s + PATIENT_S
    assert [(gpu.id, gpu.usable) for gpu in machine.gpus] == [
        (CARD, False),
        ("0000:41:00.0", False),
    ]
    assert [codes(gpu) for gpu in machine.gpus] == [{"not_answering"}] * 2
    assert machine.pool(RAM_POOL) is not None
    amd, nvidia = (gpu.problems[0].message for gpu in machine.gpus)
    assert amd.replace("AMD", "NVIDIA") == nvidia
    return amd


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    "lines",
    [
        "exec sleep 600",
        "printf '{'; exec sleep 600",
        "while :; do printf ' '; sleep 0.05; done",
        "trap '' TERM INT; while :; do sleep 600; done",
    ],
    ids=["silent", "half-a-line", "drop-by-drop", "stubborn"],
)
def test_a_child_that_hangs_is_not_waited_for(child: Child, lines: str) -> None:
    note = child(lines)
    assert told(SHORT_S) == "asking the AMD driver took longer than 0.5 s"
    gone = Path("/proc", note.read_text().strip())
    until(lambda: not gone.exists())  # neither a process nor a zombie


@pytest.mark.usefixtures("cards")
def test_what_the_child_started_ends_with_it(child: Child, tmp_path: Path) -> None:
    program = tmp_path / "program"
    child(f"sleep 600 & echo $! >'{program}'; wait")
    told(SHORT_S)
    stat = Path("/proc", program.read_text().strip(), "stat")
    until(lambda: not stat.exists() or stat.read_text().split()[2] == "Z")


@pytest.mark.usefixtures("cards")
@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("kill -SEGV $$", "crashed (signal 11)"),
        ("printf '{'; kill -KILL $$", "crashed (signal 9)"),
        ("exit 3", "failed (exit code 3)"),
        ("echo Traceback; exit 1", "failed (exit code 1)"),
        ("exit 0", "gave no answer"),
        ("exec >&-; exec sleep 600", "gave no answer"),
        ("echo nonsense", "gave no answer"),
        ("echo '{}'", "gave no answer"),
        ("echo '[1]'; exec sleep 600", "gave no answer"),
        (r"printf '\377\376\n'", "gave no answer"),
        (r"""printf '{"hostname":"\377"}\n'""", "gave no answer"),
        (r"printf '\0\n'", "gave no answer"),
        ("echo", "gave no answer"),
    ],
)
def test_a_child_without_an_answer_is_said(child: Child, lines: str, why: str) -> None:
    child(lines)
    assert told(PATIENT_S) == f"asking the AMD driver {why}"


@pytest.mark.usefixtures("cards")
def test_a_line_without_end_does_not_fill_the_memory(child: Child) -> None:
    child("exec cat /dev/zero")
    assert told(PATIENT_S) == "asking the AMD driver gave no answer"


@pytest.mark.usefixtures("cards")
def test_no_process_to_be_had_is_said_without_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(sys, "executable", str(gone))
    assert told(PATIENT_S) == (
        f"asking the AMD driver failed (cannot use {gone}: no such file or directory)"
    )


@pytest.mark.usefixtures("cards")
def test_the_settings_hold_without_an_answer_too(child: Child) -> None:
    child("exit 1")
    machine = isolated.detect(ram_reserve_bytes=3 * GIB, ram_budget_bytes=5 * GIB)
    ram = machine.pool(RAM_POOL)
    assert ram is not None
    assert (ram.reserve_bytes, ram.budget_bytes) == (3 * GIB, 5 * GIB)


@pytest.fixture
def many_files() -> Iterator[None]:
    """As in a daemon with a thousand connections: the next descriptor is above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    opened = [os.open("/dev/null", os.O_RDONLY)]
    while opened[-1] < 1100:
        opened.append(os.dup(opened[0]))
    yield
    for descriptor in opened:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("cards", "many_files")
def test_a_parent_with_many_open_files_hears_its_child(child: Child) -> None:
    child("exit 3")
    assert told(PATIENT_S) == "asking the AMD driver failed (exit code 3)"


@pytest.mark.usefixtures("cards")
def test_the_childs_answer_is_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made by this very package, whatever lies in the folder of the one who asks."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "flexlab").mkdir()
    monkeypatch.chdir(tmp_path)
    asked = isolated.detect(ram_reserve_bytes=3 * GIB, ram_budget_bytes=5 * GIB, deadline_s=120)
    monkeypatch.setattr(inventory, "read_bus", read_bus)  # the child looked at the real one
    here = inventory.detect(ram_reserve_bytes=3 * GIB, ram_budget_bytes=5 * GIB)
    assert (asked.hostname, asked.platform, asked.cpu) == (here.hostname, here.platform, here.cpu)
    assert [gpu.id for gpu in asked.gpus] == [gpu.id for gpu in here.gpus]
    ram, now = asked.pool(RAM_POOL), here.pool(RAM_POOL)
    assert ram is not None
    assert now is not None
    assert (ram.total_bytes, ram.reserve_bytes, ram.budget_bytes) == (
        now.total_bytes, 3 * GIB, 5 * GIB,
    )  # fmt: skip


def test_another_root_needs_no_child(child: Child, tmp_path: Path) -> None:
    note = child("exit 1")
    tree = Tree(tmp_path / "machine").cpu().ram().amd(CARD)
    (gpu,) = isolated.detect(tree.root).gpus
    assert gpu.usable
    assert not note.exists()


def test_a_machine_without_a_gpu_needs_no_child(
    child: Child, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = child("exit 1")
    monkeypatch.setattr(isolated, "_has_gpus", lambda _root: HAS_GPUS(tmp_path))
    machine = isolated.detect()
    assert machine.pool(RAM_POOL) is not None
    assert not note.exists()


HAS_GPUS = isolated._has_gpus


@pytest.mark.parametrize(
    "sign",
    ["pci", "drm", "kfd", "proc/driver/nvidia/version", "wsl", "tegra"],
)
def test_every_sign_of_a_gpu_makes_a_child(tmp_path: Path, sign: str) -> None:
    tree = Tree(tmp_path)
    assert not HAS_GPUS(tree.root)
    if sign == "pci":
        tree.pci(CARD, 0x1002, 0x744C)
    elif sign == "drm":
        tree.drm(CARD, 0x8086, 0x56A5, card=0, minor=None, driver="xe")
    elif sign == "kfd":
        tree.kfd(CARD, 0x744C, node=1, gfx=110000)
    elif sign == "wsl":
        tree.wsl().write("usr/lib/wsl/lib/libnvidia-ml.so.1", "")
    elif sign == "tegra":
        tree.tegra()
    else:
        tree.write(sign, "NVRM version")
    assert HAS_GPUS(tree.root)
