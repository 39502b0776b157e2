"""Typer's complaints about words of the command line, in our sentences."""

from __future__ import annotations

from typing import Any

import typer

from flexlab.core.errors import UsageError
from flexlab.core.near import near

HABITS = {
    "ask": "run",
    "chat": "run",
    "delete": "rm",
    "devices": "gpus",
    "download": "pull",
    "hardware": "gpus",
    "kill": "down",
    "list": "ls",
    "load": "up",
    "log": "logs",
    "models": "recipes",
    "remove": "rm",
    "show": "recipes show",
    "start": "up",
    "status": "ps",
    "stop": "down",
    "unload": "down",
}
"""Verbs that other tools have taught people to type."""
_NUMBERS = {"int": "a whole number", "float": "a number"}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "less_than_equal": ("le", "at most"),
}


def unknown_command(name: str, known: list[str], path: str) -> UsageError:
    """No verb (or verb of a verb) of this name."""
    likely = near(name, known, limit=2)
    if path == "flexlab" and name in HABITS:
        likely = (HABITS[name],)
    meant = f"; did you mean {' or '.join(likely)}?" if likely else ""
    return UsageError(f"no command named {name!r}{meant}", f"{path} --help lists them")


def usage_error(error: typer.TyperException, words: list[str]) -> UsageError:
    """What was wrong with these words, the usage line, and where to read more."""
    context: Any = getattr(error, "ctx", None)
    message = _sentence(error, context, words)
    if context is None:
        verb = next((word for word in words if not word.startswith("-")), "")
        return UsageError(message, " ".join(f"flexlab {verb} --help".split()))
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    return UsageError(f"{message}\nusage: {usage}", _hint(error, context))


def _sentence(error: typer.TyperException, context: Any, words: list[str]) -> str:
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        likely = near(option, error.possibilities or (), limit=1)
        meant = f"; did you mean {likely[0]}?" if likely else ""
        return f"no option {_as_typed(option, words)}{meant}"
    message = " ".join(error.format_message().split()).rstrip(".")
    if option is not None:
        wants = "takes no value" if "does not take" in message else "wants a value"
        return f"{option} {wants}"
    if (param := getattr(error, "param", None)) is not None:
        return _about_value(error, param) or _lowered(message)
    if context is not None and message.startswith("Got unexpected extra argument"):
        return _too_much(context, message)
    if context is not None and message == "Missing command":
        verbs = ", ".join(context.command.list_commands(context))
        return f"{_verb(context)} wants one of: {verbs}"
    return _lowered(message)


def _as_typed(option: str, words: list[str]) -> str:
    """Of `-hello` Typer names the first letter that it does not know."""
    if len(option) > 2:
        return option
    clusters = [word for word in words if word[:1] == "-" != word[1:2] and option[1] in word]
    return clusters[0] if clusters else option


def _about_value(error: typer.TyperException, param: Any) -> str | None:
    """A number that is none, or out of bounds. pydantic's own error is the cause of Typer's."""
    judge = getattr(error.__cause__, "errors", None)
    if judge is None:
        return f"{param.metavar} is missing" if not error.__cause__ and param.metavar else None
    problem = judge()[0]
    name = max(param.opts, key=len)
    kind, _, how = problem["type"].partition("_")
    if how in ("parsing", "from_float", "type") and kind in _NUMBERS:
        return f"{name} wants {_NUMBERS[kind]}, not {problem['input']!r}"
    if problem["type"] in _BOUNDS:
        key, words = _BOUNDS[problem["type"]]
        return f"{name} must be {words} {problem['ctx'][key]:g}, not {problem['input']}"
    return None


def _too_much(context: Any, message: str) -> str:
    extra = message.removeprefix("Got unexpected extra argument(s) (").removesuffix(")")
    wanted = [p.metavar for p in context.command.params if p.param_type_name == "argument"]
    takes = f"one {wanted[0].strip('[].')}" if wanted else "no arguments"
    return f"{_verb(context)} takes {takes}; {extra!r} is too much"


def _hint(error: typer.TyperException, context: Any) -> str:
    option = getattr(error, "option_name", None)
    if option is not None and _verb(context) == "run" and not getattr(error, "possibilities", None):
        return "a prompt with words that begin with - : quote it, or put -- before it"
    return f"{context.command_path} --help"


def _verb(context: Any) -> str:
    return str(context.command_path).removeprefix("flexlab ")


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
