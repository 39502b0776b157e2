"""Recorded machines beside the repository: each is told right, and stays so when it is changed.

Without them (a stranger has only the repository) these tests skip, by name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from gpu_checks import owners, without

from flexlab.gpus.inventory import detect
from flexlab.spec.machine import Gpu, Machine

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared"
FIXTURES = SHARED / "fixtures/gpu"
NAMES = [path.parent.name for path in sorted(FIXTURES.glob("*/expected.json"))]

pytestmark = pytest.mark.skipif(not NAMES, reason="no recorded machines beside the repository")


def test_every_recorded_machine_is_told_right() -> None:
    script = SHARED / "accept/gpus.py"
    if not script.is_file():
        pytest.skip("no acceptance script beside the repository")
    program = f"{sys.executable} -m flexlab"
    run = subprocess.run(
        [sys.executable, str(script), "--flexlab", program],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


def rows(root: Path) -> dict[str, Gpu]:
    return {gpu.id: gpu for gpu in detect(root).gpus}


def copied(name: str, target: Path) -> Path:
    """The machine in a folder that may be written; without what it should say."""
    shutil.copytree(FIXTURES / name, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    (target / "expected.json").unlink()
    return target


@pytest.mark.parametrize("name", NAMES)
def test_other_card_numbers_are_the_same_cards(name: str, tmp_path: Path) -> None:
    copy = copied(name, tmp_path / "machine")
    before = rows(copy)
    drm = copy / "sys/class/drm"
    numbers = [path.name.removeprefix("card") for path in drm.glob("card*")]
    for number in sorted((int(text) for text in numbers if text.isdigit()), reverse=True):
        (drm / f"card{number}").rename(drm / f"card{number + 3}")
    after = rows(copy)
    assert after.keys() == before.keys()
    for gpu_id, gpu in before.items():
        assert without(after[gpu_id], "card") == without(gpu, "card")
        assert after[gpu_id].card == _moved(gpu.card, 3)


def _moved(card: str | None, by: int) -> str | None:
    return card and f"card{int(card.removeprefix('card')) + by}"


MOVED = ("index", "hip_index", "best")
"""What a card may change when another one is no longer seen."""
NEVER_ZERO = ("vram_total_bytes", "pool_total_bytes", "cu_count", "vram_used_bytes")


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_file_costs_its_own_card_only(name: str, tmp_path: Path) -> None:
    copy = copied(name, tmp_path / "machine")
    before = rows(copy)
    for path in some(sorted(path for path in copy.rglob("*") if path.is_file())):
        kept = path.read_bytes()
        path.unlink()
        after = rows(copy)
        path.write_bytes(kept)
        for gpu_id, gpu in after.items():
            for field in NEVER_ZERO:
                if getattr(before.get(gpu_id, gpu), field) != 0:
                    assert getattr(gpu, field) != 0, f"{field} is 0 without {path}"
        if "proc" in path.relative_to(copy).parts:
            continue  # of the host, which all cards share
        for gpu_id in before.keys() - owners(path, list(before.values())):
            assert without(after[gpu_id], *MOVED) == without(before[gpu_id], *MOVED), str(path)


def some(paths: Sequence[Path]) -> Iterator[Path]:
    """Some forty of them, spread over all."""
    yield from paths[:: max(1, len(paths) // 40)]


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_survives_its_own_words(name: str) -> None:
    machine = detect(FIXTURES / name)
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine
    assert sum(gpu.best for gpu in machine.gpus) == any(gpu.usable for gpu in machine.gpus)


def partners() -> Iterator[tuple[str, str]]:
    """Every machine with one of each other vendor, so that all come up about equally often."""
    vendors: dict[str, list[str]] = {}
    for name in NAMES:
        vendors.setdefault(name.partition("-")[0], []).append(name)
    for vendor, names in vendors.items():
        for other in vendors.keys() - {vendor}:
            for at, name in enumerate(names):
                yield name, vendors[other][at % len(vendors[other])]


PAIRS = sorted(set(partners()))
HOST = ("pool_total_bytes", "pool_free_bytes", "vram_total_bytes", "vram_used_bytes")
"""Of a GPU that shares the memory of its host: in a merged machine there is one host."""


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_two_machines_in_one_have_the_cards_of_both(one: str, two: str, tmp_path: Path) -> None:
    """The second machine's card numbers are moved out of the way of the first's."""
    first, second = rows(FIXTURES / one), rows(FIXTURES / two)
    if first.keys() & second.keys():
        pytest.skip("they have a slot in common")
    merged = copied(one, tmp_path / "merged")
    add_moved(FIXTURES / two, merged)
    both = rows(merged)
    assert both.keys() == first.keys() | second.keys()
    for gpu_id, gpu in chain(first.items(), second.items()):
        loose = ["index", "best", "card", "render_minor", "nodes", "problems", "hip_index"]
        loose += HOST if gpu.unified else []
        assert without(both[gpu_id], *loose) == without(gpu, *loose)


def add_moved(source: Path, target: Path) -> None:
    """The files of one machine among those of another, whose own files stay."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target.joinpath(*map(_moved_name, path.relative_to(source).parts))
        if path.name != "expected.json" and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)


def _moved_name(name: str, by: int = 40) -> str:
    for word in ("renderD", "card"):
        number = name.removeprefix(word)
        if name != number and number.isdigit():
            return f"{word}{int(number) + by}"
    return name
