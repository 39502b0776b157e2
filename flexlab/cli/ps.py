"""`flexlab ps`."""

from __future__ import annotations

from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import model_rows, output
from flexlab.cli.common import JsonOption, verb_app, watch_interval_s
from flexlab.cli.variables import warn_of_variables
from flexlab.core.errors import DaemonUnreachable
from flexlab.core.text import clean_line
from flexlab.spec.lab import ModelView, Snapshot

INTERVAL_S = 1.0
NOTHING: dict[str, object] = {
    "daemon": None,
    "models": [],
    "instances": [],
    "pools": [],
    "gpus": [],
}

app = verb_app()


@app.command()
def ps(
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Models that are not running, too.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Live, until Ctrl-C.")] = False,
    interval: Annotated[
        str | None,
        typer.Option("--interval", metavar="S", help="Between two looks; 1 s if not given."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what runs, where, since when and why.

    Without a daemon nothing can run: that is said on stderr and is no error.
    """
    interval_s = watch_interval_s(interval, INTERVAL_S, watch=watch, command="flexlab ps --watch")
    warn_of_variables()
    daemon = daemons.find()
    if daemon is None and watch:
        raise DaemonUnreachable(
            "the daemon is not running: there is nothing to watch",
            "flexlab up MODEL starts it",
            code="not_running",
        )
    if daemon is None:
        output.say("the daemon is not running; flexlab up MODEL starts it")
        if left := daemons.left_running():
            output.say(f"an earlier one may have left running: {', '.join(left)}")
        if as_json:
            output.answer_json(NOTHING)
    elif watch:
        from flexlab.cli.ps_watch import Watch

        Watch(daemon, interval_s, show_all=show_all).run(as_json=as_json)
    else:
        _show(daemon.snapshot(), show_all=show_all, as_json=as_json)


def _show(snapshot: Snapshot, *, show_all: bool, as_json: bool) -> None:
    models = [model for model in snapshot.models if show_all or model_rows.is_active(model)]
    if as_json:
        output.answer_json(model_rows.as_json(snapshot, models))
    elif models:
        rows = [row for model in models for row in model_rows.rows(model, snapshot)]
        output.answer_table(model_rows.COLUMNS, rows)
        _say_what_failed(models)
    else:
        output.say(model_rows.NONE)


def _say_what_failed(models: list[ModelView]) -> None:
    """Whole, while the table may have had no room for it."""
    for model in models:
        if model.word == "failed":
            output.say(f"{model.name} failed: {clean_line(model.why)} (flexlab logs {model.name})")
