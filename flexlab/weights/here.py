"""What is on this machine of the weights that are asked for: paths, sizes, headers, and damage."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from flexlab.core.errors import WeightsError
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Weight
from flexlab.spec.source import parse_source
from flexlab.weights.gguf import GgufHeader, check_whole, read_header
from flexlab.weights.store import Store


class Here(msgspec.Struct, frozen=True, kw_only=True):
    """Everything by source URI; what is not installed is missing from all four."""

    paths: dict[str, str]
    sizes: dict[str, int]
    """In bytes; of a folder, of all its files."""
    headers: dict[str, GgufHeader]
    broken: dict[str, Problem]
    """GGUF files that no engine could load."""


class WeightsHere:
    """Looks into a store; a header is read once as long as its file stays the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._headers: dict[tuple[str, int, int], GgufHeader] = {}
        """(path, size, mtime in ns) -> header: reading one takes tens of milliseconds."""

    def look(self, weights: Iterable[Weight]) -> Here:
        """Raises WeightsError when the models folder cannot be used."""
        here = Here(paths={}, sizes={}, headers={}, broken={})
        for weight in weights:
            if weight.source in here.paths or (path := self._store.installed(weight)) is None:
                continue
            here.paths[weight.source] = str(path)
            here.sizes[weight.source] = _size(path)
            # By what the recipe says, not by the file's name: in a hub's cache it has none.
            if (weight.format or parse_source(weight.source).format) != "gguf":
                continue
            try:
                here.headers[weight.source] = self._header(path)
            except WeightsError as error:
                here.broken[weight.source] = Problem(
                    code=error.code, message=error.message, hint=error.hint or ""
                )
        return here

    def _header(self, path: Path) -> GgufHeader:
        """Raises WeightsError for what is no GGUF file, or not all of one."""
        try:
            info = path.stat()
        except OSError as error:
            raise WeightsError(f"{path} cannot be read: {error.strerror}") from error
        key = (str(path), info.st_size, info.st_mtime_ns)
        if key not in self._headers:
            header = read_header(path)
            check_whole(path, header)
            self._headers[key] = header
        return self._headers[key]


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size
