"""Which variables an engine gets on a device, and which are taken away from its image. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexlab.planning.images import is_older
from flexlab.recipes.backend_schema import Image
from flexlab.recipes.gpu_schema import GpuEnvironment, GpuRecipe
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Reason


class Environment(NamedTuple):
    """Variables by name; what is cleared; and the words that start the engine where clearing them
    needs more than the image's own entrypoint."""

    variables: dict[str, str]
    cleared: tuple[str, ...]
    command: tuple[str, ...] | None
    reasons: tuple[Reason, ...]
    problems: tuple[Problem, ...]


def environment(
    backend: str,
    own: Mapping[str, str],
    gpu: GpuRecipe | None,
    image: Image | None,
    *,
    where: str,
) -> Environment:
    """`own` are the engine's variables; those of the arch come after them and win.

    A list of variables can set one to the empty text at most, and a program may take that for a
    value. So what must not be set is taken away by `env -u` in front of the image's program,
    unless the image is known not to have it.
    """
    variables = dict(own)
    cleared: dict[str, None] = {}
    reasons: list[Reason] = []
    for block in gpu.environment if gpu else ():
        if not _applies(block, backend, image):
            continue
        for name in block.never:
            variables.pop(name, None)
            cleared[name] = None
        for name, value in block.variables.items():
            variables[name] = value
            cleared.pop(name, None)
        if what := _told(block):
            because = f"{block.reason.removesuffix('.')} ({block.evidence}: {block.source})"
            reasons.append(Reason(choice=what, because=because, source=where))
    command, problems = _command(tuple(cleared), image)
    return Environment(variables, tuple(cleared), command, tuple(reasons), problems)


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


def _told(block: GpuEnvironment) -> str:
    words = [f"{name}={value}" for name, value in block.variables.items()]
    return ", ".join([*words, *(f"never {name}" for name in block.never)])


def _command(
    cleared: tuple[str, ...], image: Image | None
) -> tuple[tuple[str, ...] | None, tuple[Problem, ...]]:
    own = image.program if image and image.entrypoint == "command" else None
    if not cleared:
        return own, ()
    if image is not None and image.env_baked is not None:
        cleared = tuple(name for name in cleared if name in image.env_baked)
        if not cleared:
            return own, ()
    if image is not None and image.program:
        unset = [word for name in cleared for word in ("-u", name)]
        return ("env", *unset, *image.program), ()
    name = image.image if image else "this image"
    problem = Problem(
        code="env_uncleared",
        message=f"nobody knows what {name} sets by itself or how it starts, so "
        f"{' and '.join(cleared)} cannot be kept out of it, and it fails on this arch with them",
        hint="name an image of the recipes (flexlab plan without --image shows which)",
    )
    return None, (problem,)
