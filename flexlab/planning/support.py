"""Whether a backend may run on an arch, by what its recipe says. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from flexlab.planning.devices import Device
from flexlab.planning.question import Locate, by_name
from flexlab.recipes.backend_schema import Image
from flexlab.recipes.gpu_schema import GpuRecipe, GpuSupport
from flexlab.recipes.variants import VariantBase
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Evidence, Reason, Support

LIBRARY = "model_lib_path"
"""The setting that names a library that was compiled beforehand."""


class Judgement(NamedTuple):
    """How well it runs there, and what stands in the way."""

    level: Support
    reasons: tuple[Reason, ...]
    problems: tuple[Problem, ...]
    evidence: Evidence = "tested"


def judge(
    backend: str,
    device: Device,
    recipe: GpuRecipe | None,
    *,
    settings: Mapping[str, object],
    allow_experimental: bool,
    locate: Locate = by_name,
) -> Judgement:
    """Support decides: full runs; precompiled_only runs with its library; experimental and unknown
    run when that is allowed; unsupported never does."""
    if device.gpu is None and recipe is None:
        return Judgement("full", (), ())
    stated = recipe.support_of(backend) if recipe else None
    level: Support = stated.level if stated else "unknown"
    arch = (device.arch or "an unknown arch") if device.gpu else "the CPU"
    there = f"{arch} ({device.shown})" if device.gpu else arch
    note = f": {stated.note.removesuffix('.')}" if stated and stated.note else ""
    because = "nothing is known of it"
    if stated is not None:
        because = f"{stated.reason.removesuffix('.')} ({stated.evidence}: {stated.source})"
    reason = Reason(
        choice=f"{backend} on {arch}: {level}",
        because=because,
        source=_where(recipe, stated, locate),
    )
    problem = None
    if level == "unsupported":
        problem = Problem(
            code="unsupported",
            message=f"{backend} does not run on {there}{note}",
            hint="leave out --backend and the others are tried; flexlab recipes lists what fits",
        )
    elif level == "precompiled_only" and not settings.get(LIBRARY):
        problem = Problem(
            code="precompiled_only",
            message=f"{backend} on {arch} runs only with a library that was compiled "
            f"beforehand{note}",
            hint=f"--set {LIBRARY}=/models/NAME/lib.so",
        )
    elif level in ("experimental", "unknown") and not allow_experimental:
        problem = Problem(
            code="experimental",
            message=f"{backend} on {arch} is {level}{note}",
            hint="--allow-experimental tries it all the same",
        )
    evidence = stated.evidence if stated else "untested"
    return Judgement(level, (reason,), (problem,) if problem else (), evidence)


def _where(recipe: GpuRecipe | None, stated: GpuSupport | None, locate: Locate) -> str:
    if recipe is None:
        return "GPU recipes"
    return locate(recipe, "support", recipe.support.index(stated)) if stated else locate(recipe)


def broken_rules(
    backend: str,
    model: str,
    quantization: Iterable[str | None],
    recipe: GpuRecipe | None,
    image: Image | None,
    *,
    tested: bool,
) -> tuple[Problem, ...]:
    """What the arch's rules forbid of this model; a mark of the image lifts one, if a test of that
    very digest (`tested`) stands behind it. `quantization`: all that names it."""
    named = [name for name in quantization if name]
    found = []
    for rule in recipe.rules if recipe else ():
        if rule.backend != backend:
            continue
        if rule.model and not re.search(rule.model, model, re.IGNORECASE):
            continue
        if rule.quantization and not any(
            re.search(rule.quantization, name, re.IGNORECASE) for name in named
        ):
            continue
        if rule.mark and has_mark(image, rule.mark, tested=tested):
            continue
        found.append(Problem(code="forbidden_here", message=rule.message, hint=rule.hint))
    return tuple(found)


def has_mark(image: Image | None, mark: str, *, tested: bool) -> bool:
    """A mark counts only with a test of that very digest on this arch behind it."""
    return bool(image and tested and mark in image.marks and "@sha256:" in image.image)


def unpromoted(variant: VariantBase, image: Image | None, *, tested: bool) -> tuple[Problem, ...]:
    """A candidate that has not shown yet what its promotion asks for."""
    wanted = variant.promotion
    if wanted is None or has_mark(image, wanted.mark, tested=tested):
        return ()
    return (Problem(code="candidate", message=wanted.message, hint=wanted.hint),)
