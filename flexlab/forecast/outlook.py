"""What every model would do here: fits, after a swap, with limits, not at all, untested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec.structs import replace

from flexlab.core.errors import FlexLabError
from flexlab.forecast.here import Here
from flexlab.forecast.planned import Planned, Verdict, plan
from flexlab.recipes.schema import ModelRecipe
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Limit, Wishes

Fit = Literal["fits", "swap", "limits", "no", "untested"]


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """One model's line of `flexlab recipes --json`."""

    model: str
    aliases: tuple[str, ...]
    capabilities: tuple[str, ...]
    fit: Fit
    verdict: Verdict
    variant: str | None = None
    backend: str | None = None
    need_bytes: int | None = None
    free_bytes: int | None = None
    because: str = ""
    limits: tuple[Limit, ...] = ()
    would_displace: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def outlooks(here: Here, recipes: Iterable[ModelRecipe], wishes: Wishes) -> list[Outlook]:
    """One for each recipe, in their order."""
    return [outlook(here, recipe, wishes) for recipe in recipes]


def outlook(here: Here, recipe: ModelRecipe, wishes: Wishes) -> Outlook:
    """What it would do here; a recipe that cannot be planned says why and is no more than that."""
    plain = Outlook(
        model=recipe.name,
        aliases=recipe.aliases,
        capabilities=tuple(recipe.capabilities),
        fit="no",
        verdict="refused",
    )
    try:
        planned = plan(here, recipe, wishes)
    except FlexLabError as error:
        problem = Problem(code=error.code, message=error.message, hint=error.hint or "")
        return replace(plain, because=error.message, problems=(problem,))
    return replace(
        plain,
        fit=fit_of(planned),
        verdict=planned.verdict,
        variant=planned.variant,
        backend=planned.backend,
        need_bytes=planned.memory.need_bytes,
        free_bytes=planned.memory.free_bytes,
        because=_because(planned),
        limits=planned.limits,
        would_displace=planned.would_displace,
        problems=planned.problems,
    )


def fit_of(planned: Planned) -> Fit:
    """The one word for it."""
    if planned.verdict == "refused":
        return "no"
    if planned.verdict == "swap":
        return "swap"
    if planned.limits:
        return "limits"
    return "untested" if planned.evidence == "untested" else "fits"


def _because(planned: Planned) -> str:
    """The one sentence that a list has room for."""
    if planned.verdict == "refused":
        return planned.problems[0].message if planned.problems else "nothing here can run it"
    if planned.would_displace:
        return f"{', '.join(planned.would_displace)} would make room"
    if planned.limits:
        first = planned.limits[0]
        return f"{first.what} {first.given}"
    where = ", ".join(gpu.name for gpu in planned.gpus) or "the CPU"
    if planned.evidence == "untested":
        return f"nobody has tried {planned.backend} on {where} like this"
    return f"{planned.backend} on {where}"
