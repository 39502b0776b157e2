"""Small reads of pseudo files that cannot raise, block or fill memory."""

from __future__ import annotations

import os
from pathlib import Path

_LIMIT_BYTES = 4 * 1024 * 1024
"""More than /proc/cpuinfo of a 1,000-thread machine."""


def read_text(path: Path) -> str | None:
    """The file's text without NUL bytes (some sysfs dumps are padded); None if unreadable."""
    raw = read_bytes(path)
    return None if raw is None else raw.replace(b"\0", b"").decode("utf-8", errors="replace")


def read_bytes(path: Path) -> bytes | None:
    """The file as it is; None if unreadable."""
    try:
        # Not blocking: where a tree holds a FIFO in a file's place, this reads an empty file.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):  # ValueError: a NUL byte in a path that came out of another file
        return None
    try:
        chunks = []
        left = _LIMIT_BYTES
        while left > 0 and (chunk := os.read(descriptor, min(left, 256 * 1024))):
            chunks.append(chunk)
            left -= len(chunk)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return b"".join(chunks)


def read_count(path: Path) -> int | None:
    """A file that holds one decimal number >= 0; None for anything else."""
    return count(read_text(path))


def count(text: str | None) -> int | None:
    """`text` as a decimal number >= 0 of at most 64 bits; None for anything else."""
    word = (text or "").strip()
    if not word.isascii() or not word.isdigit() or len(word) > 20:
        return None
    value = int(word)
    return value if value < 2**64 else None


def list_names(folder: Path) -> list[str]:
    """Names in a folder, sorted; empty where it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except (OSError, ValueError):
        return []


def fields(text: str | None) -> dict[str, int]:
    """`name value [unit]` lines (meminfo, memory.stat) as numbers; other lines are left out."""
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        words = line.replace(":", " ", 1).split()
        value = count(words[1]) if len(words) in (2, 3) else None
        if value is not None:
            found.setdefault(words[0], value)
    return found
