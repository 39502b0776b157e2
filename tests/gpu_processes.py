"""Processes as /proc shows them: files that they have open, and what DRM says of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

KIB = 1024
RENDER = "/dev/dri/renderD128"


def told(slot: str, client: int, driver: str = "amdgpu", **values: object) -> str:
    """The fdinfo of one client; `_` in a name stands for `-`."""
    lines = ["pos:\t0", "flags:\t02100002", "mnt_id:\t26", f"drm-driver:\t{driver}"]
    lines += [f"drm-client-id:\t{client}", f"drm-pdev:\t{slot}"]
    lines += [f"drm-{name.replace('_', '-')}:\t{value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def process(
    root: Path,
    pid: int,
    clients: Mapping[int, str] | None = None,
    *,
    name: str = "llama-server",
    cgroup: str | None = "0::/user.slice",
    node: str = RENDER,
) -> Path:
    """A process with these GPU files open (descriptor -> fdinfo), beside a log file."""
    folder = root / "proc" / str(pid)
    for part in ("fd", "fdinfo"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "comm").write_text(f"{name}\n")
    if cgroup is not None:
        (folder / "cgroup").write_text(f"{cgroup}\n")
    targets = {0: "/dev/null", 1: "/tmp/log", 2: "socket:[4711]"} | dict.fromkeys(
        clients or {}, node
    )
    for number, target in targets.items():
        link = folder / "fd" / str(number)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        text = (clients or {}).get(number, "pos:\t0\nflags:\t02\n")
        (folder / "fdinfo" / str(number)).write_text(text)
    return folder
