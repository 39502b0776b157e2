"""Every test has a home of its own; nothing of the user's is read or written."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

# pytest-asyncio asks for the current loop before it sets its own; where none was ever set, Python
# makes one, which nobody closes.
asyncio.set_event_loop(None)


@pytest.fixture(autouse=True)
def home(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Path:
    """An empty HOME, with every XDG_* and FLEXLAB_* variable gone; a container engine is seen by
    the tests that ask for one."""
    folder = tmp_path_factory.mktemp("home")
    for name in list(os.environ):
        if name.startswith(("XDG_", "FLEXLAB_", "HF_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    if request.node.get_closest_marker("docker") is None:
        monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    return folder
