"""`flexlab rm`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from flexlab import client
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.core.errors import UsageError
from flexlab.core.units import show_bytes
from flexlab.spec.control import Removed

app = verb_app()


@app.command()
def rm(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Names, aliases, or sources.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a model's weights from FlexLab's folder, half downloads included.

    Refused while the model runs. Files of yours (a path, the Hugging Face cache) stay.
    """
    need_words(models or [], "MODEL", "flexlab rm MODEL... [--yes]")
    words = [model_word(word) for word in models or []]
    if not yes:
        _ask(words)
    running = client.find_or_adopt(output.say)
    removed = []
    for word in words:
        answer = running.rm(word) if running else _remove_here(word)
        removed.append(
            {"model": word, "removed": answer.removed, "freed_bytes": answer.freed_bytes}
        )
        if not as_json:
            _tell(word, answer)
    if running:
        client.end_if_unused(running)
    if as_json:
        output.answer_json(removed)


def _ask(words: list[str]) -> None:
    if not output.is_terminal(sys.stdin):
        raise UsageError("nobody is here to ask", f"flexlab rm {' '.join(words)} --yes")
    output.say(f"delete the weights of {', '.join(words)}? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Exit(1)


def _remove_here(word: str) -> Removed:
    """Without a daemon nothing runs, so nothing can be in use."""
    from flexlab.core.settings import load_settings
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.weights.store import Store

    store = Store(load_settings().settings.models_dir)
    recipe = Catalogue.load().resolve(word)
    weights = [file.weight() for variant in recipe.variants for file in variant.weights]
    freed = {weight.source: store.remove(weight) for weight in weights}
    return Removed(
        removed=tuple(source for source, freed_bytes in freed.items() if freed_bytes),
        freed_bytes=sum(freed.values()),
    )


def _tell(word: str, answer: Removed) -> None:
    if answer.removed:
        output.answer(f"{word}: deleted, {show_bytes(answer.freed_bytes)} free again")
    else:
        output.answer(f"{word}: nothing of it was installed here")
