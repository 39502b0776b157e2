"""Starting a detached daemon, and hearing from it over a pipe whether it came up."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import msgspec

from flexlab.core import paths
from flexlab.core.errors import DaemonUnreachable, FlexLabError
from flexlab.core.text import clean_line, os_sentence
from flexlab.spec.control import Ready, WireProblem

LOG_TAIL_BYTES = 2000
ENDING_S = 1.0

# Kept until this process ends: the daemon outlives us, and nobody waits for it.
_started: list[subprocess.Popen[bytes]] = []


class DaemonSaid(FlexLabError):
    """A refusal that came over the wire; it keeps the code and exit code it had over there."""

    def __init__(self, problem: WireProblem) -> None:
        super().__init__(problem.message, problem.hint, code=problem.code)
        self.exit_code = problem.exit_code
        self.near = problem.near


def start_daemon(deadline: float) -> bool:
    """Starts `flexlab serve` detached; True once ours listens, False when another one already does.

    `deadline` is a time.monotonic() value. Raises the error that the daemon itself reports
    (a port that is taken, wrong settings), or DaemonUnreachable when it ends without a word.
    """
    read_fd, write_fd = os.pipe()
    try:
        try:
            process = _spawn(write_fd)
        finally:
            os.close(write_fd)
        try:
            line = _read_line(read_fd, deadline)
        except BaseException:
            # Ctrl-C while it starts: nobody asked for this daemon any more.
            process.send_signal(signal.SIGTERM)
            raise
    finally:
        os.close(read_fd)
    return _judge(line, process)


def _spawn(ready_fd: int) -> subprocess.Popen[bytes]:
    try:
        state = paths.private_dir(paths.state_dir())
        with _open_log() as log:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "flexlab",
                    "serve",
                    "--detached",
                    "--ready-fd",
                    str(ready_fd),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A folder that is ours: `-m` puts the working folder on the module path.
                cwd=state,
                pass_fds=(ready_fd,),
                start_new_session=True,
            )
    except OSError as error:
        raise DaemonUnreachable(
            f"the daemon cannot be started: {os_sentence(error)}",
            "FLEXLAB_STATE_DIR chooses another folder for its state",
        ) from error
    _started.append(process)
    return process


def _open_log() -> IO[bytes]:
    """For what the interpreter itself says; the daemon's logging rotates this file."""
    return (paths.private_dir(paths.logs_dir()) / "daemon.log").open("ab")


def _read_line(fd: int, deadline: float) -> bytes:
    """Until a line end, end of file (the daemon died) or the deadline; what came so far."""
    received = b""
    while not received.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([fd], [], [], remaining)[0]:
            break
        chunk = os.read(fd, 65536)
        if not chunk:
            break
        received += chunk
    return received


def _judge(line: bytes, process: subprocess.Popen[bytes]) -> bool:
    log = paths.logs_dir() / "daemon.log"
    try:
        report = msgspec.json.decode(line, type=Ready)
    except msgspec.MsgspecError:
        if not _has_ended(process):
            raise DaemonUnreachable(
                f"the daemon (pid {process.pid}) is still starting", f"its log: {log}"
            ) from None
        raise DaemonUnreachable(
            f"the daemon ended while it started: {_last_words(log)}", f"its log: {log}"
        ) from None
    if report.error is not None:
        raise DaemonSaid(report.error)
    return report.ready


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """A dying process closes its pipe a moment before it can be waited for."""
    try:
        process.wait(ENDING_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _last_words(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    said = [line for line in lines if line.startswith("error: ")] or lines
    return clean_line(said[-1].removeprefix("error: ")) if said else "its log is empty"
