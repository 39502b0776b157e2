"""`flexlab plan`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import typer

from flexlab.cli import output
from flexlab.cli.common import (
    BackendOption,
    ExperimentalOption,
    GpuOption,
    ImageOption,
    JsonOption,
    ModelArgument,
    RuntimeOption,
    SetOption,
    SysrootOption,
    VariantOption,
    machine_root,
    model_word,
    need_words,
    runtime_name,
    verb_app,
    wishes_of,
)
from flexlab.core.errors import EXIT_NO_FIT
from flexlab.core.text import clean_line
from flexlab.core.units import show_bytes
from flexlab.spec.plan import Reason, Wishes

if TYPE_CHECKING:
    from flexlab.forecast.planned import Planned, Verdict

LABEL_WIDTH = 10
NOTES = frozenset(
    {
        "image_arch", "image_build_needed", "image_private", "runtime_assumed",
        "waits",
    }
)  # fmt: skip
"""Problems that stand in nobody's way."""
app = verb_app()


@app.command()
def plan(
    model: ModelArgument = None,
    backend: BackendOption = None,
    runtime: RuntimeOption = None,
    gpu: GpuOption = None,
    variant: VariantOption = None,
    image: ImageOption = None,
    settings: SetOption = None,
    allow_experimental: ExperimentalOption = False,
    sysroot: SysrootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what would be launched here, and why; nothing is started.

    Exit 3 when nothing here can run it, with every reason and what would have to change.
    """
    need_words([model] if model else [], "MODEL", "flexlab plan MODEL [OPTIONS]")
    wishes = wishes_of(
        runtime=runtime_name(runtime, ("process", "docker")),
        backend=backend,
        variant=variant,
        gpu=gpu,
        image=image,
        settings=settings,
        allow_experimental=allow_experimental,
    )
    tell(model_word(model or ""), wishes, sysroot, as_json=as_json)


def tell(word: str, wishes: Wishes, sysroot: str | None, *, as_json: bool) -> None:
    """Plan and answer. Raises typer.Exit(3) for a refusal."""
    root = machine_root(sysroot)
    # Planning reads recipes and hardware: nothing that other verbs should import.
    from flexlab.forecast.here import Here
    from flexlab.forecast.planned import plan
    from flexlab.recipes.catalogue import Catalogue

    catalogue = Catalogue.load()
    recipe = catalogue.resolve(word)  # a wrong name costs no look at the hardware
    planned = plan(Here.look(root, catalogue), recipe, wishes)
    if as_json:
        output.answer_json(planned)
    else:
        show(planned)
    if planned.verdict == "refused":
        raise typer.Exit(EXIT_NO_FIT)


def show(planned: Planned) -> None:
    """For people: the verdict, what would be launched, why, and what is in the way."""
    words: Mapping[Verdict, str] = {
        "ok": "would start", "swap": "would start after others yield", "refused": "cannot run here",
    }  # fmt: skip
    output.answer(f"{clean_line(planned.model)}: {words[planned.verdict]}")
    if planned.verdict != "refused":
        for label, text in _launch(planned):
            _line(label, text)
    elif planned.variant is not None:
        what = f"{planned.variant} ({planned.backend}, {planned.runtime}) on {planned.arch}"
        _line("tried", f"{what}: {planned.support}")
        if planned.image:
            _line("image", planned.image)
    for limit in planned.limits:
        _line("limit", f"{limit.what}: {limit.given}, not {limit.wanted}")
    for reason in planned.reasons if planned.verdict != "refused" else _passed_over(planned):
        _line("why", f"{reason.choice}: {reason.because} ({reason.source})")
    for problem in planned.problems:
        is_note = planned.verdict != "refused" or problem.code in NOTES
        _line("note" if is_note else "problem", problem.message)
        _line("", f"-> {problem.hint}")
    for other in planned.alternatives:
        where = other.arch if other.devices == ("cpu",) else f"{other.arch} {other.devices[0]}"
        _line("also", f"{other.backend} on {where}: {other.command}")


def _line(label: str, text: str) -> None:
    output.answer_labelled(f"  {label}" if label else "", text, LABEL_WIDTH)


def _launch(planned: Planned) -> Iterator[tuple[str, str]]:
    yield "variant", f"{planned.variant} ({planned.backend}, {planned.runtime})"
    for gpu in planned.gpus:
        yield "gpu", f"{gpu.index}  {gpu.name}  {gpu.arch or '?'}  {gpu.id}"
    need, free = planned.memory.need_bytes, planned.memory.free_bytes
    yield "memory", f"{show_bytes(need)} of {show_bytes(free)} free"
    if planned.would_displace:
        yield "yields", ", ".join(planned.would_displace)
    if planned.group:
        yield "group", planned.group
    if planned.image:
        yield "image", planned.image
    if planned.command:
        yield "command", shlex.join(planned.command)
    yield "args", shlex.join(planned.args)
    for name, value in planned.env.items():
        yield "env", f"{name}={value}"
    if planned.env_cleared:
        yield "cleared", ", ".join(planned.env_cleared)
    for device in planned.devices:
        yield "device", device
    for mount in planned.mounts:
        yield "mount", f"{mount.source} -> {mount.target}{' (ro)' if mount.read_only else ''}"
    for one in planned.certificates:
        word = "admitted" if one.admitted else "refused"
        yield "proof", f"{one.capability} {word}: {one.why}"


def _passed_over(planned: Planned) -> Iterator[Reason]:
    """Of a refusal only where it was tried: what stands in the way follows as problems."""
    return (one for one in planned.reasons if one.source in ("machine", "option --gpu"))
