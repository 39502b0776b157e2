"""Where a container engine may listen, in the order in which people mean it.

Option or setting, DOCKER_HOST, the docker command's context, the usual sockets (also rootless),
then podman's. Only an engine on this machine is of use: GPUs, paths and ports are this machine's.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from flexlab.core.text import clean_line
from flexlab.spec.machine import Problem

DEFAULT_SOCKET = "/var/run/docker.sock"
CONNECT_TIMEOUT_S = 2.0


class Place(NamedTuple):
    """One address of an engine, and who named it."""

    url: str
    named_by: str
    """For people: `DOCKER_HOST`, `the usual place`."""
    is_wish: bool = False
    """Named by somebody: no other place is tried in its stead."""


class Search(NamedTuple):
    """Where one answers, or why none can be used."""

    place: Place | None
    problem: Problem | None


def places(environ: Mapping[str, str], wish: str | None = None) -> Iterator[Place]:
    """In order; ends with the first that somebody named."""
    if wish:
        yield Place(_with_scheme(wish), "setting docker_host", is_wish=True)
        return
    if host := environ.get("DOCKER_HOST"):
        yield Place(_with_scheme(host), "DOCKER_HOST", is_wish=True)
        return
    if (context := _context(environ)) is not None:
        yield context
        return
    runtime_dir = environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    yield Place(f"unix://{DEFAULT_SOCKET}", "the usual place")
    yield Place(f"unix://{runtime_dir}/docker.sock", "rootless Docker's place")
    if host := environ.get("CONTAINER_HOST"):
        yield Place(_with_scheme(host), "CONTAINER_HOST", is_wish=True)
        return
    yield Place(f"unix://{runtime_dir}/podman/podman.sock", "podman's place")
    yield Place("unix:///run/podman/podman.sock", "podman's place (root)")


def search(environ: Mapping[str, str], wish: str | None = None) -> Search:
    """The first place where something accepts connections; else the most telling problem."""
    problems: list[Problem] = []
    for place in places(environ, wish):
        problem = problem_of(place)
        if problem is None:
            return Search(place, None)
        problems.append(problem)
    # One that is there and closed to this user says more than one that is not there.
    order = ("docker_remote", "docker_permission", "docker_not_running", "docker_missing")
    return Search(None, min(problems, key=lambda one: order.index(one.code)))


def problem_of(place: Place) -> Problem | None:
    """Why this place cannot be used; None when something listens there."""
    address = urlsplit(place.url)
    if address.scheme != "unix":
        return Problem(
            code="docker_remote",
            message=f"{place.named_by} names {clean_line(place.url)}, and FlexLab starts "
            "containers on this machine only: its GPUs, paths and ports are not another one's",
            hint="unset DOCKER_HOST (docker context use default), or run FlexLab over there",
        )
    path = address.path
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            probe.connect(path)
    except PermissionError:
        return Problem(
            code="docker_permission",
            message=f"{path} may not be used by this user",
            hint="sudo usermod -aG docker $USER, then log in anew (it is as good as root's "
            "rights); or use rootless Docker",
        )
    except FileNotFoundError:
        return Problem(
            code="docker_missing",
            message=f"no container engine listens at {path} ({place.named_by})",
            hint="sudo apt-get install docker.io, or leave out --runtime docker",
        )
    except (OSError, ValueError) as error:
        return Problem(
            code="docker_not_running",
            message=f"the container engine at {path} does not answer ({error})",
            hint="sudo systemctl start docker",
        )
    return None


def _with_scheme(text: str) -> str:
    """`/run/x.sock` is what people write; `tcp://` and `ssh://` stay what they are."""
    word = text.strip()
    return f"unix://{word}" if word.startswith("/") else word


def _context(environ: Mapping[str, str]) -> Place | None:
    """Of `docker context use`; None for the default one, and for what cannot be read."""
    home = Path(environ.get("HOME") or "/")
    folder = Path(environ.get("DOCKER_CONFIG") or home / ".docker")
    name = environ.get("DOCKER_CONTEXT")
    if name is None:
        config = _json(folder / "config.json")
        name = config.get("currentContext") if isinstance(config, dict) else None
    if not isinstance(name, str) or name in ("", "default"):
        return None
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = _json(folder / "contexts/meta" / digest / "meta.json")
    try:
        host = meta["Endpoints"]["docker"]["Host"]  # type: ignore[index]
    except (KeyError, TypeError):
        return None
    if not isinstance(host, str) or not host:
        return None
    return Place(_with_scheme(host), f"docker context {clean_line(name)}", is_wish=True)


def _json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
