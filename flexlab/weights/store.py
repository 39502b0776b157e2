"""What is installed, where, and what it takes.

    MODELS_DIR/pypi/PROJECT-VERSION/path/in/wheel
    MODELS_DIR/hf/ORG/REPO/REV/path/in/repository
    MODELS_DIR/.flexlab/NAME-HASH.json   one item: source, checksum, size, files, when
    MODELS_DIR/.flexlab/*.lock           held by whoever fetches into that folder

The files lie where a person would look for them. An item is written when its fetch begins and
completed when it ends; `installed` believes a completed item whose files have their sizes, so it
costs a few stat calls and no checksum.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import quote

import msgspec

from flexlab.core.errors import WeightsError
from flexlab.spec.plan import Weight
from flexlab.spec.source import (
    FileSource,
    HfSource,
    LocalSource,
    PypiSource,
    Source,
    parse_source,
)
from flexlab.weights import files, hub_cache
from flexlab.weights.lock import FileLock

ITEM_SCHEMA = 1
_INDEX = ".flexlab"
_COUNTED = (".whl", files.PART_SUFFIX)

EntryState = Literal["installed", "partial", "bad", "unknown"]


class ItemFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an item; the path is relative to the models folder unless it lies elsewhere."""

    path: str
    size_bytes: int | None = None
    sha256: str | None = None
    done: bool = False


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about one source: the content of its JSON file."""

    schema: int = ITEM_SCHEMA
    source: str
    path: str
    """What an engine is given: a file, or the folder of a repository."""
    files: tuple[ItemFile, ...] = ()
    sha256: str | None = None
    """Of the file that `path` names; None for a folder."""
    revision: str | None = None
    """The commit that was fetched from a hub."""
    total_bytes: int | None = None
    """What the fetch moves over the network; the wheel, where there is one."""
    verified: bool = False
    """Whether every file had a checksum to be held against."""
    in_place: bool = False
    """It belongs to the user (a file:// source, the Hugging Face cache): never deleted."""
    installed_at: float | None = None
    """None while it is being fetched."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `ls`."""

    state: EntryState
    path: str
    size_bytes: int
    source: str | None = None
    total_bytes: int | None = None
    """Of a partial one: what it will have fetched in the end."""
    installed_at: float | None = None
    verified: bool = False
    in_place: bool = False


class Store:
    """The models folder. Every method raises WeightsError when the folder cannot be used."""

    def __init__(self, models_dir: Path) -> None:
        self.models_dir = Path(os.path.abspath(os.path.expanduser(models_dir)))
        self._index = self.models_dir / _INDEX

    # ── questions ────────────────────────────────────────────────────────────────────────────────

    def installed(self, weight: Weight) -> Path | None:
        """Where it lies, ready to be given to an engine; None when it must be fetched first."""
        source = parse_source(weight.source)
        if isinstance(source, LocalSource) or (
            isinstance(source, FileSource) and weight.sha256 is None
        ):
            path = self.absolute(source.path)
            return path if os.path.exists(path) and _fits(path, weight.size_bytes) else None
        try:
            item = self.item(source)
            whole = item is not None and self._is_whole(item, weight)
        except OSError as error:
            raise files.disk_trouble(self.models_dir, error) from error
        if item is not None and whole:
            return self.absolute(item.path)
        return hub_cache.file_of(source, weight) if isinstance(source, HfSource) else None

    def stamp(self) -> int:
        """Changes whenever something is installed or removed here: one stat call."""
        try:
            return os.stat(self._index).st_mtime_ns
        except OSError:
            return 0

    def _is_whole(self, item: Item, weight: Weight) -> bool:
        if item.installed_at is None or weight.sha256 not in (None, item.sha256):
            return False
        if not all(_fits(self.absolute(file.path), file.size_bytes) for file in item.files):
            return False
        # What belongs to the user may be changed by the user.
        return not item.in_place or all(
            self.absolute(file.path).stat().st_mtime <= item.installed_at for file in item.files
        )

    def entries(self) -> list[Entry]:
        """Everything in the folder: installed, partial, set aside, and what nobody knows."""
        try:
            items = sorted(self._items(), key=lambda item: item.source)
            known = [entry for item in items for entry in self._entries_of(item)]
            return known + self._unknown(items)
        except OSError as error:
            raise files.disk_trouble(self.models_dir, error) from error

    def disk_free(self) -> int | None:
        """Free bytes on the disk of the models folder, for this user; None if unknown."""
        return files.free_bytes(self.models_dir)

    # ── removal ──────────────────────────────────────────────────────────────────────────────────

    def remove(self, weight: Weight) -> int:
        """Delete what FlexLab fetched for it, parts included; returns the bytes set free.

        What belongs to the user (file:// sources, the Hugging Face cache) stays where it is.
        """
        source = parse_source(weight.source)
        if not self._index.is_dir():
            return 0
        lock = self.lock(source)
        if not lock.try_hold():
            raise WeightsError(
                f"{weight.source} is being fetched right now",
                "stop that fetch first (Ctrl-C in its terminal), or wait for its end",
                code="weights_busy",
            )
        try:
            return self._remove(source)
        except OSError as error:
            raise files.disk_trouble(self.models_dir, error) from error
        finally:
            lock.release()

    def _remove(self, source: Source) -> int:
        item = self.item(source)
        if item is None:
            return 0
        others = {path for other in self._items() if other != item for path in self._paths(other)}
        freed = 0
        for path in [path for path in self._paths(item) if path not in others]:
            freed += files.size_of(path) or 0
            path.unlink(missing_ok=True)
            self._remove_empty_parents(path)
        self._item_path(source).unlink(missing_ok=True)
        return freed

    def _remove_empty_parents(self, path: Path) -> None:
        for folder in path.parents:
            if folder == self.models_dir or not folder.is_relative_to(self.models_dir):
                return
            try:
                folder.rmdir()
            except OSError:  # not empty, or somebody was quicker
                return

    # ── for fetch ────────────────────────────────────────────────────────────────────────────────

    def lock(self, source: Source) -> FileLock:
        """Held by the one who fetches or removes this source.

        One per wheel or repository, not per file: two members of a wheel share its part.
        """
        place = (
            source.path if isinstance(source, FileSource | LocalSource) else str(self.home(source))
        )
        return FileLock(self._index / f"{_word(place)}.lock")

    def prepare(self) -> None:
        """Make the folder. Raises WeightsError when this user may not write to it."""
        files.make_folder(self._index)
        if not os.access(self._index, os.W_OK | os.X_OK):
            denied = PermissionError(13, os.strerror(13), str(self.models_dir))
            raise files.disk_trouble(self.models_dir, denied)

    def item(self, source: Source) -> Item | None:
        """What is known about the source; None when nothing is, or its file is unreadable."""
        return _read_item(self._item_path(source))

    def save(self, item: Item) -> None:
        """Write the item, whole or not at all."""
        path = self._item_path(parse_source(item.source))
        try:
            files.write_whole(path, msgspec.json.format(msgspec.json.encode(item)))
        except OSError as error:
            raise files.disk_trouble(path, error) from error

    def home(self, source: PypiSource | HfSource) -> Path:
        """The folder that the source's files go into."""
        if isinstance(source, PypiSource):
            folder = f"{source.normalized_project}-{source.version}"
            return self.models_dir / "pypi" / folder
        revision = quote(source.revision or hub_cache.DEFAULT_REVISION, safe="")
        return self.models_dir / "hf" / source.org / source.repo / revision

    def absolute(self, path: str) -> Path:
        """The path of an item or of one of its files."""
        return self.models_dir / path

    def relative(self, path: Path) -> str:
        """As an item keeps it: the folder may be moved, or be mounted elsewhere."""
        inside = path.is_relative_to(self.models_dir)
        return str(path.relative_to(self.models_dir) if inside else path)

    def fetched_bytes(self, item: Item) -> int:
        """How much of it is here, finished or not."""
        source = parse_source(item.source)
        if isinstance(source, PypiSource):
            paths = [p for p in self.home(source).glob("*.whl*") if p.suffix in _COUNTED]
        else:
            targets = [self.absolute(file.path) for file in item.files]
            paths = [p for t in targets for p in (t, files.beside(t, files.PART_SUFFIX))]
        return sum(files.size_of(path) or 0 for path in paths)

    # ── inner ────────────────────────────────────────────────────────────────────────────────────

    def _item_path(self, source: Source) -> Path:
        return self._index / f"{source.name[:80]}-{_word(source.uri)}.json"

    def _items(self) -> Iterator[Item]:
        for path in self._index.glob("*.json"):
            if item := _read_item(path):
                yield item

    def _paths(self, item: Item) -> list[Path]:
        """Every file that exists because of this item, under whatever ending."""
        if item.in_place:
            return []
        wanted = [self.absolute(file.path) for file in item.files]
        found = [
            path
            for target in wanted
            for suffix in ("", files.PART_SUFFIX, files.NOTE_SUFFIX, files.BAD_SUFFIX)
            if (path := files.beside(target, suffix)).exists()
        ]
        source = parse_source(item.source)
        if isinstance(source, PypiSource):
            found += self.home(source).glob("*.whl*")
        return found

    def _entries_of(self, item: Item) -> Iterator[Entry]:
        installed = item.installed_at is not None and all(
            _fits(self.absolute(file.path), file.size_bytes) for file in item.files
        )
        size_bytes = sum(file.size_bytes or 0 for file in item.files)
        if not installed:
            size_bytes = self.fetched_bytes(item)
        if installed or size_bytes:
            yield Entry(
                state="installed" if installed else "partial",
                path=str(self.absolute(item.path)),
                size_bytes=size_bytes,
                source=item.source,
                total_bytes=None if installed else item.total_bytes,
                installed_at=item.installed_at if installed else None,
                verified=installed and item.verified,
                in_place=item.in_place,
            )
        for path in self._paths(item):
            if path.name.endswith(files.BAD_SUFFIX):
                size_bytes = files.size_of(path) or 0
                yield Entry(state="bad", path=str(path), size_bytes=size_bytes, source=item.source)

    def _unknown(self, items: list[Item]) -> list[Entry]:
        known = {path for item in items for path in self._paths(item)}
        found = []
        for folder, folders, names in os.walk(self.models_dir):
            folders[:] = sorted(name for name in folders if name != _INDEX)
            for path in (Path(folder) / name for name in sorted(names)):
                if path not in known and (size_bytes := files.size_of(path)) is not None:
                    found.append(Entry(state="unknown", path=str(path), size_bytes=size_bytes))
        return found


def _word(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:12]


def _read_item(path: Path) -> Item | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Item)
    except (FileNotFoundError, NotADirectoryError, msgspec.MsgspecError):
        return None


def _fits(path: Path, size_bytes: int | None) -> bool:
    found = files.size_of(path)
    return found is not None and size_bytes in (None, found)
