"""`flexlab config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, verb_app
from flexlab.cli.table import Column
from flexlab.core import paths
from flexlab.core.errors import DaemonUnreachable, SettingsError
from flexlab.core.text import counted
from flexlab.core.units import show_value

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
    loaded, problems = _survey()
    # Field names state the unit (`idle_timeout_s`); keys are what people write.
    values: dict[str, Any] = loaded.settings.model_dump(mode="json")
    decided = [(key, source) for key, _, source in loaded.rows()]
    if as_json and not problems:
        output.answer_json(
            {
                name: {"value": value, "source": source, "key": key}
                for (name, value), (key, source) in zip(values.items(), decided, strict=True)
            }
        )
    elif not as_json:
        rows = [
            [key, show_value(name, value), source]
            for (name, value), (key, source) in zip(values.items(), decided, strict=True)
        ]
        output.answer_table(COLUMNS, rows)
        output.flush()
    _say_what_the_daemon_has_not_read()
    _refuse(problems)


@app.command()
def check(as_json: JsonOption = False) -> None:
    """Check the settings file and the FLEXLAB_* variables; exit 2 with everything wrong."""
    loaded, problems = _survey()
    _refuse(problems)
    changed = {key: source for key, _, source in loaded.rows() if source != "default"}
    if as_json:
        output.answer_json({"ok": True, "set": changed})
        return
    output.answer(
        f"the settings are valid; {counted(len(changed), 'value')} set by file or variable"
    )


def _survey() -> tuple[Loaded, list[str]]:
    # pydantic costs 90 ms, which `config path` need not pay.
    from flexlab.core.settings import survey_settings

    loaded, problems = survey_settings()
    for warning in loaded.warnings:
        output.say(f"warning: {warning}")
    return loaded, problems


def _refuse(problems: list[str]) -> None:
    if problems:
        hint = f"edit {paths.settings_file()}, or unset the variable"
        raise SettingsError("\n".join(problems), hint)


def _say_what_the_daemon_has_not_read() -> None:
    """The daemon follows the file while it runs, but for what it was started with."""
    try:
        daemon = daemons.find(wait_s=0)
        pending = daemon.status().pending if daemon else ()
    except DaemonUnreachable:
        return
    if pending:
        output.say(
            f"note: {', '.join(pending)} will count once the daemon is started anew: "
            "flexlab down --daemon, then flexlab serve or the next flexlab up"
        )
