"""Detection in a process of its own: a driver that hangs or crashes costs that process only.

A thread inside a driver call that never returns keeps its process alive through SIGKILL, so a
command that read the hardware itself could never end. The parent reads one line and does not wait.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from flexlab.core.text import os_sentence
from flexlab.gpus import helper, inventory
from flexlab.gpus.bus import read_bus
from flexlab.spec.machine import Machine

DEADLINE_S = 20.0
"""Above every deadline inside: one vendor's search, then one reading of a few cards."""
_ENDING_S = 0.5
"""From the end of a child's output to its own."""


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
    except _NoAnswer as error:
        why = str(error)
    except OSError as error:  # no process to be had
        why = f"failed ({os_sentence(error)})"
    return inventory.detect(root, **sizes._asdict(), silence=why)


class Sizes(NamedTuple):
    """What the settings say about the host's RAM, in bytes."""

    ram_reserve_bytes: int | None
    ram_budget_bytes: int | None


class _NoAnswer(Exception):
    """Why the child gave no machine, as the end of a sentence."""


def _ask_child(sizes: Sizes, deadline_s: float) -> Machine:
    words = [sys.executable, "-P", "-m", "flexlab.gpus.isolated"]
    child = helper.start([*words, msgspec.json.encode(sizes).decode()])
    with helper.Helper(child) as asked:
        line = next(asked.lines(deadline_s), b"")
        if line is None:
            raise _NoAnswer(f"took longer than {deadline_s:g} s")
        try:
            return msgspec.json.decode(line, type=Machine)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _NoAnswer(_how_it_ended(child)) from error


def _how_it_ended(child: subprocess.Popen[bytes]) -> str:
    """Of a child whose output has ended, or makes no sense."""
    try:
        code = child.wait(timeout=_ENDING_S)
    except subprocess.TimeoutExpired:
        code = 0
    if code < 0:
        return f"crashed (signal {-code})"
    return f"failed (exit code {code})" if code else "gave no answer"


def _has_gpus(root: Path) -> bool:
    return bool(inventory.vendors_here(root, read_bus(root)))


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
