"""The need of one variant here, estimated or measured, and whether it ever fits. Pure."""

from __future__ import annotations

import msgspec

from flexlab.backends.base import BackendSettings
from flexlab.core.units import show_bytes
from flexlab.planning import fit
from flexlab.planning.question import Question
from flexlab.planning.reasons import sum_of
from flexlab.planning.render import render
from flexlab.recipes.schema import LlamaCppVariant
from flexlab.spec.machine import Pool, Problem
from flexlab.spec.plan import Candidate, Grant


def known_model(question: Question, variant: LlamaCppVariant) -> fit.Model:
    """Real sizes where the files are here, the recipe's until then."""
    weights = [weight.weight() for weight in variant.weights]
    sizes = [question.facts.weight_bytes.get(w.source, w.size_bytes) for w in weights]
    known = [size for size in sizes if size is not None]
    return fit.Model(
        weight_bytes=sum(known) if len(known) == len(sizes) else None,
        parameters=question.recipe.parameters,
        shape=question.shapes.get(weights[0].source),
    )


def with_measured_claim(question: Question, candidate: Candidate) -> tuple[Candidate, int | None]:
    """Rule 2: what earlier runs of the same plan took beats the estimate."""
    facts = question.facts
    installed = all(weight.source in facts.weights for weight in candidate.weights)
    if not installed or not facts.measured_bytes:
        return candidate, None
    plan = render(
        candidate,
        Grant(devices=candidate.devices, claims={}),
        machine=question.machine,
        facts=facts,
        backend_recipe=question.backend_recipe,
    )
    (need,) = candidate.needs
    measured = facts.measured_bytes.get(plan.hash, {}).get(need.pool)
    if measured is None:
        return candidate, None
    claim = fit.claim_bytes(need, measured)
    told = msgspec.structs.replace(need, total_bytes=claim, terms={"measured": claim})
    return msgspec.structs.replace(candidate, needs=(told,)), claim


def usable_bytes(pool: Pool | None) -> int | None:
    """What a pool could ever give to all models together; None while its size is unknown."""
    if pool is None or pool.total_bytes is None:
        return None
    usable = max(0, pool.total_bytes - pool.reserve_bytes)
    return usable if pool.budget_bytes is None else min(usable, pool.budget_bytes)


def too_big(
    question: Question,
    candidate: Candidate,
    settings: BackendSettings,
    model: fit.Model,
    need: fit.Estimate,
    measured: int | None,
) -> list[Problem]:
    """Whether it is larger than its pool ever is; what is only guessed never refuses."""
    (claimed,) = candidate.needs
    pool = question.machine.pool(claimed.pool)
    usable = usable_bytes(pool)
    at_least = need.certain_bytes if measured is None else measured
    if pool is None or usable is None or at_least <= usable:
        return []
    terms = need.terms if measured is None else claimed.terms
    bound = f"{show_bytes(pool.total_bytes)} less {show_bytes(pool.reserve_bytes)} for the system"
    if pool.budget_bytes is not None and pool.budget_bytes == usable:
        bound = "setting ram_limit"
    return [
        Problem(
            code="too_big",
            message=f"variant {candidate.variant} needs {show_bytes(claimed.total_bytes)} of "
            f"{claimed.pool} ({sum_of(terms)}); there is {show_bytes(usable)} ({bound})",
            hint=_smaller(settings, model, need.terms["overhead"], usable),
        )
    ]


def _smaller(settings: BackendSettings, model: fit.Model, overhead: int, usable: int) -> str:
    """The nearest context that would fit, as options; then with one slot, then without a cache."""
    wanted = int(getattr(settings, "context_size", 0))
    steps: list[dict[str, object]] = [{}, {"parallel": 1}, {"parallel": 1, "cache_ram_mib": 0}]
    for update in steps:
        fewer = settings.model_copy(update=update)

        def fits(context: int, fewer: BackendSettings = fewer) -> bool:
            smaller = fit.with_context(fewer, context)
            return fit.estimate(smaller, model, overhead).total_bytes <= usable

        context = fit.largest_context(wanted, fits)
        if context is not None:
            changed = fewer.model_copy(update={"context_size": context}).model_dump()
            before = settings.model_dump()
            options = [f"--set {k}={v}" for k, v in changed.items() if v != before[k]]
            return f"it would fit with {' '.join(options)}"
    return "it fits with no context: choose a smaller model or variant (flexlab recipes)"
