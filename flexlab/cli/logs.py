"""`flexlab logs`."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import model_word, need_words, verb_app
from flexlab.cli.names import model_name
from flexlab.cli.variables import warn_of_variables
from flexlab.core import paths
from flexlab.core.errors import FlexLabError, UsageError
from flexlab.core.text import os_sentence

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
        _show_file(paths.logs_dir() / "daemon.log", lines, "no daemon has been started by `up` yet")
        return
    need_words([model] if model else [], "MODEL", "flexlab logs MODEL [-f] [-n N]")
    warn_of_variables()
    word = model_word(model or "")
    running = daemons.find()
    if running is None:
        log = _last_log(word)
        output.say("the daemon is not running; this is the log of the last start")
        _show_file(log, lines, "flexlab up starts a model")
        return
    for line in running.logs(word, tail=lines, follow=follow):
        output.answer(line)
        if follow:
            output.flush()


def _last_log(word: str) -> Path:
    """Of the model's last start. Raises UnknownModel, or UsageError where it had none."""
    # A model that was derived from a file is known by nothing but its log.
    found = _logs_of(word)
    name = word if found else model_name(word)
    found = found or _logs_of(name)
    if not found:
        raise UsageError(f"{name} has no log: it was never started here", f"flexlab up {name}")
    return max(found, key=lambda path: path.stat().st_mtime_ns)


def _logs_of(model: str) -> list[Path]:
    # The scheduler names instances, and the daemon their logs after them.
    from flexlab.scheduler.state import safe_name

    return list(paths.logs_dir().glob(f"{safe_name(model)}-{'[0-9a-f]' * 8}.log"))


def _show_file(log: Path, lines: int, hint: str) -> None:
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            last = deque(file, maxlen=lines)
    except OSError as error:
        raise FlexLabError(os_sentence(error), hint) from error
    for line in last:
        output.answer(line.rstrip("\n"))
