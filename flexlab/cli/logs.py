"""`flexlab logs`."""

from __future__ import annotations

from collections import deque
from typing import Annotated

import typer

from flexlab import client
from flexlab.cli import output
from flexlab.cli.common import model_word, need_words, verb_app
from flexlab.core import paths
from flexlab.core.errors import DaemonUnreachable, FlexLabError

DEFAULT_LINES = 200

app = verb_app()


@app.command()
def logs(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Name or alias.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, metavar="N", help="How many of the last lines.")
    ] = DEFAULT_LINES,
    daemon: Annotated[bool, typer.Option("--daemon", help="The daemon's own log.")] = False,
) -> None:
    """Show what a model's engine writes, oldest line first."""
    if daemon:
        _show_daemon_log(lines)
        return
    need_words([model] if model else [], "MODEL", "flexlab logs MODEL [-f] [-n N]")
    running = client.find()
    if running is None:
        raise DaemonUnreachable(
            "the daemon is not running, so no model is",
            f"earlier logs are in {paths.logs_dir()}",
            code="not_running",
        )
    for line in running.logs(model_word(model or ""), tail=lines, follow=follow):
        output.answer(line)
        if follow:
            output.flush()


def _show_daemon_log(lines: int) -> None:
    log = paths.logs_dir() / "daemon.log"
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=lines):
                output.answer(line.rstrip("\n"))
    except OSError as error:
        raise FlexLabError(
            f"no daemon log: {error}", "it is written by a daemon that `up` started"
        ) from error
