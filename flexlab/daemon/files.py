"""Small state files: JSON with a schema number, mode 0600, replaced atomically."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeVar

import msgspec

from flexlab.core import paths
from flexlab.spec.instance import RECORD_SCHEMA, LaunchRecord
from flexlab.spec.plan import Keep, Wishes

log = logging.getLogger(__name__)
T = TypeVar("T")
MODELS_SCHEMA = 1


def write_private(path: Path, content: bytes) -> None:
    """Replace `path` so that a reader, or a crash at any moment, sees the old or the new whole."""
    paths.private_dir(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _Schema(msgspec.Struct):
    schema: int = 0


def _schema_of(path: Path) -> int:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Schema).schema
    except (OSError, msgspec.MsgspecError):
        return 0


def read_state(path: Path, kind: type[T], schema: int) -> T | None:
    """None for what is missing, broken, or written by a newer version (which is left alone)."""
    try:
        content = path.read_bytes()
        if msgspec.json.decode(content, type=_Schema).schema > schema:
            log.warning("%s was written by a newer FlexLab; it is left alone", path)
            return None
        return msgspec.json.decode(content, type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s cannot be used: %s", path, error)
        return None


class Records:
    """Launch records, one file per instance."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, record: LaunchRecord) -> None:
        """Create or replace. Raises OSError."""
        write_private(self._folder / f"{record.instance}.json", msgspec.json.encode(record))

    def remove(self, instance: str) -> None:
        """Once it is confirmed gone."""
        (self._folder / f"{instance}.json").unlink(missing_ok=True)

    def names(self) -> set[str]:
        """Instances that have a record, readable or not."""
        return {path.stem for path in self._folder.glob("*.json")}

    def all(self) -> list[LaunchRecord]:
        """Every readable record, oldest first."""
        found = [
            record
            for path in self._folder.glob("*.json")
            if (record := read_state(path, LaunchRecord, RECORD_SCHEMA)) is not None
        ]
        return sorted(found, key=lambda record: record.created_at)


class ModelState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a user decided about one model; survives the daemon."""

    keep: Keep | None = None
    """None: as its recipe says."""
    pinned: bool = False
    enabled: bool = True
    held_down: bool = False
    wishes: Wishes = Wishes()
    source: str | None = None
    """Of a model without a recipe: what it was derived from."""


class _Models(msgspec.Struct, frozen=True, kw_only=True):
    schema: int = MODELS_SCHEMA
    models: dict[str, ModelState] = {}


def read_models(path: Path) -> dict[str, ModelState]:
    """Model name -> state; empty when there is none."""
    found = read_state(path, _Models, MODELS_SCHEMA)
    return dict(found.models) if found else {}


def write_models(path: Path, models: dict[str, ModelState]) -> None:
    """Keep what differs from the defaults. Raises OSError, also rather than lose a newer file."""
    if _schema_of(path) > MODELS_SCHEMA:
        raise OSError(f"{path} was written by a newer FlexLab")
    told = {name: state for name, state in models.items() if state != ModelState()}
    write_private(path, msgspec.json.encode(_Models(models=told)))


def installation_id(folder: Path) -> str:
    """The random word that marks everything this installation creates; made at first use.

    Raises OSError.
    """
    path = folder / "installation"
    try:
        if word := path.read_text(encoding="ascii").strip():
            return word
    except FileNotFoundError:
        pass  # any other error may pass: a new word would disown all that runs
    word = os.urandom(8).hex()
    write_private(path, word.encode())
    return word
