"""An engine's log file: opened for it, kept small, read from the end, followed.

The engine writes into the file itself (no pipe to the daemon), in append mode, so that the file
may be emptied under it.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import deque
from pathlib import Path

POLL_S = 0.2
LINE_LIMIT_BYTES = 64 * 1024
"""A longer line is passed on in parts."""
TAIL_LIMIT_BYTES = 8 * 1024**2
"""Never read further back than this, however many lines were asked for."""
_BLOCK_BYTES = 64 * 1024


def open_for_engine(path: Path, max_bytes: int) -> int:
    """A descriptor in append mode, the caller's to close. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    rotate(path, max_bytes)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path, flags, 0o600)


def rotate(path: Path, max_bytes: int) -> bool:
    """Above `max_bytes`: move its newest `max_bytes` to `NAME.1` and empty it; True when it did.

    Copied and emptied rather than renamed: an engine that runs goes on writing into its own file.
    Lines written between the two steps are lost, which is the price of needing no pipe.
    """
    try:
        if path.stat().st_size <= max_bytes:
            return False
        previous = _previous(path)
        with path.open("rb") as source, open(previous, "wb", opener=_private) as target:
            source.seek(-max_bytes, os.SEEK_END)
            shutil.copyfileobj(source, target)
        os.truncate(path, 0)
    except OSError:
        return False
    return True


def tail(path: Path, count: int) -> list[bytes]:
    """The last `count` lines without their ends, oldest first; older ones come from `NAME.1`."""
    return list(LogLines(path, tail_lines=count, follow=False))


class LogLines:
    """An iterator over lines, with a `close()` that any thread may call to end a follow."""

    def __init__(self, path: Path, *, tail_lines: int, follow: bool) -> None:
        self._path = path
        self._follow = follow
        self._closed = threading.Event()
        self._inode, self._offset = _place(path)
        lines, self._partial = _tail_until(path, max(0, tail_lines), self._offset)
        if not follow and self._partial:
            lines.append(self._partial)
        self._ready = deque(lines[-tail_lines:] if tail_lines > 0 else ())

    def __iter__(self) -> LogLines:
        return self

    def __next__(self) -> bytes:
        while not self._closed.is_set():
            if self._ready:
                return self._ready.popleft()
            if not self._follow:
                break
            self._read_more()
            if not self._ready:
                self._closed.wait(POLL_S)
        raise StopIteration

    def close(self) -> None:
        """End it; a thread that waits in `next()` returns."""
        self._closed.set()

    def _read_more(self) -> None:
        inode, size = _place(self._path)
        if inode != self._inode or size < self._offset:
            # A new file, or emptied by a rotation: everything in it is new.
            self._inode, self._offset = inode, 0
        if size == self._offset:
            return
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(TAIL_LIMIT_BYTES)
        except OSError:
            return
        self._offset += len(data)
        *whole, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LINE_LIMIT_BYTES:
            whole, self._partial = [*whole, self._partial], b""
        self._ready.extend(part for line in whole for part in _parts(line))


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".1")


def _place(path: Path) -> tuple[int, int]:
    """Inode and size; zeros while there is no such file."""
    try:
        info = path.stat()
    except OSError:
        return 0, 0
    return info.st_ino, info.st_size


def _private(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o600)


def _tail_until(path: Path, count: int, end: int) -> tuple[list[bytes], bytes]:
    """The last `count` whole lines before the offset `end`, and what follows the last of them."""
    lines, partial = _last_lines(path, count, end)
    if len(lines) < count:
        previous = _previous(path)
        older, rest = _last_lines(previous, count - len(lines), _place(previous)[1])
        # A rotation may have cut a line in two.
        lines = ([*older, rest] if rest else older) + lines
    return lines, partial


def _last_lines(path: Path, count: int, end: int) -> tuple[list[bytes], bytes]:
    position = end
    try:
        with path.open("rb") as file:
            blocks: list[bytes] = []
            newlines = 0
            # One newline more than lines: the one before the first line that is wanted.
            while position > 0 and newlines <= count and end - position < TAIL_LIMIT_BYTES:
                step = min(_BLOCK_BYTES, position)
                position -= step
                file.seek(position)
                blocks.append(file.read(step))
                newlines += blocks[-1].count(b"\n")
    except OSError:
        return [], b""
    *lines, partial = b"".join(reversed(blocks)).split(b"\n")
    wanted = lines[-count:] if count > 0 else []
    return [part for line in wanted for part in _parts(line)], partial


def _parts(line: bytes) -> list[bytes]:
    line = line.rstrip(b"\r")
    if len(line) <= LINE_LIMIT_BYTES:
        return [line]
    return [line[at : at + LINE_LIMIT_BYTES] for at in range(0, len(line), LINE_LIMIT_BYTES)]
