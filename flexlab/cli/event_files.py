"""What the daemon's files of events hold: for when none runs, and for what one has forgotten."""

from __future__ import annotations

from pathlib import Path

import msgspec

from flexlab.core import paths
from flexlab.spec.lab import Event


def recorded(after: int = 0) -> list[Event]:
    """Events newer than `after`, oldest first. What is torn or cannot be read is passed over."""
    newest = paths.events_file()
    lines = [*_lines(newest.with_suffix(".1.jsonl")), *_lines(newest)]
    found = (event for line in lines if (event := _event(line)) is not None)
    return [event for event in found if event.id > after]


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines()
    except OSError:
        return []


def _event(line: bytes) -> Event | None:
    try:
        return msgspec.json.decode(line, type=Event)
    except msgspec.MsgspecError:
        return None
