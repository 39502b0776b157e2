"""Settings: defaults, then settings.yaml, then FLEXLAB_* variables, then options.

A key of the file is a field's name without its unit (`idle_timeout`); a variable is the key in
capitals (`FLEXLAB_IDLE_TIMEOUT`). Text is taken as it stands: `${NAME}` is not replaced.
Which source won is known for every setting, and all that is wrong in any of them is reported at
once.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from flexlab.core import paths
from flexlab.core.errors import SettingsError
from flexlab.core.fields import Bytes, Seconds
from flexlab.core.near import did_you_mean, near
from flexlab.core.text import clean_line
from flexlab.core.units import MIB
from flexlab.core.validate import judge, known_keys, sentence
from flexlab.core.yaml import Document, load, report

PREFIX = "FLEXLAB_"
# Variables of ours that are no settings: folders, and marks put on what FlexLab starts.
_NO_SETTINGS = {
    "FLEXLAB_CONFIG_DIR", "FLEXLAB_DATA_DIR", "FLEXLAB_STATE_DIR", "FLEXLAB_INSTANCE",
    "FLEXLAB_OWNER", "FLEXLAB_SYSROOT",
}  # fmt: skip
_TEST_PREFIX = "FLEXLAB_TEST_"
_HINT = "flexlab config check names all that is wrong, flexlab config show every value"
_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_ORIGIN = re.compile(r"https?://[^/\s?#@]+")


def _host(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        # Digits and dots alone are a mistyped address, not the name of a host.
        if _HOST_NAME.fullmatch(value) and not re.fullmatch(r"[\d.]+", value):
            return value
    raise ValueError(f"{value!r} is not an address or name such as 127.0.0.1, ::1 or localhost")


def _folder(value: Path) -> Path:
    try:
        folder = value.expanduser()
    except RuntimeError:
        raise ValueError(f"{str(value)!r} names a user that does not exist") from None
    # The daemon works in another folder than the shell in which a relative path was meant.
    if not folder.is_absolute():
        raise ValueError(f"{str(value)!r} must be an absolute path, or start with ~")
    return folder


def _split(value: object) -> object:
    if isinstance(value, str):
        return tuple(filter(None, re.split(r"[,\s]+", value)))
    return tuple(value) if isinstance(value, list) else value


def _origins(value: tuple[str, ...]) -> tuple[str, ...]:
    for origin in value:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(f"{origin!r} is not an origin such as https://chat.example.org:8443")
    return value


class Settings(BaseModel):
    """Every setting with its default; frozen, so that nobody changes one on the way."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True
    )

    host: Annotated[str, AfterValidator(_host)] = "127.0.0.1"
    """Where the gateway listens: an address or a name."""

    port: int = Field(8484, ge=0, le=65535)
    """The gateway's port; 0 takes any free one."""

    open_to_network: bool = False
    """Whether it may listen beyond this machine, where everybody can use it without a key."""

    models_dir: Annotated[Path, AfterValidator(_folder)] = Field(
        default_factory=lambda: paths.data_dir() / "models"
    )
    """Where weights are kept: an absolute path, or one that starts with ~."""

    runtime: Literal["process", "docker", "k3s"] | None = None
    """How engines are started; unset: what this machine and the model allow."""

    docker_host: str | None = None
    """Address of the container engine, as of DOCKER_HOST; unset: the first that is found."""

    allow_experimental: bool = False
    """Also start what is experimental on a GPU, or of which nothing is known."""

    idle_timeout_s: Seconds = Field(900.0, alias="idle_timeout")
    """A model without work is unloaded after this long."""

    linger_s: Seconds = Field(5.0, alias="linger")
    """An idle model makes room for another one after this long."""

    min_residency_s: Seconds = Field(30.0, alias="min_residency")
    """The shortest turn that a model has before one of equal priority may replace it."""

    turn_max_s: Seconds = Field(300.0, alias="turn_max")
    """The longest turn that a model has, however long it takes to load."""

    drain_timeout_s: Seconds = Field(30.0, alias="drain_timeout")
    """Requests that run may go on for this long when a higher priority wants the memory."""

    drain_limit_s: Seconds = Field(600.0, alias="drain_limit")
    """The same when an equal priority wants it."""

    stop_timeout_s: Seconds = Field(10.0, alias="stop_timeout")
    """An engine that was asked to end is killed after this long."""

    stop_confirm_s: Seconds = Field(10.0, alias="stop_confirm")
    """One that was killed and is not gone after this long is stuck, and keeps its memory."""

    start_timeout_s: Seconds = Field(600.0, alias="start_timeout")
    """A start without progress has failed after this long; recipes may say more."""

    back_off_first_s: Seconds = Field(10.0, alias="back_off_first")
    """After a failed start the next one waits this long, and twice as long each further time."""

    back_off_max_s: Seconds = Field(300.0, alias="back_off_max")
    """It never waits longer than this."""

    settled_s: Seconds = Field(60.0, alias="settled")
    """A model that was ready for this long has no failed starts any more."""

    restore_tries: int = Field(3, ge=1, le=1000)
    """A warm model comes back by itself until this many starts in a row have failed."""

    queue_timeout_s: Seconds = Field(600.0, alias="queue_timeout")
    """A request waits for its model this long at most."""

    queue_limit: int = Field(256, ge=1, le=100_000)
    """Requests that may wait for one model."""

    yield_after_s: Seconds = Field(30.0, alias="yield_after")
    """While a warm model waits for memory, cold ones there are unloaded after this long idle."""

    freed_within_s: Seconds = Field(15.0, alias="freed_within")
    """A card's memory is given again once it is seen free, or this long after its engine ended."""

    pressed_s: Seconds = Field(10.0, alias="pressed")
    """Idle models unload when less RAM than its reserve is free for this long."""

    ram_reserve_bytes: Bytes | None = Field(None, alias="ram_reserve")
    """Memory that is never planned with; unset: what the size of the machine suggests."""

    ram_limit_bytes: Bytes | None = Field(None, alias="ram_limit")
    """Budget for all models together; unset: what the machine has."""

    max_body_bytes: Bytes = Field(1 << 30, alias="max_body")
    """The largest request body; it is held in memory while its request runs."""

    allow_origins: Annotated[
        tuple[str, ...],
        AfterValidator(_origins),
        BeforeValidator(_split, json_schema_input_type=tuple[str, ...] | str),
    ] = ()
    """Web pages, by origin, that may use the gateway from a browser."""

    log_max_bytes: Bytes = Field(16 * MIB, alias="log_max")
    """What the daemon's log may take on the disk, older part included."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and per field (`idle_timeout_s`) where its value was set."""

    settings: Settings
    sources: dict[str, str]
    """`default`, `settings.yaml:LINE`, `FLEXLAB_PORT` or `option`."""

    warnings: tuple[str, ...] = ()
    """What is odd but stops nothing, such as a FLEXLAB_ variable that nobody reads."""

    def options(self) -> dict[str, object]:
        """What was given as an option: it beats every later reading of the file too."""
        given = (name for name, source in self.sources.items() if source == "option")
        return {name: getattr(self.settings, name) for name in given}

    def rows(self) -> list[tuple[str, Any, str]]:
        """Key, value and source of every setting, for `flexlab config show`."""
        return [
            (key, getattr(self.settings, name), self.sources[name])
            for name, key in _KEY_OF_FIELD.items()
        ]


_KEY_OF_FIELD = dict(zip(Settings.model_fields, known_keys(Settings), strict=True))
_FIELD_OF_KEY = {key: name for name, key in _KEY_OF_FIELD.items()}


def key_of(field: str) -> str:
    """What people write for a field: `idle_timeout` of `idle_timeout_s`."""
    return _KEY_OF_FIELD[field]


def load_settings(options: Mapping[str, object] | None = None) -> Loaded:
    """Read all sources. `options` are by key or field name; those that are None were not given.

    Raises SettingsError with every wrong setting, where it was set, and what is valid.
    """
    loaded, problems = survey_settings(options)
    if problems:
        raise SettingsError("\n".join(problems), _HINT)
    return loaded


def survey_settings(options: Mapping[str, object] | None = None) -> tuple[Loaded, list[str]]:
    """As `load_settings`, for showing: what is right counts, what is wrong is told beside it."""
    file = paths.settings_file()
    problems: list[str] = []
    chosen: dict[str, Any] = {}
    sources = dict.fromkeys(_KEY_OF_FIELD, "default")
    from_variables, warnings = _variables()
    given = {_FIELD_OF_KEY.get(k, k): v for k, v in (options or {}).items() if v is not None}
    for values, labels in (
        _from_file(file, problems),
        _from_words(from_variables, _variable_name, problems),
        _from_words(given, _option_name, problems, label="option"),
    ):
        chosen |= values
        sources |= labels
    return Loaded(Settings().model_copy(update=chosen), sources, tuple(warnings)), problems


def _from_file(file: Path, problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    if not os.path.lexists(file):
        return {}, {}
    try:
        document = load(file, SettingsError)
    except SettingsError as failure:
        problems.append(failure.message)
        return {}, {}
    settings, flaws = judge(Settings, document)
    if settings is None or flaws:
        problems.append(report(document.name, flaws))
        settings = _what_is_right(document)
    names = sorted(settings.model_fields_set)
    return (
        {name: getattr(settings, name) for name in names},
        {
            name: f"{file.name}:{document.position((_KEY_OF_FIELD[name],), key=True)[0]}"
            for name in names
        },
    )


def _what_is_right(document: Document) -> Settings:
    """The settings of a file in which others are wrong."""
    values = document.data if isinstance(document.data, dict) else {}
    right = {
        key: value
        for key, value in values.items()
        if judge(Settings, Document(document.name, {key: value}))[0] is not None
    }
    return judge(Settings, Document(document.name, right))[0] or Settings()


def _from_words(
    given: Mapping[str, object],
    called: Callable[[str], str],
    problems: list[str],
    *,
    label: str | None = None,
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values that came as words of a shell; `called(name)` is what the user wrote there."""
    try:
        settings = Settings.model_validate(dict(given))
    except ValidationError as failure:
        for problem in failure.errors(include_url=False):
            name = str(problem["loc"][0])
            key = _KEY_OF_FIELD.get(name, name)
            if problem["type"] == "extra_forbidden":
                problems.append(f"{called(key)} is no setting{did_you_mean(key, _FIELD_OF_KEY)}")
            else:
                problems.append(f"{called(key)}: {sentence(problem)}")
        wrong = {str(problem["loc"][0]) for problem in failure.errors(include_url=False)}
        given = {
            name: value
            for name, value in given.items()
            if not wrong & {name, _KEY_OF_FIELD.get(name, name)}
        }
        settings = Settings.model_validate(given)
    names = [name for name in _KEY_OF_FIELD if name in given]
    return (
        {name: getattr(settings, name) for name in names},
        {name: label or called(_KEY_OF_FIELD[name]) for name in names},
    )


def _variables() -> tuple[dict[str, str], list[str]]:
    """Field -> text of the variables that are settings, and a warning for each that is nothing.

    An empty variable is one that is not set, as elsewhere on Unix.
    """
    found: dict[str, str] = {}
    warnings: list[str] = []
    known = {_variable_name(key): name for name, key in _KEY_OF_FIELD.items()}
    ours = [*known, *_NO_SETTINGS]
    for variable, text in sorted(os.environ.items()):
        if not variable.startswith(PREFIX) or variable.startswith(_TEST_PREFIX):
            continue
        if variable in known:
            if text:
                found[known[variable]] = text
        elif variable not in _NO_SETTINGS:
            # Compared without the prefix, which would make every name look like every other.
            close = near(
                variable.removeprefix(PREFIX), (name.removeprefix(PREFIX) for name in ours)
            )
            suggestion = f"; did you mean {PREFIX}{close[0]}?" if close else ""
            warnings.append(f"{clean_line(variable)} is no setting{suggestion}")
    return found, warnings


def _variable_name(key: str) -> str:
    return PREFIX + key.upper()


def _option_name(key: str) -> str:
    return "--" + key.replace("_", "-")
