"""The need of one variant here, estimated or measured, and whether it ever fits. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flexlab.backends.base import BackendSettings
from flexlab.core.units import show_bytes
from flexlab.planning import fit
from flexlab.planning.advice import advice
from flexlab.planning.question import Question
from flexlab.planning.reasons import sum_of
from flexlab.planning.render import render
from flexlab.recipes.schema import LlamaCppVariant, ModelRecipe
from flexlab.spec.machine import Pool, Problem
from flexlab.spec.plan import Candidate, Grant, Need


def known_model(question: Question, variant: LlamaCppVariant) -> fit.Model:
    """Real sizes and shapes where the files are here, the recipe's until then."""
    weights = [weight.weight() for weight in variant.weights]
    sizes = [question.facts.weight_bytes.get(w.source, w.size_bytes) for w in weights]
    known = [size for size in sizes if size is not None]
    return fit.Model(
        weight_bytes=sum(known) if len(known) == len(sizes) else None,
        parameters=question.recipe.parameters,
        shape=question.shapes.get(weights[0].source) or stated_shape(question.recipe),
    )


def stated_shape(recipe: ModelRecipe) -> fit.ModelShape | None:
    """The shape that the recipe states, so that a need is known before anything is fetched."""
    stated = recipe.shape
    if stated is None:
        return None
    return fit.KnownShape(
        heads=stated.heads,
        kv_heads_total=stated.layers * stated.kv_heads,
        key_length=stated.key_length,
        value_length=stated.value_length,
        embedding_length=stated.embedding,
        vocabulary=stated.vocabulary,
        context_length=recipe.context,
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
        gpu_recipe=question.gpu_recipe,
    )
    found = facts.measured_bytes.get(plan.hash, {})
    told = tuple(_measured(need, found.get(need.pool)) for need in candidate.needs)
    first = candidate.needs[0].pool
    claim = told[0].total_bytes if first in found else None
    return msgspec.structs.replace(candidate, needs=told), claim


def _measured(need: Need, measured: int | None) -> Need:
    if measured is None:
        return need
    claim = fit.claim_bytes(need, measured)
    return msgspec.structs.replace(need, total_bytes=claim, terms={"measured": claim})


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
    claimed = candidate.needs[0]
    pool = question.machine.pool(claimed.pool)
    usable = usable_bytes(pool)
    at_least = sum(_certain(need, claimed).values()) if measured is None else measured
    if pool is None or usable is None or at_least <= usable:
        return []
    told, terms = _told(need, claimed, measured)
    bound = f"{show_bytes(pool.total_bytes)} less {show_bytes(pool.reserve_bytes)} for the system"
    if pool.budget_bytes is not None and pool.budget_bytes == usable:
        bound = "setting ram_limit"
    return [
        Problem(
            code="too_big",
            message=f"variant {candidate.variant} needs {told} of {claimed.pool} "
            f"({sum_of(terms)}); there is {show_bytes(usable)} ({bound})",
            hint=advice(settings, model, need.terms["overhead"], usable),
        )
    ]


def _certain(need: fit.Estimate, claimed: Need) -> dict[str, int]:
    return {term: size for term, size in claimed.terms.items() if term not in need.guessed}


def _told(need: fit.Estimate, claimed: Need, measured: int | None) -> tuple[str, Mapping[str, int]]:
    """The need as a refusal names it, and its terms: no more than what is certain."""
    if measured is not None:
        return show_bytes(claimed.total_bytes), claimed.terms
    if need.guessed or need.unknown:
        certain = _certain(need, claimed)
        return f"at least {show_bytes(sum(certain.values()))}", certain
    return show_bytes(claimed.total_bytes), claimed.terms
