"""What models took, remembered between daemons."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexlab.daemon.claims import KEYS_MAX, Claims


def kept(path: Path, *runs: dict[str, int]) -> Claims:
    """A store that saw these runs of one key, read anew by the next daemon."""
    claims = Claims(path)
    for run in runs:
        claims.remember_use("key", run)
    claims.write(claims.encoded())
    return Claims(path)


def test_the_highest_of_the_last_three_runs_counts(tmp_path: Path) -> None:
    peaks = [{"gpu0": size} for size in (90, 40, 60, 50)]
    assert kept(tmp_path / "claims.json", *peaks).measured() == {"key": {"gpu0": 60}}


def test_pools_are_kept_apart(tmp_path: Path) -> None:
    claims = kept(tmp_path / "claims.json", {"gpu0": 5, "ram": 1}, {"gpu0": 3, "ram": 2})
    assert claims.measured() == {"key": {"gpu0": 5, "ram": 2}}


def test_a_shortage_drops_what_was_measured_and_raises_the_least(tmp_path: Path) -> None:
    claims = kept(tmp_path / "claims.json", {"gpu0": 100})
    claims.remember_shortage("key", {"gpu0": 100})
    assert claims.measured() == {}
    assert claims.floors() == {"key": {"gpu0": pytest.approx(115, abs=1)}}
    claims.remember_use("key", {"gpu0": 50})
    assert claims.measured()["key"]["gpu0"] >= 114, "never below what was not enough"


def test_a_second_shortage_raises_it_again_and_never_lowers_it(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims.json")
    claims.remember_shortage("key", {"gpu0": 1000})
    claims.remember_shortage("key", {"gpu0": 1150})
    assert claims.floors()["key"]["gpu0"] == pytest.approx(1322, abs=1)
    claims.remember_shortage("key", {"gpu0": 10})
    assert claims.floors()["key"]["gpu0"] == pytest.approx(1322, abs=1)


def test_the_longest_unused_are_forgotten(tmp_path: Path) -> None:
    claims = Claims(tmp_path / "claims.json")
    claims.remember_use("first", {"ram": 1})
    for number in range(KEYS_MAX - 1):
        claims.remember_use(f"key {number}", {"ram": 1})
    claims.remember_use("first", {"ram": 1})  # used again: it is not the oldest any more
    claims.remember_use("one more", {"ram": 1})
    measured = claims.measured()
    assert len(measured) == KEYS_MAX
    assert "first" in measured
    assert "key 0" not in measured


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": 1, "uses": {"key": 5}}',
        b"\xff",
    ],
)
def test_a_file_that_cannot_be_read_costs_only_what_was_learnt(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "claims.json"
    path.write_bytes(content)
    claims = Claims(path)
    assert claims.measured() == claims.floors() == {}
    claims.remember_use("key", {"ram": 1})
    claims.write(claims.encoded())
    assert Claims(path).measured() == {"key": {"ram": 1}}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    claims = Claims(tmp_path / "file" / "claims.json")
    claims.remember_use("key", {"ram": 1})
    claims.write(claims.encoded())
    assert claims.measured() == {"key": {"ram": 1}}
