"""A home, the command in it, and a daemon that answers what a test tells it to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cli_process import Flexlab, run_here, run_in
from fake_daemon import FakeDaemon


@pytest.fixture
def flexlab(home: Path) -> Flexlab:
    """Runs commands in this test's home, each as a process."""
    return run_in(home)


@pytest.fixture
def flexlab_here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Flexlab:
    """Runs commands in this test's home, in this process."""
    return run_here(home, monkeypatch)


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    """A running fake daemon in this home."""
    with FakeDaemon() as running:
        yield running
