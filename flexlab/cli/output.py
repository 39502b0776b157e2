"""Everything that is printed goes through here; this module alone writes to stderr.

stdout carries the answer. stderr carries the narration: one line per change, and with a terminal
that can move its cursor also one progress line at the bottom, drawn over and over. No colours are
used, so NO_COLOR has nothing to switch off; words and glyphs carry the meaning.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

import msgspec

from flexlab.cli import table
from flexlab.core.errors import FlexLabError
from flexlab.core.text import clean, clean_line, os_sentence
from flexlab.core.units import show_bytes, show_seconds
from flexlab.spec.lab import Progress

DRAW_INTERVAL_S = 0.1
LINE_INTERVAL_S = 10.0
"""Without a moving cursor, how often one phase may say how far it is."""
SMALLEST_BAR_CELLS = 8
LARGEST_BAR_CELLS = 30


def prepare_streams() -> None:
    """A terminal that cannot show a character gets `?` for it, never a UnicodeEncodeError.

    Where stdin or stderr is closed it becomes the null device: else the next file that is opened
    would take its number, and be read or written as if it were that stream.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for life
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for life
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")


def answer(text: str = "") -> None:
    """One line (or block) of the answer, on stdout, without control characters."""
    _write(clean(text) + "\n")


def answer_json(value: object) -> None:
    """The answer as indented JSON on stdout; plain ASCII where stdout is not UTF-8."""
    builtins: Any = msgspec.to_builtins(value)
    _write(json.dumps(builtins, indent=2, ensure_ascii=not _is_unicode(sys.stdout)) + "\n")


def answer_piece(text: str) -> None:
    """A piece of a streamed answer, shown at once."""
    _write(clean(text))
    flush()


def answer_json_line(value: object) -> None:
    """The answer's next object, on a line of its own and shown at once."""
    builtins: Any = msgspec.to_builtins(value)
    _write(json.dumps(builtins, ensure_ascii=not _is_unicode(sys.stdout)) + "\n")
    flush()


def answer_table(columns: Sequence[table.Column], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout, as wide as the terminal (or $COLUMNS) allows."""
    _write("".join(f"{line}\n" for line in table_lines(columns, rows)))


def table_lines(columns: Sequence[table.Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of `answer_table`."""
    ellipsis = "…" if answers_in_unicode() else "~"
    return table.render(columns, rows, width=_width(sys.stdout), ellipsis=ellipsis)


def answer_folded(text: str) -> None:
    """Sentences of the answer, broken between words where a table would be cut."""
    width = _width(sys.stdout)
    lines = [clean(text)] if width is None else table.fold(clean(text), width)
    _write("".join(f"{line}\n" for line in lines))


def answer_labelled(label: str, text: str, cells: int) -> None:
    """`text` beside a label of so many cells, folded there."""
    width = _width(sys.stdout)
    line = clean_line(text)
    room = None if width is None else max(table.SMALLEST_FLEXIBLE_CELLS, width - cells)
    lines = [line] if room is None else table.fold(line, room)
    margins = (label.ljust(cells), *(" " * cells for _ in lines[1:]))
    _write("".join(f"{margin}{part}\n" for margin, part in zip(margins, lines, strict=True)))


def answers_in_unicode() -> bool:
    """Whether stdout takes more than ASCII."""
    return _is_unicode(sys.stdout)


def answer_cells() -> int | None:
    """How wide an answer may be; None where nobody says."""
    return _width(sys.stdout)


def can_redraw() -> bool:
    """Whether stdout is a terminal whose cursor moves."""
    return _cursor_moves(sys.stdout)


def begin_drawing() -> None:
    """Scrolls away what the terminal shows, so that drawing over it loses nothing."""
    _write("\n" * _height())


def redraw(lines: Sequence[str]) -> None:
    """`lines` of `table_lines` in place of all that the terminal shows; what has no room is
    counted."""
    room = _height() - 1  # below the last line, the cursor has one of its own
    if len(lines) > room:
        lines = [*lines[: room - 1], f"({len(lines) - room + 1} more)"]
    drawn = "".join(f"{line}\x1b[K\n" for line in lines)
    # One write, and what is left of the last picture is cleared behind this one: no flicker.
    _write(f"\x1b[H{drawn}\x1b[J")
    flush()


def flush() -> None:
    """Whoever reads a pipe sees what was answered so far. Raises AnswerLost."""
    with _answering():
        sys.stdout.flush()


def give_up_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter's end does not fail over it."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _write(text: str) -> None:
    with _answering():
        sys.stdout.write(text)


@contextlib.contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AnswerLost(error) from error


def say(text: str) -> None:
    """One line of narration on stderr; lost where stderr is (a terminal that was closed)."""
    with contextlib.suppress(OSError, ValueError):
        print(_fold(clean(text), sys.stderr), file=sys.stderr, flush=True)


def _fold(text: str, stream: TextIO) -> str:
    """Broken between words where a terminal would break it in the middle of one."""
    width = _width(stream) if is_terminal(stream) else None
    return text if width is None else "\n".join(table.fold(text, width))


def show_error(error: FlexLabError, *, as_json: bool = False) -> None:
    """`error: ...` and `hint: ...` on stderr; with --json also an object on stdout."""
    say(f"error: {error}")
    if error.hint:
        say(f"hint: {error.hint}")
    if as_json:
        answer_json(
            {
                "error": {
                    "code": error.code,
                    "message": str(error),
                    "hint": error.hint,
                    "exit_code": error.exit_code,
                    "near": list(getattr(error, "near", ())),
                }
            }
        )


def show_traceback() -> None:
    """Of the exception that is being handled; for --debug."""
    import traceback  # 6 ms that no other command needs

    traceback.print_exc()


class AnswerLost(FlexLabError):
    """stdout does not take the answer: a full disk, a reader that left."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the answer cannot be written: {os_sentence(error)}", code="stdout")
        self.reader_left = error.errno == errno.EPIPE
        """As with `flexlab logs MODEL | head`: nothing to complain about."""


class Narrator:
    """Lines and one progress bar on stderr. Use as a context manager: the bar is cleared."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._moves = _cursor_moves(self._stream)
        self._bar_is_drawn = False
        self._last_at = float("-inf")
        self._last_phase = ""
        self._last_line = ""

    def __enter__(self) -> Narrator:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def line(self, text: str) -> None:
        """A change: said once, above the bar."""
        line = clean(text).rstrip()
        if line and line != self._last_line:
            self.clear()
            self._last_line = line
            with contextlib.suppress(OSError, ValueError):
                print(_fold(line, self._stream), file=self._stream, flush=True)

    def progress(self, progress: Progress) -> None:
        """Redraws the bar, at most ten times a second; elsewhere a line now and then."""
        now = time.monotonic()
        phase = f"{progress.phase} {progress.text}"
        is_new = phase != self._last_phase
        is_due = now - self._last_at >= (DRAW_INTERVAL_S if self._moves else LINE_INTERVAL_S)
        is_end = progress.done_bytes is not None and progress.done_bytes == progress.total_bytes
        if not (is_new or is_due or (is_end and self._moves)):
            return
        self._last_phase, self._last_at = phase, now
        if self._moves:
            # One cell stays free: a terminal wraps when its last column is written.
            cells = (_width(self._stream) or 80) - 1
            text = progress_line(progress, cells, is_unicode=_is_unicode(self._stream))
            self._bar_is_drawn = True
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(f"\r{text}\x1b[K")
                self._stream.flush()
        else:
            self.line(progress_line(progress, None, is_unicode=False))

    def clear(self) -> None:
        """Takes the bar off the screen; harmless without one."""
        if self._bar_is_drawn:
            self._bar_is_drawn = False
            with contextlib.suppress(OSError, ValueError):
                self._stream.write("\r\x1b[K")
                self._stream.flush()


def progress_line(progress: Progress, cells: int | None, *, is_unicode: bool) -> str:
    """One line for `progress`, in at most `cells` cells.

    On a narrow terminal the text is cut first, then time left, rate and bar go; bytes stay.
    """
    numbers = _numbers(progress)
    text = clean_line(progress.text) or progress.phase
    if cells is None:
        return f"{text}: {', '.join(numbers)}" if numbers else text
    ellipsis = "…" if is_unicode else "~"
    done, total = progress.done_bytes, progress.total_bytes
    share = min(1.0, done / total) if done is not None and total else None
    text_cells = min(table.cell_width(text), cells // 3)
    for kept in (numbers, numbers[:2], numbers[:1]):
        tail = "  ".join(kept)
        room = cells - table.cell_width(tail) - 2 * len(table.GAP)
        if kept and share is not None and room - text_cells >= SMALLEST_BAR_CELLS:
            bar = _bar(share, min(room - text_cells, LARGEST_BAR_CELLS), is_unicode=is_unicode)
            return f"{table.cut(text, room - len(bar), ellipsis)}  {bar}  {tail}"
    tail = f"  {numbers[0]}" if numbers else ""
    text = table.cut(text, max(0, cells - table.cell_width(tail)), ellipsis)
    return table.cut(f"{text}{tail}", cells, ellipsis)


def _numbers(progress: Progress) -> list[str]:
    """What is known, the most telling first: bytes, rate, time left."""
    done, total = progress.done_bytes, progress.total_bytes
    numbers = []
    if done is not None:
        numbers.append(f"{show_bytes(done)} of {show_bytes(total)}" if total else show_bytes(done))
    if progress.bytes_per_s:
        numbers.append(f"{show_bytes(progress.bytes_per_s)}/s")
    if progress.eta_s is not None and done != total:
        numbers.append(f"{show_seconds(progress.eta_s)} left")
    return numbers


def _bar(share: float, cells: int, *, is_unicode: bool) -> str:
    full, empty = ("█", "░") if is_unicode else ("#", "-")
    done = round(share * cells)
    return full * done + empty * (cells - done)


@contextlib.contextmanager
def narrator() -> Iterator[Narrator]:
    """A narrator whose bar is gone when the block ends, however it ends."""
    with Narrator() as narrator_:
        yield narrator_


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person sits at `stream` (a closed stream is none)."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def _cursor_moves(stream: TextIO) -> bool:
    return is_terminal(stream) and os.environ.get("TERM", "dumb") not in ("dumb", "")


def _width(stream: TextIO) -> int | None:
    """Cells of the terminal, else $COLUMNS, else None. Asked anew each time: windows resize."""
    if is_terminal(stream):
        with contextlib.suppress(OSError, ValueError):
            if columns := os.get_terminal_size(stream.fileno()).columns:
                return columns
    chosen = os.environ.get("COLUMNS", "")
    return int(chosen) if chosen.isascii() and chosen.isdigit() and int(chosen) > 0 else None


def _height() -> int:
    """Lines of the terminal that stdout is; 24 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        if lines := os.get_terminal_size(sys.stdout.fileno()).lines:
            return max(3, lines)
    return 24


def _is_unicode(stream: TextIO) -> bool:
    """Whether it takes more than ASCII.

    Python writes UTF-8 under LC_ALL=C as well, where whoever set that wants plain ASCII.
    """
    told = (os.environ.get(name) for name in ("LC_ALL", "LC_CTYPE", "LANG"))
    if next((locale for locale in told if locale), "") in ("C", "POSIX"):
        return False
    encoding = (getattr(stream, "encoding", None) or "ascii").lower().replace("-", "")
    return encoding.startswith("utf")
