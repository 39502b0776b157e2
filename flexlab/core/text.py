"""Text that comes from models, backends, containers or file names, before a terminal sees it."""

from __future__ import annotations

import errno
import os
import re

# Only writing fails in these ways.
_WRITING = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# C0 and C1 controls, DEL, and the bidirectional overrides that can hide what a line says.
# Newline and tab stay: they are harmless and common in answers.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Whole escape sequences go first (CSI, OSC with its terminator, two-character ones), so that no
# "[31m" is left behind where the escape character was taken out.
_ESCAPE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]|\x1b[\\]PX^_].*?(?:\x07|\x1b\\\\)|\x1b[ -/]*[0-~]", re.DOTALL
)


def clean(text: str) -> str:
    """Without control characters and escape sequences; newlines and tabs stay."""
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def clean_line(text: str) -> str:
    """As `clean`, on one line."""
    return " ".join(clean(text).split())


def counted(count: int, noun: str) -> str:
    """`1 check`, `2 checks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def os_sentence(error: OSError) -> str:
    """What the system refused: `cannot write /x: read-only file system`, without error numbers."""
    why = (error.strerror or str(error) or type(error).__name__).strip()
    why = why[:1].lower() + why[1:]
    if error.filename is None:
        return why
    act = "write" if error.errno in _WRITING else "use"
    return f"cannot {act} {clean_line(os.fsdecode(error.filename))}: {why}"
