"""`flexlab restart`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from flexlab import client
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.cli.ensure import follow, gateway_root, withdrawing
from flexlab.cli.names import daemon_for, view_of
from flexlab.cli.up import where
from flexlab.cli.variables import warn_of_variables
from flexlab.core.text import counted

app = verb_app()


@app.command()
def restart(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name or alias.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a model once its requests are answered, and start it anew.

    Requests that come meanwhile wait for it. It is planned anew, with what was wished for before.
    """
    need_words([model] if model else [], "MODEL", "flexlab restart MODEL")
    word = model_word(model or "")
    warn_of_variables()
    daemon = daemon_for([word])
    started = time.monotonic()
    with withdrawing(daemon, f"flexlab up {word} starts it again"):
        _say_who_is_waited_for(daemon, word)
        ready, instance = follow(word, daemon.restart(word))
    endpoint = f"{gateway_root(daemon)}/v1"
    if as_json:
        output.answer_json(
            {
                "model": ready.name,
                "endpoint": endpoint,
                "waited_s": round(time.monotonic() - started, 3),
                "instance": instance,
            }
        )
        return
    output.answer(f"{ready.name} is ready again at {endpoint}{where(instance)}")


def _say_who_is_waited_for(daemon: client.Client, word: str) -> None:
    view = view_of(word, daemon.snapshot())
    if view is not None and view.in_flight:
        requests = counted(view.in_flight, "request")
        output.say(
            f"{view.name} answers {requests}; waiting for that "
            f"(flexlab down {view.name} --force cuts it off)"
        )
