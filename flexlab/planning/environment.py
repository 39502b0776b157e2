"""Which variables an engine gets on a device, and which are taken away from its image. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from flexlab.planning.images import is_older
from flexlab.planning.question import Locate, by_name
from flexlab.recipes.backend_schema import Image
from flexlab.recipes.gpu_schema import DEVICES, GpuEnvironment, GpuRecipe
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Reason


class Environment(NamedTuple):
    """Variables by name; what is cleared; and the words that start the engine where clearing them
    needs more than the image's own entrypoint."""

    variables: dict[str, str]
    cleared: tuple[str, ...]
    command: tuple[str, ...] | None
    reasons: tuple[Reason, ...]


def environment(
    backend: str,
    own: Mapping[str, str],
    gpu: GpuRecipe | None,
    image: Image | None,
    *,
    devices: int = 1,
    locate: Locate = by_name,
) -> Environment:
    """`own` are the engine's variables; those of the arch come after them and win.

    `devices`: how many are passed in; they are numbered from 0 inside.

    A list of variables can set one to the empty text at most, and a program may take that for a
    value. So what must not be set is taken away by `env -u` in front of the image's program,
    unless the image is known not to have it.
    """
    variables = dict(own)
    reasons: list[Reason] = []
    for at, block in enumerate(gpu.environment if gpu else ()):
        if gpu is None or not _applies(block, backend, image):
            continue
        for name in block.never:
            variables.pop(name, None)
        given = {name: _value(text, devices) for name, text in block.variables.items()}
        variables |= given
        if what := _told(given, block.never):
            because = f"{block.reason.removesuffix('.')} ({block.evidence}: {block.source})"
            where = locate(gpu, "environment", at)
            reasons.append(Reason(choice=what, because=because, source=where))
    cleared = _cleared(backend, gpu, image)
    command = _command(cleared, image)
    return Environment(variables, cleared, command, tuple(reasons))


def uncleared(backend: str, gpu: GpuRecipe | None, image: Image | None) -> tuple[Problem, ...]:
    """What cannot be kept out of an image: it would fail on this arch."""
    there = _to_unset(_cleared(backend, gpu, image), image)
    if not there or (image is not None and image.program):
        return ()
    name = image.image if image else "this image"
    return (
        Problem(
            code="env_uncleared",
            message=f"nobody knows what {name} sets by itself or how it starts, so "
            f"{' and '.join(there)} cannot be kept out of it, and it fails on this arch with them",
            hint="name an image of the recipes (flexlab plan without --image shows which)",
        ),
    )


def _blocks(backend: str, gpu: GpuRecipe | None, image: Image | None) -> Iterator[GpuEnvironment]:
    return (block for block in (gpu.environment if gpu else ()) if _applies(block, backend, image))


def _cleared(backend: str, gpu: GpuRecipe | None, image: Image | None) -> tuple[str, ...]:
    """What must not be set; of two blocks about one variable the later one counts."""
    cleared: dict[str, None] = {}
    for block in _blocks(backend, gpu, image):
        cleared |= dict.fromkeys(block.never)
        for name in block.variables:
            cleared.pop(name, None)
    return tuple(cleared)


def _to_unset(cleared: tuple[str, ...], image: Image | None) -> tuple[str, ...]:
    """Those that the image sets, or may set where nobody looked."""
    if image is None or image.env_baked is None:
        return cleared
    return tuple(name for name in cleared if name in image.env_baked)


def _applies(block: GpuEnvironment, backend: str, image: Image | None) -> bool:
    if block.backends and backend not in block.backends:
        return False
    rocm = image.rocm if image else None
    if block.rocm_min is None and block.rocm_below is None:
        return True
    # An override that is wrong for a ROCm crashes it: without knowing, none is set.
    if rocm is None or is_older(rocm, block.rocm_min):
        return False
    return block.rocm_below is None or is_older(rocm, block.rocm_below)


def _value(text: str, devices: int) -> str:
    """`{devices}` stands for the numbers of the devices that are passed in: 0, or 0,1."""
    return text.replace(DEVICES, ",".join(str(number) for number in range(devices)))


def _told(variables: Mapping[str, str], never: Iterable[str]) -> str:
    words = [f"{name}={value}" for name, value in variables.items()]
    return ", ".join([*words, *(f"never {name}" for name in never)])


def _command(cleared: tuple[str, ...], image: Image | None) -> tuple[str, ...] | None:
    """None: the image's own entrypoint."""
    if image is None or not image.program:
        return None
    if there := _to_unset(cleared, image):
        unset = [word for name in there for word in ("-u", name)]
        return ("env", *unset, *image.program)
    return image.program if image.entrypoint == "command" else None
