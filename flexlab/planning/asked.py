"""The settings that a variant runs with: its own, the arch's, the user's, and what limits them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexlab.backends.base import BackendSettings, read_settings
from flexlab.planning import fit
from flexlab.planning.devices import Device
from flexlab.planning.question import Question
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.variants import AnyVariant
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Limit


class Asked(NamedTuple):
    """What was wanted, what is given, and what is wrong with the rest."""

    wanted: BackendSettings
    given: BackendSettings
    limits: tuple[Limit, ...]
    problems: tuple[Problem, ...]
    wrong: Mapping[str, str] = {}
    """Settings whose wish was left out, with what is wrong with it."""


def settings_for(
    question: Question,
    variant: AnyVariant,
    device: Device,
    recipe: GpuRecipe | None,
    model: fit.Model,
) -> Asked:
    """A user's wish beats the arch's need, which stands in where the variant says nothing."""
    own: BackendSettings = variant.settings
    wanted, wrong = read_settings(
        variant.backend, _with_defaults(own, variant.backend, recipe), question.wishes.settings
    )
    problems = list(_forbidden(variant, own, wanted))
    if wrong is not None:
        problems.insert(0, Problem(code=wrong.code, message=wrong.message, hint=wrong.hint or ""))
    given, limits = _within_limits(wanted, model, device)
    return Asked(wanted, given, limits, tuple(problems), wrong.names if wrong else {})


def _with_defaults(
    settings: BackendSettings, backend: str, recipe: GpuRecipe | None
) -> BackendSettings:
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


def _forbidden(
    variant: AnyVariant, own: BackendSettings, wanted: BackendSettings
) -> tuple[Problem, ...]:
    def changed(name: str) -> bool:
        return bool(getattr(wanted, name, None) != getattr(own, name, None))

    return tuple(
        Problem(code="forbidden_setting", message=rule.message, hint=rule.hint)
        for rule in variant.forbidden
        if changed(rule.setting)
    )


def _within_limits(
    settings: BackendSettings, model: fit.Model, device: Device
) -> tuple[BackendSettings, tuple[Limit, ...]]:
    """The engine cuts the context to what was trained and ignores GPU layers on the CPU: do so
    before it does, and say it."""
    limits: list[Limit] = []
    given: dict[str, object] = {}
    layers = getattr(settings, "n_gpu_layers", None)
    if device.gpu is None and hasattr(settings, "n_gpu_layers"):
        given["n_gpu_layers"] = 0
        if layers:
            limits.append(Limit(what="n_gpu_layers", wanted=str(layers), given="0 (on the CPU)"))
    trained = (model.shape.context_length if model.shape else None) or model.context
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


def changed(settings: BackendSettings, update: Mapping[str, object]) -> BackendSettings:
    """The same with other values. Raises ValueError where they do not go together."""
    return type(settings).model_validate({**settings.model_dump(), **update})
