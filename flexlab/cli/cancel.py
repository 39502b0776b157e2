"""`flexlab cancel`."""

from __future__ import annotations

from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, typed, verb_app
from flexlab.cli.variables import warn_of_variables
from flexlab.core.errors import DaemonUnreachable, UsageError
from flexlab.core.text import clean_line
from flexlab.core.units import show_seconds
from flexlab.spawn import DaemonSaid
from flexlab.spec.control import RequestView

app = verb_app()


@app.command()
def cancel(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID...",
            help="Ids of requests, or beginnings that only one has.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """End requests: who sent them gets an error, and the model is free for others.

    `flexlab requests` lists the ids.
    """
    if not ids:
        raise UsageError("ID is missing\nusage: flexlab cancel ID...", "flexlab requests lists ids")
    warn_of_variables()
    daemon = daemons.find()
    if daemon is None:
        raise DaemonUnreachable(
            "the daemon is not running, so no request is in flight",
            "flexlab up MODEL starts it",
            code="not_running",
        )
    cancelled, wrong = [], []
    # A cell that was cut off in the table ends with an ellipsis, and its beginning is enough.
    for word in dict.fromkeys(typed(word).rstrip("…") for word in ids):
        try:
            request = daemon.cancel(word).request
        except DaemonSaid as no:
            wrong.append(no)
            continue
        cancelled.append(request)
        tell = output.say if as_json else output.answer
        tell(_told(request))
    for error in wrong[1:]:
        output.say(f"error: {error}")
    if wrong:
        raise wrong[0]
    if as_json:
        output.answer_json({"cancelled": cancelled})


def _told(request: RequestView) -> str:
    asked = f" to {request.model}" if request.model else ""
    after = f" after {show_seconds(request.duration_s)}"
    return clean_line(f"{request.id} is cancelled: {request.route}{asked}{after}")
