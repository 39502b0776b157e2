"""`flexlab why`."""

from __future__ import annotations

from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.cli.names import model_name
from flexlab.cli.variables import warn_of_variables

app = verb_app()


@app.command()
def why(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Name or alias.", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a model is in its state: what it waits for, who holds what, until when at most.

    Without a daemon no model answers: that is said, and is no error.
    """
    need_words([model] if model else [], "MODEL", "flexlab why MODEL")
    word = model_word(model or "")
    warn_of_variables()
    daemon = daemons.find()
    if daemon is None:
        _without_daemon(word, as_json=as_json)
        return
    told = daemon.why(word)
    if as_json:
        output.answer_json(told)
        return
    output.answer(f"{told.model.name} is {told.model.word}")
    for sentence in told.sentences:
        _answer(sentence)


def _without_daemon(word: str, *, as_json: bool) -> None:
    name = model_name(word)
    sentences = [f"the daemon is not running, so nobody is answered; flexlab up {name} starts both"]
    if left := daemons.left_running():
        sentences.append(f"an earlier daemon may have left running: {', '.join(left)}")
    if as_json:
        output.answer_json({"model": None, "sentences": sentences})
        return
    output.answer(name)
    for sentence in sentences:
        _answer(sentence)


def _answer(sentence: str) -> None:
    output.answer_labelled("  ", sentence, 2)
