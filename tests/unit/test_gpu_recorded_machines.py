"""Recorded machines beside the repository: each is told right, and stays so when it is changed.

Without them (a stranger has only the repository) these tests skip, by name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from flexlab.gpus.inventory import detect
from flexlab.spec.machine import Gpu

REPOSITORY = Path(__file__).parents[2]
SHARED = REPOSITORY.parent / "shared"
MACHINES = sorted((SHARED / "fixtures/gpu").glob("*/expected.json"))
NAMES = [path.parent.name for path in MACHINES]

pytestmark = pytest.mark.skipif(not MACHINES, reason="no recorded machines beside the repository")


def test_every_recorded_machine_is_told_right() -> None:
    program = f"{sys.executable} -m flexlab"
    script = SHARED / "accept/gpus.py"
    run = subprocess.run(
        [sys.executable, str(script), "--flexlab", program],
        capture_output=True, text=True, cwd=REPOSITORY, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout


def rows(root: Path) -> dict[str, Gpu]:
    return {gpu.id: gpu for gpu in detect(root).gpus}


def without(gpu: Gpu, *names: str) -> dict[str, object]:
    return {name: getattr(gpu, name) for name in gpu.__struct_fields__ if name not in names}


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = SHARED / "fixtures/gpu" / request.param
    target = tmp_path / "machine"
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return target


@pytest.mark.parametrize("copy", NAMES, indirect=True)
def test_other_card_numbers_are_the_same_cards(copy: Path) -> None:
    before = rows(copy)
    drm = copy / "sys/class/drm"
    cards = sorted(drm.glob("card*")) if drm.is_dir() else []
    for card in reversed(cards):
        number = card.name.removeprefix("card")
        if number.isdigit():
            card.rename(drm / f"card{int(number) + 3}")
    after = rows(copy)
    assert after.keys() == before.keys()
    for gpu_id, gpu in before.items():
        assert without(after[gpu_id], "card") == without(gpu, "card")


@pytest.mark.parametrize("copy", NAMES, indirect=True)
def test_any_file_may_be_missing(copy: Path) -> None:
    before = rows(copy)
    for path in some(sorted(p for p in copy.rglob("*") if p.is_file())):
        if path.name == "expected.json":
            continue
        kept = path.read_bytes()
        path.unlink()
        for gpu_id, gpu in rows(copy).items():
            for name in ("vram_total_bytes", "pool_total_bytes", "cu_count", "vram_used_bytes"):
                if getattr(before.get(gpu_id, gpu), name) != 0:
                    assert getattr(gpu, name) != 0, f"{name} is 0 without {path}"
        path.write_bytes(kept)


def some(paths: list[Path]) -> Iterator[Path]:
    """Some forty of them, spread over all."""
    yield from paths[:: max(1, len(paths) // 40)]


PAIRS = [(one, two) for one, two in pairwise(NAMES) if one.split("-")[0] != two.split("-")[0]] + [
    ("amd-vega56", "intel-b580-xe"),
    ("amd-strixpoint-890m", "intel-a380-i915"),
]


@pytest.mark.parametrize(("one", "two"), PAIRS)
def test_two_machines_in_one_have_the_cards_of_both(one: str, two: str, tmp_path: Path) -> None:
    """Of different vendors; the second machine's card numbers are moved out of the way."""
    fixtures = SHARED / "fixtures/gpu"
    first, second = rows(fixtures / one), rows(fixtures / two)
    merged = tmp_path / "merged"
    shutil.copytree(fixtures / one, merged)
    for path in (merged, *merged.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    shift(fixtures / two, merged)
    both = rows(merged)
    assert both.keys() >= first.keys() | second.keys()
    loose = ("index", "best", "card", "render_minor", "nodes", "pool_total_bytes",
             "pool_free_bytes", "problems", "name")  # fmt: skip
    for gpu_id, gpu in (first | second).items():
        assert without(both[gpu_id], *loose) == without(gpu, *loose)


def shift(source: Path, target: Path) -> None:
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        parts = list(path.relative_to(source).parts)
        for at, part in enumerate(parts):
            for word, by in (("renderD", 40), ("card", 40)):
                number = part.removeprefix(word)
                if part.startswith(word) and number.isdigit():
                    parts[at] = f"{word}{int(number) + by}"
        place = target.joinpath(*parts)
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
