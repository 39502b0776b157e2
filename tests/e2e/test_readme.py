"""The README's commands, one after the other, as a stranger would paste them."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from readme_commands import COMMANDS, README, Command

ROOT = README.parent
PORT = "8484"
LEFT_BEHIND = shutil.ignore_patterns(".git", ".*_cache", ".venv", "__pycache__", ".hypothesis")

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the checkout beside an empty home; no daemon of it lives on."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "home").mkdir()
    shutil.copytree(ROOT, folder / "flexlab", ignore=LEFT_BEHIND)
    yield folder
    flexlab = folder / "flexlab" / ".venv" / "bin" / "flexlab"
    if flexlab.exists():
        subprocess.run([flexlab, "down", "--all", "--daemon"], env=_env(folder, "0"), timeout=120)


@pytest.fixture(scope="module")
def port() -> str:
    """8484 may be somebody's on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return str(free.getsockname()[1])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:40])
def test_a_command_of_the_readme_works(command: Command, place: Path, port: str) -> None:
    text = command.as_run.replace(PORT, port)
    words = ["bash", "-c", text] if command.language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(
        words,
        cwd=place / "flexlab",
        env=_env(place, port),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert command.expect in done.stdout


def _env(place: Path, port: str) -> dict[str, str]:
    bin_folder = place / "flexlab" / ".venv" / "bin"
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("XDG_", "FLEXLAB_", "PYTHON"))
    }
    return {
        **kept,
        "HOME": str(place / "home"),
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "FLEXLAB_PORT": port,
        "TERM": "dumb",
    }
