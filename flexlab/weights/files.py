"""Files that appear whole or not at all, and what to say when the disk says no."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from flexlab.core.errors import WeightsError
from flexlab.core.units import MIB, show_bytes

PART_SUFFIX = ".part"
"""An unfinished file, kept over restarts."""
NOTE_SUFFIX = ".part.json"
"""What is known about an unfinished file."""
BAD_SUFFIX = ".bad"
"""A finished file with the wrong checksum, set aside."""

DISK_SPARE_BYTES = 16 * MIB
"""Left free beyond what a download needs, so that state files and logs still find room."""

_BLOCK_BYTES = MIB
_MODELS_DIR_HINT = "set models_dir in settings.yaml (or FLEXLAB_MODELS_DIR) to a folder you own"


def beside(path: Path, suffix: str) -> Path:
    """The path with a suffix added to its name."""
    return path.with_name(path.name + suffix)


def make_folder(folder: Path) -> None:
    """With its parents. Raises WeightsError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_trouble(folder, error) from error


def write_whole(path: Path, data: bytes) -> None:
    """Replace the file at once: a reader sees the old or the new text. Raises OSError.

    One writer at a time: the caller holds the lock of the folder.
    """
    draft = beside(path, ".tmp")
    with open(draft, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)


def finish(part: Path, target: Path) -> None:
    """Give a finished file its name, durably: after a power cut it is whole or still a part."""
    with open(part, "rb") as stream:
        os.fsync(stream.fileno())
    os.replace(part, target)
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def hash_file(path: Path, moved: Callable[[int], None]) -> str:
    """sha256 in hex; `moved(position)` is called along the way. Raises OSError."""
    digest = hashlib.sha256()
    position = 0
    with open(path, "rb", buffering=0) as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
            position += len(block)
            moved(position)
    return digest.hexdigest()


def size_of(path: Path) -> int | None:
    """Bytes of a file, None when there is none."""
    try:
        return path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def free_bytes(folder: Path) -> int | None:
    """Free bytes for this user on the disk where the folder is, or will be; None if unknown."""
    for existing in (folder, *folder.parents):
        try:
            return shutil.disk_usage(existing).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raises WeightsError when so many bytes more would not fit there."""
    free = free_bytes(folder)
    if free is not None and needed_bytes + DISK_SPARE_BYTES > free:
        raise WeightsError(
            f"not enough disk space in {folder}: {show_bytes(needed_bytes)} needed, "
            f"{show_bytes(free)} free",
            "flexlab ls shows what the models take, flexlab rm MODEL frees it",
            code="disk_full",
        )


def disk_trouble(path: Path, error: OSError) -> WeightsError:
    """What the system refused, as a sentence with its mend."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return WeightsError(
            f"the disk is full: {path} ({error.strerror}); what was fetched is kept",
            "free some space (flexlab ls, flexlab rm MODEL), then the same command goes on",
            code="disk_full",
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return WeightsError(
            f"may not use {error.filename or path}: {error.strerror}",
            _MODELS_DIR_HINT,
            code="models_dir",
        )
    return WeightsError(
        f"cannot use {error.filename or path}: {error.strerror or error}",
        _MODELS_DIR_HINT,
        code="models_dir",
    )
