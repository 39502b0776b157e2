"""Where this process stands in the control groups, and the limits on the way up to the root.

A limit of any ancestor binds, so readers look at the whole chain. In a container without a group
namespace /proc/self/cgroup names the host's path while the mount starts at the container's own
group: mountinfo says where, and the mount itself is always part of the chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from flexlab.gpus.files import read_text

Version = Literal[1, 2]
_OCTAL = re.compile(r"\\([0-7]{3})")


class Group(NamedTuple):
    """One group's folder, and which interface files it has."""

    version: Version
    folder: Path


class _Mount(NamedTuple):
    version: Version
    controllers: frozenset[str]
    root: str
    point: str


def groups(root: Path, controller: str) -> list[Group]:
    """The groups that bind this process for `controller` (cpu, memory), innermost first.

    Both hierarchies may be mounted at once; a v1 hierarchy that has the controller comes first.
    """
    own = _own_paths(root)
    found: list[Group] = []
    for mount in _mounts(root):
        name = controller if mount.version == 1 else ""
        if mount.version == 1 and controller not in mount.controllers:
            continue
        found += [Group(mount.version, folder) for folder in _chain(root, mount, own.get(name))]
    return found


def _chain(root: Path, mount: _Mount, own: str | None) -> Iterator[Path]:
    point = root / mount.point.lstrip("/")
    inside = PurePosixPath("/")
    if own is not None and ".." not in PurePosixPath(own).parts:
        path = PurePosixPath("/" + own.lstrip("/"))
        if path.is_relative_to(mount.root):
            inside = PurePosixPath("/") / path.relative_to(mount.root)
    for step in (inside, *inside.parents):
        yield point / str(step).lstrip("/")


def _own_paths(root: Path) -> dict[str, str]:
    """Controller -> path; the unified hierarchy is ``""``."""
    paths: dict[str, str] = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                paths.setdefault(controller, parts[2])
    return paths


def _mounts(root: Path) -> list[_Mount]:
    found: list[_Mount] = []
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split()
        if not separator or len(left) < 5 or len(right) < 3:
            continue
        if right[0] == "cgroup2":
            found.append(_Mount(2, frozenset(), _plain(left[3]), _plain(left[4])))
        elif right[0] == "cgroup":
            controllers = frozenset(right[2].split(","))
            found.append(_Mount(1, controllers, _plain(left[3]), _plain(left[4])))
    return sorted(found, key=lambda mount: mount.version)


def _plain(text: str) -> str:
    """mountinfo writes blanks as \\040."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), text)
