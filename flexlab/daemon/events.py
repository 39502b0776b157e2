"""What happened: a ring in memory for those who follow, JSON lines on disk for later.

Two files of at most 8 MiB; ids continue over restarts. A record, never the source of truth: a disk
that is full loses lines here and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from flexlab.spec.lab import Event, EventKind

log = logging.getLogger(__name__)
FILE_MAX_BYTES = 8 << 20
RING = 2000
_encode = msgspec.json.Encoder().encode


class EventLog:
    """Appended to on the loop; read by id."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ring: deque[Event] = deque(maxlen=RING)
        self._size = 0
        self._torn = False
        """The file ends in the half line of a daemon that was killed while it wrote."""
        self._changed = asyncio.Event()
        self.heard: list[Callable[[Event], None]] = []
        """Called with each event, on the loop."""
        self.last_id = self._read_back()

    def _read_back(self) -> int:
        """The newest events of an earlier daemon, so that `--after` works across a restart."""
        try:
            content = self._path.read_bytes()
            lines = content.splitlines()[-RING:]
            self._size = len(content)
            self._torn = not content.endswith(b"\n") and bool(content)
        except OSError:
            return 0
        for line in lines:
            try:
                self._ring.append(msgspec.json.decode(line, type=Event))
            except msgspec.MsgspecError:
                continue  # torn, see above
        return max((event.id for event in self._ring), default=0)

    def add(
        self,
        kind: EventKind,
        text: str,
        *,
        model: str | None = None,
        instance: str | None = None,
        state: str | None = None,
        why: str | None = None,
        by: str | None = None,
        seconds: float | None = None,
        size: int | None = None,
    ) -> None:
        """Keep one event and wake those who follow; `size` in bytes."""
        self.last_id += 1
        event = Event(
            id=self.last_id,
            at=time.time(),
            kind=kind,
            text=text,
            model=model,
            instance=instance,
            state=state,
            why=why,
            by=by,
            seconds=seconds,
            bytes=size,
        )
        self._ring.append(event)
        for heard in self.heard:
            heard(event)
        log.info("%s", text)
        self._write(_encode(event) + b"\n")
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _write(self, line: bytes) -> None:
        try:
            if self._size + len(line) > FILE_MAX_BYTES:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
                self._size = 0
            with self._path.open("ab") as file:
                file.write(b"\n" + line if self._torn else line)
            self._torn = False
            self._size += len(line)
        except OSError as error:
            log.warning("events are not written: %s", error)

    def after(self, event_id: int) -> list[Event]:
        """Those newer than `event_id` that are still in the ring, oldest first."""
        return [event for event in self._ring if event.id > event_id]

    async def wait(self, event_id: int) -> list[Event]:
        """As `after`, but waits until there is one."""
        while not (found := self.after(event_id)):
            await self._changed.wait()
        return found
