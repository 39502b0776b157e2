"""`flexlab requests`."""

from __future__ import annotations

from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, verb_app
from flexlab.cli.table import Column
from flexlab.cli.variables import warn_of_variables
from flexlab.core.units import show_seconds
from flexlab.spec.control import RequestView

DEFAULT_LAST = 10
COLUMNS = (
    Column("ID", flexible=True),
    Column("STATE"),
    Column("MODEL", drop=1, flexible=True),
    Column("ROUTE", drop=6),
    Column("CLIENT", drop=7),
    Column("WAITED", drop=4, right=True),
    Column("TTFT", drop=5, right=True),
    Column("TOKENS", drop=3, right=True),
    Column("TIME", right=True),
    Column("STATUS", drop=2, flexible=True),
)
ENDS = {
    "client_gone": "client left",
    "drained": "client left",
    "broken": "engine failed",
    "cut": "cut",
    "cancelled": "cancelled",
    "upgraded": "websocket",
}
"""How a request ended, where its status alone does not say it."""

app = verb_app()


@app.command()
def requests(
    last: Annotated[
        int,
        typer.Option("--last", "-n", min=0, metavar="N", help="How many of those that ended."),
    ] = DEFAULT_LAST,
    as_json: JsonOption = False,
) -> None:
    """Show requests: those in flight, the oldest first, then the last that ended.

    WAITED is the time in the queue for the model, TTFT that to the first byte of the answer.
    """
    warn_of_variables()
    daemon = daemons.find()
    if daemon is None:
        output.say("the daemon is not running, so no request is in flight; flexlab up starts it")
        if as_json:
            output.answer_json({"requests": []})
        return
    seen = daemon.requests(last).requests
    if as_json:
        output.answer_json({"requests": seen})
        return
    if all(request.state == "done" for request in seen):
        output.say("no request is in flight")
    if seen:
        output.answer_table(COLUMNS, [_row(request) for request in seen])


def _row(request: RequestView) -> list[str]:
    return [
        request.id,
        request.state,
        request.model or "",
        request.route,
        request.client,
        _span(request.waited_s),
        _span(request.ttft_s),
        _tokens(request),
        _span(request.duration_s),
        _status(request),
    ]


def _span(seconds: float | None) -> str:
    """Thousandths below a second: what a quick answer took is told in those."""
    if seconds is None:
        return ""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else show_seconds(seconds)


def _tokens(request: RequestView) -> str:
    if request.tokens_out is None:
        return ""
    if request.tokens_per_s is None:
        return str(request.tokens_out)
    return f"{request.tokens_out} at {request.tokens_per_s:.1f}/s"


def _status(request: RequestView) -> str:
    words = [] if request.status is None else [str(request.status)]
    if request.how in ENDS:
        words.append(ENDS[request.how])
    return " ".join(words)
