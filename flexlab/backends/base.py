"""What every engine's file provides: a settings type, and what turns settings into words.

A backend knows its engine's own option names and what its answers mean. What varies by image,
version or arch (environment, times, error patterns) is data in `recipes/backends/*.yaml`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from flexlab.backends.model_paths import OUTSIDE
from flexlab.core.errors import UsageError
from flexlab.core.text import clean_line
from flexlab.spec.machine import Problem
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT, Step


class Site(NamedTuple):
    """Where an engine is going to run, as its words have to say it."""

    model_path: str
    """The model as the engine sees it: on this machine, or inside its container."""

    served_name: str
    """FlexLab's name of the model, under which it answers."""

    threads: int | None = None
    """CPU threads that it may use; None: it chooses."""

    gpus: int = 0
    """How many it is given; 0: it runs on the CPU."""

    claim_bytes: int | None = None
    """What it may take of each GPU's memory, where that is known."""

    total_bytes: int | None = None
    """The memory of each of those GPUs."""

    build: str | None = None
    """The engine's version or build, where options depend on it."""


Readiness = Literal["ready", "loading", "failed"]
PLACEHOLDERS = frozenset({HOST, PORT, API_KEY_FILE})
"""Words that a runtime replaces; only a whole word is one, so data must never equal it."""

LOG_TAIL_MAX_CHARS = 64 * 1024
"""How much of a log is searched for a known error: patterns may come from a user's recipe."""


class BackendSettings(BaseModel):
    """Base of every engine's settings: typed, strict, snake_case, unknown names refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    other_names: ClassVar[Mapping[str, str]] = {}
    """What other programs call a setting -> its name here; only ever suggested, never accepted."""


class ErrorPattern(Protocol):
    """A known failure of an engine, by a line of its log; stands in the backend's recipe."""

    @property
    def match(self) -> str:
        """Regular expression, searched in each line."""

    @property
    def code(self) -> str: ...

    @property
    def message(self) -> str:
        """One sentence; `{line}` becomes the line of the log."""

    @property
    def hint(self) -> str: ...


S = TypeVar("S", bound=BackendSettings)


class Backend(Protocol):
    """One engine. Settings are passed as the backend's own `settings_type`."""

    @property
    def name(self) -> str: ...

    @property
    def settings_type(self) -> type[BackendSettings]: ...

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """The engine's words, values as elements of their own; HOST, PORT and API_KEY_FILE stand
        for what the runtime fills in."""

    def env(self, settings: BackendSettings, site: Site) -> dict[str, str]:
        """Variables that follow from the settings, beside those of the backend's recipe."""

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """What an answer to the ready probe means."""

    def explain(self, log_tail: str, patterns: Iterable[ErrorPattern]) -> Problem | None:
        """Why it failed, by the end of its log; None when no pattern knows the cause."""


class EngineDefaults:
    """What most engines have in common; a backend inherits it and says what is special of it."""

    def env(self, settings: BackendSettings, site: Site) -> dict[str, str]:
        """None of its own: what does not follow from settings stands in the recipes."""
        return {}

    def explain(self, log_tail: str, patterns: Iterable[ErrorPattern]) -> Problem | None:
        """Engines end in much the same way, whatever the cause; the log tells causes apart."""
        return explain_by_patterns(log_tail, patterns)


@runtime_checkable
class Prepares(Protocol):
    """An engine that answers before it has a model, and is brought one."""

    def after_start(self, settings: BackendSettings, site: Site) -> tuple[Step, ...]:
        """What to ask of it, in this order, before it can be ready."""


def parse_settings(backend: str, base: S, wishes: Mapping[str, str]) -> S:
    """`base` with the `--set key=value` of `wishes`, each value read as its field's type.

    Strict on purpose: `true` and `false` are the only booleans, numbers are plain digits, so that
    a typing mistake is never a silent other value. `null` unsets an optional setting.
    Raises UsageError, naming every wrong setting and the nearest valid one.
    """
    settings, wrong = read_settings(backend, base, wishes)
    if wrong is not None:
        raise wrong
    return settings


class WrongSettings(UsageError):
    """Wishes that are wrong, each with its sentence; `names`: those that lead out of /models."""

    def __init__(self, message: str, hint: str, *, code: str, names: Mapping[str, str]) -> None:
        super().__init__(message, hint, code=code)
        self.names = dict(names)
        """Setting -> what is wrong with it."""


def read_settings(
    backend: str, base: S, wishes: Mapping[str, str]
) -> tuple[S, WrongSettings | None]:
    """As `parse_settings`, but as far as the wishes are right, and what is wrong with the others.

    The error's code is `path_outside_models` where nothing is wrong but where a path leads.
    """
    chosen = base.model_dump()
    wrong: dict[str, str] = {}
    outside: dict[str, str] = {}
    hint = "write --set NAME=VALUE, the value a plain number, a word, true or false"
    for name, text in wishes.items():
        if name not in type(base).model_fields:
            wrong[name] = _unknown(backend, type(base), name)
            hint = f"settings of {backend}: {', '.join(type(base).model_fields)}"
            continue
        try:
            chosen[name] = _read_value(type(base), name, text)
        except ValidationError as error:
            leads_out = error.errors()[0]["type"] == OUTSIDE
            told = outside if leads_out else wrong
            told[name] = f"{name}={clean_line(text)}: {_first_message(error)}"
    failure = None
    if wrong or outside:
        code = "wrong_setting" if wrong else OUTSIDE
        if not wrong:
            hint = "; ".join(f"--set {name}=/models/NAME" for name in outside)
        sentences = [*wrong.values(), *outside.values()]
        failure = WrongSettings("; ".join(sentences), hint, code=code, names=wrong | outside)
    try:
        return type(base).model_validate(chosen), failure
    except ValidationError as error:
        said = _first_message(error)
        together = WrongSettings(
            said, "change one of the settings it names", code="wrong_setting", names={}
        )
        return base, failure or together


def of_type(settings: BackendSettings, wanted: type[S], backend: str) -> S:
    """The settings as the engine's own. Raises TypeError for another engine's."""
    if not isinstance(settings, wanted):
        raise TypeError(f"{backend} needs {wanted.__name__}, not {type(settings).__name__}")
    return settings


def option_words(options: Mapping[str, object]) -> list[str]:
    """Options with a value, each a word of its own; None: the engine decides."""
    return [
        word
        for option, value in options.items()
        if value is not None
        for word in (option, str(value))
    ]


def loads_behind_health(status: int) -> Readiness:
    """Of an engine that answers its probe before it has its model: 503 meanwhile, then 200."""
    if status == 200:
        return "ready"
    return "loading" if status == 503 else "failed"


def nearest(name: str, known: Iterable[str], other_names: Mapping[str, str] | None = None) -> str:
    """The known name that `name` most likely means; empty when none is close."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-\s.]+", "_", name.strip().lstrip("-")).lower()
    valid = list(known)
    if snake in valid:
        return snake
    if other_names and snake in other_names:
        return other_names[snake]
    close = difflib.get_close_matches(snake, valid, n=1, cutoff=0.6)
    return close[0] if close else ""


def explain_by_patterns(log_tail: str, patterns: Iterable[ErrorPattern]) -> Problem | None:
    """The first pattern (they stand in order of precision) that a line matches, last line first."""
    lines = [clean_line(line) for line in log_tail[-LOG_TAIL_MAX_CHARS:].splitlines()]
    for pattern in patterns:
        wanted = re.compile(pattern.match)
        for line in reversed(lines):
            if wanted.search(line):
                message = pattern.message.replace("{line}", line)
                return Problem(code=pattern.code, message=message, hint=pattern.hint)
    return None


def _read_value(settings_type: type[BackendSettings], name: str, text: str) -> object:
    """The text itself where the field takes text, else what it says as JSON (1, true, null)."""
    try:
        return _validated(settings_type, name, text)
    except ValidationError as first:
        try:
            value = json.loads(text)
        except ValueError:
            raise first from None
        return _validated(settings_type, name, value)


def _validated(settings_type: type[BackendSettings], name: str, value: object) -> object:
    """Judged alone: rules between settings wait until all of them are in."""
    field = settings_type.model_fields[name]
    adapter: TypeAdapter[object] = TypeAdapter(
        field.rebuild_annotation(), config=ConfigDict(strict=True)
    )
    return adapter.validate_python(value)


def _unknown(backend: str, settings_type: type[BackendSettings], name: str) -> str:
    near = nearest(name, settings_type.model_fields, settings_type.other_names)
    suggestion = f"; did you mean {near}?" if near else ""
    return f"{backend} has no setting {clean_line(name)!r}{suggestion}"


def _first_message(error: ValidationError) -> str:
    return error.errors()[0]["msg"].removeprefix("Value error, ")
