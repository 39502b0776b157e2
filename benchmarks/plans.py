"""What a plan costs: every recorded machine x every model recipe, and reading the recipes.

    python benchmarks/plans.py [--runs N] [--json]

Machines are the recorded ones beside the repository, or, where there are none, three that tests
make (one card, eight cards, 64 partitions). They are detected before the clock runs; a plan is
candidates, placement and rendering. Loading is a whole process that reads every recipe, less one
that only imports the same modules. Smallest of N runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
RECORDED = REPOSITORY.parent / "shared/fixtures/gpu"
sys.path.insert(0, str(REPOSITORY / "tests"))

from detect import MACHINES, smallest_ms  # noqa: E402

from flexlab.forecast.here import Here  # noqa: E402
from flexlab.forecast.outlook import outlook  # noqa: E402
from flexlab.recipes.catalogue import Catalogue  # noqa: E402
from flexlab.spec.plan import Wishes  # noqa: E402

PLAN_GOAL_MS = 5.0
LOAD_GOAL_MS = 150.0
IMPORT = "from flexlab.recipes.catalogue import Catalogue; "
READ = "c = Catalogue.load(); c.models(); c.backends(); c.gpus(); c.certificates()"


def machines(folder: Path) -> Iterator[tuple[str, Path]]:
    """Names and roots."""
    recorded = [path.parent for path in sorted(RECORDED.glob("*/expected.json"))]
    if recorded:
        yield from ((root.name, root) for root in recorded)
        return
    for name, (build, _, _) in MACHINES.items():
        yield name, build(folder / name.replace(" ", "-")).root


def of_plans(folder: Path, runs: int) -> dict[str, float]:
    """Milliseconds a plan, over all and of the slowest machine and model."""
    catalogue = Catalogue.load()
    recipes = catalogue.models()
    places = [(name, Here.look(root, catalogue)) for name, root in machines(folder)]
    costs: dict[tuple[str, str], float] = {}
    for name, here in places:
        for recipe in recipes:
            plan = partial(outlook, here, recipe, Wishes())
            costs[name, recipe.name] = smallest_ms(plan, runs)
    slowest = max(costs, key=lambda pair: costs[pair])
    return {
        f"plan, mean of {len(places)} machines x {len(recipes)} models": sum(costs.values())
        / len(costs),
        f"plan, slowest ({slowest[1]} on {slowest[0]})": costs[slowest],
    }


def of_loading(runs: int) -> float:
    """Milliseconds to read every recipe in a fresh process."""

    def run(program: str) -> float:
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
        return (time.perf_counter() - begun) * 1000

    whole = min(run(IMPORT + READ) for _ in range(runs))
    return whole - min(run(IMPORT) for _ in range(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = of_plans(Path(folder), options.runs)
    loading = {"reading every recipe": of_loading(options.runs)}
    if options.json:
        print(json.dumps(figures | loading, indent=2))
        return
    for what, ms in (figures | loading).items():
        goal = LOAD_GOAL_MS if what in loading else PLAN_GOAL_MS
        print(f"{what:76} {ms:8.2f} ms  goal {goal:g}")


if __name__ == "__main__":
    main()
