"""What an engine program of ours says by its exit code, before or instead of answering.

The sentence with the mend is the last line of its log and begins with SENTENCE_PREFIX; the code is
for whoever decides what to do next. The numbers stay clear of 1-2 (Python, usage) and 128+n
(signals), so that no other program says the same thing by accident.
"""

from __future__ import annotations

from collections.abc import Iterable

OUT_OF_MEMORY = "out_of_memory"
"""Stable word for a start or a run that ended for lack of memory; recipes' error patterns use it,
too."""
SENTENCE_PREFIX = "flexlab-engine: "

EXIT_BAD_MODEL = 90
EXIT_PORT_TAKEN = 91
EXIT_EMBEDDED_MISSING = 92
EXIT_LIBRARY_MISSING = 93
EXIT_LOAD_FAILED = 94
EXIT_BAD_KEY_FILE = 95

CAUSES: dict[int, tuple[str, str]] = {
    EXIT_BAD_MODEL: ("bad_model", "its model file is missing or not a GGUF file"),
    EXIT_PORT_TAKEN: ("port_taken", "its port was taken by another program"),
    EXIT_EMBEDDED_MISSING: ("embedded_missing", "the embedded engine is not installed"),
    EXIT_LIBRARY_MISSING: ("library_missing", "a system library that it needs is missing"),
    EXIT_LOAD_FAILED: ("load_failed", "the engine could not load the model"),
    EXIT_BAD_KEY_FILE: ("bad_key_file", "its API key could not be read"),
}
"""Exit code -> (stable word, what happened)."""


def sentence_in(log_lines: Iterable[str]) -> str | None:
    """What an engine of ours said last about why it cannot serve, without the prefix."""
    said = [line for line in log_lines if line.startswith(SENTENCE_PREFIX)]
    return said[-1].removeprefix(SENTENCE_PREFIX).strip() if said else None
