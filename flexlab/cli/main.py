"""The entry point: a lazy table of verbs, and the one edge where errors become sentences.

A verb's module is imported when it is used, so `flexlab --help` costs little more than Typer
itself. Each module has `app`, a Typer application of one command (or of a few, for a group).
"""

from __future__ import annotations

import itertools
import sys
from importlib import import_module
from typing import Annotated, Any, Final, NoReturn

import typer

from flexlab import __version__
from flexlab.cli import output
from flexlab.cli.common import VerbGroup
from flexlab.cli.complaints import usage_error
from flexlab.cli.signals import end_as_ctrl_c_does
from flexlab.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    FlexLabError,
)
from flexlab.core.text import os_sentence

VERBS: Final[dict[str, dict[str, str]]] = {
    "Models": {
        "up": "Start a model and wait until it answers.",
        "plan": "Say what would be launched here, and why.",
        "run": "Ask a model one thing, or chat with it.",
        "down": "Stop models.",
        "restart": "Stop a model and start it anew.",
        "ps": "Show what runs, and why.",
        "why": "Say why a model is in its state.",
        "events": "Show what happened, live with --follow.",
        "pin": "Never stop models to make room for others.",
        "unpin": "Let models make room for others again.",
        "keep": "Keep models loaded when idle.",
        "unkeep": "Let models be unloaded when idle again.",
        "enable": "Let disabled models start again.",
        "disable": "Stop models, and refuse requests to them.",
        "logs": "Show what a model's engine writes.",
        "requests": "Show requests in flight and the last that ended.",
        "cancel": "End requests.",
    },
    "Weights": {
        "ls": "Show installed weights and free disk space.",
        "pull": "Download a model's weights.",
        "rm": "Delete a model's weights.",
    },
    "Machine": {
        "gpus": "Show this machine's GPUs, live with --watch.",
        "doctor": "Check this machine; each finding with its mend.",
    },
    "Setup": {
        "serve": "Run the daemon in the foreground.",
        "recipes": "List models and whether they fit here; show or check.",
        "config": "Show or check the settings.",
        "completion": "Print a completion script for bash, zsh or fish.",
        "version": "Show versions.",
    },
}
HOLD_VERBS = ("pin", "unpin", "keep", "unkeep", "enable", "disable")
"""They differ in a word, and share a module."""
EPILOG = "Exit codes: 0 ok, 1 failed, 2 wrong usage, 3 nothing fits, 4 no daemon, 130 interrupted."


class LazyGroup(VerbGroup):
    """Knows every verb's name and help line, and imports its module when it is invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for verbs in VERBS.values() for name in verbs]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        command = typer.main.get_command(_app_of(cmd_name))
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for title, verbs in VERBS.items():
            with formatter.section(title):
                formatter.write_dl(list(verbs.items()))


def _app_of(verb: str) -> typer.Typer:
    if verb in HOLD_VERBS:
        of_family: typer.Typer = import_module("flexlab.cli.hold").app_of(verb)
        return of_family
    app: typer.Typer = import_module(f"flexlab.cli.{verb}").app
    return app


app = typer.Typer(
    cls=LazyGroup,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EPILOG,
)


@app.callback(epilog=EPILOG)
def flexlab(
    ctx: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Run AI models on whatever GPUs a homelab has, from the terminal.

    `flexlab up smollm2` gives an OpenAI endpoint; `flexlab COMMAND --help` says more.
    """
    if version:
        output.answer(f"flexlab {__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        output.answer(ctx.get_help())


def main() -> NoReturn:
    """The console script."""
    output.prepare_streams()
    if sys.stdout is None:
        # A file that is opened later would be stdout, and get the answer.
        output.say("error: stdout is closed, so nothing can be answered\nhint: >/dev/null hides it")
        sys.exit(EXIT_FAILED)
    words = sys.argv[1:]
    if "serve" not in itertools.islice(words, 2):  # the daemon ends in an order of its own
        end_as_ctrl_c_does()
    sys.exit(run(words))


def run(words: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    try:
        code = _run(words)
        output.flush()
    except output.AnswerLost as lost:
        output.give_up_stdout()
        if not lost.reader_left:
            output.show_error(lost)
        return EXIT_FAILED
    return code


def _run(words: list[str]) -> int:
    """The only edge of the CLI. Raises AnswerLost, and nothing else."""
    as_json = "--json" in itertools.takewhile(lambda word: word != "--", words)
    debug = _wants_debug(words)
    try:
        code = app(words, prog_name="flexlab", standalone_mode=False)
        if code == EXIT_INTERRUPTED:
            # Typer turns Ctrl-C into this code by itself.
            output.say("interrupted")
        return code if isinstance(code, int) else EXIT_OK
    except output.AnswerLost:
        raise
    except FlexLabError as error:
        if debug:
            output.show_traceback()
        output.show_error(error, as_json=as_json)
        return error.exit_code
    except typer.TyperException as error:
        output.show_error(usage_error(error, words), as_json=as_json)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        output.say("interrupted")
        return EXIT_INTERRUPTED
    except Exception as error:
        if debug:
            output.show_traceback()
        output.show_error(_unexpected(error), as_json=as_json)
        return EXIT_FAILED


def _wants_debug(words: list[str]) -> bool:
    """--debug counts before the verb only: after it, it may be a prompt's word."""
    return "--debug" in itertools.takewhile(lambda word: word.startswith("-"), words)


def _unexpected(error: Exception) -> FlexLabError:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, OSError):
        return FlexLabError(os_sentence(error), "flexlab doctor checks folders, ports and disk")
    return FlexLabError(
        f"this is a bug in FlexLab ({what})", "flexlab --debug COMMAND shows where it happened"
    )
