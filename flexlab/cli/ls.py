"""`flexlab ls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from flexlab.cli import output
from flexlab.cli.common import JsonOption, verb_app
from flexlab.cli.table import Column
from flexlab.core.units import show_bytes

if TYPE_CHECKING:
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.weights.store import Entry

COLUMNS = (
    Column("MODEL", flexible=True),
    Column("SIZE", right=True),
    Column("STATE", drop=2),
    Column("SOURCE", drop=3, flexible=True),
)

app = verb_app()


@app.command()
def ls(as_json: JsonOption = False) -> None:
    """Show installed weights, half downloads, and how much disk space is free."""
    # pydantic and YAML come with these: only this verb and its like pay for them.
    from flexlab.core.settings import load_settings
    from flexlab.recipes.catalogue import Catalogue
    from flexlab.weights.store import Store

    store = Store(load_settings().settings.models_dir)
    models = _models_by_source(Catalogue.load())
    entries = store.entries()
    free_bytes = store.disk_free()
    if as_json:
        listed = [_as_json(entry, models) for entry in entries]
        output.answer_json(
            {"models_dir": str(store.models_dir), "free_bytes": free_bytes, "weights": listed}
        )
        return
    if entries:
        output.answer_table(COLUMNS, [_row(entry, models) for entry in entries])
    else:
        output.say("no weights are installed; flexlab pull MODEL downloads some")
    total_bytes = sum(entry.size_bytes for entry in entries if not entry.in_place)
    output.answer(f"{show_bytes(total_bytes)} used, {show_bytes(free_bytes)} free")


def _models_by_source(catalogue: Catalogue) -> dict[str, list[str]]:
    models: dict[str, list[str]] = {}
    for recipe in catalogue.models():
        for variant in recipe.variants:
            for weight in variant.weights:
                names = models.setdefault(weight.weight().source, [])
                if recipe.name not in names:
                    names.append(recipe.name)
    return models


def _row(entry: Entry, models: dict[str, list[str]]) -> list[str]:
    names = ", ".join(models.get(entry.source or "", []))
    size = show_bytes(entry.size_bytes)
    if entry.total_bytes:
        size += f" of {show_bytes(entry.total_bytes)}"
    state = f"{entry.state}, yours" if entry.in_place else entry.state
    return [names, size, state, entry.source or entry.path]


def _as_json(entry: Entry, models: dict[str, list[str]]) -> dict[str, object]:
    return {**msgspec.structs.asdict(entry), "models": models.get(entry.source or "", [])}
