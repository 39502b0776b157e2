"""`flexlab rm`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.cli.names import model_name, view_of
from flexlab.core.errors import UnknownModel, UsageError
from flexlab.core.units import show_bytes
from flexlab.spec.control import Removed
from flexlab.spec.lab import Snapshot
from flexlab.spec.plan import Weight
from flexlab.spec.source import parse_source

if TYPE_CHECKING:
    from flexlab.recipes.schema import ModelRecipe
    from flexlab.weights.store import Store

app = verb_app()


@app.command()
def rm(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Names, aliases, or sources.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete a model's weights from FlexLab's folder, half downloads included.

    Refused while the model runs. Files of yours (a path, the Hugging Face cache) stay.
    """
    need_words(models or [], "MODEL", "flexlab rm MODEL... [--yes]")
    words = [model_word(word) for word in models or []]
    running = daemons.find()
    targets = [_target(word, running.snapshot() if running else None) for word in words]
    if not yes and any(target.may_be_here for target in targets):
        _ask([target.name for target in targets])
    running = daemons.find_or_adopt(output.say)
    removed = []
    for target in targets:
        answer = running.rm(target.word) if running else _remove_here(target.word)
        removed.append(
            {"model": target.name, "removed": answer.removed, "freed_bytes": answer.freed_bytes}
        )
        if not as_json:
            _tell(target.name, answer)
    if running:
        daemons.end_if_unused(running)
    if as_json:
        output.answer_json({"models": removed})


@dataclass(frozen=True)
class _Target:
    """A model whose weights are to go."""

    word: str
    name: str
    may_be_here: bool


def _target(word: str, snapshot: Snapshot | None) -> _Target:
    """Raises UnknownModel, so that nobody is asked about a name that is none."""
    if (view := view_of(word, snapshot)) is not None and view.installed:
        return _Target(word, view.name, True)
    name = view.name if view else model_name(word)
    try:
        recipe, store = _recipe_and_store(word)
        here = any(store.item(parse_source(weight.source)) for weight in _weights(recipe))
    except UnknownModel:  # derived before, and known to the daemon alone
        here = True
    return _Target(word, name, here)


def _ask(names: list[str]) -> None:
    if not output.is_terminal(sys.stdin):
        words = " ".join(shlex.quote(name) for name in names)
        raise UsageError("nobody is here to ask", f"flexlab rm {words} --yes")
    output.say(f"delete the weights of {', '.join(names)}? [y/N]")
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise typer.Exit(1)


def _remove_here(word: str) -> Removed:
    """Without a daemon nothing runs, so nothing can be in use."""
    recipe, store = _recipe_and_store(word)
    freed = {weight.source: store.remove(weight) for weight in _weights(recipe)}
    return Removed(
        removed=tuple(source for source, freed_bytes in freed.items() if freed_bytes),
        freed_bytes=sum(freed.values()),
    )


def _recipe_and_store(word: str) -> tuple[ModelRecipe, Store]:
    # pydantic and YAML come with these.
    from flexlab.core.settings import load_settings
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.weights.store import Store

    return Catalogue.load().resolve(word), Store(load_settings().settings.models_dir)


def _weights(recipe: ModelRecipe) -> list[Weight]:
    return [file.weight() for variant in recipe.variants for file in variant.weights]


def _tell(name: str, answer: Removed) -> None:
    if answer.removed:
        output.answer(f"{name}: deleted, {show_bytes(answer.freed_bytes)} free again")
    else:
        output.answer(f"{name}: nothing of it was installed here")
