"""Detection in a process of its own: a driver that hangs or crashes costs that process only.

A thread inside a driver call that never returns keeps its process alive through SIGKILL, so a
command that read the hardware itself could never end. The parent reads one line and does not wait.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from flexlab.gpus import inventory, presence
from flexlab.gpus.bus import read_bus
from flexlab.spec.machine import Machine

DEADLINE_S = 20.0
"""Above every deadline inside: one vendor's search, then one reading of a few cards."""
_LINE_LIMIT_BYTES = 16 * 1024 * 1024


def detect(
    root: Path = Path("/"),
    *,
    ram_reserve_bytes: int | None = None,
    ram_budget_bytes: int | None = None,
    deadline_s: float = DEADLINE_S,
) -> Machine:
    """inventory.detect(), in a child process where there is a GPU whose driver could hang.

    Never raises. When the child says nothing within `deadline_s`, or dies, the cards are those of
    the bus, each with the reason why nothing more is known.
    """
    sizes = Sizes(ram_reserve_bytes, ram_budget_bytes)
    if root != Path("/") or not _has_gpus(root):
        return inventory.detect(root, **sizes._asdict())
    try:
        return _ask_child(sizes, deadline_s)
    except (OSError, _NoAnswer) as error:
        return inventory.detect(root, **sizes._asdict(), silence=str(error))


class Sizes(NamedTuple):
    """What the settings say about the host's RAM, in bytes."""

    ram_reserve_bytes: int | None
    ram_budget_bytes: int | None


class _NoAnswer(Exception):
    """Why the child gave no machine, as the end of a sentence."""


def _ask_child(sizes: Sizes, deadline_s: float) -> Machine:
    # A session of its own: Ctrl-C ends the command, which then does not wait for the child either.
    child = subprocess.Popen(
        [sys.executable, "-m", "flexlab.gpus.isolated", msgspec.json.encode(sizes).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout is not None
    try:
        line = _one_line(child.stdout.fileno(), time.monotonic() + deadline_s)
        return msgspec.json.decode(line, type=Machine)
    except msgspec.DecodeError as error:
        code = child.poll()
        raise _NoAnswer(
            f"crashed (exit code {code})" if code else f"took longer than {deadline_s:.0f} s"
        ) from error
    finally:
        child.kill()
        child.stdout.close()
        _forget(child)


def _has_gpus(root: Path) -> bool:
    bus = read_bus(root)
    kfd = os.path.isdir(root / "sys/class/kfd/kfd")
    return bool(bus.pci or bus.drm or kfd or presence.nvidia_without_bus(root))


def _one_line(descriptor: int, deadline: float) -> bytes:
    """What came up to a newline, the end, or the deadline."""
    line = b""
    while b"\n" not in line and len(line) < _LINE_LIMIT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            break
        chunk = os.read(descriptor, 65536)
        if not chunk:
            break
        line += chunk
    return line


def _forget(child: subprocess.Popen[bytes]) -> None:
    """Collects the child if it is gone, and never waits: killed inside a driver call, it stays."""
    try:
        child.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        child.returncode = -9  # so that the destructor does not warn; init collects it after us


def main(words: list[str]) -> None:
    """The child: one Machine as one JSON line."""
    sizes = msgspec.json.decode(words[0], type=Sizes)
    machine = inventory.detect(**sizes._asdict())
    line = memoryview(msgspec.json.encode(machine) + b"\n")
    while line:
        line = line[os.write(1, line) :]
    os._exit(0)  # an abandoned thread would hold the interpreter's orderly end


if __name__ == "__main__":
    main(sys.argv[1:])
