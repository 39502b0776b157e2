"""Which of the user's files have changed: looked at again and again, through every link.

What a file says counts, not how it got there. So one that was written in place, replaced by a
rename, reached by another link (`ln -sfn`, Kubernetes' `..data`) or changed under a mount of the
file alone is a change, and one that was only touched is none.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

SETTLED_S = 0.3
"""A change counts once nothing has changed for this long: who saves may write several times."""
COMPARED_MAX_BYTES = 1024 * 1024
"""Larger files are judged by their size and times alone; they are refused when they are read."""
_RACY_NS = 2_000_000_000
"""A file this young may change again without another time stamp: its content is read again."""

_Print = str
_Stamp = tuple[str, int, int, int, int, int]


class FileWatch:
    """Remembers what was seen last of groups of files and folders; `look` blocks (a little)."""

    def __init__(
        self,
        groups: Mapping[str, tuple[Path, ...]],
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`groups`: name -> files, and folders whose files count; none of them need exist."""
        self._groups = groups
        self._now_ns = now_ns
        self._known: dict[Path, tuple[_Stamp, _Print]] = {}
        self._seen = self._told = self._read()
        self._since = 0.0

    @property
    def is_moving(self) -> bool:
        """Something differs from what was told last, and has not settled yet."""
        return self._seen != self._told

    def look(self, now: float) -> frozenset[str]:
        """The groups that have changed and settled since the last such answer.

        `now` is any clock in seconds that does not go back.
        """
        seen = self._read()
        if seen != self._seen:
            self._seen, self._since = seen, now
            return frozenset()
        if not self.is_moving or now - self._since < SETTLED_S:
            return frozenset()
        changed = frozenset(name for name in seen if seen[name] != self._told[name])
        self._told = seen
        return changed

    def _read(self) -> dict[str, dict[Path, _Print]]:
        seen = {
            name: {file: self._print(file) for place in places for file in _files(place)}
            for name, places in self._groups.items()
        }
        present = {file for prints in seen.values() for file in prints}
        self._known = {file: kept for file, kept in self._known.items() if file in present}
        return seen

    def _print(self, file: Path) -> _Print:
        """What stands for the content of a file."""
        try:
            target = os.path.realpath(file)
            info = os.stat(target)
            stamp = (
                target,
                info.st_dev,
                info.st_ino,
                info.st_size,
                info.st_mtime_ns,
                info.st_ctime_ns,
            )
            known = self._known.get(file)
            if known is not None and known[0] == stamp:
                return known[1]
            if info.st_size > COMPARED_MAX_BYTES:
                return repr(stamp)
            print_ = hashlib.sha256(Path(target).read_bytes()).hexdigest()
        except OSError as error:
            return f"cannot be read: {error.errno}"
        if self._now_ns() - max(info.st_mtime_ns, info.st_ctime_ns) > _RACY_NS:
            self._known[file] = (stamp, print_)
        return print_


def _files(place: Path) -> Iterator[Path]:
    """The files of a folder that are not hidden; a file itself; nothing where nothing is."""
    try:
        with os.scandir(place) as entries:
            found = sorted(Path(entry.path) for entry in entries if not entry.name.startswith("."))
        yield from found
    except FileNotFoundError:
        if os.path.lexists(place):  # a link to nothing says something else than no file
            yield place
    except OSError:  # a file, or a folder that must not be looked into
        yield place
