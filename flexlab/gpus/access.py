"""Whether this process may use a device node, and which group it would have to be in.

sysfs is world readable, so a GPU is seen even where it cannot be used (ollama/ollama#6685). A node
is never opened to find out: opening a render node wakes a sleeping card.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple

from flexlab.spec.machine import DeviceNode

_GROUP_RW = stat.S_IRGRP | stat.S_IWGRP


class NodeAccess(NamedTuple):
    """One node in /dev; None where the root says nothing about access."""

    node: DeviceNode
    exists: bool | None
    allowed: bool | None
    by_group: bool = True
    """Its group may open it, and is not root's: joining that group is the mend."""


def look(root: Path, path: str) -> NodeAccess:
    """The node `path` (`/dev/kfd`) below `root`; a root without a dev folder says nothing."""
    below = os.path.join(root, path.lstrip("/"))
    try:
        found = os.stat(below)
    except (FileNotFoundError, NotADirectoryError):
        known = os.path.isdir(os.path.join(root, "dev"))
        return NodeAccess(DeviceNode(path=path), False if known else None, None)
    except OSError:
        # A folder on the way may not be searched, so the node cannot be opened either.
        return NodeAccess(DeviceNode(path=path), None, False)
    allowed = os.access(below, os.R_OK | os.W_OK)
    by_group = found.st_gid != 0 and found.st_mode & _GROUP_RW == _GROUP_RW
    return NodeAccess(DeviceNode(path=path, gid=found.st_gid), True, allowed, by_group)


def mend(root: Path, access: NodeAccess) -> str:
    """What to type so that this user may open the node: the group by name and number.

    Names stand for numbers of the running system only; another root's groups are just numbers.
    """
    path, gid = access.node.path, access.node.gid
    if gid is None:
        return f"ls -l {path} shows who may open it"
    if not access.by_group:
        rule = f'KERNEL=="{os.path.basename(path)}", GROUP="render", MODE="0660"'
        return f"joining its group (gid {gid}) does not help; a udev rule does: {rule}"
    name = _group_name(gid) if root == Path("/") else None
    return f"sudo usermod -aG {name or gid} $USER, then log in again (gid {gid} owns {path})"


def _group_name(gid: int) -> str | None:
    # Read only when something is wrong: with a directory service this is a question to the network.
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return None
