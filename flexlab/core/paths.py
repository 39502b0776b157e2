"""Where FlexLab keeps things. XDG folders, each replaceable by one FLEXLAB_* variable.

    config  $FLEXLAB_CONFIG_DIR  $XDG_CONFIG_HOME/flexlab  ~/.config/flexlab
            settings.yaml, recipes/
    data    $FLEXLAB_DATA_DIR    $XDG_DATA_HOME/flexlab    ~/.local/share/flexlab
            models/ (weights)
    state   $FLEXLAB_STATE_DIR   $XDG_STATE_HOME/flexlab   ~/.local/state/flexlab
            one folder per machine

Weights are never put into a cache folder: cleaners delete those. State has a folder per machine
id, since a home may be shared over NFS while processes and containers are not.
Functions, not constants: tests and `--sysroot` change the environment.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path

SOCKET_PATH_MAX = 100
"""A unix socket's path must fit sun_path (108 bytes); some room is left for a temporary suffix."""


def _folder(variable: str, xdg: str, default: str) -> Path:
    if chosen := os.environ.get(variable):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get(xdg, "")
    # The XDG specification: a relative path in these variables is to be ignored.
    root = Path(base) if base.startswith("/") else Path.home() / default
    return root / "flexlab"


def config_dir() -> Path:
    """Settings and the user's own recipes."""
    return _folder("FLEXLAB_CONFIG_DIR", "XDG_CONFIG_HOME", ".config")


def data_dir() -> Path:
    """Weights; big, and never deleted but by `flexlab rm`."""
    return _folder("FLEXLAB_DATA_DIR", "XDG_DATA_HOME", ".local/share")


def state_dir() -> Path:
    """This machine's state: daemon lock, launch records, logs, events."""
    return _folder("FLEXLAB_STATE_DIR", "XDG_STATE_HOME", ".local/state") / machine_id()


def settings_file() -> Path:
    """The settings file; need not exist."""
    return config_dir() / "settings.yaml"


def user_recipes_dir() -> Path:
    """Recipes here add to or replace those that FlexLab ships."""
    return config_dir() / "recipes"


def shipped_dir(name: str) -> Path:
    """`recipes` or `compose`: inside the wheel, or beside the package in a checkout."""
    package = Path(__file__).resolve().parent.parent
    inside = package / "_data" / name
    return inside if inside.is_dir() else package.parent / name


def machine_id() -> str:
    """A stable name for this machine; the host's name where there is no machine id."""
    try:
        found = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        found = ""
    return found or socket.gethostname() or "unknown"


def lock_file() -> Path:
    """Held by the daemon for life; its content (JSON: pid, socket, version) is for clients."""
    return state_dir() / "daemon.lock"


def instances_dir() -> Path:
    """Launch records, one JSON file per instance."""
    return state_dir() / "instances"


def logs_dir() -> Path:
    """Logs of the daemon and of every embedded engine."""
    return state_dir() / "logs"


def events_file() -> Path:
    """What happened, as JSON lines; what is older than these is beside it in `events.1.jsonl`."""
    return state_dir() / "events.jsonl"


def socket_path() -> Path:
    """Where a daemon of this state folder puts its control socket.

    The runtime folder where there is one, else the state folder, else (path too long) a folder of
    this user's under the temporary one. The name carries a hash of the state folder: two homes of
    one user are two daemons.
    """
    state = state_dir()
    word = hashlib.sha256(str(state).encode()).hexdigest()[:8]
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/") and _is_ours(Path(runtime)):
        first = Path(runtime) / f"flexlab-{word}" / "control.sock"
    else:
        first = state / "run" / "control.sock"
    if len(str(first)) <= SOCKET_PATH_MAX:
        return first
    return Path(tempfile.gettempdir()) / f"flexlab-{os.getuid()}-{word}" / "control.sock"


def private_dir(folder: Path) -> Path:
    """Make `folder` (mode 0700, ours) and return it.

    Raises OSError; PermissionError when someone else owns it or others may write to it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")
    if info.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _is_ours(folder: Path) -> bool:
    try:
        return folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False
