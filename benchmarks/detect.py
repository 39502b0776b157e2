"""What it costs to look at the hardware, beside what others pay before they look at any.

    python benchmarks/detect.py [--runs N] [--nvitop-python PYTHON] [--json]

The machines are file trees that tests also use (one card, eight cards, 64 partitions), so the
figures are of our own readers on a page cache that is warm; a kernel's sysfs is slower by what its
drivers need to answer. A tick is one reading of every card by the sampler of the hardware helper.
Smallest of N runs, since everything else on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from gpu_trees import Tree  # noqa: E402

from flexlab.gpus.inventory import detect  # noqa: E402
from flexlab.gpus.sampler import Sampler  # noqa: E402


class Figure(NamedTuple):
    """One line of the table; `goal_ms` where there is one."""

    what: str
    ms: float | None
    goal_ms: float | None = None


def one_card(root: Path) -> Tree:
    return Tree(root).cpu().ram().kfd_cpu().amd()


def eight_cards(root: Path) -> Tree:
    tree = Tree(root).cpu().ram().kfd_cpu()
    for at in range(8):
        slot = f"0000:{3 + at:02x}:00.0"
        tree.amd(slot, 0x740F, gfx=90010, card=at, minor=128 + at, node=1 + at, revision=2)
    return tree


def partitions(root: Path) -> Tree:
    tree = Tree(root).cpu().ram().kfd_cpu()
    for at in range(8):
        tree.amd_partitioned(
            f"0000:{5 + 16 * at:02x}:00.0", parts=8, first_node=1 + 8 * at,
            first_minor=128 + 8 * at, unique_id=100 + at,
        )  # fmt: skip
    return tree


MACHINES: dict[str, tuple[Callable[[Path], Tree], int, float | None]] = {
    "one card": (one_card, 1, 10.0),
    "8 cards": (eight_cards, 8, None),
    "64 partitions of 8 cards": (partitions, 64, 60.0),
}
TICK_GOAL_MS = 2.0
"""For each card."""


def smallest_ms(work: Callable[[], object], runs: int) -> float:
    """Of `runs` runs after one that fills caches."""
    work()
    best = float("inf")
    for _ in range(runs):
        begun = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - begun)
    return best * 1000


def of_machines(folder: Path, runs: int) -> list[Figure]:
    figures = []
    for name, (build, devices, goal_ms) in MACHINES.items():
        root = build(folder / name.replace(" ", "-")).root
        found = len(detect(root).gpus)
        if found != devices:
            raise SystemExit(f"{name}: {found} devices found instead of {devices}")
        whole = smallest_ms(partial(detect, root), runs)
        figures.append(Figure(f"inventory, {name}", whole, goal_ms))
        sampler = Sampler(root, holders_every_s=1e9)
        sampler.begin(5.0)
        tick = smallest_ms(sampler.tick, runs)
        figures.append(
            Figure(f"sampler tick, {name}", tick, TICK_GOAL_MS * devices if devices < 64 else None)
        )
    return figures


def of_programs(nvitop_python: str | None, runs: int) -> list[Figure]:
    """What others cost before the first number: import or start, as whole processes."""
    commands: dict[str, Sequence[str] | None] = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import flexlab.gpus.inventory'": [
            sys.executable, "-c", "import flexlab.gpus.inventory",
        ],
        "python -c 'import pynvml'": [sys.executable, "-c", "import pynvml"],
        "python -c 'import nvitop'": (
            [nvitop_python, "-c", "import nvitop"] if nvitop_python else None
        ),
        "nvidia-smi": ["nvidia-smi"] if shutil.which("nvidia-smi") else None,
    }  # fmt: skip
    return [Figure(name, _process_ms(words, runs)) for name, words in commands.items()]


def _process_ms(words: Sequence[str] | None, runs: int) -> float | None:
    if words is None:
        return None

    def run() -> None:
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=REPOSITORY)

    return smallest_ms(run, max(3, runs // 5))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--nvitop-python", help="a Python that has nvitop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = of_machines(Path(folder), options.runs)
    figures += of_programs(options.nvitop_python, options.runs)
    if options.json:
        answer: dict[str, Any] = {
            one.what: {"ms": one.ms, "goal_ms": one.goal_ms} for one in figures
        }
        print(json.dumps(answer))
        return
    for one in figures:
        ms = "not installed" if one.ms is None else f"{one.ms:8.2f} ms"
        goal = "" if one.goal_ms is None else f"   goal {one.goal_ms:g} ms"
        print(f"{one.what:44} {ms}{goal}")


if __name__ == "__main__":
    main()
