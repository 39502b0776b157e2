"""What it costs to look at the hardware, beside what others pay before they look at any.

    python benchmarks/detect.py [--runs N] [--nvitop-python PYTHON] [--json]

The machines are file trees that tests also use (one card, eight cards, 64 partitions) and recorded
ones, where there are any beside the repository. So the figures are of our own readers on a page
cache that is warm; a kernel's sysfs is slower by what its drivers need to answer. A tick is one
reading of every card by the sampler of the hardware helper. Programs are whole processes, by wall
clock. Smallest of N runs, since everything else on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
RECORDED = REPOSITORY.parent / "shared/fixtures/gpu"
sys.path.insert(0, str(REPOSITORY / "tests"))

from gpu_trees import Tree  # noqa: E402

from flexlab.gpus.inventory import detect  # noqa: E402
from flexlab.gpus.sampler import Sampler  # noqa: E402


class Figure(NamedTuple):
    """One line of the table; `goal_ms` where there is one."""

    what: str
    ms: float | None
    """None: `note` says why."""
    goal_ms: float | None = None
    note: str = ""


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


MACHINES: dict[str, tuple[Callable[[Path], Tree], int, float]] = {
    "one card": (one_card, 1, 10.0),
    "8 cards": (eight_cards, 8, 60.0),
    "64 partitions of 8 cards": (partitions, 64, 60.0),
}
"""What it is -> how it is made, how many devices it has, the goal for its inventory in ms."""
TICK_GOAL_MS = 2.0
"""For each device."""


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
    """Inventory and tick of every made machine. A wrong inventory has no cost: SystemExit."""
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
        figures.append(Figure(f"tick per device, {name}", tick / devices, TICK_GOAL_MS))
    return figures


def of_recordings(runs: int) -> list[Figure]:
    """The slowest of the recorded machines that are sysfs (not the output of a program)."""
    machines = [
        path.parent
        for path in sorted(RECORDED.glob("*/expected.json"))
        if not list(path.parent.glob("nvidia-smi.*"))
    ]
    costs = {root.name: smallest_ms(partial(detect, root), max(3, runs // 5)) for root in machines}
    if not costs:
        return [Figure("inventory, recorded machines", None, note="none beside the repository")]
    slowest = max(costs, key=lambda name: costs[name])
    what = f"inventory, slowest of {len(costs)} recorded"
    return [Figure(what, costs[slowest], 60.0, note=slowest)]


def of_programs(one_card: Path, nvitop_python: str | None, runs: int) -> list[Figure]:
    """Ours to the last number, others' up to before the first, each as whole processes."""
    python = sys.executable
    if nvitop_python is None and importlib.util.find_spec("nvitop"):
        nvitop_python = python
    ours = [python, "-m", "flexlab", "gpus", "--json", "--sysroot", str(one_card)]
    helper = [python, "-m", "flexlab.gpus.watch", "--count", "1", "--sysroot", str(one_card)]
    nvidia_smi = shutil.which("nvidia-smi")
    commands: dict[str, list[str] | None] = {
        "python -c pass": [python, "-c", "pass"],
        "flexlab gpus --json, one card": ours,
        "flexlab.gpus.watch --count 1, one card": helper,
        "import flexlab.gpus.inventory": [python, "-c", "import flexlab.gpus.inventory"],
        "import pynvml": [python, "-c", "import pynvml"],
        "import nvitop": [nvitop_python, "-c", "import nvitop"] if nvitop_python else None,
        "nvitop --version": [nvitop_python, "-m", "nvitop", "--version"] if nvitop_python else None,
        "nvidia-smi": [nvidia_smi] if nvidia_smi else None,
    }
    return [_of_program(name, words, max(3, runs // 5)) for name, words in commands.items()]


def _of_program(name: str, words: Sequence[str] | None, runs: int) -> Figure:
    if words is None:
        return Figure(name, None, note="not installed")
    run = partial(
        subprocess.run, words, check=True, cwd=REPOSITORY, timeout=60,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return Figure(name, smallest_ms(run, runs))
    except (OSError, subprocess.SubprocessError) as error:
        return Figure(name, None, note=f"does not run here ({type(error).__name__})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--nvitop-python", help="a Python that has nvitop")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = of_machines(Path(folder), options.runs)
        figures += of_recordings(options.runs)
        root = one_card(Path(folder) / "for-programs").root
        figures += of_programs(root, options.nvitop_python, options.runs)
    if options.json:
        print(json.dumps({one.what: one._asdict() for one in figures}, indent=2))
        return
    print(f"{'':44} {'ms':>8} {'goal':>6}")
    for one in figures:
        ms = "-" if one.ms is None else f"{one.ms:.2f}"
        goal = "" if one.goal_ms is None else f"{one.goal_ms:g}"
        print(f"{one.what:44} {ms:>8} {goal:>6}  {one.note}".rstrip())


if __name__ == "__main__":
    main()
