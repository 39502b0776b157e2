"""`flexlab events`."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from flexlab import client, daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, verb_app
from flexlab.cli.event_files import recorded
from flexlab.cli.names import model_name
from flexlab.cli.variables import warn_of_variables
from flexlab.core.errors import DaemonUnreachable
from flexlab.core.text import clean_line
from flexlab.core.units import say_bytes, show_bytes, show_seconds
from flexlab.spec.lab import Event

DEFAULT_LINES = 200
NARROW_CELLS = 60
"""Below this, a terminal shows no kind, which leaves room for the sentence."""
KIND_CELLS = len("settings")

app = verb_app()


@app.command()
def events(
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as they come, until Ctrl-C.")
    ] = False,
    after: Annotated[
        int | None,
        typer.Option(
            "--after", min=0, metavar="ID", help="Only newer ones than this; all of them."
        ),
    ] = None,
    lines: Annotated[
        int | None,
        typer.Option(
            "--lines", "-n", min=0, metavar="N", help="How many of the last; 200 if not given."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Only what it did, or what it caused."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened and why, newest last.

    Without a daemon, what its file holds. With --follow, --json gives one object a line.
    """
    warn_of_variables()
    daemon = daemons.find()
    if daemon is None and follow:
        raise DaemonUnreachable(
            "the daemon is not running: nothing happens that could be followed",
            "flexlab events shows what happened before; flexlab up MODEL starts the daemon",
            code="not_running",
        )
    if daemon is None:
        output.say("the daemon is not running; this is what its file holds")
    found = _until_now(daemon, after or 0)
    name = None if model is None else _name(model_word(model), found, daemon)
    chosen = [event for event in found if _concerns(event, name)]
    most = DEFAULT_LINES if lines is None and after is None else lines
    shown = chosen if most is None else chosen[max(0, len(chosen) - most) :]
    if as_json and not follow:
        output.answer_json({"events": shown})
        return
    for event in shown:
        _tell(event, as_json=as_json)
    if daemon is not None and follow:
        output.flush()
        _follow(daemon, max([after or 0, *(event.id for event in found)]), name, as_json=as_json)
    elif not shown:
        output.say("nothing has happened" if name is None else f"nothing has happened to {name}")


def _until_now(daemon: client.Client | None, after: int) -> list[Event]:
    """The daemon remembers the last ones; what came before those is in its files."""
    if daemon is None:
        return recorded(after)
    known = list(daemon.events(after=after))
    if known and known[0].id > after + 1:
        older = recorded(after)
        return [*(event for event in older if event.id < known[0].id), *known]
    return known


def _name(word: str, found: list[Event], daemon: client.Client | None) -> str:
    """The name of a model. Raises UnknownModel for one of which nothing was ever told."""
    if any(event.model == word for event in found):
        return word  # it may be known by nothing else any more
    return model_name(word, daemon.snapshot() if daemon else None)


def _concerns(event: Event, model: str | None) -> bool:
    return model is None or model in (event.model, event.by)


def _follow(daemon: client.Client, after: int, model: str | None, *, as_json: bool) -> None:
    """Until Ctrl-C. Raises DaemonUnreachable when the daemon ends."""
    with contextlib.closing(daemon.events(after=after, follow=True)) as coming:
        for event in coming:
            after = event.id
            if _concerns(event, model):
                _tell(event, as_json=as_json)
                output.flush()
    raise DaemonUnreachable(
        "the daemon has ended",
        f"flexlab events --follow --after {after} goes on with the next one",
        code="daemon_ended",
    )


def _tell(event: Event, *, as_json: bool) -> None:
    """For programs an object; for people a line, folded only where a terminal would break it."""
    if as_json:
        output.answer_json_line(event)
        return
    told = clean_line(event.text) + _costs(event)
    kind = f"{event.kind:{KIND_CELLS}}  "
    if not output.is_terminal(sys.stdout):
        output.answer(f"{_clock(event.at, with_date=True)}  {kind}{told}")
        return
    label = f"{_clock(event.at, with_date=not _is_today(event.at))}  "
    cells = output.answer_cells()
    if cells is None or cells >= NARROW_CELLS:
        label += kind
    output.answer_labelled(label, told, len(label))


def _costs(event: Event) -> str:
    """` [2.1 s, 400M]`: what is told of time and memory beside what the sentence says."""
    parts = []
    if event.seconds is not None and show_seconds(event.seconds) not in event.text:
        parts.append(show_seconds(event.seconds))
    if event.bytes is not None and not _says_bytes(event):
        parts.append(show_bytes(event.bytes))
    return f" [{', '.join(parts)}]" if parts else ""


def _says_bytes(event: Event) -> bool:
    return show_bytes(event.bytes) in event.text or say_bytes(event.bytes) in event.text


def _clock(at: float, *, with_date: bool) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S" if with_date else "%H:%M:%S", time.localtime(at))


def _is_today(at: float) -> bool:
    return time.localtime(at)[:3] == time.localtime()[:3]
