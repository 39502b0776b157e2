"""`flexlab plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import (
    JsonOption,
    ModelArgument,
    SetOption,
    SysrootOption,
    VariantOption,
    key_values,
    machine_root,
    model_word,
    need_words,
    typed,
    verb_app,
)
from flexlab.cli.up import runtime_name
from flexlab.core.errors import EXIT_NO_FIT
from flexlab.spec.plan import Wishes

app = verb_app()


@app.command()
def plan(
    model: ModelArgument = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this engine; never another one.")
    ] = None,
    runtime: Annotated[
        str | None, typer.Option(metavar="NAME", help="How it would start: process or docker.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="GPU", help="Only this one, by index or id; or cpu."),
    ] = None,
    variant: VariantOption = None,
    image: Annotated[
        str | None, typer.Option("--image", metavar="IMAGE", help="This container image.")
    ] = None,
    settings: SetOption = None,
    allow_experimental: Annotated[
        bool,
        typer.Option("--allow-experimental", help="Also what is experimental or unknown."),
    ] = False,
    sysroot: SysrootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what would be launched here, and why; nothing is started.

    Exit 3 when nothing here can run it, with every reason and what would have to change.
    """
    need_words([model] if model else [], "MODEL", "flexlab plan MODEL [OPTIONS]")
    root = machine_root(sysroot)
    wishes = Wishes(
        runtime=runtime_name(runtime, ("process", "docker")),
        backend=backend,
        variant=variant,
        gpu=None if gpu is None else typed(gpu),
        image=image,
        settings=key_values(settings or []),
        allow_experimental=allow_experimental,
    )
    # Planning reads recipes and hardware: nothing that other verbs should import.
    from flexlab.cli.planned import plan_here, show

    planned = plan_here(model_word(model or ""), root, wishes)
    if as_json:
        output.answer_json(planned)
    else:
        show(planned)
    if planned.verdict == "refused":
        raise typer.Exit(EXIT_NO_FIT)
