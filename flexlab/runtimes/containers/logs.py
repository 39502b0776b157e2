"""Lines of a container's output, and what is kept of them once it is gone."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flexlab.runtimes.logfile import LINE_LIMIT_BYTES


class ContainerLines:
    """As `runtimes.base.LogLines`; has a connection of its own while somebody reads."""

    def __init__(self, client: Any, container: str, *, tail: int, follow: bool) -> None:
        """`client` is the reader's own and is closed with it."""
        self._client = client
        self._closed = threading.Event()
        wanted = max(0, tail)
        self._stream = client.logs(container, stream=True, follow=follow, tail=wanted)
        self._lines = lines_of(self._stream)

    def __iter__(self) -> ContainerLines:
        return self

    def __next__(self) -> bytes:
        if self._closed.is_set():
            raise StopIteration
        try:
            return next(self._lines)
        except StopIteration:
            self.close()
            raise
        except Exception:  # the engine went, or `close` took the connection away
            self.close()
            raise StopIteration from None

    def close(self) -> None:
        """End it; a thread that waits in `next()` returns."""
        if not self._closed.is_set():
            self._closed.set()
            with contextlib.suppress(Exception):  # whatever is left of the connection
                self._stream.close()
            with contextlib.suppress(Exception):
                self._client.close()


def lines_of(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Whole lines without their ends, out of pieces as they come; a long one in parts."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield from _parts(line.rstrip(b"\r"))
        if len(rest) > LINE_LIMIT_BYTES:
            yield from _parts(rest)
            rest = b""
    if rest:
        yield from _parts(rest)


def _parts(line: bytes) -> list[bytes]:
    if len(line) <= LINE_LIMIT_BYTES:
        return [line]
    return [line[at : at + LINE_LIMIT_BYTES] for at in range(0, len(line), LINE_LIMIT_BYTES)]


def keep_tail(output: bytes, path: Path) -> None:
    """Write the last lines of a container to its log file. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(output)
