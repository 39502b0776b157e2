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


class NodeAccess(NamedTuple):
    """One node in /dev; None where the root says nothing about access."""

    node: DeviceNode
    exists: bool | None
    allowed: bool | None


def look(root: Path, path: str) -> NodeAccess:
    """The node `path` (`/dev/kfd`) below `root`; a root without a dev folder says nothing."""
    below = os.path.join(root, path.lstrip("/"))
    try:
        found = os.stat(below)
    except (FileNotFoundError, NotADirectoryError):
        known = os.path.isdir(os.path.join(root, "dev"))
        return NodeAccess(DeviceNode(path=path), False if known else None, None)
    except OSError:
        # Its folder may not be searched, so the node cannot be opened either.
        return NodeAccess(DeviceNode(path=path), None, False)
    return NodeAccess(
        DeviceNode(path=path, gid=found.st_gid), True, os.access(below, os.R_OK | os.W_OK)
    )


def mend(access: NodeAccess) -> str:
    """What to do about a node that may not be opened: which group, by number and name."""
    path, gid = access.node.path, access.node.gid
    if gid is None:
        return f"ls -l {path} shows who may open it"
    if not access.node_mode_lets_group:
        return f"ls -l {path}: its group may not open it either"
    return f"sudo usermod -aG {_group(gid)} $USER, then log in again (gid {gid} owns {path})"


def _group(gid: int) -> str:
    # pwd-style lookups read /etc/group only when something is wrong.
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, OSError):
        return str(gid)
