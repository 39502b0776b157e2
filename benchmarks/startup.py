"""What it costs to start a command, beside Python and Typer themselves.

    python benchmarks/startup.py [--runs N] [--json]

Each command runs N times, interleaved so that a busy machine is unfair to all alike; the smallest
CPU time (user + system) counts, since everything else on the machine only ever adds. The target is
`--help` within 2.5 times a bare `import typer`. Exit 1 when it is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence

TARGET_RATIO = 2.5
BASE = "import typer"
COMMANDS: dict[str, Sequence[str]] = {
    "python -c pass": ["-c", "pass"],
    BASE: ["-c", "import typer"],
    "flexlab --version": ["-m", "flexlab", "--version"],
    "flexlab --help": ["-m", "flexlab", "--help"],
    "flexlab ps": ["-m", "flexlab", "ps"],
    "flexlab ps --json": ["-m", "flexlab", "ps", "--json"],
    "flexlab completion models": ["-m", "flexlab", "completion", "models"],
    "flexlab recipes": ["-m", "flexlab", "recipes"],
    "flexlab config show": ["-m", "flexlab", "config", "show"],
}


def cpu_ms(words: Sequence[str], env: dict[str, str]) -> float:
    """CPU milliseconds of one run; its output goes nowhere. Raises OSError."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    try:
        pid = os.posix_spawn(
            sys.executable,
            [sys.executable, *words],
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, nowhere, fd) for fd in (0, 1, 2)],
        )
    finally:
        os.close(nowhere)
    _, status, used = os.wait4(pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"{' '.join(words)} exited with {os.waitstatus_to_exitcode(status)}")
    return (used.ru_utime + used.ru_stime) * 1000


def measure(runs: int) -> dict[str, float]:
    """Smallest CPU milliseconds of each command, in an empty home."""
    smallest = dict.fromkeys(COMMANDS, float("inf"))
    with tempfile.TemporaryDirectory() as home:
        env = {key: value for key, value in os.environ.items() if not key.startswith("XDG_")}
        env["HOME"] = home
        for _ in range(runs + 1):  # the first round only fills __pycache__ and the page cache
            for name, words in COMMANDS.items():
                smallest[name] = min(smallest[name], cpu_ms(words, env))
    return smallest


def main() -> int:
    """Print the table, or JSON; 1 when `--help` misses the target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = measure(options.runs)
    ratio = costs["flexlab --help"] / costs[BASE]
    if options.json:
        print(json.dumps({"cpu_ms": costs, "help_ratio": ratio, "target": TARGET_RATIO}, indent=2))
    else:
        print(f"{'command':28} {'CPU ms':>8} {'x typer':>8}")
        for name, cost in costs.items():
            print(f"{name:28} {cost:8.1f} {cost / costs[BASE]:8.2f}")
        verdict = "met" if ratio <= TARGET_RATIO else "MISSED"
        print(f"\n--help is {ratio:.2f} x typer, target {TARGET_RATIO}: {verdict}")
    return ratio > TARGET_RATIO


if __name__ == "__main__":
    sys.exit(main())
