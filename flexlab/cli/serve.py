"""`flexlab serve`: the one verb that becomes the daemon."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from flexlab.cli.common import verb_app
from flexlab.core.errors import FlexLabError, UsageError

app = verb_app()


@app.command()
def serve(
    host: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where to listen.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="N", help="Port.  [default: 8484]")
    ] = None,
    external: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=URL",
            help="A server that already runs, as model NAME. URL is its root. Repeatable.",
        ),
    ] = None,
    open_to_network: Annotated[
        bool, typer.Option("--open-to-network", help="Allow a --host that others can reach.")
    ] = False,
    detached: Annotated[bool, typer.Option(hidden=True)] = False,
    ready_fd: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run the daemon in the foreground: gateway, scheduler, control socket.

    `flexlab up` starts one by itself when none runs; use this under systemd or to watch it.
    Ctrl-C ends it in order; models keep running and are taken over by the next one.
    """
    # Everything heavy is here: no other verb may pay for the daemon.
    from flexlab.core.settings import load_settings
    from flexlab.daemon.main import run as run_daemon

    options = {"host": host, "port": port, "open_to_network": open_to_network or None}
    try:
        externals = _externals(external or [])
        loaded = load_settings({key: value for key, value in options.items() if value is not None})
    except FlexLabError as error:
        _report(ready_fd, error)
        raise
    code = run_daemon(loaded, externals=externals, detached=detached, ready_fd=ready_fd)
    raise typer.Exit(code)


def _externals(words: list[str]) -> dict[str, str]:
    externals: dict[str, str] = {}
    for word in words:
        name, equals, url = word.partition("=")
        if not equals or not name or not url.startswith(("http://", "https://")):
            raise UsageError(
                f"--external wants NAME=URL, not {word!r}",
                "such as --external big=http://127.0.0.1:8000",
            )
        if name in externals:
            raise UsageError(f"--external names {name!r} twice", "each model needs its own name")
        externals[name] = url.rstrip("/")
    return externals


def _report(ready_fd: int | None, error: FlexLabError) -> None:
    """Whoever started us waits at the pipe and cannot see our stderr."""
    if ready_fd is not None:
        problem = {
            "code": error.code,
            "message": str(error),
            "hint": error.hint,
            "exit_code": error.exit_code,
        }
        with os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(json.dumps({"error": problem}).encode() + b"\n")
