"""Live readings, in a process of their own: a driver call that hangs, or a driver library that
crashes, costs this process and no other.

`python -m flexlab.gpus.watch [--sysroot DIR] [--interval S] [--holders-every S] [--count N]
[--die-with-parent]` writes one Sample as one line of JSON a tick. It reads wishes from stdin, one
a line: `{"holders_every_s": 2}`. It ends on a signal, when nobody reads its output any more, and,
with --die-with-parent, at the end of stdin.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from flexlab.core.parent import die_with_parent
from flexlab.gpus.helper import HOLDERS_EVERY_S, INTERVAL_S
from flexlab.gpus.sampler import Sampler

SHORTEST_S = 0.1
SEARCH_PATIENCE_S = 5.0
"""The first line waits so long for the search for GPUs: below what a parent takes for silence."""
_BLOCK_BYTES = 4096


class Wish(msgspec.Struct, frozen=True):
    """What may be asked of a helper that runs."""

    holders_every_s: float


def main(words: Sequence[str]) -> NoReturn:
    """The helper. It ends by `_exit`: a thread inside a driver call would hold an orderly end."""
    parser = argparse.ArgumentParser(prog="python -m flexlab.gpus.watch", allow_abbrev=False)
    parser.add_argument("--sysroot", type=Path, default=Path("/"))
    parser.add_argument("--interval", type=_seconds, default=INTERVAL_S)
    parser.add_argument("--holders-every", type=_seconds, default=HOLDERS_EVERY_S)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--die-with-parent", action="store_true")
    options = parser.parse_args(words)
    # The kernel's own way to end: it needs no step of Python, which a library may hold up.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if options.die_with_parent:
        die_with_parent()
    output = _own_output()
    sampler = Sampler(options.sysroot, holders_every_s=options.holders_every)
    listener = threading.Thread(
        target=_listen, args=(sampler, options.die_with_parent), name="flexlab-wishes", daemon=True
    )
    listener.start()
    with contextlib.suppress(OSError):  # nobody reads it any more, or the disk is full
        sampler.begin(SEARCH_PATIENCE_S)
        for _tick in _ticks(options.interval, options.count, output):
            _write_line(output, msgspec.json.encode(sampler.tick()) + b"\n")
    os._exit(0)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return max(SHORTEST_S, seconds)


def _own_output() -> int:
    """Our stdout, kept from driver libraries: what they print goes to stderr."""
    output = os.dup(1)
    os.dup2(2, 1)
    return output


def _ticks(interval_s: float, count: int | None, output: int) -> Iterator[int]:
    """Numbers of the ticks, each when it is due; those that are over already are left out.

    Ends when nobody reads `output` any more, which a write would notice one tick later.
    """
    closed = select.poll()
    closed.register(output, 0)  # an error or a hang-up is told unasked
    begun = time.monotonic()
    number = told = 0
    while count is None or told < count:
        yield number
        told += 1
        number = max(number + 1, math.ceil((time.monotonic() - begun) / interval_s))
        if told != count and closed.poll(
            max(0.0, begun + number * interval_s - time.monotonic()) * 1000
        ):
            return


def _write_line(output: int, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(output, rest) :]


def _listen(sampler: Sampler, ends_with_input: bool) -> None:
    """Obey what stdin says, up to its end."""
    if os.isatty(0):
        return  # a read in the background would stop the process
    pending = b""
    while block := _read_input():
        *lines, pending = (pending + block).split(b"\n")
        pending = pending[-_BLOCK_BYTES:]
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                wish = msgspec.json.decode(line, type=Wish)
                sampler.holders_every_s = max(SHORTEST_S, wish.holders_every_s)
    if ends_with_input:
        os._exit(0)


def _read_input() -> bytes:
    try:
        return os.read(0, _BLOCK_BYTES)
    except OSError:
        return b""


if __name__ == "__main__":
    main(sys.argv[1:])
