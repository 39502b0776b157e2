"""Why each thing was chosen, and where the rule or the wish stands. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from flexlab.backends.base import BackendSettings
from flexlab.core.units import show_bytes
from flexlab.planning.devices import Device, shown
from flexlab.planning.fit import Estimate
from flexlab.planning.question import Question
from flexlab.recipes.variants import AnyVariant
from flexlab.spec.plan import Admission, Candidate, Reason


def choice_reasons(
    question: Question, variant: AnyVariant, cards: Sequence[Device]
) -> Iterable[Reason]:
    wishes, variants = question.wishes, question.recipe.variants
    if wishes.variant is not None:
        because, source = "asked for", "option --variant"
    elif len(variants) == 1:
        because, source = f"the only one of {question.recipe.name}", question.where_of(variant)
    else:
        because, source = "the recipe's order of preference", question.where_of(variant)
    because += f": {variant.reason.removesuffix('.')}"
    yield Reason(choice=f"variant {variant.name}", because=because, source=source)
    if wishes.backend is not None:
        yield Reason(
            choice=f"backend {variant.backend}", because="asked for", source="option --backend"
        )
    else:
        because = f"variant {variant.name} is made for it"
        yield Reason(
            choice=f"backend {variant.backend}", because=because, source=question.where_of(variant)
        )
    yield Reason(
        choice=f"runtime {question.runtime}",
        because=question.runtime_because,
        source=question.runtime_source,
    )
    yield _device_reason(question, cards)


def admission_reasons(admissions: Iterable[Admission]) -> Iterable[Reason]:
    """What a certificate admits, with what holds all the same."""
    for one in admissions:
        if one.admitted:
            because = " ".join([one.why, *one.limits])
            source = f"certificate {one.certificate}" if one.certificate else "certificates"
            yield Reason(choice=one.capability, because=because, source=source)


def _device_reason(question: Question, cards: Sequence[Device]) -> Reason:
    machine = question.machine
    if cards[0].gpu is not None:
        because = "asked for" if question.wishes.gpu else "the best that can run it"
        if len(cards) > 1:
            because = "it is too big for one of them"
        source = "option --gpu" if question.wishes.gpu else "machine"
        return Reason(choice=shown(cards), because=because, source=source)
    choice = f"CPU: {machine.cpu.name or 'model unknown'}"
    if question.wishes.gpu is not None:
        return Reason(choice=choice, because="asked for", source="option --gpu")
    usable = [gpu for gpu in machine.gpus if gpu.usable]
    if not machine.gpus:
        because = "no GPU was found"
    elif not usable:
        because = "no GPU here can be used"
    elif question.runtime == "process":
        because = "the embedded engine holds no code for the GPUs here"
    else:
        because = "nothing is known of this engine on the GPUs here"
    return Reason(choice=choice, because=because, source="machine")


def setting_reasons(
    question: Question, variant: AnyVariant, asked: BackendSettings, settings: BackendSettings
) -> Iterable[Reason]:
    """Every setting that was asked for, and those that people reckon with: each once, with who
    chose it. `asked` is what was wanted, `settings` what is given."""
    told: dict[tuple[str, str], list[str]] = {}
    known = type(settings).model_fields  # a wish for another one is refused, with all the rest
    own = variant.settings
    wished = [
        name
        for name, text in question.wishes.settings.items()
        if name in known and not _was_wrong(text, getattr(asked, name), getattr(own, name))
    ]
    for name in dict.fromkeys([*wished, *_told_anyway(settings)]):
        because, source = _chosen_by(question, variant, name)
        wanted, given = getattr(asked, name), getattr(settings, name)
        if wanted != given:
            because += f", cut from {wanted}"
        told.setdefault((because, source), []).append(_setting(name, given))
    for (because, source), choices in told.items():
        yield Reason(choice=", ".join(choices), because=because, source=source)


def _was_wrong(text: str, asked: object, own: object) -> bool:
    """Whether a wish was left out because it is wrong: then the value is the variant's own."""
    return asked == own and text not in (str(asked), json.dumps(asked))


def _told_anyway(settings: BackendSettings) -> Iterable[str]:
    if hasattr(settings, "context_size"):
        yield "context_size"
    if getattr(settings, "parallel", 1) > 1:
        yield "parallel"
    if getattr(settings, "threads", None) is not None:
        yield "threads"


def _chosen_by(question: Question, variant: AnyVariant, name: str) -> tuple[str, str]:
    if name in question.wishes.settings:
        return "asked for", "option --set"
    if name in variant.settings.model_fields_set:
        return "the variant's settings", question.where_of(variant)
    return f"the default of {variant.backend}", f"backend {variant.backend}"


def _setting(name: str, value: object) -> str:
    if name == "context_size":
        return f"context {value} tokens a request"
    if name == "parallel":
        return f"{value} request{'' if value == 1 else 's'} at a time"
    if name == "threads" and value is not None:
        return f"{value} thread{'' if value == 1 else 's'}"
    return f"{name} {value if isinstance(value, str) else json.dumps(value)}"


def memory_reason(need: Estimate, candidate: Candidate, measured: int | None) -> Reason:
    claimed = candidate.needs[0]
    choice = f"memory {show_bytes(claimed.total_bytes)} of {claimed.pool}"
    if measured is not None:
        return Reason(
            choice=choice,
            because=f"the most that its last runs took; the estimate was "
            f"{show_bytes(need.total_bytes)}",
            source="measurement",
        )
    because = sum_of(claimed.terms)
    if need.guessed:
        names = " and ".join(_words(term) for term in need.guessed)
        because += f"; {names} by a rule of thumb until the weights are here"
    if need.unknown:
        names = " and ".join(_words(term) for term in need.unknown)
        because += f"; {names} unknown until the weights are here"
    return Reason(choice=choice, because=because, source="estimate")


def sum_of(terms: Mapping[str, int]) -> str:
    return " + ".join(f"{_words(term)} {show_bytes(size)}" for term, size in terms.items() if size)


def _words(term: str) -> str:
    return term.replace("kv_", "KV ").replace("_", " ")
