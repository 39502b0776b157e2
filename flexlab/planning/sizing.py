"""The need of one variant here, estimated or measured, and whether it ever fits. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from flexlab.backends.base import BackendSettings
from flexlab.core.units import say_bytes
from flexlab.planning import fit
from flexlab.planning.advice import advice
from flexlab.planning.devices import Device
from flexlab.planning.question import Question
from flexlab.planning.reasons import sum_of
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import AnyVariant, OllamaVariant, PipelineVariant
from flexlab.spec.machine import RAM_POOL, Pool, Problem
from flexlab.spec.plan import Candidate, Need

BY_LAYER_BACKENDS = frozenset({"llamacpp"})
"""Each of several cards computes its own layers."""
ALIKE_BACKENDS = frozenset({"vllm", "mlc"})
"""Each of several cards computes a part of every layer (tensor parallel)."""


def known_model(question: Question, variant: AnyVariant) -> fit.Model:
    """Real sizes and shapes where the files are here, the recipe's until then."""
    weights = [weight.weight() for weight in variant.weights]
    sizes = [question.facts.weight_bytes.get(w.source, w.size_bytes) for w in weights]
    if isinstance(variant, OllamaVariant):
        sizes = [variant.download]
    known = [size for size in sizes if size is not None]
    found = question.shapes.get(weights[0].source) if weights else None
    pipeline = variant if isinstance(variant, PipelineVariant) else None
    return fit.Model(
        weight_bytes=sum(known) if len(known) == len(sizes) else None,
        parameters=question.recipe.parameters,
        shape=found or stated_shape(question.recipe),
        quantization=variant.quantization,
        context=question.recipe.context,
        parts=pipeline.parts if pipeline else None,
        activations=pipeline.activations if pipeline else None,
    )


def shares(backend: str, cards: Sequence[Device]) -> tuple[fit.Share, ...]:
    """Which part of a model each card takes: by its memory where each has layers of its own."""
    sizes = [(card.pool, card.total_bytes) for card in cards]
    known = [(pool, size) for pool, size in sizes if size]
    if backend in BY_LAYER_BACKENDS and len(known) == len(sizes):
        return fit.by_size(known)
    return fit.even([pool for pool, _ in sizes])


def stated_shape(recipe: ModelRecipe) -> fit.ModelShape | None:
    """The shape that the recipe states, so that a need is known before anything is fetched."""
    stated = recipe.shape
    if stated is None:
        return None
    return fit.KnownShape(
        heads=stated.heads,
        layers=stated.layers,
        kv_heads_total=(stated.kv_layers or stated.layers) * stated.kv_heads,
        key_length=stated.key_length,
        value_length=stated.value_length,
        embedding_length=stated.embedding,
        vocabulary=stated.vocabulary,
        context_length=recipe.context,
    )


def memory_key(candidate: Candidate, cards: Sequence[Device]) -> str:
    """sha256 over all that decides how much memory a launch takes; claims are no part of it."""
    driver = cards[0].gpu.driver_version if cards[0].gpu else None
    told = (
        candidate.model, candidate.variant, candidate.backend, candidate.runtime, candidate.arch,
        candidate.image, candidate.settings, driver, len(cards),
    )  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(told, order="sorted")).hexdigest()


def with_measured_claim(question: Question, candidate: Candidate) -> tuple[Candidate, int | None]:
    """Rule 2: what earlier runs took beats the estimate; what was too little raises it."""
    facts, key = question.facts, candidate.memory_key
    found, floors = facts.measured_bytes.get(key, {}), facts.floor_bytes.get(key, {})
    if not found and not floors:
        return candidate, None
    told = tuple(
        _raised(_measured(need, _of_pool(found, need.pool)), _of_pool(floors, need.pool))
        for need in candidate.needs
    )
    is_measured = _of_pool(found, candidate.needs[0].pool) is not None
    claim = told[0].total_bytes if is_measured else None
    return msgspec.structs.replace(candidate, needs=told), claim


def _of_pool(told: Mapping[str, int], pool: str) -> int | None:
    """What was so on one card is so on any other of its arch: only RAM is told apart."""
    if pool == RAM_POOL or pool in told:
        return told.get(pool)
    return max((size for other, size in told.items() if other != RAM_POOL), default=None)


def _measured(need: Need, measured: int | None) -> Need:
    if measured is None:
        return need
    claim = fit.claim_bytes(need, measured)
    return msgspec.structs.replace(need, total_bytes=claim, terms={"measured": claim})


def _raised(need: Need, floor: int | None) -> Need:
    """It died with less than this once."""
    if floor is None or floor <= need.total_bytes:
        return need
    terms = {**need.terms, "after_shortage": floor - need.total_bytes}
    return msgspec.structs.replace(need, total_bytes=floor, terms=terms)


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
    ground: fit.Ground,
    measured: int | None,
) -> Iterator[Problem]:
    """Whether it is larger than its pools ever are; what is only guessed never refuses."""
    for at, claimed in enumerate(candidate.needs):
        pool = question.machine.pool(claimed.pool)
        usable = usable_bytes(pool)
        by_measure = measured if at == 0 else None
        at_least = _certain_bytes(need, claimed) if by_measure is None else by_measure
        if pool is None or usable is None or at_least <= usable:
            continue
        told, terms = _told(need, claimed, by_measure)
        bound = "all of it"
        if pool.reserve_bytes:
            bound = f"{say_bytes(pool.total_bytes)} less {say_bytes(pool.reserve_bytes)} kept free"
        if pool.budget_bytes is not None and pool.budget_bytes == usable:
            bound = "setting ram_limit"
        yield Problem(
            code="too_big",
            message=f"variant {candidate.variant} needs {told} of {claimed.pool} "
            f"({sum_of(terms)}); there is {say_bytes(usable)} ({bound})",
            hint=advice(settings, model, ground, candidate.backend, usable),
        )
    yield from _share_too_small(candidate, need, ground)


def _share_too_small(
    candidate: Candidate, need: fit.Estimate, ground: fit.Ground
) -> Iterator[Problem]:
    """A share that somebody chose, and that the model does not fit into."""
    cards = len([one for one in candidate.needs if one.pool != RAM_POOL]) or 1
    if need.fixed_bytes is None or not need.has_share_too_small(cards):
        return
    least = need.least_terms(cards)
    yield Problem(
        code="share_too_small",
        message=f"variant {candidate.variant} needs at least "
        f"{say_bytes(sum(least.values()))} ({sum_of(least)}), and the chosen share of the card is "
        f"{say_bytes(need.fixed_bytes)}",
        hint="a larger share, a smaller --set context_size, or a variant of fewer bits",
    )


def _certain_bytes(need: fit.Estimate, claimed: Need) -> int:
    return sum(_certain(need, claimed).values())


def _certain(need: fit.Estimate, claimed: Need) -> dict[str, int]:
    return {term: size for term, size in claimed.terms.items() if term not in need.guessed}


def _told(need: fit.Estimate, claimed: Need, measured: int | None) -> tuple[str, Mapping[str, int]]:
    """The need as a refusal names it, and its terms: no more than what is certain."""
    if measured is not None:
        return say_bytes(claimed.total_bytes), claimed.terms
    if need.guessed or need.unknown:
        certain = _certain(need, claimed)
        return f"at least {say_bytes(sum(certain.values()))}", certain
    return say_bytes(claimed.total_bytes), claimed.terms
