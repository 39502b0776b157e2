"""A terminal that closes and a plain `kill` end a command as Ctrl-C does: wishes are withdrawn."""

from __future__ import annotations

import signal
from types import FrameType
from typing import NoReturn

ENDINGS = (signal.SIGHUP, signal.SIGTERM)


class Terminated(KeyboardInterrupt):
    """As Ctrl-C, but meant for the whole command: a chat does not go on after it."""


def end_as_ctrl_c_does() -> None:
    """From now on. What the caller has decided to ignore (`nohup`) stays ignored."""
    for number in ENDINGS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _end)


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # A closed terminal sends its signal twice, by the kernel and by the shell: the second one
    # must not cut the withdrawal short.
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    raise Terminated
