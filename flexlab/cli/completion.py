"""`flexlab completion`: scripts for three shells, and the words that they ask for.

The scripts hold the verbs; model names are asked for at each Tab, so that new recipes and sources
count at once. That answer must be quick: names are read from the recipe files' own lines, without
a YAML parser, pydantic or the daemon.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from flexlab.cli import output
from flexlab.cli.common import verb_app
from flexlab.core import paths

MODEL_VERBS = ("up", "run", "down", "logs", "pull", "rm")
SUBCOMMANDS = {
    "recipes": ("show", "check"),
    "config": ("show", "path", "check"),
    "completion": ("bash", "zsh", "fish"),
}
_NAME = re.compile(r"^name:\s*['\"]?([A-Za-z0-9._-]+)")
_INLINE_ALIASES = re.compile(r"^aliases:\s*\[([^\]]*)\]")
_ALIAS_ITEM = re.compile(r"^\s*-\s+['\"]?([A-Za-z0-9._-]+)['\"]?\s*(?:#.*)?$")

# One command per shell and no argument: Typer would ask pydantic to judge that (90 ms a Tab).
app = verb_app("Print a completion script; it knows the models' names.")


@app.command()
def bash() -> None:
    """For ~/.local/share/bash-completion/completions/flexlab."""
    output.answer(_bash())


@app.command()
def zsh() -> None:
    """For a folder of $fpath, as _flexlab."""
    output.answer(_zsh())


@app.command()
def fish() -> None:
    """For ~/.config/fish/completions/flexlab.fish."""
    output.answer(_fish())


@app.command(hidden=True)
def models() -> None:
    """What the scripts ask for at each Tab."""
    for name in sorted(set(model_names())):
        output.answer(name)


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


def _verbs() -> dict[str, str]:
    # Here and not at the top: main imports this module lazily, and not the other way round.
    from flexlab.cli.main import VERBS

    return {name: help_line for verbs in VERBS.values() for name, help_line in verbs.items()}


def _bash() -> str:
    cases = "".join(
        f'        {verb}) words="{" ".join(words)}" ;;\n' for verb, words in SUBCOMMANDS.items()
    )
    return f"""# bash completion for flexlab
_flexlab() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} verb="" word words=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        [[ $word == -* ]] || {{ verb=$word; break; }}
    done
    case $verb in
        "") words="{" ".join(_verbs())}" ;;
        {"|".join(MODEL_VERBS)}) words=$(flexlab completion models 2>/dev/null) ;;
{cases}    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    # No name fits: a path to a .gguf file, or of a recipe.
    [[ ${{#COMPREPLY[@]}} -gt 0 || -z $verb ]] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _flexlab flexlab"""


def _zsh() -> str:
    verbs = "\n".join(
        "        " + shlex.quote(f"{name}:{help_line}") for name, help_line in _verbs().items()
    )
    cases = "".join(
        f"        {verb}) compadd -- {' '.join(words)}; _files ;;\n"
        for verb, words in SUBCOMMANDS.items()
    )
    return f"""#compdef flexlab
_flexlab() {{
    local -a verbs
    verbs=(
{verbs}
    )
    if (( CURRENT == 2 )); then
        _describe 'command' verbs
        return
    fi
    case $words[2] in
        {"|".join(MODEL_VERBS)})
            compadd -- ${{(f)"$(flexlab completion models 2>/dev/null)"}}
            _files ;;
{cases}    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _flexlab "$@"
else
    compdef _flexlab flexlab
fi"""


def _fish() -> str:
    lines = ["# fish completion for flexlab", "complete -c flexlab -f"]
    for name, help_line in _verbs().items():
        quoted = help_line.replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c flexlab -n __fish_use_subcommand -a {name} -d '{quoted}'")
    for verb, words in SUBCOMMANDS.items():
        seen = f"'__fish_seen_subcommand_from {verb}'"
        lines.append(f"complete -c flexlab -n {seen} -a '{' '.join(words)}'")
    seen = f"'__fish_seen_subcommand_from {' '.join(MODEL_VERBS)}'"
    lines.append(f"complete -c flexlab -n {seen} -a '(flexlab completion models)'")
    lines.append("complete -c flexlab -n '__fish_seen_subcommand_from up run pull recipes' -F")
    return "\n".join(lines)
