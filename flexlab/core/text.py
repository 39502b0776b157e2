"""Text that comes from models, backends, containers or file names, before a terminal sees it."""

from __future__ import annotations

import re

# C0 and C1 controls, DEL, and the bidirectional overrides that can hide what a line says.
# Newline and tab stay: they are harmless and common in answers.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
# Whole escape sequences go first (CSI, OSC with its terminator, two-character ones), so that no
# "[31m" is left behind where the escape character was taken out.
_ESCAPE = re.compile(
    "\x1b\\[[0-?]*[ -/]*[@-~]|\x1b[\\]PX^_].*?(?:\x07|\x1b\\\\)|\x1b[ -/]*[0-~]", re.DOTALL
)


def clean(text: str) -> str:
    """Without control characters and escape sequences; newlines and tabs stay."""
    return _CONTROL.sub("", _ESCAPE.sub("", text))


def clean_line(text: str) -> str:
    """As `clean`, on one line."""
    return " ".join(clean(text).split())
