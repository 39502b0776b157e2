"""`flexlab config`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from flexlab.cli import output
from flexlab.cli.common import JsonOption, verb_app
from flexlab.cli.table import Column
from flexlab.core import paths
from flexlab.core.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from flexlab.core.settings import Loaded

COLUMNS = (
    Column("SETTING"),
    Column("VALUE", flexible=True),
    Column("FROM", drop=1, flexible=True),
)

app = verb_app("Show or check the settings.")


@app.command()
def path(as_json: JsonOption = False) -> None:
    """Show where the settings file and FlexLab's folders are."""
    places = {
        "settings": paths.settings_file(),
        "recipes": paths.user_recipes_dir(),
        "data": paths.data_dir(),
        "state": paths.state_dir(),
        "logs": paths.logs_dir(),
    }
    if as_json:
        output.answer_json({name: str(place) for name, place in places.items()})
        return
    for name, place in places.items():
        missing = "" if place.exists() else "  (not there yet)"
        output.answer(f"{name:9} {place}{missing}")


@app.command()
def show(as_json: JsonOption = False) -> None:
    """Show each setting, its value, and what decided it: default, file, variable or option."""
    loaded = _load()
    # Field names state the unit (`idle_timeout_s`); keys are what people write.
    values: dict[str, Any] = loaded.settings.model_dump(mode="json")
    decided = [(key, source) for key, _, source in loaded.rows()]
    if as_json:
        output.answer_json(
            {
                name: {"value": value, "source": source, "key": key}
                for (name, value), (key, source) in zip(values.items(), decided, strict=True)
            }
        )
        return
    rows = [
        [key, _readable(name, value), source]
        for (name, value), (key, source) in zip(values.items(), decided, strict=True)
    ]
    output.answer_table(COLUMNS, rows)


@app.command()
def check(as_json: JsonOption = False) -> None:
    """Check the settings file and the FLEXLAB_* variables; exit 2 with everything wrong."""
    changed = {key: source for key, _, source in _load().rows() if source != "default"}
    if as_json:
        output.answer_json({"ok": True, "set": changed})
        return
    output.answer(f"settings are valid; {len(changed)} set by file or variable")


def _load() -> Loaded:
    # pydantic costs 90 ms, which `config path` need not pay.
    from flexlab.core.settings import load_settings

    loaded = load_settings()
    for warning in loaded.warnings:
        output.say(f"warning: {warning}")
    return loaded


def _readable(name: str, value: Any) -> str:
    if value is None:
        return "automatic"
    if name.endswith("_bytes") and isinstance(value, int):
        return show_bytes(value)
    if name.endswith("_s") and isinstance(value, int | float):
        return show_seconds(value)
    if isinstance(value, list):
        return ", ".join(str(item) for item in value) or "none"
    return value if isinstance(value, str) else json.dumps(value)
