"""What could run here: the ways in which a model could run, the preferred one first. Pure.

Knows nothing of who is running. Weights that are not installed are no obstacle: fetching them is
the daemon's, and until then the need comes from the recipe's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from flexlab.backends.base import BackendSettings, parse_settings
from flexlab.core.errors import UsageError
from flexlab.planning import certificates as certificates_of
from flexlab.planning import devices, environment, fit, images, reasons, sizing, support
from flexlab.planning.conditions import (
    WRONG_WISH,
    cpu_arch,
    obstacles,
    wanted_backend,
    wrong_wishes,
)
from flexlab.planning.devices import Device
from flexlab.planning.question import Question
from flexlab.planning.render import CONTAINERS
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.gpu_schema import GpuRecipe
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
    Support,
    Wishes,
)

DEFAULT_RUNTIME: RuntimeName = "process"


class _Draft(NamedTuple):
    """One variant on one device, as far as it can be thought through."""

    candidate: Candidate
    device: Device
    problems: tuple[Problem, ...]
    """What stands in the way; none: it can run."""


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
    gpu_recipe: Callable[[str | None], GpuRecipe | None] = lambda _arch: None,
    certificates: Sequence[Certificate] = (),
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
        gpu_recipe=gpu_recipe,
        certificates=certificates,
    )
    problems = wrong_wishes(recipe, wishes, machine, backend_recipe)
    if problems:
        return Candidates(model=recipe.name, refusal=_refusal(recipe.name, problems))
    drafts: list[_Draft] = []
    out: list[Reason] = []
    for variant in _wanted(question):
        choice = _devices(question, variant)
        out += [_not(device, problem.message) for device, problem in choice.out]
        problems += [problem for _, problem in choice.out]
        drafts += [_draft(question, variant, device) for device in choice.devices]
    return _answer(recipe.name, drafts, out, problems, question.where)


def _answer(
    model: str, drafts: list[_Draft], out: list[Reason], problems: list[Problem], where: str
) -> Candidates:
    """Each candidate says what came before it and why that was passed over."""
    items: list[Candidate] = []
    classes: dict[tuple[str, bool, str], int] = {}
    passed_over = list(dict.fromkeys(out))
    for draft in drafts:
        candidate = draft.candidate
        if draft.problems:
            passed_over.append(_passed_over(draft, where))
            problems += draft.problems
            continue
        kind = (candidate.variant, draft.device.gpu is None, candidate.support)
        reasons = (*passed_over, *candidate.reasons)
        place = classes.setdefault(kind, len(classes))
        items.append(msgspec.structs.replace(candidate, preference=place, reasons=reasons))
    if items:
        return Candidates(model=model, items=tuple(items))
    closest = min(drafts, key=lambda draft: len(draft.problems), default=None)
    if not problems:
        problems = [_nowhere(model)]
    return Candidates(
        model=model,
        refusal=_refusal(model, problems),
        closest=closest.candidate if closest else None,
    )


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


def _devices(question: Question, variant: LlamaCppVariant) -> devices.Choice:
    on_gpu, on_cpu = "gpu" in variant.devices, CPU_DEVICE in variant.devices
    backend = question.backend_recipe(variant.backend)
    if not on_gpu:
        cpu = devices.cpu_of(question.machine)
        asked = question.wishes.gpu
        if asked is None or asked.lower() == CPU_DEVICE:
            return devices.Choice((cpu,), ())
        problem = Problem(
            code="device_unsupported",
            message=f"variant {variant.name} runs on the CPU only",
            hint="--gpu cpu, or leave it out",
        )
        return devices.Choice((), ((cpu, problem),))

    def stated(arch: str | None) -> Support | None:
        if question.runtime == "process":
            archs = backend.embedded.archs if backend.embedded else ()
            if arch not in archs:
                return None
        recipe = question.gpu_recipe(arch)
        known = recipe.support_of(backend.name) if recipe else None
        # That nobody knows is no word about it.
        return known.level if known and known.level != "unknown" else None

    return devices.choose(question.machine, question.wishes.gpu, on_cpu=on_cpu, stated=stated)


def _draft(question: Question, variant: LlamaCppVariant, device: Device) -> _Draft:
    """Every choice for this variant on this device, and all that stands in its way."""
    backend = question.backend_recipe(variant.backend)
    recipe = question.gpu_recipe(device.arch) if device.gpu else None
    problems = list(obstacles(question, variant, backend, device))
    wanted = _with_defaults(variant.settings, variant.backend, recipe)
    asked: BackendSettings = wanted
    try:
        asked = parse_settings(variant.backend, wanted, question.wishes.settings)
    except UsageError as error:
        problems.append(Problem(code="wrong_setting", message=error.message, hint=error.hint or ""))
    model = sizing.known_model(question, variant)
    settings, limits = _within_limits(question, asked, model, device)
    values = settings.model_dump()
    judged = _support(question, variant, device, recipe, values)
    image = _image(question, backend, device, values)
    admissions = certificates_of.judge(
        variant.backend,
        values,
        arch=device.arch,
        image=image.name,
        on_cpu=device.gpu is None,
        certificates=question.certificates,
    )
    problems += judged.problems
    problems += image.problems if image.name is None else ()
    problems += [problem for each in admissions for problem in each.problems]
    problems += support.broken_rules(
        variant.backend,
        question.recipe.name,
        getattr(settings, "quantization", None) or variant.quantization,
        recipe,
        image.facts,
        tested=image.tested,
    )
    if image.name is not None:
        problems += environment.uncleared(variant.backend, recipe, image.facts)
    need = fit.estimate(settings, model, backend.memory.overhead)
    candidate = msgspec.structs.replace(
        _bare(question, variant, backend, device),
        support=judged.level,
        image=image.name,
        settings=values,
        needs=need.needs(device.pool),
        limits=limits,
        context=getattr(settings, "context_size", None),
        admissions=tuple(admissions),
    )
    if image.name is not None:
        told = (*candidate.problems, *image.problems)
        candidate = msgspec.structs.replace(candidate, problems=told)
    candidate, measured = sizing.with_measured_claim(question, candidate)
    problems += sizing.too_big(question, candidate, settings, model, need, measured)
    why = (
        *reasons.choice_reasons(question, variant, device),
        *judged.reasons,
        *image.reasons,
        *reasons.setting_reasons(question, variant, asked, settings),
        reasons.memory_reason(need, candidate, measured),
    )
    return _Draft(msgspec.structs.replace(candidate, reasons=why), device, tuple(problems))


def _with_defaults(
    settings: BackendSettings, backend: str, recipe: GpuRecipe | None
) -> BackendSettings:
    """The variant's settings, with what the arch needs where the variant says nothing."""
    needed = {
        name: value
        for block in (recipe.defaults if recipe else ())
        if block.backend == backend
        for name, value in block.settings.items()
        if name not in settings.model_fields_set
    }
    if not needed:
        return settings
    return type(settings).model_validate({**settings.model_dump(exclude_unset=True), **needed})


def _support(
    question: Question,
    variant: LlamaCppVariant,
    device: Device,
    recipe: GpuRecipe | None,
    values: Mapping[str, object],
) -> support.Judgement:
    if device.gpu is None:
        return support.Judgement("full", (), ())
    return support.judge(
        variant.backend,
        device,
        recipe,
        settings=values,
        allow_experimental=question.wishes.allow_experimental,
        where=f"GPU recipe {recipe.name}" if recipe else "GPU recipes",
    )


def _image(
    question: Question, backend: BackendRecipe, device: Device, values: Mapping[str, object]
) -> images.Chosen:
    if question.runtime not in CONTAINERS:
        return images.Chosen(None, None)
    known = question.certificates
    bound = certificates_of.bound_image(backend.name, values, device.arch, known)
    return images.choose(
        backend,
        device,
        platform=question.machine.platform,
        wish=question.wishes.image,
        bound=bound,
        where=f"backend {backend.name}",
    )


def _bare(
    question: Question, variant: LlamaCppVariant, backend: BackendRecipe, device: Device
) -> Candidate:
    """What follows from the recipes alone; needs and settings are still to come."""
    recipe, facts = question.recipe, question.facts.runtimes.get(question.runtime)
    return Candidate(
        model=recipe.name,
        variant=variant.name,
        backend=variant.backend,
        runtime=question.runtime,
        arch=(device.arch or "?") if device.gpu else cpu_arch(question.machine),
        support="full",
        devices=(device.id,),
        needs=(),
        weights=tuple(weight.weight() for weight in variant.weights),
        keep=recipe.keep,
        priority=recipe.priority,
        start_timeout_s=backend.times.start_timeout,
        idle_timeout_s=recipe.idle_timeout,
        problems=facts.problems if facts else (),
    )


def _passed_over(draft: _Draft, where: str) -> Reason:
    choice = f"not variant {draft.candidate.variant}"
    if draft.device.gpu is not None:
        choice += f" on {draft.device.shown}"
    because = "; ".join(problem.message for problem in draft.problems)
    return Reason(choice=choice, because=because, source=where)


def _not(device: Device, because: str) -> Reason:
    return Reason(choice=f"not {device.shown}", because=because, source="machine")


def _nowhere(model: str) -> Problem:
    return Problem(
        code="no_device",
        message=f"no device here can run {model}",
        hint="flexlab gpus says why; --gpu cpu takes the CPU where a variant runs there",
    )


def _within_limits(
    question: Question, settings: BackendSettings, model: fit.Model, device: Device
) -> tuple[BackendSettings, tuple[Limit, ...]]:
    """The engine cuts the context to what was trained and ignores GPU layers on the CPU: do so
    before it does, and say it."""
    limits: list[Limit] = []
    given: dict[str, object] = {} if device.gpu else {"n_gpu_layers": 0}
    layers = getattr(settings, "n_gpu_layers", None)
    if layers and device.gpu is None:
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
