"""Asking the program nvidia-smi, where NVML cannot be loaded by us.

It hangs on a card that fell off the bus, so it gets one deadline for everything, no stdin, and a
process group of its own that is killed as a whole.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from typing import NamedTuple

from flexlab.gpus import nvidia_smi
from flexlab.gpus.nvidia_card import (
    DRIVER_NOT_LOADED,
    LIBRARY_NOT_FOUND,
    TIMEOUT,
    UNKNOWN_ERROR,
    VERSION_MISMATCH,
    Answer,
)
from flexlab.gpus.patience import Background

TIMEOUT_S = 5.0
EVERY_S = 5.0
"""How often the program is started for live readings: it takes 30 ms to some seconds."""
OUT_OF_DATE_S = 3 * EVERY_S
FIRST_S = 0.7
"""How long a reading waits for the first answer: below the deadline of a sampler's tick."""
_LIMIT_BYTES = 8 * 1024 * 1024
"""Eight cards say 0.5 MB in XML."""
_POLL_S = 0.05

PROGRAM = "nvidia-smi"
_FOLDERS = ("/usr/bin", "/usr/lib/wsl/lib", "/run/current-system/sw/bin", "/usr/local/nvidia/bin")
_COLUMNS = (
    "index,name,uuid,pci.bus_id,driver_version,memory.total,memory.used,utilization.gpu,"
    "utilization.memory,temperature.gpu,power.draw,power.limit,clocks.sm,clocks.mem,fan.speed"
)
_SENTENCES = (
    ("version mismatch", VERSION_MISMATCH),
    ("communicate with the NVIDIA driver", DRIVER_NOT_LOADED),
    ("Driver Not Loaded", DRIVER_NOT_LOADED),
    ("find libnvidia-ml", LIBRARY_NOT_FOUND),
)


class Run(NamedTuple):
    """What came of one run; `code` None: it was killed at its deadline."""

    output: str
    code: int | None


def ask(timeout_s: float = TIMEOUT_S) -> Answer:
    """All cards, by XML, else by CSV, within `timeout_s` in all; never raises."""
    until = time.monotonic() + timeout_s
    xml = run(("-q", "-x"), until)
    if xml is None:
        return Answer(fault=LIBRARY_NOT_FOUND)
    answer = nvidia_smi.parse(xml.output)
    if answer is None and xml.code is not None:
        answer = _ask_csv(until)
    if answer is None:
        return Answer(fault=_fault(xml))
    if any(card.slices for card in answer.cards) and (listing := run(("-L",), until)):
        answer = nvidia_smi.with_listed_slices(answer, listing.output)
    return answer


def _ask_csv(until: float) -> Answer | None:
    for columns in (f"{_COLUMNS},compute_cap", _COLUMNS):  # compute_cap: driver 510 and newer
        found = run((f"--query-gpu={columns}", "--format=csv"), until)
        answer = nvidia_smi.parse_csv(found.output) if found else None
        if answer is not None:
            return answer
    return None


def _fault(failed: Run) -> int:
    """Why there is no card; exit codes are NVML's, unless a wrapper script swallowed them."""
    if failed.code is None:
        return TIMEOUT
    told = (code for words, code in _SENTENCES if words.lower() in failed.output.lower())
    return next(told, failed.code or UNKNOWN_ERROR)


def run(words: tuple[str, ...], until: float) -> Run | None:
    """`nvidia-smi WORDS`, stopped at `until` (monotonic clock); None where there is no program."""
    program = _program()
    if program is None:
        return None
    try:
        child = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C"},
            cwd="/",
            start_new_session=True,
        )
    except OSError:
        return None
    assert child.stdout is not None
    try:
        output = _read(child, child.stdout.fileno(), until)
    finally:
        code = _end(child)
        child.stdout.close()
    return Run(output.decode("utf-8", errors="replace"), code)


def _program() -> str | None:
    paths = (os.path.join(folder, PROGRAM) for folder in (*os.get_exec_path(), *_FOLDERS))
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def _read(child: subprocess.Popen[bytes], descriptor: int, until: float) -> bytes:
    """What it wrote up to its end; a process that it left behind may hold the pipe open."""
    blocks: list[bytes] = []
    size = 0
    while size < _LIMIT_BYTES and (left := until - time.monotonic()) > 0:
        ended = _has_ended(child)
        if select.select([descriptor], [], [], 0 if ended else min(left, _POLL_S))[0]:
            block = os.read(descriptor, 256 * 1024)
            if not block:
                break
            blocks.append(block)
            size += len(block)
        elif ended:
            break
    while not _has_ended(child) and time.monotonic() < until:
        time.sleep(0.005)  # stdout is closed: it is about to end
    return b"".join(blocks)


def _has_ended(child: subprocess.Popen[bytes]) -> bool:
    """Without collecting it, so that its process group is still its own."""
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _end(child: subprocess.Popen[bytes]) -> int | None:
    """Kill what is left of the group and collect the child; None where it had not ended itself."""
    ended = _has_ended(child)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    try:
        code = child.wait(timeout=0.2)
    except subprocess.TimeoutExpired:
        child.returncode = -9  # inside a driver call it stays; init collects it after us
        return None
    return code if ended else None


class SharedAnswer:
    """The program's last answer for all cards; it runs beside the readings, never twice at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._job: Background[Answer] = Background()
        self._answer: Answer | None = None
        self._answered_at = 0.0
        self._begun_at: float | None = None

    def put(self, answer: Answer) -> None:
        """What a search for cards got anyway."""
        with self._lock:
            self._answer, self._answered_at = answer, time.monotonic()
            self._begun_at = self._answered_at

    def get(self) -> Answer:
        """At most OUT_OF_DATE_S old. Raises OSError where the program gives none."""
        with self._lock:
            self._take()
            now = time.monotonic()
            if not self._job.busy and (self._begun_at is None or now - self._begun_at >= EVERY_S):
                self._begun_at = now
                self._job.begin(ask)
            if self._answer is None or now - self._answered_at > OUT_OF_DATE_S:
                self._job.wait(FIRST_S)
                self._take()
            if self._answer is None or now - self._answered_at > OUT_OF_DATE_S:
                raise OSError("nvidia-smi does not answer")
            return self._answer

    def _take(self) -> None:
        outcome = self._job.take()
        if outcome is not None and outcome.value is not None and outcome.value.cards:
            self._answer, self._answered_at = outcome.value, outcome.at or time.monotonic()


SHARED = SharedAnswer()
"""One for this process: cards share what one run says."""
