"""An engine's log file: the end of it, what comes, and rotations while somebody reads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flexlab.runtimes import logfile
from flexlab.runtimes.logfile import LogLines, rotate, tail


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


@pytest.mark.parametrize("count", [0, 1, 2, 3, 99])
def test_the_last_lines_oldest_first(log: Path, count: int) -> None:
    log.write_bytes(b"one\ntwo\r\nthree")
    assert tail(log, count) == [b"one", b"two", b"three"][max(0, 3 - count) :]


def test_no_file_has_no_lines(log: Path) -> None:
    assert tail(log, 10) == []


def test_older_lines_come_from_before_the_rotation(log: Path) -> None:
    log.write_bytes(b"a\nb\nc\n")
    assert rotate(log, 4)
    log.write_bytes(b"d\n")
    assert tail(log, 2) == [b"c", b"d"]
    assert tail(log, 9) == [b"b", b"c", b"d"]


def test_a_small_file_is_left_alone(log: Path) -> None:
    log.write_bytes(b"a\n")
    assert not rotate(log, 2)
    assert log.read_bytes() == b"a\n"


def test_an_engine_goes_on_writing_after_a_rotation(log: Path) -> None:
    descriptor = logfile.open_for_engine(log, 1000)
    try:
        os.write(descriptor, b"x" * 99 + b"\n")
        assert rotate(log, 10)
        os.write(descriptor, b"next\n")
    finally:
        os.close(descriptor)
    assert log.read_bytes() == b"next\n"


def test_a_follow_sees_what_comes_once_and_whole(log: Path) -> None:
    log.write_bytes(b"old\npart")
    lines = LogLines(log, tail_lines=5, follow=True)
    with log.open("ab", buffering=0) as writer:
        assert next(lines) == b"old"
        writer.write(b"ial\nnew\n")
        assert [next(lines), next(lines)] == [b"partial", b"new"]
        assert rotate(log, 4)
        writer.write(b"after\n")
        assert next(lines) == b"after"
    log.rename(log.with_name("moved"))
    log.write_bytes(b"another file\n")
    assert next(lines) == b"another file"
    lines.close()
    assert list(lines) == []


def test_a_follow_begins_before_there_is_a_file(log: Path) -> None:
    lines = LogLines(log, tail_lines=0, follow=True)
    log.write_bytes(b"first\n")
    assert next(lines) == b"first"


def test_a_line_without_end_is_passed_on_in_parts(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logfile, "LINE_LIMIT_BYTES", 4)
    log.write_bytes(b"abcdefghij\n")
    assert tail(log, 3) == [b"abcd", b"efgh", b"ij"]


def test_a_huge_file_is_not_read_whole(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logfile, "TAIL_LIMIT_BYTES", 64 * 1024)
    log.write_bytes(b"line\n" * 100_000)
    assert len(tail(log, 100_000)) < 30_000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.binary(max_size=30).filter(lambda b: b"\n" not in b and b"\r" not in b)),
    count=st.integers(0, 40),
    block=st.integers(1, 20),
)
def test_any_block_size_finds_the_same_lines(
    log: Path, lines: list[bytes], count: int, block: int
) -> None:
    log.write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logfile, "_BLOCK_BYTES", block)
        assert tail(log, count) == (lines[-count:] if count else [])
