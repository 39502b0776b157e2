"""Names that somebody most likely meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near(word: str, known: Iterable[str], limit: int = 3) -> tuple[str, ...]:
    """Known names close to `word`, the closest first; those that it is the start of count too."""
    names = sorted(set(known))
    wanted = word.lower()
    folded = {name.lower(): name for name in reversed(names)}
    found = [folded[hit] for hit in difflib.get_close_matches(wanted, folded, limit, cutoff=0.6)]
    if len(wanted) >= 3:
        found += [name for name in names if name.lower().startswith(wanted)]
    return tuple(dict.fromkeys(found))[:limit]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'port'?`, or nothing: to be put at the end of a sentence."""
    names = near(word, known, 1)
    return f"; did you mean {names[0]!r}?" if names else ""
