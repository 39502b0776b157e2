"""What an exit code says of how an engine ended. Pure."""

from __future__ import annotations

import signal

from flexlab.spec.engine import CAUSES
from flexlab.spec.instance import RunState


def ended(exit_code: int) -> RunState:
    """Gone, and why, as far as the number tells."""
    if exit_code in CAUSES:
        code, why = CAUSES[exit_code]
        return RunState(alive=False, exit_code=exit_code, why=why, code=code)
    if exit_code > 128:
        return RunState(alive=False, exit_code=exit_code, why=_signal_sentence(exit_code - 128))
    words = "it ended by itself" if exit_code == 0 else "it failed"
    return RunState(alive=False, exit_code=exit_code, why=f"{words} (exit code {exit_code})")


def _signal_sentence(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    notes = {
        "SIGKILL": "; the kernel does that too when memory runs out",
        "SIGILL": "; this CPU lacks an instruction that the engine uses",
    }
    return f"it was killed by {name}{notes.get(name, '')}"
