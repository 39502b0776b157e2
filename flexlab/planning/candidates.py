"""What could run here: the ways in which a model could run, the preferred one first. Pure.

Knows nothing of who is running. Weights that are not installed are no obstacle: fetching them is
the daemon's, and until then the need comes from the recipe's sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec

from flexlab.planning import devices, fit, sizing, smaller
from flexlab.planning.conditions import WRONG_WISH, wanted_backend, wrong_wishes
from flexlab.planning.devices import Device
from flexlab.planning.draft import Draft, Given, draft, on_twin
from flexlab.planning.question import Locate, Question, by_name
from flexlab.planning.sizing import ALIKE_BACKENDS, BY_LAYER_BACKENDS
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import AnyVariant
from flexlab.spec.machine import CPU_DEVICE, RAM_POOL, Machine, Problem
from flexlab.spec.plan import (
    Candidate,
    Candidates,
    Facts,
    Reason,
    Refusal,
    RuntimeName,
    Support,
    Wishes,
)

DEFAULT_RUNTIME: RuntimeName = "process"
CONTAINED: RuntimeName = "docker"
AUTOMATIC = "default"


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
    certificates: Callable[[str], Sequence[Certificate]] = lambda _backend: (),
    locate: Locate = by_name,
) -> Candidates:
    """All candidates of a model, or the refusal that names every obstacle and what would help.

    `locate` says where recipes stand (`where`, if given, of the model's own); `default_runtime` is
    the setting `runtime`; `shapes` holds the headers of installed weights by source, `broken` what
    is wrong with those that no engine could load. Wishes that name what does not exist are refused
    with status 400.
    """
    runtime, source, because = _choose_runtime(wishes, default_runtime)
    question = Question(
        recipe=recipe,
        machine=machine,
        facts=facts,
        wishes=wishes,
        backend_recipe=backend_recipe,
        where=where,
        runtime=runtime,
        runtime_source=source,
        runtime_because=because,
        shapes=shapes or {},
        broken=broken or {},
        gpu_recipe=gpu_recipe,
        certificates=certificates,
        locate=locate,
    )
    problems = wrong_wishes(recipe, wishes, machine, backend_recipe)
    if problems:
        return Candidates(model=recipe.name, refusal=_refusal(recipe.name, problems))
    docker = facts.runtimes.get(CONTAINED)
    if source == AUTOMATIC and docker is not None and docker.available:
        return _either(question)
    return _in_runtime(question)


def _either(question: Question) -> Candidates:
    """Nobody named a runtime: containers where they do more than the embedded engine can."""
    own = _in_runtime(question)
    contained = msgspec.structs.replace(question, runtime=CONTAINED)
    found = _in_runtime(contained)
    because = _why_contained(question, own, found)
    if because is None:
        shows_more = bool(question.machine.gpus) and not own.items
        return found if shows_more and found.refusal else own
    return _in_runtime(msgspec.structs.replace(contained, runtime_because=because))


def _why_contained(question: Question, own: Candidates, found: Candidates) -> str | None:
    """Why a container is the better way; None where it is not, or where none would start."""
    if not found.items:
        return None
    if question.wishes.image is not None:
        return "an image was asked for"
    if not own.items:
        return "the embedded engine cannot run it"
    on_cpu = (CPU_DEVICE,)
    if found.items[0].devices != on_cpu and own.items[0].devices == on_cpu:
        return "it runs on a GPU there, which the embedded engine cannot use"
    if found.items[0].image in question.facts.images:
        return "the container engine has its image"
    return None


def _in_runtime(question: Question) -> Candidates:
    drafts: list[Draft] = []
    out: list[Reason] = []
    problems: list[Problem] = []
    for variant in _wanted(question):
        choice = _devices(question, variant)
        out += [_not(device, problem.message) for device, problem in choice.out]
        problems += [problem for _, problem in choice.out]
        drafts += _drafts(question, variant, choice.devices)
    if not drafts:
        if question.wishes.gpu is None and (not problems or not _may_use_cpu(question)):
            problems.append(_nowhere(question))
        return _answer_without_place(question, problems)
    return _answer(question, drafts, out, problems)


def _answer_without_place(question: Question, problems: list[Problem]) -> Candidates:
    """No device may even be tried: what came closest is thought through where it would have been,
    so that a refusal names arch, support and words all the same."""
    cards = devices.gpu_devices(question.machine)
    place = cards[0] if cards else devices.cpu_of(question.machine)
    if question.wishes.gpu is not None:
        named = [card for card in cards if devices.is_meant(card, question.wishes.gpu)]
        place = named[0] if named else devices.cpu_of(question.machine)
    wanted = _wanted(question)
    return Candidates(
        model=question.recipe.name,
        refusal=_refusal(question.recipe.name, problems),
        closest=draft(question, wanted[0], (place,)).candidate if wanted else None,
    )


def _drafts(question: Question, variant: AnyVariant, places: Sequence[Device]) -> Iterator[Draft]:
    """On each device alone; where it is too big for all of them, on several together; and where
    that does not help, smaller, as far as its recipe allows."""
    alone = list(_alone(question, variant, places))
    yield from alone
    for one in alone:
        if not one.problems:
            yield from _smaller_now(question, one)
    large = [one for one in alone if one.only_too_big]
    if not large or any(not one.problems for one in alone):
        return
    for cards in _together(question, variant, [card for one in large for card in one.alike]):
        joined = draft(question, variant, cards)
        if not joined.problems:
            yield joined
            return
    for one in large:
        yield from _smaller_ever(question, one)


def _smaller_ever(question: Question, one: Draft) -> Iterator[Draft]:
    """On each of the cards that are too small, with what makes it fit there."""
    given = smaller.fitting(question, one)
    if given is None:
        return
    first = draft(question, one.variant, one.cards, given, given_up=1)
    yield first
    if first.problems:
        return
    for card in one.alike:
        if card.id != one.cards[0].id:
            yield on_twin(first, card)
        yield from _smaller_now(question, one._replace(cards=(card,)), besides=given)


def _smaller_now(question: Question, one: Draft, besides: Given | None = None) -> Iterator[Draft]:
    """Of a worse class: taken only where others hold what the whole would need. `besides`: what is
    offered already."""
    given = smaller.fitting_now(question, one)
    if given is not None and given != besides:
        yield draft(question, one.variant, one.cards, given, given_up=2)


def _alone(question: Question, variant: AnyVariant, places: Sequence[Device]) -> Iterator[Draft]:
    """Cards that are alike in everything that planning looks at are thought through once.

    Each that can run it is a candidate of its own; those that cannot are told together.
    """
    kinds: dict[object, list[Device]] = {}
    for place in places:
        kinds.setdefault(_kind(question, place), []).append(place)
    for cards in kinds.values():
        first = draft(question, variant, cards[:1])
        if first.problems:
            yield first._replace(alike=tuple(cards))
            continue
        yield first
        yield from (on_twin(first, card) for card in cards[1:])


def _kind(question: Question, card: Device) -> object:
    gpu = card.gpu
    if gpu is None:
        return card.id
    pool = question.machine.pool(card.pool)
    return (
        gpu.vendor,
        card.arch,
        gpu.name,
        card.total_bytes,
        gpu.driver_version,
        card.pool == RAM_POOL,
        card.slice.profile if card.slice else None,
        sizing.usable_bytes(pool),
    )


def _together(
    question: Question, variant: AnyVariant, cards: Sequence[Device]
) -> Iterable[tuple[Device, ...]]:
    """Never what somebody asked one device for."""
    if question.wishes.gpu is not None:
        return ()
    if variant.backend in ALIKE_BACKENDS:
        return devices.together(cards, alike=True)
    if variant.backend in BY_LAYER_BACKENDS:
        found = devices.together(cards, alike=False)
        return [some for some in found if _same_environment(question, some)]
    return ()


def _same_environment(question: Question, cards: Sequence[Device]) -> bool:
    """One process has one environment: archs that need different ones cannot share it."""
    recipes = [question.gpu_recipe(card.arch) for card in cards]
    blocks = [recipe.environment if recipe else None for recipe in recipes]
    return all(block == blocks[0] for block in blocks[1:])


def _answer(
    question: Question, drafts: list[Draft], out: list[Reason], problems: list[Problem]
) -> Candidates:
    """Each candidate says what came before it and why that was passed over."""
    model, drafts = question.recipe.name, _startable(drafts)
    possible: list[tuple[tuple[bool, bool, int], Draft, tuple[Reason, ...]]] = []
    passed_over = list(dict.fromkeys(out))
    for one in drafts:
        if one.problems:
            passed_over.append(_passed_over(one, question.where_of(one.variant)))
            problems += one.problems
        else:
            possible.append((_worse(one), one, tuple(passed_over)))
    # A worse class (experimental, the CPU, smaller) comes after every better one.
    possible.sort(key=lambda item: item[0])
    items: list[Candidate] = []
    classes: dict[tuple[object, ...], int] = {}
    for worse, one, before in possible:
        place = classes.setdefault((*worse, one.candidate.variant), len(classes))
        reasons = (*before, *one.candidate.reasons)
        items.append(msgspec.structs.replace(one.candidate, preference=place, reasons=reasons))
    if items:
        return Candidates(model=model, items=tuple(items))
    closest = min(drafts, key=_how_far, default=None)
    if closest is not None:  # what is nearest to running is told first
        problems = [*closest.problems, *problems]
    return Candidates(
        model=model,
        refusal=_refusal(model, problems),
        closest=closest.candidate if closest else None,
    )


def _how_far(one: Draft) -> tuple[bool, int]:
    """A variant for other archs is further away than any that lacks something else."""
    return any(each.code == "variant_arch" for each in one.problems), len(one.problems)


def _startable(drafts: list[Draft]) -> list[Draft]:
    """Where this runtime starts some of the engines, the others are beside the point."""
    able = [one for one in drafts if not any(p.code == "not_embedded" for p in one.problems)]
    return able or drafts


def _worse(one: Draft) -> tuple[bool, bool, int]:
    experimental = one.candidate.support not in ("full", "precompiled_only")
    return experimental, one.cards[0].gpu is None, one.given_up


def _choose_runtime(
    wishes: Wishes, default_runtime: RuntimeName | None
) -> tuple[RuntimeName, str, str]:
    """The runtime, who chose it, and why."""
    if wishes.runtime is not None:
        return wishes.runtime, "option --runtime", "asked for"
    if default_runtime is not None:
        return default_runtime, "setting runtime", "asked for"
    return DEFAULT_RUNTIME, AUTOMATIC, "the engine that comes with FlexLab needs no container"


def _wanted(question: Question) -> list[AnyVariant]:
    wishes = question.wishes
    backend = wanted_backend(wishes, question.backend_recipe)
    return [
        variant
        for variant in question.recipe.variants
        if wishes.variant in (None, variant.name) and backend in (None, variant.backend)
    ]


def _devices(question: Question, variant: AnyVariant) -> devices.Choice:
    on_gpu, on_cpu = "gpu" in variant.devices, CPU_DEVICE in variant.devices
    backend = question.backend_recipe(variant.backend)
    cpu = devices.cpu_of(question.machine)
    asked = question.wishes.gpu
    wants_cpu = asked is not None and asked.lower() == CPU_DEVICE
    if not on_gpu and (asked is None or wants_cpu):
        return devices.Choice((cpu,), ())
    if not on_gpu or (wants_cpu and not on_cpu):
        where = "a GPU" if on_gpu else "the CPU"
        problem = Problem(
            code="device_unsupported",
            message=f"variant {variant.name} runs on {where} only",
            hint="leave out --gpu" if on_gpu else "--gpu cpu, or leave it out",
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


def _passed_over(one: Draft, where: str) -> Reason:
    choice = f"not variant {one.candidate.variant}"
    if one.cards[0].gpu is not None:
        choice += f" on {devices.shown(one.cards)}"
        if len(one.alike) > 1:
            choice += f" and {len(one.alike) - 1} like it"
    because = "; ".join(problem.message for problem in one.problems)
    return Reason(choice=choice, because=because, source=where)


def _not(device: Device, because: str) -> Reason:
    return Reason(choice=f"not {device.shown}", because=because, source="machine")


def _may_use_cpu(question: Question) -> bool:
    return any(CPU_DEVICE in variant.devices for variant in _wanted(question))


def _nowhere(question: Question) -> Problem:
    """No device at all for any of its variants."""
    model = question.recipe.name
    return Problem(
        code="no_device",
        message=f"{model} runs on a GPU only, and no usable one was found here",
        hint="flexlab gpus says what was found; flexlab recipes lists models that fit",
    )


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
