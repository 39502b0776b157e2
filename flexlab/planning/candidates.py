"""What could run here: the ways in which a model could run, the preferred one first. Pure.

Knows nothing of who is running. Weights that are not installed are no obstacle: fetching them is
the daemon's, and until then the need comes from the recipe's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from flexlab.backends.base import BackendSettings, parse_settings
from flexlab.core.errors import UsageError
from flexlab.planning import fit, reasons, sizing
from flexlab.planning.conditions import (
    WRONG_WISH,
    cpu_arch,
    obstacles,
    wanted_backend,
    wrong_wishes,
)
from flexlab.planning.question import Question
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.schema import LlamaCppVariant, ModelRecipe
from flexlab.spec.machine import CPU_DEVICE, Machine, Problem
from flexlab.spec.plan import (
    Candidate,
    Candidates,
    Facts,
    Limit,
    Reason,
    Refusal,
    RuntimeName,
    Wishes,
)

DEFAULT_RUNTIME: RuntimeName = "process"


class _Impossible(Exception):
    """Why a variant cannot run here."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = problems


def candidates(
    recipe: ModelRecipe,
    machine: Machine,
    facts: Facts,
    wishes: Wishes,
    *,
    backend_recipe: Callable[[str], BackendRecipe],
    where: str = "",
    default_runtime: RuntimeName | None = None,
    shapes: Mapping[str, fit.ModelShape] | None = None,
    broken: Mapping[str, Problem] | None = None,
) -> Candidates:
    """All candidates of a model, or the refusal that names every obstacle and what would help.

    `where` says where the recipe stands (file:line); `default_runtime` is the setting `runtime`;
    `shapes` holds the headers of installed weights by source, `broken` what is wrong with those
    that no engine could load. Wishes that name what does not exist are refused with status 400.
    """
    runtime, source = _choose_runtime(wishes, default_runtime)
    question = Question(
        recipe=recipe,
        machine=machine,
        facts=facts,
        wishes=wishes,
        backend_recipe=backend_recipe,
        where=where or f"recipe {recipe.name}",
        runtime=runtime,
        runtime_source=source,
        shapes=shapes or {},
        broken=broken or {},
    )
    problems = wrong_wishes(recipe, wishes, backend_recipe)
    if problems:
        return Candidates(model=recipe.name, refusal=_refusal(recipe.name, problems))
    items: list[Candidate] = []
    passed_over: list[Reason] = []
    for preference, variant in enumerate(_wanted(question)):
        try:
            found = _candidate(question, variant, preference)
        except _Impossible as impossible:
            problems += impossible.problems
            passed_over.append(_passed_over(question, variant, impossible))
        else:
            why = (*passed_over, *found.reasons)
            items.append(msgspec.structs.replace(found, reasons=why))
    refusal = None if items else _refusal(recipe.name, problems)
    return Candidates(model=recipe.name, items=tuple(items), refusal=refusal)


def _choose_runtime(wishes: Wishes, default_runtime: RuntimeName | None) -> tuple[RuntimeName, str]:
    if wishes.runtime is not None:
        return wishes.runtime, "option --runtime"
    if default_runtime is not None:
        return default_runtime, "setting runtime"
    return DEFAULT_RUNTIME, "default"


def _wanted(question: Question) -> list[LlamaCppVariant]:
    wishes = question.wishes
    backend = wanted_backend(wishes, question.backend_recipe)
    return [
        variant
        for variant in question.recipe.variants
        if wishes.variant in (None, variant.name) and backend in (None, variant.backend)
    ]


def _candidate(question: Question, variant: LlamaCppVariant, preference: int) -> Candidate:
    """Raises _Impossible with every obstacle of this variant."""
    backend = question.backend_recipe(variant.backend)
    problems = list(obstacles(question, variant, backend))
    asked: BackendSettings = variant.settings
    try:
        asked = parse_settings(variant.backend, asked, question.wishes.settings)
    except UsageError as error:
        problems.append(Problem(code="wrong_setting", message=error.message, hint=error.hint or ""))
    model = sizing.known_model(question, variant)
    settings, limits = _within_limits(question, asked, model)
    need = fit.estimate(settings, model, backend.memory.overhead)
    candidate = msgspec.structs.replace(
        _bare(question, variant, backend),
        preference=preference,
        settings=settings.model_dump(),
        needs=(need.need(question.machine.cpu.pool),),
        limits=limits,
        context=getattr(settings, "context_size", None),
    )
    candidate, measured = sizing.with_measured_claim(question, candidate)
    problems += sizing.too_big(question, candidate, settings, model, need, measured)
    if problems:
        raise _Impossible(*problems)
    why = (
        *reasons.choice_reasons(question, variant),
        *reasons.setting_reasons(question, variant, asked, settings),
        reasons.memory_reason(need, candidate, measured),
    )
    return msgspec.structs.replace(candidate, reasons=why)


def _bare(question: Question, variant: LlamaCppVariant, backend: BackendRecipe) -> Candidate:
    """What follows from the recipes alone; needs and settings are still to come."""
    recipe, facts = question.recipe, question.facts.runtimes.get(question.runtime)
    return Candidate(
        model=recipe.name,
        variant=variant.name,
        backend=variant.backend,
        runtime=question.runtime,
        arch=cpu_arch(question.machine),
        support="full",
        devices=(CPU_DEVICE,),
        needs=(),
        weights=tuple(weight.weight() for weight in variant.weights),
        keep=recipe.keep,
        priority=recipe.priority,
        start_timeout_s=backend.times.start_timeout,
        idle_timeout_s=recipe.idle_timeout,
        problems=facts.problems if facts else (),
    )


def _passed_over(question: Question, variant: LlamaCppVariant, impossible: _Impossible) -> Reason:
    return Reason(
        choice=f"not variant {variant.name}", because=str(impossible), source=question.where
    )


def _within_limits(
    question: Question, settings: BackendSettings, model: fit.Model
) -> tuple[BackendSettings, tuple[Limit, ...]]:
    """The engine cuts the context to what was trained and ignores GPU layers on the CPU: do so
    before it does, and say it."""
    limits: list[Limit] = []
    given: dict[str, object] = {"n_gpu_layers": 0}
    layers = getattr(settings, "n_gpu_layers", None)
    if layers:
        limits.append(Limit(what="n_gpu_layers", wanted=str(layers), given="0 (on the CPU)"))
    trained = (model.shape.context_length if model.shape else None) or question.recipe.context
    wanted = getattr(settings, "context_size", None)
    if trained and wanted and wanted > trained:
        given["context_size"] = trained
        limits.append(
            Limit(
                what="context_size",
                wanted=str(wanted),
                given=f"{trained} (what the model was trained for)",
            )
        )
    return settings.model_copy(update=given), tuple(limits)


def _refusal(model: str, problems: Iterable[Problem]) -> Refusal:
    """All obstacles, each once; several variants often meet the same one."""
    found = tuple(dict.fromkeys(problems))
    first = found[0]
    message = first.message
    if len(found) > 1:
        message = f"{model} cannot run here: " + "; ".join(each.message for each in found)
    return Refusal(
        code=first.code,
        message=message,
        hint="; ".join(dict.fromkeys(each.hint for each in found if each.hint)) or None,
        status=400 if all(each.code in WRONG_WISH for each in found) else 503,
        problems=found,
    )
