"""Series of numbers over time in memory of a fixed size: fine ones for now, coarse ones for today.

A slot is a step of Unix time, so a gap in the ticks is a gap in the series, and unknown (NaN) is
not 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from math import nan

FINE_STEP_S = 1
FINE_SLOTS = 300
BACK_SLOTS = 5
COARSE_STEP_S = 15
COARSE_SLOTS = 480
PER_COARSE = COARSE_STEP_S // FINE_STEP_S
Thing = tuple[str, str]
"""Kind and id of what the values are of."""
Kept = tuple[Thing, str, "array[float]"]
"""Thing, name of the value, and the values."""
_UNKNOWN = {code: array(code, [nan]) for code in "df"}


class Column:
    """One value of one thing, at both steps; a coarse slot is the mean of what is known of it."""

    __slots__ = ("coarse", "count", "fine", "total", "written")

    def __init__(self, *, exact: bool) -> None:
        """`exact` keeps 53 bits of a number (bytes), else 24."""
        unknown = _UNKNOWN["d" if exact else "f"]
        self.fine = unknown * FINE_SLOTS
        self.coarse = unknown * COARSE_SLOTS
        self.total = 0.0
        self.count = 0
        self.written = -1
        """The last fine slot with a value."""


class Rings:
    """Columns by the thing that they are of, and which slot is the last one written."""

    def __init__(self) -> None:
        self.things: dict[Thing, dict[str, Column]] = {}
        """Columns by the name of the value."""
        self.last = -1
        """The last fine slot, counted from the epoch; -1 before the first."""
        self._late: int | None = None
        """A slot that was missed by a moment: it gets the value of the next one."""

    def columns(self) -> Iterator[Column]:
        """All of them."""
        for columns in self.things.values():
            yield from columns.values()

    def open(self, at: float) -> None:
        """Begin the slot of this Unix time. Slots that were passed over stay unknown.

        A clock that was set back a little is waited for; one that was set back far, or ahead by
        more than is kept, begins anew.
        """
        slot = int(at // FINE_STEP_S)
        if self.last - BACK_SLOTS <= slot < self.last:
            slot = self.last
        self._late = (slot - 1) % FINE_SLOTS if slot - self.last == 2 else None
        if self.last >= 0 and not 0 <= slot - self.last <= COARSE_SLOTS * PER_COARSE:
            self.things.clear()
        elif self.last >= 0:
            self._pass_over(slot)
        self.last = slot

    def _pass_over(self, slot: int) -> None:
        fine = [
            passed % FINE_SLOTS for passed in range(max(self.last, slot - FINE_SLOTS) + 1, slot + 1)
        ]
        for column in self.columns():
            for at in fine:
                column.fine[at] = nan
        before, now = self.last // PER_COARSE, slot // PER_COARSE
        if before == now:
            return
        for thing, columns in list(self.things.items()):
            if all(slot - c.written > COARSE_SLOTS * PER_COARSE for c in columns.values()):
                del self.things[thing]
        for column in self.columns():
            column.coarse[before % COARSE_SLOTS] = _mean(column)
            column.total, column.count = 0.0, 0
            for passed in range(before + 1, now + 1):
                column.coarse[passed % COARSE_SLOTS] = nan

    def put(self, thing: Thing, values: Iterable[tuple[str, float]]) -> None:
        """Known values for the open slot; the last one of a slot counts."""
        columns = self.things.get(thing)
        if columns is None:
            columns = self.things[thing] = {}
        last, late = self.last, self._late
        at = last % FINE_SLOTS
        for name, value in values:
            column = columns.get(name)
            if column is None:
                column = columns[name] = Column(exact=name.endswith("_bytes"))
            column.fine[at] = value
            if late is not None:
                column.fine[late] = value
            column.written = last
            column.total += value
            column.count += 1

    def window(self, seconds: float) -> tuple[float, int, list[Kept]]:
        """(Unix time of the first slot, step, columns copied); oldest value first.

        Fine steps for as long as they reach, else coarse ones; the newest slot is the open one.
        """
        if seconds <= FINE_STEP_S * FINE_SLOTS:
            step, slots, last = FINE_STEP_S, FINE_SLOTS, self.last
        else:
            step, slots, last = COARSE_STEP_S, COARSE_SLOTS, self.last // PER_COARSE
        count = max(1, min(slots, -int(-seconds // step)))
        copies = [
            (thing, name, _oldest_first(_kept(column, step, last), last % slots, count))
            for thing, columns in self.things.items()
            for name, column in columns.items()
        ]
        return float((last - count + 1) * step), step, copies


def _kept(column: Column, step: int, last: int) -> array[float]:
    if step == FINE_STEP_S:
        return column.fine
    column.coarse[last % COARSE_SLOTS] = _mean(column)  # as far as it has come
    return column.coarse


def _mean(column: Column) -> float:
    return column.total / column.count if column.count else nan


def _oldest_first(kept: array[float], last: int, count: int) -> array[float]:
    whole = kept[last + 1 :] + kept[: last + 1]
    return whole[len(whole) - count :]
