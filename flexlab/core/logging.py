"""The daemon's own log: plain lines in one file of bounded size.

A detached daemon's stdout and stderr are the same file, so that a crash of the interpreter is in
it too. When the file is rotated they move along: else they would write to the old one for ever.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

from flexlab.core.text import clean

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_STDOUT, _STDERR = 1, 2


class PlainFormatter(logging.Formatter):
    """Lines without control characters: messages hold names and output of others.

    What follows the first line is indented, so that no text can pass for a record of ours.
    """

    def __init__(self) -> None:
        super().__init__(_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """One record; a traceback is part of it."""
        return clean(super().format(record)).replace("\n", "\n    ")


class LogFile(RotatingFileHandler):
    """One older part (`.1`) beside the current one, together at most about `max_bytes`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        super().__init__(
            path,
            maxBytes=max(max_bytes // 2, 1),
            backupCount=1,
            encoding="utf-8",
            errors="backslashreplace",
        )
        self.setFormatter(PlainFormatter())

    def doRollover(self) -> None:
        """Rotate, and take stdout and stderr along where they are this file."""
        following = [fd for fd in (_STDOUT, _STDERR) if self.is_file_of(fd)]
        super().doRollover()
        if following:
            with open(self.baseFilename, "ab") as current:
                for fd in following:
                    os.dup2(current.fileno(), fd)

    def is_file_of(self, fd: int) -> bool:
        """Whether this open descriptor writes to the same file."""
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.baseFilename))
        except OSError:
            return False


def limit_log(max_bytes: int) -> None:
    """Another size for the files that are logged to."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            handler.maxBytes = max(max_bytes // 2, 1)


@contextmanager
def logging_to(path: Path, max_bytes: int, *, verbose: bool = False) -> Iterator[None]:
    """Send what is logged to `path`, and to stderr unless that is the same file.

    FlexLab's own loggers speak from INFO up (`verbose`: DEBUG), those of others from WARNING up.
    Raises OSError when the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = LogFile(path, max_bytes)
    handlers: list[logging.Handler] = [file]
    if not file.is_file_of(_STDERR):
        terminal = logging.StreamHandler(sys.stderr)
        terminal.setFormatter(PlainFormatter())
        handlers.append(terminal)
    root, ours = logging.getLogger(), logging.getLogger("flexlab")
    levels = root.level, ours.level
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.DEBUG if verbose else logging.INFO)
    for handler in handlers:
        root.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(levels[0])
        ours.setLevel(levels[1])
