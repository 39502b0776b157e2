"""Plain tables that measure terminal cells and drop columns rather than wrap."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from flexlab.core.text import clean_line

GAP = "  "
SMALLEST_FLEXIBLE_CELLS = 16
"""Narrower than this, a column says too little: others are dropped instead."""


@dataclass(frozen=True)
class Column:
    """One column. The highest `drop` goes first when the terminal is narrow; 0 never goes."""

    title: str
    drop: int = 0
    right: bool = False
    flexible: bool = False
    """May be cut with an ellipsis before anything is dropped."""


def cell_width(text: str) -> int:
    """Terminal cells that `text` takes: wide East Asian characters two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_char_width(char) for char in text)


def cut(text: str, cells: int, ellipsis: str = "…") -> str:
    """`text` in at most `cells` cells, with an ellipsis where something was taken away."""
    if cell_width(text) <= cells:
        return text
    room = max(0, cells - cell_width(ellipsis))
    kept: list[str] = []
    for char in text:
        room -= _char_width(char)
        if room < 0:
            break
        kept.append(char)
    return ("".join(kept) + ellipsis)[: max(cells, 0)]


def fold(text: str, width: int) -> list[str]:
    """`text` in lines of at most `width` cells, broken between words alone.

    What follows a break is indented below its line. A word that is longer than a line is left
    whole: it may be a path or a command to copy.
    """
    return [part for line in text.split("\n") for part in _fold_line(line, width)]


def _fold_line(line: str, width: int) -> list[str]:
    if cell_width(line) <= width:
        return [line]
    margin = line[: len(line) - len(line.lstrip())]
    head, *words = line.split()
    lines, current = [], margin + head
    for word in words:
        if cell_width(current) + 1 + cell_width(word) <= width:
            current += f" {word}"
        else:
            lines.append(current)
            current = f"{margin}  {word}"
    return [*lines, current]


def render(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    ellipsis: str = "…",
) -> list[str]:
    """The lines of a table, header first. `width` None means that nothing is cut or dropped.

    Cells are stripped of control characters: they may come from models and file names.
    """
    cells = [[column.title for column in columns]]
    cells += [[clean_line(cell) or "-" for cell in row] for row in rows]
    widths = [max(cell_width(line[i]) for line in cells) for i in range(len(columns))]
    shown = list(range(len(columns)))
    if width is not None:
        shown, widths = _fit(columns, widths, width)
    return [_line(columns, line, shown, widths, ellipsis) for line in cells]


def _fit(columns: Sequence[Column], natural: list[int], width: int) -> tuple[list[int], list[int]]:
    """Which columns stay and how wide: flexible ones shrink first, then columns are dropped."""
    shown = list(range(len(columns)))
    while True:
        widths = list(natural)
        over = sum(widths[i] for i in shown) + len(GAP) * (len(shown) - 1) - width
        for i in sorted(shown, key=lambda i: -columns[i].drop):
            if over > 0 and columns[i].flexible:
                taken = min(over, max(0, widths[i] - SMALLEST_FLEXIBLE_CELLS))
                widths[i] -= taken
                over -= taken
        droppable = [i for i in shown if columns[i].drop]
        if over <= 0 or not droppable:
            return shown, _squeeze(shown, widths, over)
        shown.remove(max(droppable, key=lambda i: columns[i].drop))


def _squeeze(shown: list[int], widths: list[int], over: int) -> list[int]:
    """The last resort on a very narrow terminal: cut what is left, the widest column first."""
    for i in sorted(shown, key=lambda i: -widths[i]):
        taken = min(max(over, 0), widths[i] - 1)
        widths[i] -= taken
        over -= taken
    return widths


def _line(
    columns: Sequence[Column],
    cells: list[str],
    shown: list[int],
    widths: list[int],
    ellipsis: str,
) -> str:
    parts = []
    for i in shown:
        text = cut(cells[i], widths[i], ellipsis)
        padding = " " * (widths[i] - cell_width(text))
        parts.append(padding + text if columns[i].right else text + padding)
    return GAP.join(parts).rstrip()


def _char_width(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
