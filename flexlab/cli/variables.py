"""FLEXLAB_* variables, judged without pydantic: for commands that do not read the settings.

Those that do read them refuse a wrong one. The others go on, but not silently: whoever sets
FLEXLAB_PROT believes that it counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from flexlab.cli import output
from flexlab.core.near import near
from flexlab.core.text import clean_line
from flexlab.core.units import parse_bytes, parse_seconds

PREFIX = "FLEXLAB_"
SECONDS = (
    "BACK_OFF_FIRST", "BACK_OFF_MAX", "DRAIN_LIMIT", "DRAIN_TIMEOUT", "FREED_WITHIN",
    "IDLE_TIMEOUT", "LINGER", "MIN_RESIDENCY", "PRESSED", "QUEUE_TIMEOUT", "SETTLED",
    "START_TIMEOUT", "STOP_CONFIRM", "STOP_TIMEOUT", "TURN_MAX", "YIELD_AFTER",
)  # fmt: skip
BYTES = ("LOG_MAX", "MAX_BODY", "RAM_LIMIT", "RAM_RESERVE")
NUMBERS = ("PORT", "QUEUE_LIMIT", "RESTORE_TRIES")
TEXTS = (
    "ALLOW_EXPERIMENTAL",
    "ALLOW_ORIGINS",
    "DOCKER_HOST",
    "HOST",
    "MODELS_DIR",
    "OPEN_TO_NETWORK",
    "RUNTIME",
)
NO_SETTINGS = ("CONFIG_DIR", "DATA_DIR", "STATE_DIR", "INSTANCE", "OWNER", "SYSROOT")
KNOWN = (*SECONDS, *BYTES, *NUMBERS, *TEXTS, *NO_SETTINGS)

_JUDGES: dict[str, Callable[[str], object]] = {
    **dict.fromkeys(SECONDS, parse_seconds),
    **dict.fromkeys(BYTES, parse_bytes),
    **dict.fromkeys(NUMBERS, int),
}


def warn_of_variables() -> None:
    """One line on stderr for each that is wrong."""
    for problem in _problems():
        output.say(f"warning: {problem}; flexlab config check says more")


def _problems() -> Iterator[str]:
    for variable, text in sorted(os.environ.items()):
        name = variable.removeprefix(PREFIX)
        if name == variable or name.startswith("TEST_") or not text:
            continue
        if name not in KNOWN:
            likely = near(name, KNOWN, limit=1)
            meant = f" (did you mean {PREFIX}{likely[0]}?)" if likely else ""
            yield f"{clean_line(variable)} is no setting{meant}"
        elif name in _JUDGES:
            try:
                _JUDGES[name](text)
            except ValueError:
                yield f"{variable}={clean_line(text)} is not understood"
