"""Tables and progress lines, for any text and any width."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.cli import output, table
from flexlab.core.errors import FlexLabError
from flexlab.core.units import show_seconds
from flexlab.spec.lab import Progress

COLUMNS = (
    table.Column("MODEL", flexible=True),
    table.Column("SIZE", right=True),
    table.Column("WHY", drop=2, flexible=True),
    table.Column("NOTE", drop=1),
)
rows = st.lists(st.tuples(st.text(), st.text(), st.text(), st.text()), max_size=5)


@given(rows=rows, width=st.integers(10, 120))
def test_no_line_of_a_table_is_wider_than_asked(rows: list[tuple[str, ...]], width: int) -> None:
    lines = table.render(COLUMNS, rows, width=width)
    assert len(lines) == len(rows) + 1
    assert max(map(table.cell_width, lines)) <= width
    assert not any("\n" in line or "\x1b" in line for line in lines)


@given(rows=rows)
def test_without_a_width_every_cell_is_whole(rows: list[tuple[str, ...]]) -> None:
    lines = table.render(COLUMNS, rows)
    for row, line in zip(rows, lines[1:], strict=True):
        for cell in row:
            if cell.isalnum() and cell.isascii():
                assert cell in line


def test_the_least_important_column_goes_first() -> None:
    row = ("a-model", "9.0G", "because of this", "a note")
    wide = table.render(COLUMNS, [row], width=60)
    narrow = table.render(COLUMNS, [row], width=30)
    assert wide[0].split() == ["MODEL", "SIZE", "WHY", "NOTE"]
    assert narrow[0].split() == ["MODEL", "SIZE", "NOTE"]


@pytest.mark.parametrize(
    ("text", "cells"), [("abc", 3), ("日本", 4), ("é", 1), ("e\u0301", 1), ("\u200b", 0), ("", 0)]
)
def test_cells_are_counted_as_a_terminal_does(text: str, cells: int) -> None:
    assert table.cell_width(text) == cells


@given(
    text=st.text(max_size=80),
    done=st.none() | st.integers(0, 10**12),
    total=st.none() | st.integers(0, 10**12),
    rate=st.none() | st.floats(0, 1e12),
    cells=st.integers(1, 160),
)
def test_a_progress_line_fits_its_line(
    text: str, done: int | None, total: int | None, rate: float | None, cells: int
) -> None:
    progress = Progress(
        phase="weights",
        text=text,
        done_bytes=done,
        total_bytes=total,
        bytes_per_s=rate,
        eta_s=rate,
    )
    for is_unicode in (True, False):
        line = output.progress_line(progress, cells, is_unicode=is_unicode)
        assert table.cell_width(line) <= cells
        assert "\n" not in line
    if text.isascii():
        assert line.isascii()


def test_a_progress_line_shows_bytes_rate_and_time_left() -> None:
    progress = Progress(
        phase="weights",
        text="smollm2",
        done_bytes=50 * 1024**2,
        total_bytes=100 * 1024**2,
        bytes_per_s=10 * 1024**2,
        eta_s=5.0,
    )
    assert output.progress_line(progress, 79, is_unicode=False) == (
        "smollm2  ###############---------------  50.0M of 100.0M  10.0M/s  5 s left"
    )
    assert output.progress_line(progress, 39, is_unicode=False).startswith("smollm2  ##")


@given(text=st.text("ab 日\n", max_size=200), width=st.integers(4, 60))
def test_long_lines_are_broken_between_words_alone(text: str, width: int) -> None:
    lines = table.fold(text, width)
    assert " ".join("\n".join(lines).split()) == " ".join(text.split())
    for line in lines:
        assert table.cell_width(line) <= width or len(line.split()) <= 1


def test_what_follows_a_break_is_indented_below_its_line() -> None:
    assert table.fold("error: it is not there", 16) == ["error: it is not", "  there"]
    assert table.fold("  a note that goes on", 12) == ["  a note", "    that", "    goes on"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.42, "0.4 s"), (5.0, "5 s"), (9.97, "10 s"), (59.6, "1m"), (200, "3m 20s"), (900, "15m"),
     (7200, "2h"), (360_000, "4d 4h"), (None, "?")],
)  # fmt: skip
def test_durations_have_no_parts_that_say_nothing(seconds: float | None, shown: str) -> None:
    assert show_seconds(seconds) == shown


class Terminal(io.StringIO):
    """Says that it is one."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError("not a real one")


def test_a_line_appears_above_the_bar_and_the_bar_is_gone_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with output.Narrator(terminal) as narrator:
        narrator.progress(Progress(phase="weights", text="w", done_bytes=1, total_bytes=2))
        narrator.line("loading")
    written = terminal.getvalue()
    assert written.startswith("\rw  ")
    assert written.endswith("\r\x1b[Kloading\n")


def test_a_dumb_terminal_gets_one_line_a_phase_and_no_escape_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    terminal = Terminal()
    with output.Narrator(terminal) as narrator:
        for done in range(100):
            narrator.progress(Progress(phase="weights", text="w", done_bytes=done, total_bytes=99))
        narrator.line("loading")
        narrator.line("loading")
    assert terminal.getvalue().splitlines() == ["w: 0B of 99B", "loading"]


def test_an_error_without_a_hint_has_no_hint_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.show_error(FlexLabError("it \x1b[31mfailed\x1b[0m"))
    assert capsys.readouterr().err == "error: it failed\n"
