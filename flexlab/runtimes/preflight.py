"""Whether the embedded engine can be used here; quick, imports none of it, never raises."""

from __future__ import annotations

import os
import re

from flexlab.spec.machine import Problem
from flexlab.spec.plan import RuntimeFacts

EMBEDDED_PACKAGE = "xllamacpp"
EMBEDDED_AT_LEAST = (2026, 10, 11549)
EMBEDDED_BELOW = (2026, 11)
"""The pin of the extra `embedded` in pyproject.toml; a test compares the two."""
_INSTALL_EMBEDDED = "pip install 'flexlab[embedded]'"


def process_facts() -> RuntimeFacts:
    """The facts of the process runtime."""
    version = _installed_version()
    problems = [
        problem
        for problem in (_kernel_problem(), _embedded_problem(version), _libgomp_problem())
        if problem is not None
    ]
    blocking = [problem for problem in problems if problem.code != "embedded_version"]
    return RuntimeFacts(
        name="process", available=not blocking, version=version, problems=tuple(problems)
    )


def _installed_version() -> str | None:
    # importlib.metadata costs 20 ms, which verbs without a runtime need not pay.
    from importlib import metadata, util

    try:
        # A version without the module is what an interrupted uninstall leaves behind.
        found = util.find_spec(EMBEDDED_PACKAGE)
        return metadata.version(EMBEDDED_PACKAGE) if found else None
    except (metadata.PackageNotFoundError, KeyError, OSError, ValueError):
        return None


def _embedded_problem(version: str | None) -> Problem | None:
    if version is None:
        return Problem(
            code="embedded_missing",
            message="the embedded engine (xllamacpp) is not installed",
            hint=_INSTALL_EMBEDDED,
        )
    if EMBEDDED_AT_LEAST <= _numbers(version) < EMBEDDED_BELOW:
        return None
    least, below = (".".join(map(str, part)) for part in (EMBEDDED_AT_LEAST, EMBEDDED_BELOW))
    return Problem(
        code="embedded_version",
        message=f"xllamacpp {version} is installed; FlexLab knows {least} up to before {below}",
        hint=_INSTALL_EMBEDDED,
    )


def _libgomp_problem() -> Problem | None:
    import ctypes  # 10 ms, as above

    try:
        # The loader's own answer; find_library would start ldconfig and gcc.
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return Problem(
            code="libgomp_missing",
            message="the system library libgomp.so.1 is missing; the embedded engine needs it",
            hint="sudo apt-get install -y libgomp1",
        )
    return None


def _kernel_problem() -> Problem | None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Problem(
            code="pidfd_missing",
            message=f"processes cannot be watched safely here (pidfd_open: {error})",
            hint="FlexLab needs Linux 5.3 or newer, and a sandbox that allows pidfd_open",
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
