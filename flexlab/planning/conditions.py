"""What stands in the way of a variant here: each obstacle a Problem with its mend. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import msgspec

from flexlab import backends
from flexlab.backends.base import BackendSettings, read_settings
from flexlab.core.near import did_you_mean
from flexlab.core.text import clean_line
from flexlab.planning import cpus
from flexlab.planning.devices import Device, unknown_device
from flexlab.planning.question import Question
from flexlab.recipes.backend_schema import BackendRecipe, Embedded
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import VariantBase
from flexlab.spec.machine import Machine, Problem
from flexlab.spec.plan import Facts, RuntimeName, Wishes
from flexlab.spec.source import FileSource

_IMAGE = re.compile(r"[A-Za-z0-9][\w./:-]*(?:@sha256:[0-9a-f]{64})?")

WRONG_WISH = frozenset(
    {
        "unknown_variant",
        "unknown_backend",
        "unknown_gpu",
        "wrong_setting",
        "wrong_image",
        "image_without_container",
    }
)
"""Codes of wishes that name what does not exist: the asker's mistake, not this machine's lack."""


def cpu_arch(machine: Machine) -> str:
    """`x86_64`, `aarch64`, or `cpu` where the platform could not be read."""
    return cpus.arch_of(machine.platform)


def wrong_wishes(
    recipe: ModelRecipe,
    wishes: Wishes,
    machine: Machine,
    backend_recipe: Callable[[str], BackendRecipe],
) -> list[Problem]:
    """Wishes that no variant of this model can meet, whatever the machine."""
    found = [
        _variant(recipe, wishes),
        _backend(recipe, wishes, backend_recipe),
        unknown_device(machine, wishes.gpu),
        _image(wishes),
    ]
    problems = [problem for problem in found if problem is not None]
    return problems or list(_settings(recipe, wishes, backend_recipe))


def _image(wishes: Wishes) -> Problem | None:
    if wishes.image is None or _IMAGE.fullmatch(wishes.image):
        return None
    return Problem(
        code="wrong_image",
        message=f"{clean_line(wishes.image)!r} is no name of an image",
        hint="--image NAME:TAG or NAME@sha256:DIGEST",
    )


def _settings(
    recipe: ModelRecipe, wishes: Wishes, backend_recipe: Callable[[str], BackendRecipe]
) -> Iterator[Problem]:
    """Settings that are wrong for every variant that is left; one that only some of the engines
    know leads to those."""
    backend = wanted_backend(wishes, backend_recipe)
    told: dict[str, Problem] = {}
    for variant in recipe.variants:
        if wishes.variant not in (None, variant.name) or backend not in (None, variant.backend):
            continue
        own: BackendSettings = variant.settings
        _, wrong = read_settings(variant.backend, own, wishes.settings)
        if wrong is None or wrong.code not in WRONG_WISH:
            return
        told.setdefault(
            variant.backend, Problem(code=wrong.code, message=wrong.message, hint=wrong.hint or "")
        )
    yield from told.values()


def wanted_backend(wishes: Wishes, backend_recipe: Callable[[str], BackendRecipe]) -> str | None:
    """The backend asked for, by its own name (`llama.cpp` is `llamacpp`); None when none is."""
    if wishes.backend is None:
        return None
    asked = wishes.backend.lower()
    for name in backends.names():
        if asked == name or asked in backend_recipe(name).aliases:
            return name
    return asked


def obstacles(
    question: Question, variant: VariantBase, backend: BackendRecipe, device: Device
) -> Iterator[Problem]:
    """Why this variant cannot run on this device, all reasons but its support and its image."""
    yield from _runtime(question.facts, question.runtime)
    if variant.archs and device.arch not in variant.archs:
        yield Problem(
            code="variant_arch",
            message=f"variant {variant.name} is for {', '.join(variant.archs)}, and this is "
            f"{device.arch or 'an unknown arch'} ({device.shown})",
            hint=f"flexlab recipes show {question.recipe.name} lists its other variants",
        )
    if question.runtime == "process":
        if question.wishes.image is not None:
            yield Problem(
                code="image_without_container",
                message="an image was asked for, but the runtime process starts none",
                hint="leave out --image",
            )
        yield from _embedded(backend, device, question.machine)
    yield from _broken_weights(question, variant)


def _variant(recipe: ModelRecipe, wishes: Wishes) -> Problem | None:
    names = [variant.name for variant in recipe.variants]
    if wishes.variant is None or wishes.variant in names:
        return None
    asked = clean_line(wishes.variant)
    return Problem(
        code="unknown_variant",
        message=f"{recipe.name} has no variant {asked!r}{did_you_mean(asked, names)}",
        hint=f"variants of {recipe.name}: {', '.join(names)}",
    )


def _backend(
    recipe: ModelRecipe, wishes: Wishes, backend_recipe: Callable[[str], BackendRecipe]
) -> Problem | None:
    wanted = wanted_backend(wishes, backend_recipe)
    offered = list(dict.fromkeys(variant.backend for variant in recipe.variants))
    if wanted is None or wanted in offered:
        return None
    known = backends.names()
    asked = clean_line(wishes.backend or "")
    if wanted in known:
        message = f"{recipe.name} has no variant for the backend {wanted}"
    else:
        message = f"no backend named {asked!r}{did_you_mean(asked, known)}"
    return Problem(
        code="unknown_backend",
        message=message,
        hint=f"backends that {recipe.name} has a variant for: {', '.join(offered)}",
    )


def _runtime(facts: Facts, runtime: RuntimeName) -> Iterator[Problem]:
    known = facts.runtimes.get(runtime)
    if known is None:
        others = ", ".join(name for name, other in facts.runtimes.items() if other.available)
        yield Problem(
            code="runtime_unavailable",
            message=f"this version cannot start models in the runtime {runtime}",
            hint=f"--runtime takes: {others}" if others else "flexlab doctor says what is missing",
        )
    elif not known.available:
        yield from known.problems or (
            Problem(
                code="runtime_unavailable",
                message=f"the runtime {runtime} cannot be used here",
                hint="flexlab doctor says what is missing",
            ),
        )


def _broken_weights(question: Question, variant: VariantBase) -> Iterator[Problem]:
    """Files that are no model or are cut short. What FlexLab fetched, FlexLab can fetch again."""
    model = question.recipe.name
    for weight in variant.weights:
        source = weight.parsed
        if (problem := question.broken.get(source.uri)) is None:
            continue
        mend = problem.hint
        if not isinstance(source, FileSource):
            mend = f"flexlab rm {model} and flexlab pull {model} fetch it anew"
        yield msgspec.structs.replace(problem, hint=mend)


def _embedded(backend: BackendRecipe, device: Device, machine: Machine) -> Iterator[Problem]:
    embedded = backend.embedded
    if embedded is None:
        yield Problem(
            code="not_embedded",
            message=f"{backend.name} has no engine that runs as a process",
            hint="--runtime docker runs it in a container",
        )
    elif device.gpu is not None and device.arch not in embedded.archs:
        yield Problem(
            code="arch_not_embedded",
            message=f"the embedded {backend.name} engine holds no code for "
            f"{device.arch or 'an unknown arch'} ({device.shown})",
            hint="--gpu cpu runs it on the CPU",
        )
    elif device.gpu is None:
        yield from _cpu_flags(backend.name, embedded, machine)


def _cpu_flags(name: str, embedded: Embedded, machine: Machine) -> Iterator[Problem]:
    required = {str(name): flags for name, flags in embedded.cpu_flags.items()}
    arch = cpu_arch(machine)
    if arch != cpus.UNKNOWN_ARCH and arch not in required:
        yield Problem(
            code="platform_unsupported",
            message=f"the embedded {name} engine is not built for {arch}",
            hint=f"it is built for: {', '.join(required)}",
        )
    missing = cpus.missing_flags(required, machine.cpu, machine.platform)
    if missing:
        yield Problem(
            code="cpu_flags_missing",
            message=f"{cpus.called(machine.cpu)} lacks {', '.join(missing)}, which "
            f"the embedded {name} engine is compiled for",
            hint="--runtime docker has an image for older CPUs; a virtual machine may hide flags "
            "that its host has (choose the CPU type host)",
        )
