"""Commands as people run them: as a process, or (ten times quicker) in the test's own one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexlab.cli import main

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


def run_here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Flexlab:
    """As `run_in`, through the same edge, without a new Python for each command."""

    def run(*words: str, stdin: str = "", **env: str) -> Result:
        streams = {
            "stdin": io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"),
            "stdout": io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
            "stderr": io.TextIOWrapper(io.BytesIO(), encoding="utf-8"),
        }
        with monkeypatch.context() as patched:
            patched.chdir(folder)
            for name, value in environment(**env).items():
                patched.setenv(name, value)
            for name, stream in streams.items():
                patched.setattr(sys, name, stream)
            code = main.run(list(words))
        said = []
        for name in ("stdout", "stderr"):
            streams[name].seek(0)
            said.append(streams[name].read())
        return Result(words, code, *said)

    return run
