"""One variant on one device (or on several together), as far as it can be thought through. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from flexlab import backends
from flexlab.backends.base import BackendSettings
from flexlab.planning import certificates as certificates_of
from flexlab.planning import environment, fit, images, reasons, sizing, support
from flexlab.planning.asked import changed, settings_for
from flexlab.planning.conditions import cpu_arch, obstacles
from flexlab.planning.devices import Device
from flexlab.planning.question import Question
from flexlab.planning.render import CONTAINERS
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.variants import AnyVariant
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Admission, Candidate, Evidence, Limit, Support

_LACKS_MEMORY = frozenset({"too_big", "share_too_small"})


class Draft(NamedTuple):
    """One variant in one place, and what stands in its way."""

    candidate: Candidate
    variant: AnyVariant
    cards: tuple[Device, ...]
    problems: tuple[Problem, ...]
    """None: it can run."""
    settings: BackendSettings
    model: fit.Model
    ground: fit.Ground
    given_up: int = 0
    """0: nothing; 1: so that it ever fits; 2: so that it fits beside what others hold now."""
    alike: tuple[Device, ...] = ()
    """Where it cannot run: all the cards of which the same is true."""

    @property
    def only_too_big(self) -> bool:
        """Whether it lacks memory and nothing else."""
        return bool(self.problems) and all(one.code in _LACKS_MEMORY for one in self.problems)


class Given(NamedTuple):
    """What was given up so that it fits."""

    settings: Mapping[str, object] = {}
    limits: tuple[Limit, ...] = ()


def draft(
    question: Question,
    variant: AnyVariant,
    cards: Sequence[Device],
    smaller: Given | None = None,
    given_up: int = 0,
) -> Draft:
    """Every choice for this variant on these cards, and all that stands in its way."""
    device = cards[0]
    backend = question.backend_recipe(variant.backend)
    recipe = question.gpu_recipe(device.arch)
    model = sizing.known_model(question, variant)
    asked = settings_for(question, variant, device, recipe, model)
    given, limits = asked.given, asked.limits
    if smaller is not None:
        given, limits = changed(given, smaller.settings), (*limits, *smaller.limits)
    ground = _ground(backend, cards)
    need = fit.estimate(given, model, ground)
    image = _image(question, variant, backend, cards, given)
    judged = support.judge(
        variant.backend,
        device,
        recipe,
        settings=given.model_dump(),
        allow_experimental=question.wishes.allow_experimental,
        locate=question.locate,
    )
    admissions = certificates_of.judge(
        variant.backend,
        given.model_dump(),
        arch=device.arch,
        image=image.name,
        on_cpu=device.gpu is None,
        certificates=question.certificates(variant.backend),
        contract=variant.contract,
        certified=variant.settings.model_dump(),
    )
    admissions += _left_out(question, variant, asked.wrong)
    candidate = msgspec.structs.replace(
        _bare(question, variant, backend, cards),
        support=judged.level,
        image=image.name,
        settings=given.model_dump(),
        needs=need.needs(*sizing.shares(variant.backend, cards)),
        limits=limits,
        context=getattr(given, "context_size", None),
        admissions=tuple(admissions),
        evidence=_weakest(variant.evidence, judged.evidence, image.evidence),
    )
    if image.name is not None:
        told = (*candidate.problems, *image.problems)
        candidate = msgspec.structs.replace(candidate, problems=told)
    key = sizing.memory_key(candidate, cards)
    candidate = msgspec.structs.replace(candidate, memory_key=key, slots=_slots(given))
    candidate, measured = sizing.with_measured_claim(question, candidate)
    problems = [
        *obstacles(question, variant, backend, device),
        *asked.problems,
        *judged.problems,
        *image.refused,
        *_of_another_engine(question, variant),
        *(image.problems if image.name is None else ()),
        *(problem for each in admissions for problem in each.problems),
        *_rules(question, variant, recipe, image, given),
        *sizing.too_big(question, candidate, given, model, need, ground, measured),
    ]
    why = (
        *reasons.choice_reasons(question, variant, cards),
        *judged.reasons,
        *image.reasons,
        *reasons.admission_reasons(admissions),
        *reasons.setting_reasons(question, variant, asked.wanted, given),
        reasons.memory_reason(need, candidate, measured),
    )
    candidate = msgspec.structs.replace(candidate, reasons=why)
    return Draft(
        candidate=candidate,
        variant=variant,
        cards=tuple(cards),
        problems=tuple(problems),
        settings=given,
        model=model,
        ground=ground,
        given_up=given_up,
        alike=tuple(cards),
    )


def on_twin(first: Draft, card: Device) -> Draft:
    """The same on a card that differs by nothing but its address."""
    old, candidate = first.cards[0], first.candidate
    needs = tuple(
        msgspec.structs.replace(need, pool=card.pool) if need.pool == old.pool else need
        for need in candidate.needs
    )
    named = {old.shown: card.shown}
    told = tuple(
        msgspec.structs.replace(
            reason,
            choice=named.get(reason.choice) or reason.choice.replace(old.pool, card.pool),
        )
        if reason.choice in named or reason.choice.endswith(old.pool)
        else reason
        for reason in candidate.reasons
    )
    twin = msgspec.structs.replace(candidate, devices=(card.id,), needs=needs, reasons=told)
    return first._replace(candidate=twin, cards=(card,), alike=(card,))


def _slots(settings: BackendSettings) -> int | None:
    """Requests side by side, by whatever name the engine has for them."""
    names = ("parallel", "max_num_seqs", "max_num_sequence")
    found = (getattr(settings, name, None) for name in names)
    return next((slots for slots in found if slots is not None), None)


def _of_another_engine(question: Question, variant: AnyVariant) -> list[Problem]:
    """An image that is known as another engine's never starts this one."""
    wish = question.wishes.image
    if wish is None or question.runtime not in CONTAINERS:
        return []
    wanted = images.repository(wish)
    owners = [
        name
        for name in backends.names()
        for image, _ in question.backend_recipe(name).image_choices
        if images.repository(image.image) == wanted
    ]
    if not owners or variant.backend in owners:
        return []
    return [
        Problem(
            code="image_engine",
            message=f"{wish} is an image of {owners[0]}, and variant {variant.name} runs in "
            f"{variant.backend}",
            hint=f"--backend {owners[0]}, or leave out --image",
        )
    ]


def _left_out(question: Question, variant: AnyVariant, wrong: Mapping[str, str]) -> list[Admission]:
    """A gated feature that was asked for with a wrong setting is refused as such, too."""
    return [
        Admission(capability=one.capability, admitted=False, why=why, certificate=one.name)
        for one in question.certificates(variant.backend)
        for name, why in wrong.items()
        if name in one.asks
    ]


def _weakest(*evidence: Evidence) -> Evidence:
    order: tuple[Evidence, ...] = ("untested", "documented", "tested")
    return min(evidence, key=order.index)


def _ground(backend: BackendRecipe, cards: Sequence[Device]) -> fit.Ground:
    on_gpu = cards[0].gpu is not None
    return fit.Ground(
        overhead_bytes=backend.memory.overhead,
        on_gpu=on_gpu,
        card_bytes=cards[0].total_bytes if on_gpu else None,
        driver_bytes=backend.driver.bytes if backend.driver and on_gpu else 0,
    )


def _image(
    question: Question,
    variant: AnyVariant,
    backend: BackendRecipe,
    cards: Sequence[Device],
    given: BackendSettings,
) -> images.Chosen:
    if question.runtime not in CONTAINERS:
        return images.Chosen(None, None)
    known = question.certificates(variant.backend)
    return images.choose(
        backend,
        cards,
        platform=question.machine.platform,
        cpu=question.machine.cpu,
        wish=question.wishes.image,
        bound=certificates_of.bound_image(backend.name, given.model_dump(), cards[0].arch, known),
        engine_min=variant.engine_min,
        locate=question.locate,
    )


def _rules(
    question: Question,
    variant: AnyVariant,
    recipe: GpuRecipe | None,
    image: images.Chosen,
    given: BackendSettings,
) -> list[Problem]:
    """What the arch forbids, what a candidate lacks, and what the image would smuggle in."""
    named = (getattr(given, "quantization", None), variant.quantization, library_of(given))
    found = support.broken_rules(
        variant.backend, question.recipe.name, named, recipe, image.facts, tested=image.tested
    )
    lacking = support.unpromoted(variant, image.facts, tested=image.tested)
    hidden: tuple[Problem, ...] = ()
    if image.name is not None:
        hidden = environment.uncleared(variant.backend, recipe, image.facts)
    return [*found, *lacking, *hidden]


def library_of(settings: BackendSettings) -> str | None:
    """The compiled library that the settings name; its path tells its quantisation."""
    library: str | None = getattr(settings, support.LIBRARY, None)
    return library


def _bare(
    question: Question, variant: AnyVariant, backend: BackendRecipe, cards: Sequence[Device]
) -> Candidate:
    """What follows from the recipes alone; needs and settings are still to come."""
    recipe, facts = question.recipe, question.facts.runtimes.get(question.runtime)
    device = cards[0]
    level: Support = "full"
    return Candidate(
        model=recipe.name,
        variant=variant.name,
        backend=variant.backend,
        runtime=question.runtime,
        arch=(device.arch or "?") if device.gpu else cpu_arch(question.machine),
        support=level,
        devices=tuple(card.id for card in cards),
        needs=(),
        weights=tuple(weight.weight() for weight in variant.weights),
        group=variant.group,
        group_with_card=variant.takes_in is not None,
        keep=recipe.keep,
        priority=recipe.priority,
        start_timeout_s=backend.times.start_timeout,
        idle_timeout_s=recipe.idle_timeout,
        problems=facts.problems if facts else (),
    )
