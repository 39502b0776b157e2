"""`flexlab down`."""

from __future__ import annotations

from typing import Annotated

import typer

from flexlab import client, daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, model_word, need_words, verb_app
from flexlab.cli.names import model_name
from flexlab.cli.variables import warn_of_variables
from flexlab.core.errors import LaunchError
from flexlab.core.text import counted
from flexlab.core.units import show_seconds
from flexlab.spec.control import Stopped

END_TIMEOUT_S = 60.0

app = verb_app()


@app.command()
def down(
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Names or aliases.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every running model.")] = False,
    daemon: Annotated[
        bool,
        typer.Option("--daemon", help="End the daemon too. Alone, models keep running."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Do not wait for requests, give up on a stuck stop.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Stop models once their requests are answered, and with --daemon the daemon as well.

    Asking for what is already so is no error: a model that does not run, no daemon at all.
    """
    warn_of_variables()
    names = tuple(model_word(word) for word in models or ())
    if not everything and not daemon:
        need_words(list(names), "MODEL or --all", "flexlab down [MODEL]... [--all] [--daemon]")
    running = daemons.find_or_adopt(output.say)
    if running is None:
        stopped = Stopped(not_running=tuple(model_name(name) for name in names))
        if not names:
            output.say("nothing is running")
    elif names or everything:
        if not force:
            _say_who_is_waited_for(running, names, everything=everything)
        stopped = running.down(names, everything=everything, force=force)
    else:
        stopped = Stopped()
    if not as_json:
        _tell(stopped, says_nothing=everything and running is not None)
    ended = running is not None and daemon and _end(running)
    if running is not None and not ended:
        daemons.end_if_unused(running)
    if as_json:
        output.answer_json(
            {
                "stopped": stopped.stopped,
                "not_running": stopped.not_running,
                "daemon_ended": ended,
            }
        )
    stuck = [one.model for one in stopped.stopped if not one.confirmed]
    if stuck:
        raise LaunchError(
            f"{', '.join(stuck)} did not go away in time and still holds its memory",
            f"flexlab down {' '.join(stuck)} --force tries again",
            code="stuck",
        )


def _say_who_is_waited_for(
    running: client.Client, names: tuple[str, ...], *, everything: bool
) -> None:
    for model in running.snapshot().models:
        if model.in_flight and (everything or {model.name, *model.aliases} & set(names)):
            requests = counted(model.in_flight, "request")
            output.say(f"{model.name} answers {requests}; waiting for that (--force cuts it off)")


def _tell(stopped: Stopped, *, says_nothing: bool) -> None:
    for one in stopped.stopped:
        if one.confirmed:
            output.answer(f"{one.model} is stopped ({show_seconds(one.seconds)})")
    for name in stopped.not_running:
        output.answer(f"{name} was not running")
    if says_nothing and not stopped.stopped and not stopped.not_running:
        output.say("no model was running")


def _end(running: client.Client) -> bool:
    """Ends the daemon and waits until its lock is free, so that the next command starts anew."""
    running.shutdown(stop_models=False, why="flexlab down --daemon")
    if not daemons.wait_until_ended(running.info, END_TIMEOUT_S):
        output.say(f"the daemon (pid {running.info.pid}) is still ending")
        return False
    output.say("the daemon has ended")
    return True
