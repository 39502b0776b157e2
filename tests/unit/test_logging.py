"""The daemon's log: bounded, plain, and followed by stdout and stderr."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from flexlab.core.logging import logging_to

log = logging.getLogger("flexlab.test")


def test_lines_say_when_who_and_what(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path / "logs" / "daemon.log", 1 << 20):
        log.info("ready on %s", "port 1")
        log.debug("not worth a line")
        logging.getLogger("elsewhere").info("chatter")
        logging.getLogger("elsewhere").warning("trouble")
    lines = (tmp_path / "logs" / "daemon.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == [
        "INFO flexlab.test: ready on port 1",
        "WARNING elsewhere: trouble",
    ]
    assert capfd.readouterr().err.splitlines() == lines


def test_no_text_can_pass_for_a_record_or_steer_a_terminal(tmp_path: Path) -> None:
    with logging_to(tmp_path / "log", 1 << 20):
        log.warning("name \x1b[31mred\x07\n2026-01-01 00:00:00 INFO flexlab: all is well")
    first, second = (tmp_path / "log").read_text().splitlines()
    assert first.endswith("name red")
    assert second.startswith("    2026")


def test_a_traceback_is_part_of_its_record(tmp_path: Path) -> None:
    with logging_to(tmp_path / "log", 1 << 20):
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("task ended")
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines[0].endswith("task ended")
    assert lines[-1] == "    ValueError: odd"


def test_the_log_and_its_older_part_stay_within_the_bound(tmp_path: Path) -> None:
    with logging_to(tmp_path / "log", 8192):
        for number in range(2000):
            log.info("line %d of many", number)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert set(sizes) == {"log", "log.1"}
    assert sum(sizes.values()) <= 8192
    assert "line 1999" in (tmp_path / "log").read_text()


def test_logging_is_as_before_afterwards(tmp_path: Path) -> None:
    root = logging.getLogger()
    before = list(root.handlers), root.level, logging.getLogger("flexlab").level
    with logging_to(tmp_path / "log", 1 << 20, verbose=True):
        assert log.isEnabledFor(logging.DEBUG)
    assert (list(root.handlers), root.level, logging.getLogger("flexlab").level) == before


def test_a_detached_daemons_stderr_follows_the_rotation(tmp_path: Path) -> None:
    path = tmp_path / "log"
    program = (
        "import logging, os, sys; from pathlib import Path\n"
        "from flexlab.core.logging import logging_to\n"
        "with logging_to(Path(sys.argv[1]), 4096):\n"
        "    for n in range(200): logging.getLogger('flexlab.x').info('line %d', n)\n"
        "    os.write(2, b'crash of the interpreter\\n')\n"
    )
    with path.open("ab") as output:
        subprocess.run(
            [sys.executable, "-c", program, str(path)], stdout=output, stderr=output, check=True
        )
    assert "crash of the interpreter" in path.read_text()
    assert path.read_text().count("line 199\n") == 1


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"), logging_to(tmp_path / "file" / "log", 4096):
        pass
