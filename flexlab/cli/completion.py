"""`flexlab completion`: scripts for three shells, and the words that they ask for at each Tab.

The scripts hold verbs and options; models are asked for, so that new recipes and what runs count
at once. That answer must be quick: names are read from the recipe files' own lines, without a YAML
parser or pydantic, and the daemon is given a moment to say what runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from flexlab import client, daemons
from flexlab.cli import output
from flexlab.cli.common import verb_app
from flexlab.core import paths
from flexlab.core.errors import FlexLabError

DAEMON_PATIENCE_S = 0.3
_NAME = re.compile(r"^name:\s*['\"]?([A-Za-z0-9._-]+)")
_INLINE_ALIASES = re.compile(r"^aliases:\s*\[([^\]]*)\]")
_ALIAS_ITEM = re.compile(r"^\s*-\s+['\"]?([A-Za-z0-9._-]+)['\"]?\s*(?:#.*)?$")
# bash expands the words that it is given to choose from: a name must not be a command.
_HARMLESS = re.compile(r"[A-Za-z0-9._:/@+-]+")

# One command per shell and no argument: Typer would ask pydantic to judge that (90 ms a Tab).
app = verb_app("Print a completion script; it knows verbs, options and models.")


@app.command()
def bash() -> None:
    """For ~/.local/share/bash-completion/completions/flexlab."""
    # The scripts look at every verb: nothing that a Tab should pay for.
    from flexlab.cli.completion_scripts import bash_script

    output.answer(bash_script())


@app.command()
def zsh() -> None:
    """For a folder of $fpath, as _flexlab."""
    from flexlab.cli.completion_scripts import zsh_script

    output.answer(zsh_script())


@app.command()
def fish() -> None:
    """For ~/.config/fish/completions/flexlab.fish."""
    from flexlab.cli.completion_scripts import fish_script

    output.answer(fish_script())


@app.command(hidden=True)
def models() -> None:
    """What the scripts ask for where any model may follow."""
    _print({*model_names(), *_known_to_the_daemon(running=False)})


@app.command(hidden=True)
def running() -> None:
    """What the scripts ask for where a running one is meant; any recipe's, if nobody knows."""
    _print(set(_known_to_the_daemon(running=True)) or set(model_names()))


def _print(names: Iterable[str]) -> None:
    for name in sorted(names):
        if _HARMLESS.fullmatch(name):
            output.answer(name)


def _known_to_the_daemon(*, running: bool) -> Iterator[str]:
    """Names and aliases, those of derived recipes too; nothing when it does not answer at once."""
    info = daemons.read_lock_file()
    if info is None:
        return
    try:
        snapshot = client.Client(info).snapshot(timeout_s=DAEMON_PATIENCE_S)
    except FlexLabError:
        return
    for model in snapshot.models:
        if not running or model.instances or model.waiting:
            yield from (model.name, *model.aliases)


def model_names() -> Iterator[str]:
    """Names and aliases of all recipes, shipped and the user's own; wrong files are passed over."""
    for folder in (paths.shipped_dir("recipes") / "models", paths.user_recipes_dir()):
        for file in sorted(folder.rglob("*.yaml")):
            yield from _names_in(file)


def _names_in(file: Path) -> Iterator[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    in_aliases = False
    for line in lines:
        if match := _NAME.match(line):
            yield match[1]
        elif match := _INLINE_ALIASES.match(line):
            yield from (word.strip(" '\"") for word in match[1].split(",") if word.strip())
        elif line.startswith("aliases:"):
            in_aliases = True
            continue
        elif in_aliases and (match := _ALIAS_ITEM.match(line)):
            yield match[1]
            continue
        in_aliases = False
