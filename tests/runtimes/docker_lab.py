"""A container engine for tests, and an image that needs no registry: this very Python.

The engine is the one that FlexLab would find (DOCKER_HOST or the usual places). Where none answers,
tests skip by name.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
from functools import cache
from pathlib import Path

import pytest

from flexlab.runtimes.docker import DockerRuntime

IMAGE = "flexlab-test/python:1"
ENGINE = "/opt/fake_engine.py"
_LEFT_OUT = re.compile(
    r"/(test|tests|idlelib|tkinter|ensurepip|site-packages|__pycache__|lib2to3)/"
)


@cache
def engine_problem() -> str | None:
    """Why no engine can be used here; None when one answers."""
    facts = DockerRuntime().facts()
    if facts.available:
        return None
    return facts.problems[0].message if facts.problems else "no container engine"


def need_engine() -> None:
    """Skips by name where there is none."""
    if (problem := engine_problem()) is not None:
        pytest.skip(f"no container engine: {problem}")


@cache
def python_image() -> str:
    """The name of an image with this Python and the tests' engine, made once."""
    import docker

    client = docker.APIClient(**_kwargs())
    try:
        client.import_image(src=_root(), repository="flexlab-test/python", tag="1")
    finally:
        client.close()
    return IMAGE


def python_in_image() -> str:
    return os.path.realpath(sys.executable)


def _kwargs() -> dict[str, object]:
    from flexlab.runtimes.containers import places

    found = places.search(os.environ)
    assert found.place is not None
    return {"base_url": found.place.url, "version": "auto", "timeout": 300}


def _root() -> bytes:
    """A tar of the interpreter, its standard library and every shared library of them."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        seen: set[str] = set()
        python = Path(python_in_image())
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = [python, *(path for path in stdlib.rglob("*") if path.is_file())]
        kept = [path for path in files if not _LEFT_OUT.search(str(path))]
        binaries = [python, *(path for path in kept if path.suffix == ".so")]
        for path in [*kept, *_libraries(binaries)]:
            if str(path) not in seen:
                seen.add(str(path))
                archive.add(os.path.realpath(path), arcname=str(path).lstrip("/"))
        archive.add(Path(__file__).with_name("fake_engine.py"), arcname=ENGINE.lstrip("/"))
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(folder)
    return made.getvalue()


def _libraries(binaries: list[Path]) -> list[Path]:
    told = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True).stdout
    return [Path(word) for word in sorted(set(re.findall(r"(/\S+\.so\S*) \(", told)))]
