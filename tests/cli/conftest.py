"""Commands run as people run them: a process of their own, in the test's own home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_daemon import FakeDaemon

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


@pytest.fixture
def flexlab(home: Path) -> Flexlab:
    """`flexlab("ps", "--json")` runs it and returns exit code, stdout and stderr."""

    def run(*words: str, stdin: str = "", timeout: float = 30, **env: str) -> Result:
        return subprocess.run(
            command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment(**env),
            cwd=home,
        )

    return run


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """A running fake daemon in this home."""
    with FakeDaemon() as running:
        yield running
