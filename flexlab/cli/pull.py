"""`flexlab pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.core.errors import UsageError
from flexlab.core.near import near
from flexlab.core.units import show_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from flexlab.recipes.schema import ModelRecipe
    from flexlab.recipes.variants import AnyVariant
    from flexlab.weights.store import Store

app = verb_app()


@app.command()
def pull(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="Names, aliases, or sources.", show_default=False),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Not the first variant, but this one.")
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the recipe derived from a source or path.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Download weights, so that the first `up` or request need not wait for them.

    An interrupted download goes on where it was; what is installed is not fetched again.
    """
    need_words(models or [], "MODEL", "flexlab pull MODEL... [OPTIONS]")
    # pydantic, YAML and (in fetch) httpx come with these.
    from flexlab.core.settings import load_settings
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.weights.store import Store

    store = Store(load_settings().settings.models_dir)
    catalogue = Catalogue.load()
    chosen = {}
    for word in map(model_word, models or []):
        recipe = catalogue.resolve(word)
        chosen[word] = (recipe, _variant(recipe, variant))
    fetched = []
    for word, (recipe, way) in chosen.items():
        try:
            paths = _fetch(way, store)
        except KeyboardInterrupt:
            output.say(f"stopped; what came so far is kept. flexlab pull {word} goes on")
            raise
        if not paths:
            output.say(f"{recipe.name}: {way.backend} fetches {way.name} itself when it starts")
        fetched.append({"model": recipe.name, "variant": way.name, "paths": [*map(str, paths)]})
        if not as_json:
            _tell(recipe, paths)
        if save:
            from flexlab.cli.recipes import save_derived

            save_derived(word)
    if as_json:
        output.answer_json({"models": fetched})


def _variant(recipe: ModelRecipe, wanted: str | None) -> AnyVariant:
    """The variant of this name, else the first: recipes put the one to try first there."""
    for variant in recipe.variants:
        if wanted in (None, variant.name):
            return variant
    names = [variant.name for variant in recipe.variants]
    likely = near(wanted or "", names, limit=1) or names[:1]
    raise UsageError(
        f"{recipe.name} has no variant {wanted!r}; it has {', '.join(names)}",
        f"flexlab pull {recipe.name} --variant {likely[0]}",
    )


def _fetch(variant: AnyVariant, store: Store) -> list[Path]:
    from flexlab.weights.fetch import fetch_all

    with output.narrator() as narrator:
        weights = [file.weight() for file in variant.weights]
        return fetch_all(weights, store, narrator.progress)


def _tell(recipe: ModelRecipe, paths: list[Path]) -> None:
    for path in paths:
        size_bytes = path.stat().st_size if path.is_file() else None
        size = f" ({show_bytes(size_bytes)})" if size_bytes is not None else ""
        output.answer(f"{recipe.name} is installed: {path}{size}")
