"""What several verbs share: their Typer settings, options, and names made from words."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
import typer.core

from flexlab.cli import output
from flexlab.cli.complaints import unknown_command
from flexlab.core.errors import UsageError
from flexlab.core.units import parse_seconds
from flexlab.spec.plan import RuntimeName, Wishes

F = TypeVar("F", bound=Callable[..., Any])

SHORTEST_INTERVAL_S = 0.1
"""Of --watch."""

JsonOption = Annotated[bool, typer.Option("--json", help="Answer as JSON, in a stable shape.")]
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A recipe's name or alias, hf://ORG/REPO/FILE.gguf, or a path to a .gguf.",
        show_default=False,
    ),
]
BackendOption = Annotated[
    str | None,
    typer.Option("--backend", metavar="NAME", help="Only this engine; never another one."),
]
RuntimeOption = Annotated[
    str | None,
    typer.Option("--runtime", metavar="NAME", help="How to start it: process, docker."),
]
VariantOption = Annotated[
    str | None, typer.Option("--variant", metavar="NAME", help="Only this variant of the recipe.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A setting of the engine. Repeatable."),
]
GpuOption = Annotated[
    str | None,
    typer.Option("--gpu", metavar="GPU", help="Only this one, by index or id; or cpu."),
]
ImageOption = Annotated[
    str | None, typer.Option("--image", metavar="IMAGE", help="This container image.")
]
ExperimentalOption = Annotated[
    bool, typer.Option("--allow-experimental", help="Also what is experimental or unknown.")
]
SysrootOption = Annotated[
    str | None,
    typer.Option(
        "--sysroot",
        envvar="FLEXLAB_SYSROOT",
        metavar="DIR",
        show_envvar=False,
        help="Look at the machine recorded below DIR, and at nothing of this one.",
    ),
]


class _QuickHelp:
    """Gives --help a default, without which Typer asks pydantic to judge it (90 ms a command).

    Contexts and options are Any: their classes live in Typer's private copy of click.
    """

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None and option.default is None:
            option.default = False
            option.callback = _show_help
        return option


def _show_help(context: Any, _option: Any, is_wanted: bool) -> None:
    """On stdout as every answer, with what that means where stdout takes none."""
    if is_wanted and not context.resilient_parsing:
        output.answer(context.get_help())
        context.exit()


class _AsTyped:
    """For texts: Typer has pydantic judge them too (90 ms a command), which changes nothing."""

    def coerce(self, value: Any, **_: Any) -> Any:
        return value


class VerbCommand(_QuickHelp, typer.core.TyperCommand):
    """One verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        params: list[Any] = self.get_params(ctx)
        for param in params:
            if param.nargs == 1 and not param.multiple and param.type_descriptor.annotation is str:
                param._runtime_param = _AsTyped()
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments as their metavars say: Typer calls each optional that has a default."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(param.metavar or "" for param in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments without Python's names for their types (`<list[str]>`)."""
        records: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                records[param.param_type_name].append(record)
        arguments = [
            (name.split(" <")[0].strip("[]."), text.replace("[required]", "").rstrip())
            for name, text in records["argument"]
        ]
        for title, lines in (("Arguments", arguments), ("Options", records["option"])):
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)


class VerbGroup(_QuickHelp, typer.core.TyperGroup):
    """A verb with verbs of its own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise unknown_command(args[0], known, ctx.command_path)
        return super().resolve_command(ctx, args)


class _VerbApp(typer.Typer):
    def command(self, *args: Any, **options: Any) -> Callable[[F], F]:
        options.setdefault("cls", VerbCommand)
        return super().command(*args, **options)


def verb_app(help_text: str | None = None) -> typer.Typer:
    """A Typer application with the settings that keep start-up quick and errors ours."""
    return _VerbApp(
        help=help_text,
        cls=VerbGroup,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )


def machine_root(sysroot: str | None) -> Path:
    """The folder that is looked at as a machine's `/`; None is this machine.

    Raises UsageError where it is no folder, or none that can be read: an empty machine would be
    believed.
    """
    if sysroot is None:
        return Path("/")
    if sysroot and os.path.isdir(sysroot) and os.access(sysroot, os.R_OK | os.X_OK):
        return Path(os.path.realpath(sysroot))
    raise UsageError(
        f"sysroot {typed(sysroot)!r} is no folder that can be read",
        "--sysroot DIR (or FLEXLAB_SYSROOT) holds sys/ and proc/ of a machine, or nvidia-smi.xml",
    )


def typed(text: str) -> str:
    """What was typed, as UTF-8: in the C locale Python hands over bytes in a disguise."""
    return os.fsencode(text).decode("utf-8", errors="replace")


def model_word(word: str) -> str:
    """A model as the daemon understands it: a path to a GGUF file becomes a file:// URI.

    The daemon has another working folder, so a relative path would mean another file there.
    """
    # Words alone; whether a name has a recipe is for the daemon (or the catalogue) to say.
    from flexlab.recipes.words import means_path, source_of

    return source_of(typed(word)).uri if means_path(word) else typed(word)


def key_values(words: list[str]) -> dict[str, str]:
    """`--set key=value`, repeated. The backend's settings judge keys and values."""
    pairs = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set wants key=value, not {word!r}", "such as --set parallel=2")
        pairs[typed(key.strip())] = typed(value)
    return pairs


def wishes_of(
    *,
    runtime: RuntimeName | None,
    backend: str | None = None,
    variant: str | None = None,
    gpu: str | None = None,
    image: str | None = None,
    settings: list[str] | None = None,
    allow_experimental: bool = False,
) -> Wishes:
    """What was asked for beyond the model's name, as typed. Planning judges it."""
    return Wishes(
        runtime=runtime,
        backend=None if backend is None else typed(backend),
        variant=None if variant is None else typed(variant),
        gpu=None if gpu is None else typed(gpu),
        image=None if image is None else typed(image),
        settings=key_values(settings or []),
        allow_experimental=allow_experimental,
    )


def runtime_name(word: str | None, known: Sequence[str]) -> RuntimeName | None:
    """Raises UsageError with the names that there are."""
    if word is None or word in known:
        return cast("RuntimeName | None", word)
    raise UsageError(
        f"runtime {typed(word)!r} is not in this version; there is: {', '.join(known)}",
        f"--runtime {known[0]}, or no --runtime at all",
    )


def watch_interval_s(text: str | None, default_s: float, *, watch: bool, command: str) -> float:
    """`--interval` of a verb with `--watch`. Raises UsageError; `command` is how it is used."""
    if text is None:
        return default_s
    if not watch:
        raise UsageError("--interval needs --watch", f"{command} --interval 2")
    try:
        seconds = parse_seconds(typed(text))
    except ValueError as error:
        raise UsageError(f"--interval: {error}", f"{command} --interval 2") from None
    if seconds < SHORTEST_INTERVAL_S:
        raise UsageError(
            f"--interval must be at least {SHORTEST_INTERVAL_S:g} s, not {typed(text)}",
            f"{command} --interval 1",
        )
    return seconds


def need_words(words: list[str], what: str, usage: str) -> None:
    """Raises UsageError with the usage line where the words that a verb needs are missing."""
    if not words:
        raise UsageError(f"{what} is missing\nusage: {usage}", "flexlab recipes lists models")
