"""Weights are fetched by a child process: a slow disk, a checksum or a hub library never stalls
a stream, and a daemon that dies takes the download with it (its part stays)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from flexlab.core import paths
from flexlab.core.errors import WeightsError
from flexlab.runtimes.logfile import rotate
from flexlab.spec.lab import Progress
from flexlab.spec.plan import Weight

LINE_MAX_BYTES = 1 << 20
LOG_MAX_BYTES = 1 << 20
END_TIMEOUT_S = 5.0


class _Failure(msgspec.Struct):
    code: str
    message: str
    hint: str | None = None


class _Line(msgspec.Struct):
    """One line of the child: progress, or its end."""

    phase: str | None = None
    path: str | None = None
    error: _Failure | None = None


async def fetch(
    weights: tuple[Weight, ...], models_dir: Path, report: Callable[[Progress], None]
) -> None:
    """Fetch all of them. Cancelling ends the child and keeps its part. Raises WeightsError."""
    log_path = paths.private_dir(paths.logs_dir()) / "fetch.log"
    rotate(log_path, LOG_MAX_BYTES)
    with log_path.open("ab") as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "flexlab.weights.fetch",
            "--die-with-parent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd="/",
            env=os.environ | {"PYTHONPATH": _import_path()},
            limit=LINE_MAX_BYTES,
            start_new_session=True,  # a Ctrl-C at a foreground daemon is ours to pass on
        )
    try:
        await _converse(child, weights, models_dir, report, log_path)
    finally:
        await _end(child)


async def _end(child: asyncio.subprocess.Process) -> None:
    """Ask it to end, then kill it; one that not even that ends is left to the kernel."""
    for end in (child.terminate, child.kill):
        if child.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await child.wait()


async def _converse(
    child: asyncio.subprocess.Process,
    weights: tuple[Weight, ...],
    models_dir: Path,
    report: Callable[[Progress], None],
    log_path: Path,
) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    request = {"weights": weights, "models_dir": str(models_dir)}
    child.stdin.write(msgspec.json.encode(request) + b"\n")
    child.stdin.close()
    done = False
    async for line in child.stdout:
        told = msgspec.json.decode(line, type=_Line)
        if told.error is not None:
            raise WeightsError(told.error.message, told.error.hint, code=told.error.code)
        if told.path is not None:
            done = True
        elif told.phase is not None:
            report(msgspec.json.decode(line, type=Progress))
    code = await child.wait()
    if not done or code != 0:
        raise WeightsError(f"the download ended unexpectedly (exit {code})", f"see {log_path}")


def _import_path() -> str:
    """Where this very package is imported from: the child must run the same code."""
    package_parent = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return f"{package_parent}{os.pathsep}{inherited}" if inherited else package_parent
