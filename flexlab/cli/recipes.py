"""`flexlab recipes`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, verb_app
from flexlab.cli.table import Column
from flexlab.core.errors import FlexLabError, RecipeError

if TYPE_CHECKING:
    from flexlab.recipes.schema import ModelRecipe

COLUMNS = (
    Column("MODEL", flexible=True),
    Column("ALIASES", drop=3, flexible=True),
    Column("CAN", drop=2),
    Column("BACKENDS", drop=4),
    Column("LICENSE", drop=5),
    Column("DESCRIPTION", drop=6, flexible=True),
)

app = verb_app("List, show or check model recipes.")


@app.callback(invoke_without_command=True)
def recipes(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """List the models that have a recipe; `show` and `check` say more of one."""
    if ctx.invoked_subcommand is not None:
        return
    # Recipes need pydantic and YAML: 150 ms that no other verb should pay at import.
    from flexlab.recipes.catalogue import Catalogue

    catalogue = Catalogue.load()
    models = catalogue.models()
    for problem in catalogue.problems:
        output.say(f"warning: skipped: {problem}")
    if as_json:
        output.answer_json([_as_json(recipe, catalogue.where(recipe)) for recipe in models])
    else:
        output.answer_table(COLUMNS, [_row(recipe) for recipe in models])


@app.command()
def show(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name, alias, source or path.")],
    as_json: JsonOption = False,
) -> None:
    """Show a recipe as it is understood, and where it stands."""
    from flexlab.recipes.catalogue import Catalogue, as_yaml

    catalogue = Catalogue.load()
    recipe = catalogue.resolve(model_word(model))
    if as_json:
        output.answer_json(_as_json(recipe, catalogue.where(recipe)))
        return
    output.answer(f"# {catalogue.where(recipe)}\n{as_yaml(recipe).rstrip()}")


@app.command()
def check(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Model or backend recipes.")],
    as_json: JsonOption = False,
) -> None:
    """Check recipe files; exit 2 with everything that is wrong in any of them."""
    from flexlab.recipes.catalogue import check_file

    problems: list[FlexLabError] = []
    for file in files:
        try:
            check_file(file)
        except FlexLabError as error:
            problems.append(error)
    if problems:
        message = "\n".join(str(problem) for problem in problems)
        raise RecipeError(message, problems[0].hint)
    if as_json:
        output.answer_json({"ok": True, "files": [str(file) for file in files]})
        return
    for file in files:
        output.answer(f"{file}: ok")


def save_derived(word: str) -> None:
    """Keeps the recipe that was derived from a source, as one of the user's own."""
    from flexlab.recipes.catalogue import Catalogue, save

    recipe = Catalogue.load().resolve(word)
    try:
        file = save(recipe)
    except RecipeError as error:
        # The model is up by now: a recipe that cannot be kept is no reason to fail.
        output.say(f"note: not saved: {error}")
        return
    output.say(f"saved {file}; from now on: flexlab up {recipe.name}")


def _as_json(recipe: ModelRecipe, where: str) -> dict[str, object]:
    return {**recipe.model_dump(mode="json", by_alias=True), "where": where}


def _row(recipe: ModelRecipe) -> list[str]:
    backends = dict.fromkeys(variant.backend for variant in recipe.variants)
    return [
        recipe.name,
        ", ".join(recipe.aliases),
        ", ".join(recipe.capabilities),
        ", ".join(backends),
        recipe.license,
        recipe.description,
    ]
