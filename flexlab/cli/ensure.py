"""What `up`, `run` and `restart` share: a running daemon, a ready model, how it got there."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from flexlab import client, daemons
from flexlab.cli import output
from flexlab.cli.variables import warn_of_variables
from flexlab.core.errors import (
    EXIT_NO_FIT,
    EXIT_USAGE,
    FlexLabError,
    LaunchError,
)
from flexlab.spec.lab import InstanceView, ModelView, UpStep
from flexlab.spec.plan import Keep, Refusal, Wishes
from flexlab.spec.source import is_source

ENDING = "daemon_ending"
"""Code with which a daemon refuses that is about to end."""
END_TIMEOUT_S = 60.0
_READY = re.compile(r"^\S+: ready\b")
WRONG_WISH_STATUS = frozenset({400, 404})
NO_FIT_CODES = frozenset(
    {
        "arch_not_embedded", "candidate", "certificate_arch", "certificate_contract",
        "certificate_digest", "certificate_envelope", "certificate_incomplete",
        "certificate_tag", "cpu_flags_missing", "device_unsupported", "driver_too_old",
        "engine_too_old", "env_uncleared", "experimental", "forbidden_here", "forbidden_setting",
        "image_engine", "image_platform", "image_without_container", "no_candidate", "no_device",
        "no_fit", "no_image", "no_kfd", "no_memory", "not_embedded", "path_outside_models",
        "platform_unsupported", "precompiled_only", "share_too_small", "too_big", "unsupported",
        "variant_arch",
    }
)  # fmt: skip
"""Refusals that mean: nothing here can run it, however long one waits."""


@dataclass(frozen=True)
class Ready:
    """A model that answers at `address` (the gateway's root, without /v1)."""

    model: ModelView
    instance: InstanceView | None
    address: str
    was_running: bool
    waited_s: float


@dataclass(frozen=True)
class _Wish:
    """What is asked of the daemon."""

    word: str
    wishes: Wishes
    keep: Keep | None
    pin: bool | None


def check_name(word: str) -> None:
    """Raises UnknownModel here and now, so that a typo starts no daemon."""
    # Recipes need pydantic and YAML; where a daemon runs, it judges the name itself.
    from flexlab.recipes.catalogue import Catalogue

    Catalogue.load().resolve(word)


def ensure_up(
    word: str, wishes: Wishes, *, keep: Keep | None = None, pin: bool | None = None
) -> Ready:
    """Brings the model up and tells on stderr how. Ctrl-C withdraws the wish.

    Raises what the daemon refused with the exit code that belongs to it.
    """
    if daemons.running_version() is None:
        check_name(word)
    else:
        warn_of_variables()
    started_at, started = time.time(), time.monotonic()
    wish = _Wish(word, wishes, keep, pin)
    try:
        daemon, model, instance = _granted(wish)
    except FlexLabError as error:
        if error.code != ENDING:
            raise
        # Another command ended the daemon in the moment in which this one found it.
        if info := daemons.read_lock_file():
            daemons.wait_until_ended(info, END_TIMEOUT_S)
        daemon, model, instance = _granted(wish)
    ready_at = instance.ready_at if instance else None
    return Ready(
        model=model,
        instance=instance,
        address=gateway_root(daemon),
        was_running=ready_at is not None and ready_at < started_at,
        waited_s=time.monotonic() - started,
    )


def _granted(wish: _Wish) -> tuple[client.Client, ModelView, InstanceView | None]:
    """One try."""
    daemon = daemons.connect(start=True, say=output.say)
    with withdrawing(daemon, f"flexlab up {wish.word} goes on where this stopped"):
        if is_source(wish.word):
            show_derived(wish.word, daemon)
        steps = daemon.up(wish.word, wish.wishes, keep=wish.keep, pin=wish.pin)
        return daemon, *follow(wish.word, steps)


@contextlib.contextmanager
def withdrawing(daemon: client.Client, what_then: str) -> Iterator[None]:
    """Where the block fails or is interrupted, a daemon that was started for it ends again, if it
    holds nothing."""
    try:
        yield
    except KeyboardInterrupt:
        output.say(f"withdrawn; {what_then}")
        daemons.end_if_unused(daemon)
        raise
    except FlexLabError:
        daemons.end_if_unused(daemon)
        raise


def gateway_root(daemon: client.Client) -> str:
    """The gateway's URL without a path."""
    address = daemon.info.address or daemon.status().address
    return address.rstrip("/").removesuffix("/v1")


def show_derived(word: str, daemon: client.Client) -> None:
    """A source without a recipe gets a derived one; people see it before it is used."""
    from flexlab.recipes.catalogue import Catalogue, as_yaml

    catalogue = Catalogue.load()
    recipe = catalogue.resolve(word)
    running = {model.name for model in daemon.snapshot().models if model.instances}
    if recipe.name not in running:
        lines = as_yaml(recipe).rstrip().splitlines()
        output.say(f"{catalogue.where(recipe)} (--save keeps it):")
        output.say("\n".join(f"  {line}" for line in lines))


def follow(
    word: str, asked: Generator[UpStep, None, None]
) -> tuple[ModelView, InstanceView | None]:
    """Tells the steps as they come, until the model is ready. Raises what refused it."""
    with output.narrator() as narrator, contextlib.closing(asked) as steps:
        for step in steps:
            if step.kind == "progress" and step.progress is not None:
                narrator.progress(step.progress)
            elif step.kind == "event":
                # That it is ready is what the command itself will say.
                if not _READY.search(step.text):
                    narrator.line(step.text)
            elif step.kind == "refused":
                raise refused(step.refusal, step.text)
            elif step.kind == "ready" and step.model is not None:
                return step.model, step.instance
    raise LaunchError(f"the daemon did not say whether {word} is ready", "flexlab ps")


def refused(refusal: Refusal | None, text: str) -> FlexLabError:
    """A refusal as an error: every problem that it names, its hint, and its exit code."""
    if refusal is None:
        return LaunchError(text or "refused without a reason", "flexlab ps shows why")
    more = [
        f"\n  {problem.message} ({problem.hint})"
        for problem in refusal.problems
        if problem.message not in refusal.message
    ]
    error = FlexLabError(refusal.message + "".join(more), refusal.hint, code=refusal.code)
    if refusal.status in WRONG_WISH_STATUS:
        error.exit_code = EXIT_USAGE
    elif refusal.code in NO_FIT_CODES:
        error.exit_code = EXIT_NO_FIT
    return error
