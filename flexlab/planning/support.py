"""Whether a backend may run on an arch, by what its recipe says. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from flexlab.planning.devices import Device
from flexlab.recipes.backend_schema import Image
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Reason, Support

LIBRARY = "model_lib_path"
"""The setting that names a library that was compiled beforehand."""


class Judgement(NamedTuple):
    """How well it runs there, and what stands in the way."""

    level: Support
    reasons: tuple[Reason, ...]
    problems: tuple[Problem, ...]


def judge(
    backend: str,
    device: Device,
    recipe: GpuRecipe | None,
    *,
    settings: Mapping[str, object],
    allow_experimental: bool,
    where: str,
) -> Judgement:
    """Support decides: full runs; precompiled_only runs with its library; experimental and unknown
    run when that is allowed; unsupported never does."""
    stated = recipe.support_of(backend) if recipe else None
    level: Support = stated.level if stated else "unknown"
    arch = device.arch or "an unknown arch"
    note = f": {stated.note.removesuffix('.')}" if stated and stated.note else ""
    because = "nothing is known of it"
    if stated is not None:
        because = f"{stated.reason.removesuffix('.')} ({stated.evidence}: {stated.source})"
    reason = Reason(choice=f"{backend} on {arch}: {level}", because=because, source=where)
    problem = None
    if level == "unsupported":
        problem = Problem(
            code="unsupported",
            message=f"{backend} does not run on {arch} ({device.shown}){note}",
            hint="flexlab plan MODEL without --backend tries the others",
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
    return Judgement(level, (reason,), (problem,) if problem else ())


def broken_rules(
    backend: str,
    model: str,
    quantization: str | None,
    recipe: GpuRecipe | None,
    image: Image | None,
    *,
    tested: bool,
) -> tuple[Problem, ...]:
    """What the arch's rules forbid of this model; a mark of the image lifts one, if a test of that
    very digest (`tested`) stands behind it."""
    found = []
    for rule in recipe.rules if recipe else ():
        if rule.backend != backend:
            continue
        if rule.model and not re.search(rule.model, model, re.IGNORECASE):
            continue
        if rule.quantization and not re.search(
            rule.quantization, quantization or "", re.IGNORECASE
        ):
            continue
        digest = image is not None and "@sha256:" in image.image
        if rule.mark and image and rule.mark in image.marks and digest and tested:
            continue
        found.append(Problem(code="forbidden_here", message=rule.message, hint=rule.hint))
    return tuple(found)
