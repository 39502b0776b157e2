"""A small lab for planning tests: a machine, a model with two variants, the shipped backend."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from flexlab.core.units import GIB
from flexlab.planning.candidates import candidates
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.catalogue import Catalogue
from flexlab.recipes.schema import ModelRecipe
from flexlab.spec.machine import Cpu, Machine, Pool
from flexlab.spec.plan import Candidate, Candidates, Facts, Refusal, RuntimeFacts, Wishes

SOURCE = "file:///models/small.gguf"
BIG_SOURCE = "file:///models/big.gguf"
FLAGS = frozenset({"avx2", "fma", "f16c", "bmi2", "sse2"})


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """As a GGUF header says it; the defaults are those of SmolLM2-135M."""

    layers: int | None = 30
    heads: int | None = 9
    kv_heads_total: int | None = 90
    key_length: int | None = 64
    value_length: int | None = 64
    embedding_length: int | None = 576
    vocabulary: int | None = 49152
    context_length: int | None = 8192


@cache
def backend_recipe(name: str) -> BackendRecipe:
    return Catalogue.load().backend(name)


def variant(name: str, source: str, size: int | None, **settings: object) -> dict[str, object]:
    return {
        "name": name,
        "backend": "llamacpp",
        "weights": [{"source": source, "size": size}],
        "devices": ["cpu"],
        "settings": settings,
        "evidence": "tested",
        "reason": "it was tried",
        "source": "a test",
        "date": "2026-01-31",
    }


def recipe(*variants: dict[str, object], **fields: Any) -> ModelRecipe:
    chosen = variants or (
        variant("q4", SOURCE, 98_362_432, context_size=4096),
        variant("q2", BIG_SOURCE, 40_000_000, context_size=1024),
    )
    return ModelRecipe.model_validate(
        {
            "name": "small",
            "description": "For tests.",
            "license": "Apache-2.0",
            "capabilities": ["chat"],
            "parameters": 134_515_008,
            "context": 8192,
            "variants": list(chosen),
            **fields,
        }
    )


def machine(
    *,
    total: int | None = 16 * GIB,
    reserve: int = GIB,
    threads: int | None = 4,
    flags: frozenset[str] = FLAGS,
    platform: str | None = "linux/amd64",
    budget: int | None = None,
) -> Machine:
    return Machine(
        hostname="lab",
        platform=platform,
        cpu=Cpu(name="Test CPU", threads_total=8, threads_usable=threads, flags=flags),
        pools=(
            Pool(
                id="ram",
                kind="ram",
                total_bytes=total,
                used_bytes=None if total is None else total // 4,
                reserve_bytes=reserve,
                budget_bytes=budget,
            ),
        ),
    )


def facts(**fields: Any) -> Facts:
    given: dict[str, Any] = {
        "runtimes": {"process": RuntimeFacts(name="process", available=True)},
        "weights": {SOURCE: "/models/small.gguf", BIG_SOURCE: "/models/big.gguf"},
        **fields,
    }
    return Facts(**given)


def ask(
    model: ModelRecipe | None = None,
    here: Machine | None = None,
    known: Facts | None = None,
    wishes: Wishes | None = None,
    **more: Any,
) -> Candidates:
    return candidates(
        model or recipe(),
        here or machine(),
        known or facts(),
        wishes or Wishes(),
        backend_recipe=backend_recipe,
        where="recipes/models/small.yaml:1",
        **{"shapes": {SOURCE: Shape(), BIG_SOURCE: Shape()}, **more},
    )


def refused(answer: object) -> Refusal:
    refusal: Refusal | None = getattr(answer, "refusal", None)
    assert refusal is not None
    assert refusal.hint
    return refusal


def because(candidate: Candidate, choice: str) -> str:
    return next(r.because for r in candidate.reasons if r.choice.startswith(choice))


def source(candidate: Candidate, choice: str) -> str:
    return next(r.source for r in candidate.reasons if r.choice.startswith(choice))
