"""The environment that an engine gets: the user's own, without anything secret."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from flexlab.runtimes.proc import ENDPOINT_VARIABLE, INSTANCE_VARIABLE, OWNER_VARIABLE
from flexlab.spec.instance import Launch
from flexlab.spec.plan import LaunchPlan

# Parts of a name, between underscores: MAX_TOKENS and TOKENIZERS_PARALLELISM are no secrets.
_SECRET_PARTS = frozenset(
    ("APIKEY", "CREDENTIAL", "CREDENTIALS", "KEY", "KEYS", "PASSPHRASE", "PASSWD", "PASSWORD",
     "SECRET", "SECRETS", "TOKEN")
)  # fmt: skip
_SECRET_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_APPLICATION_")
_DROPPED = frozenset(
    # The agent's and the service manager's doors: an engine has no business there.
    ("PGPASSWORD", "SSH_AUTH_SOCK", "NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")
)
_URL_WITH_PASSWORD = re.compile(r"://[^/@\s]*:[^/@\s]*@")


def is_secret(name: str, value: str) -> bool:
    """Whether this variable holds, by its name or form, something that an engine must not have."""
    upper = name.upper()
    return (
        upper in _DROPPED
        or upper.startswith(_SECRET_PREFIXES)
        or not _SECRET_PARTS.isdisjoint(upper.split("_"))
        or _URL_WITH_PASSWORD.search(value) is not None
    )


def engine_environment(
    plan: LaunchPlan, launch: Launch, address: str, inherited: Mapping[str, str]
) -> dict[str, str]:
    """`inherited` without secrets, then the plan's, then the words by which it is found again."""
    environment = {name: value for name, value in inherited.items() if not is_secret(name, value)}
    environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""))
    environment |= plan.env
    for name in plan.env_cleared:
        environment.pop(name, None)
    environment["HF_HUB_OFFLINE"] = "1"
    environment[INSTANCE_VARIABLE] = launch.instance
    environment[OWNER_VARIABLE] = launch.installation
    environment[ENDPOINT_VARIABLE] = address
    return environment


def python_path(inherited: str) -> str:
    """A PYTHONPATH under which `-m flexlab...` works from any folder.

    An installed package (wheel) is found anyway, and site-packages in front of the standard
    library would hide modules of it; a checkout is put in front.
    """
    entries = [str(Path(entry).absolute()) for entry in inherited.split(os.pathsep) if entry]
    root = str(Path(__file__).resolve().parents[2])
    if Path(root).name not in ("site-packages", "dist-packages") and root not in entries:
        entries.insert(0, root)
    return os.pathsep.join(entries)


def python_command(module: str) -> tuple[str, ...]:
    """`-P`: the current folder is no place to import from."""
    return (sys.executable, "-P", "-m", module)
