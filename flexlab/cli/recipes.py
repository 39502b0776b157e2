"""`flexlab recipes`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import (
    ExperimentalOption,
    JsonOption,
    SysrootOption,
    machine_root,
    model_word,
    verb_app,
)
from flexlab.cli.table import Column
from flexlab.core import paths
from flexlab.core.errors import FlexLabError, RecipeError
from flexlab.core.units import show_bytes
from flexlab.spec.plan import Wishes

if TYPE_CHECKING:
    from flexlab.forecast.outlook import Outlook
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.recipes.schema import ModelRecipe

COLUMNS = (
    Column("MODEL", flexible=True),
    Column("FIT"),
    Column("NEED", right=True, drop=2),
    Column("BACKEND", drop=3),
    Column("CAN", drop=4),
    Column("WHY", drop=1, flexible=True),
)

app = verb_app("List models and what they would do here; show or check recipes.")


@app.callback(invoke_without_command=True)
def recipes(
    ctx: typer.Context,
    allow_experimental: ExperimentalOption = False,
    sysroot: SysrootOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the models that have a recipe, and what each would do here.

    fits; swap: after others made room; limits: smaller than its recipe wants; untested: nobody has
    tried it like this; no: `flexlab plan MODEL` says why.
    """
    if ctx.invoked_subcommand is not None:
        return
    root = machine_root(sysroot)
    # Recipes need pydantic and YAML: 150 ms that no other verb should pay at import.
    from flexlab.forecast.here import Here
    from flexlab.forecast.outlook import outlooks
    from flexlab.recipes.catalogue import Catalogue

    catalogue = Catalogue.load()
    for file, problems in broken_recipes(catalogue).items():
        output.say(f"warning: skipped: {problems[0]}{more(problems, file)}")
    here = Here.look(root, catalogue)
    wishes = Wishes(allow_experimental=allow_experimental)
    found = outlooks(here, catalogue.models(), wishes)
    if as_json:
        output.answer_json({"models": found})
    else:
        output.answer_table(COLUMNS, [_row(one) for one in found])


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
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...",
            help="Recipe files, or folders of them. Without any: the folder of your recipes.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check recipe files; exit 2 with everything that is wrong in any of them."""
    from flexlab.recipes.catalogue import check_file

    files = [file for place in places or [_own_folder()] for file in _files_in(place)]
    problems: list[str] = []
    for file in files:
        try:
            check_file(file)
        except FlexLabError as error:
            problems.append(str(error))
    if problems:
        raise RecipeError("\n".join(problems), "flexlab recipes show smollm2 shows a right one")
    if as_json:
        output.answer_json({"ok": True, "files": [str(file) for file in files]})
        return
    for file in files:
        output.answer(f"{file}: ok")
    if not files:
        output.say("no recipe files there")


def _own_folder() -> Path:
    folder = paths.user_recipes_dir()
    if not folder.is_dir():
        output.say(f"you have no recipes of your own: {folder} is not there")
    return folder


def _files_in(place: Path) -> list[Path]:
    """The file itself, or every recipe below the folder."""
    if place.is_dir() or place == paths.user_recipes_dir():
        return sorted(path for path in place.rglob("*") if path.suffix in (".yaml", ".yml"))
    return [place]


def broken_recipes(catalogue: Catalogue) -> dict[Path, list[str]]:
    """What is wrong, line by line, with each file that is skipped or not used whole."""
    found: dict[Path, list[str]] = {}
    for problem in catalogue.problems:
        found.setdefault(problem.file, []).extend(str(problem).splitlines())
    return found


def more(problems: list[str], file: Path) -> str:
    """Where the rest is, for those who show only the first of several problems."""
    rest = len(problems) - 1
    return f" (and {rest} more: flexlab recipes check {shlex.quote(str(file))})" if rest else ""


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


def _row(one: Outlook) -> list[str]:
    return [
        one.model,
        one.fit,
        show_bytes(one.need_bytes),
        one.backend or "-",
        ", ".join(one.capabilities),
        one.because,
    ]
