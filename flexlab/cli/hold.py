"""`flexlab pin`, `unpin`, `keep`, `unkeep`, `enable`, `disable`: what a user decides about models.

One module for six verbs that differ in a word; `app_of` gives each its own application. The daemon
keeps what was decided, over restarts of its own too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.cli.names import daemon_for
from flexlab.cli.variables import warn_of_variables
from flexlab.core.text import counted
from flexlab.spec.lab import ModelView
from flexlab.spec.plan import Keep

ModelsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="MODEL...", help="Names or aliases.", show_default=False),
]


@dataclass(frozen=True)
class Decision:
    """What one verb asks of the daemon; None leaves it."""

    help: str
    keep: Keep | None = None
    pin: bool | None = None
    enabled: bool | None = None


DECISIONS = {
    "pin": Decision("Never stop these models to make room for others, nor when idle.", pin=True),
    "unpin": Decision("Let these models make room for others again.", pin=False),
    "keep": Decision(
        "Keep these models warm: loaded when idle, and back after they made room.", keep="warm"
    ),
    "unkeep": Decision("Let these models be unloaded when idle again.", keep="cold"),
    "enable": Decision("Let disabled models start again.", enabled=True),
    "disable": Decision(
        "Refuse requests to these models, and stop them once theirs are answered.", enabled=False
    ),
}


def app_of(verb: str) -> typer.Typer:
    """The application of one of the verbs."""
    decision = DECISIONS[verb]
    app = verb_app()

    @app.command(verb, help=f"{decision.help}\n\nIt holds until decided otherwise.")
    def decide(models: ModelsArgument = None, as_json: JsonOption = False) -> None:
        need_words(models or [], "MODEL", f"flexlab {verb} MODEL...")
        warn_of_variables()
        words = tuple(dict.fromkeys(model_word(word) for word in models or ()))
        daemon = daemon_for(words)
        held = daemon.hold(words, keep=decision.keep, pin=decision.pin, enabled=decision.enabled)
        daemons.end_if_unused(daemon)
        if as_json:
            output.answer_json({"models": held.models})
            return
        for model in held.models:
            output.answer(_standing(model, decision))

    return app


def _standing(model: ModelView, decision: Decision) -> str:
    """How the model stands now, in the one respect that was decided."""
    if decision.enabled is not None:
        return _enabled(model)
    stays = "it stays when idle"
    if decision.pin is None and model.keep == "warm":
        text = f"kept: {stays}, and comes back after it made room"
    elif decision.pin:
        text = f"pinned: {stays}, and never makes room for another model"
    elif model.pinned:
        text = f"not kept, but pinned: {stays}, and never makes room for another model"
    elif model.keep == "warm":
        text = f"not pinned, but kept: {stays}, and comes back after it made room"
    else:
        word = "kept" if decision.pin is None else "pinned"
        text = f"not {word}: it is unloaded when idle, or to make room for another model"
    return f"{model.name} is {text}{_not_now(model)}"


def _enabled(model: ModelView) -> str:
    if model.enabled:
        return f"{model.name} is enabled{_not_now(model)}"
    told = f"{model.name} is disabled: requests are refused until flexlab enable {model.name}"
    if model.in_flight:
        told += f"; it still answers {counted(model.in_flight, 'request')}"
    return told


def _not_now(model: ModelView) -> str:
    """What follows about a model that does not run."""
    if not model.enabled:
        return f"; it is disabled, and does not start before flexlab enable {model.name}"
    if model.instances:
        return ""
    if model.keep == "warm":  # it may come back by itself; `why` knows whether
        return f"; it does not run now, flexlab why {model.name} says what it waits for"
    return f"; it does not run now, the next request or flexlab up {model.name} starts it"
