"""The completion scripts themselves, written out of the verbs' own options.

All three do the same: walk over the words before the cursor to learn the verb (`recipes show` is
one) and how many arguments it has got, then offer options, values, models or files.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from flexlab.cli.main import VERBS, app
from flexlab.cli.up import RUNTIMES

GROUPS = ("recipes", "config", "completion")
MODELS = "models"
RUNNING = "running"
FILES = "files"
SYSROOT = "--sysroot"
"""The option whose value is a folder."""
TAKES = {
    "up": (MODELS, 1),
    "plan": (MODELS, 1),
    "run": (MODELS, 1),
    "pull": (MODELS, None),
    "rm": (MODELS, None),
    "down": (RUNNING, None),
    "restart": (RUNNING, 1),
    "why": (MODELS, 1),
    "pin": (MODELS, None),
    "unpin": (MODELS, None),
    "keep": (MODELS, None),
    "unkeep": (MODELS, None),
    "enable": (MODELS, None),
    "disable": (MODELS, None),
    "logs": (RUNNING, 1),
    "recipes show": (MODELS, 1),
    "recipes check": (FILES, None),
}
"""Verb -> what its arguments are, and how many of them (None: any number)."""
OR_A_FILE = ("up", "plan", "run", "pull", "recipes show")
"""Verbs whose model may be a path as well."""


@dataclass(frozen=True)
class Flag:
    """One option of a verb."""

    names: tuple[str, ...]
    takes_value: bool
    help: str


@dataclass(frozen=True)
class Verb:
    """A verb, or a verb of a verb: `recipes show`."""

    path: str
    help: str
    flags: tuple[Flag, ...]

    @property
    def flag_names(self) -> str:
        """For the shells that take a list of words."""
        return " ".join(name for flag in self.flags for name in flag.names if len(name) > 2)


def verbs() -> list[Verb]:
    """Every visible verb, groups before their members."""
    group: Any = typer.main.get_command(app)
    context = typer.Context(group, info_name="flexlab")
    found = []
    for name, help_line in ((n, h) for verbs in VERBS.values() for n, h in verbs.items()):
        command = group.get_command(context, name)
        found.append(Verb(name, help_line, tuple(_flags(command, context))))
        for inner, member in getattr(command, "commands", {}).items():
            if not member.hidden:
                help_line = member.get_short_help_str(80)
                flags = tuple(_flags(member, context))
                found.append(Verb(f"{name} {inner}", help_line, flags))
    return found


def _flags(command: Any, context: Any) -> Iterator[Flag]:
    for param in command.get_params(context):
        if param.param_type_name == "option" and not param.hidden:
            names = (*param.opts, *param.secondary_opts)
            yield Flag(names, not param.is_flag, (param.help or "").split(".  [")[0])


def _valued(found: list[Verb]) -> str:
    flags = (flag for verb in found for flag in verb.flags if flag.takes_value)
    return " ".join(sorted({name for flag in flags for name in flag.names}))


def _members(found: list[Verb], group: str) -> str:
    inner = (verb.path.split() for verb in found if " " in verb.path)
    return " ".join(words[1] for words in inner if words[0] == group)


def _case(path: str, most: int | None) -> str:
    return f'"{path}:"*' if most is None else f'"{path}:0"'


def bash_script() -> str:
    """`compopt -o default` leaves file names to readline, which knows how to quote them."""
    found = verbs()
    names = " ".join(verb.path for verb in found if " " not in verb.path)
    flags = "".join(f'            "{v.path}") words="{v.flag_names}" ;;\n' for v in found)
    takes = "".join(
        f"            {_case(path, most)}) words=$(flexlab completion {what} 2>/dev/null) ;;\n"
        for path, (what, most) in TAKES.items()
        if what != FILES
    )
    or_a_file = "|".join(_case(path, TAKES[path][1]) for path in OR_A_FILE)
    members = "".join(f'            {g}:*) words="{_members(found, g)}" ;;\n' for g in GROUPS)
    return f"""# bash completion for flexlab
_flexlab() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}}
    local valued=" {_valued(found)} "
    local verb="" word words="" given=0 i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${{COMP_WORDS[i]}}
        # The value of an option is no argument of the verb; bash makes three words of a=b.
        if [[ $word == "=" || $valued == *" $word "* ]]; then ((i++)); continue; fi
        [[ $word == -* ]] && continue
        case $verb in
            "") verb=$word ;;
            {"|".join(GROUPS)}) verb="$verb $word" ;;
            *) ((given++)) ;;
        esac
    done
    COMPREPLY=()
    [[ $current == "=" ]] && current=""
    [[ $before == "=" ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
    if [[ $valued == *" $before "* ]]; then
        [[ $before == --runtime ]] && words="{" ".join(RUNTIMES)}"
        [[ $before == {SYSROOT} ]] && compopt -o dirnames 2>/dev/null
    elif [[ $current == -* ]]; then
        case $verb in
            "") words="--help --version --debug" ;;
{flags}        esac
    else
        case "$verb:$given" in
            :*|help:0) words="{names}" ;;
{members}{takes}            "recipes check:"*) compopt -o default 2>/dev/null ;;
        esac
        case "$verb:$given" in
            {or_a_file}) compopt -o default 2>/dev/null ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _flexlab flexlab"""


def zsh_script() -> str:
    """Offers models and files side by side."""
    found = verbs()
    described = "\n".join(
        "        " + shlex.quote(f"{verb.path}:{verb.help}")
        for verb in found
        if " " not in verb.path
    )
    flags = "".join(f'            ("{v.path}") compadd -- {v.flag_names} ;;\n' for v in found)
    members = "".join(f"        ({g}:*) compadd -- {_members(found, g)} ;;\n" for g in GROUPS)
    takes = "".join(
        f"        ({_case(path, most)}) "
        + (
            "_files"
            if what == FILES
            else f'compadd -- ${{(f)"$(flexlab completion {what} 2>/dev/null)"}}'
        )
        + ("; _files" if path in OR_A_FILE else "")
        + " ;;\n"
        for path, (what, most) in TAKES.items()
    )
    return f"""#compdef flexlab
_flexlab() {{
    local valued=" {_valued(found)} " verb="" word
    local -a verbs
    integer given=0 i
    verbs=(
{described}
    )
    for ((i = 2; i < CURRENT; i++)); do
        word=$words[i]
        if [[ $valued == *" $word "* ]]; then ((i++)); continue; fi
        [[ $word == -* ]] && continue
        case $verb in
            ("") verb=$word ;;
            ({"|".join(GROUPS)}) verb="$verb $word" ;;
            (*) ((given++)) ;;
        esac
    done
    if [[ $valued == *" $words[CURRENT-1] "* ]]; then
        [[ $words[CURRENT-1] == --runtime ]] && compadd -- {" ".join(RUNTIMES)}
        [[ $words[CURRENT-1] == {SYSROOT} ]] && _files -/
        return
    fi
    if [[ $words[CURRENT] == -* ]]; then
        case $verb in
            ("") compadd -- --help --version --debug ;;
{flags}        esac
        return
    fi
    case "$verb:$given" in
        (:*|help:0) _describe 'command' verbs ;;
{members}{takes}    esac
}}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _flexlab "$@"
else
    compdef _flexlab flexlab
fi"""


def fish_script() -> str:
    """Options come with their help; `__flexlab_at VERB [MOST]` is the walk over the words."""
    found = verbs()
    lines = []
    for verb in found:
        group, _, inner = verb.path.rpartition(" ")
        at = f"-n '__flexlab_at {group}'" if group else "-n '__flexlab_at'"
        lines.append(f"complete -c flexlab {at} -a {inner} -d {_fish_quoted(verb.help)}")
        within = f"-n '__flexlab_in {verb.path}'"
        lines += [f"complete -c flexlab {within} {_fish_flag(flag)}" for flag in verb.flags]
    for path, (what, most) in TAKES.items():
        at = f"-n '__flexlab_at {path}{'' if most is None else ' 0'}'"
        if what != FILES:
            lines.append(f"complete -c flexlab {at} -a '(flexlab completion {what})'")
        if what == FILES or path in OR_A_FILE:
            lines.append(f"complete -c flexlab {at} -F")
    return _FISH_HEAD.format(valued=_valued(found), groups=" ".join(GROUPS)) + "\n".join(lines)


_FISH_HEAD = """# fish completion for flexlab
complete -c flexlab -f
function __flexlab_walk
    set -l valued {valued}
    set -l verb
    set -l given 0
    set -l skip 0
    for word in (commandline -opc)[2..]
        if test $skip = 1
            set skip 0
        else if contains -- $word $valued
            set skip 1
        else if string match -q -- '-*' $word
            continue
        else if test (count $verb) = 0
            set verb $word
        else if contains -- "$verb" {groups}
            set verb $verb $word
        else
            set given (math $given + 1)
        end
    end
    echo "$verb:$given"
end
function __flexlab_in
    string match -q -- "$argv:*" (__flexlab_walk)
end
function __flexlab_at
    if test "$argv[-1]" = 0
        test "$argv[1..-2]:0" = (__flexlab_walk)
    else
        string match -q -- "$argv:*" (__flexlab_walk)
    end
end
"""


def _fish_flag(flag: Flag) -> str:
    names = " ".join(
        f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
    )
    value = ""
    if flag.takes_value:
        values = " ".join(RUNTIMES) if "--runtime" in flag.names else ""
        values = "(__fish_complete_directories)" if SYSROOT in flag.names else values
        value = f" -x -a '{values}'" if values else " -x"
    return f"{names}{value} -d {_fish_quoted(flag.help)}"


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
