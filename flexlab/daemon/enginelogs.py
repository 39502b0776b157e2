"""Log files of embedded engines: one per launch, the last few of each model are kept."""

from __future__ import annotations

from pathlib import Path

from flexlab.core import paths
from flexlab.scheduler.state import safe_name

KEPT_PER_MODEL = 3


def new_log(instance: str) -> Path:
    """Where the engine of a new instance writes. Raises OSError."""
    return paths.private_dir(paths.logs_dir()) / f"{instance}.log"


def newest_log(model: str) -> str | None:
    """The log of a model's last launch; None if it was never started here."""
    found = logs_of(model)
    return str(found[-1]) if found else None


def prune(model: str) -> None:
    """Delete a model's older logs, with the parts that were rotated out of them."""
    for old in logs_of(model)[:-KEPT_PER_MODEL]:
        old.with_name(f"{old.name}.1").unlink(missing_ok=True)
        old.unlink(missing_ok=True)


def logs_of(model: str) -> list[Path]:
    """Oldest first."""
    found = paths.logs_dir().glob(f"{safe_name(model)}-{'[0-9a-f]' * 8}.log")
    return sorted(found, key=lambda path: path.stat().st_mtime_ns)
