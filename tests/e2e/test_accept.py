"""The acceptance scripts of the shared folder, where there is one beside the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).resolve().parents[2]
SPINE = ROOT.parent / "shared" / "accept" / "spine.py"


@pytest.mark.skipif(not SPINE.exists(), reason="the shared folder is not here")
def test_spine() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, str(SPINE), "--flexlab", f"{sys.executable} -m flexlab"],
        capture_output=True,
        text=True,
        timeout=600,
        env=env,
    )
    print(told.stdout)
    assert told.returncode == 0, told.stdout
