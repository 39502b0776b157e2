"""FlexLab as its users have it: the real command, daemon, engine and weights, in an empty home."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from household import Household


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data folder shared by all homes, so that the weights are fetched once."""
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def lab(home: Path, weights: Path) -> Iterator[Household]:
    """A home with the real weights within reach; nothing may be left of it in the end."""
    household = Household(home, port=_free_port(), data=weights)
    yield household
    household.flexlab("down", "--all", "--daemon", timeout=60)
    assert household.processes() == [], "something of this home still runs"


@pytest.fixture
def bare_lab(home: Path) -> Iterator[Household]:
    """A home without weights."""
    household = Household(home, port=_free_port(), data=home / "data")
    yield household
    household.flexlab("down", "--all", "--daemon", timeout=60)
    assert household.processes() == [], "something of this home still runs"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loopback is never asked through a proxy."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
