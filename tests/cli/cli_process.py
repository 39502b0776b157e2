"""Commands run as people run them: a process of their own, in the test's own home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

Result = subprocess.CompletedProcess[str]
Flexlab = Callable[..., Result]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "flexlab", *words]


def environment(**more: str) -> dict[str, str]:
    """Of a command: `serve` is the fake daemon, the terminal a dumb one."""
    places = [str(ROOT), str(HERE / "site"), str(HERE)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "TERM": "dumb",
        "COLUMNS": "80",
        **more,
    }


def run_in(folder: Path) -> Flexlab:
    """`run("ps", "--json", COLUMNS="40")` runs it there; exit code, stdout and stderr."""

    def run(*words: str, stdin: str = "", timeout: float = 30, **env: str) -> Result:
        return subprocess.run(
            command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(**env),
            cwd=folder,
        )

    return run
