"""The parent's side of the hardware helper (`flexlab.gpus.watch`): to start it, to hear it, to be
rid of it. Nothing here waits for a helper longer than it is told to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from flexlab.spec.machine import Sample

INTERVAL_S = 1.0
HOLDERS_EVERY_S = 10.0
LINE_LIMIT_BYTES = 4 * 1024 * 1024
"""A line of 64 devices and 1,000 processes has 300 kB."""
_BLOCK_BYTES = 256 * 1024


def command(
    root: Path = Path("/"),
    *,
    interval_s: float = INTERVAL_S,
    holders_every_s: float = HOLDERS_EVERY_S,
    count: int | None = None,
) -> list[str]:
    """The words that start a helper which ends with its parent; to be run with `environment()`."""
    words = [sys.executable, "-P", "-m", "flexlab.gpus.watch", "--die-with-parent"]
    words += ["--sysroot", os.path.abspath(root), "--interval", str(interval_s)]
    words += ["--holders-every", str(holders_every_s)]
    return words if count is None else [*words, "--count", str(count)]


def environment() -> Mapping[str, str]:
    """Ours, and where this very package is imported from: the child must run the same code."""
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    path = f"{package_parent}{os.pathsep}{inherited}" if inherited else package_parent
    return os.environ | {"PYTHONPATH": path}


def start(words: Sequence[str], *, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """A helper with pipes to its stdin and stdout. Raises OSError.

    In a session of its own: a Ctrl-C is its parent's, which then ends it.
    """
    return subprocess.Popen(
        words,
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd="/",
        env=environment(),
        start_new_session=True,
    )


def abandon(child: subprocess.Popen[bytes]) -> None:
    """Kill a helper with what it started, and do not wait for it.

    Inside a driver call it lives on until that returns. A thread collects it then, so that it
    leaves no zombie.
    """
    if child.returncode is None:  # not collected yet: the number is still its own
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    with contextlib.suppress(RuntimeError):  # at the end of this process init collects it
        threading.Thread(target=child.wait, name="flexlab-reap", daemon=True).start()


def ask_holders_every(child: subprocess.Popen[bytes], seconds: float) -> None:
    """How often a helper is to scan other processes; one that does not listen is not waited for."""
    assert child.stdin is not None
    line = msgspec.json.encode({"holders_every_s": seconds}) + b"\n"
    with contextlib.suppress(OSError, ValueError):  # it has ended, or the pipe is closed
        os.set_blocking(child.stdin.fileno(), False)
        os.write(child.stdin.fileno(), line)


class Helper:
    """A helper process and what it says."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def lines(self, timeout_s: float) -> Iterator[bytes | None]:
        """Each line; None whenever none came for `timeout_s`. Ends with the helper."""
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        ready = select.poll()
        ready.register(descriptor, select.POLLIN)
        pending = b""
        until = time.monotonic() + timeout_s
        while len(pending) < LINE_LIMIT_BYTES:
            if not ready.poll(max(0.0, until - time.monotonic()) * 1000):
                yield None
                until = time.monotonic() + timeout_s
                continue
            block = os.read(descriptor, _BLOCK_BYTES)
            if not block:
                return
            *whole, pending = (pending + block).split(b"\n")
            for line in whole:
                yield line
                until = time.monotonic() + timeout_s

    def samples(self, timeout_s: float) -> Iterator[Sample | None]:
        """As `lines`, decoded; a line that is no sample is left out."""
        for line in self.lines(timeout_s):
            if line is None:
                yield None
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=Sample)

    def ask_holders_every(self, seconds: float) -> None:
        """How often it is to scan other processes."""
        ask_holders_every(self._child, seconds)

    def close(self) -> None:
        """End it, without waiting."""
        abandon(self._child)

    def __enter__(self) -> Helper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_helper(
    sysroot: Path = Path("/"),
    *,
    interval_s: float = INTERVAL_S,
    holders_every_s: float = HOLDERS_EVERY_S,
    count: int | None = None,
) -> Helper:
    """A helper of one's own, for a command that runs without a daemon. Raises OSError.

    It dies with the thread that calls this.
    """
    words = command(sysroot, interval_s=interval_s, holders_every_s=holders_every_s, count=count)
    return Helper(start(words))
