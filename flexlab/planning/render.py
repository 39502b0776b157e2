"""A candidate and its grant become a launch plan: words, environment, times. Pure.

The plan never holds a port or a key: HOST, PORT and API_KEY_FILE stand for them as whole words, so
that a path or a name that contains such text stays what it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from flexlab import backends
from flexlab.backends.base import BackendSettings, Site
from flexlab.core.errors import WeightsError
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.spec.machine import CPU_DEVICE, Machine
from flexlab.spec.plan import Candidate, Facts, Grant, LaunchPlan, Reason

LAUNCHED_FIELDS = (
    "model", "variant", "backend", "runtime", "arch", "served_name", "image", "command", "args",
    "env", "env_cleared", "devices", "group_add", "mounts", "shm_bytes", "port",
)  # fmt: skip
"""What a plan's hash is taken over; the rest is why and how long, not what."""


def render(
    candidate: Candidate,
    grant: Grant,
    *,
    machine: Machine,
    facts: Facts,
    backend_recipe: Callable[[str], BackendRecipe],
    gpu_recipe: Callable[[str | None], GpuRecipe | None] = lambda _arch: None,
    stop_timeout_s: float | None = None,
) -> LaunchPlan:
    """How `candidate` is launched in what it was granted.

    Raises WeightsError when its weights are not installed (facts.weights says where they are).
    """
    backend = backends.get(candidate.backend)
    recipe = backend_recipe(candidate.backend)
    settings = backend.settings_type.model_validate(candidate.settings)
    paths = [_installed(candidate, weight.source, facts) for weight in candidate.weights]
    threads = machine.cpu.threads_usable if CPU_DEVICE in grant.devices else None
    site = Site(model_path=paths[0], served_name=candidate.model, threads=threads)
    plan = LaunchPlan(
        model=candidate.model,
        variant=candidate.variant,
        backend=candidate.backend,
        runtime=candidate.runtime,
        arch=candidate.arch,
        served_name=candidate.model,
        image=candidate.image,
        args=backend.argv(settings, site),
        env={**recipe.env, **backend.env(settings, site)},
        devices=grant.devices,
        ready=recipe.ready.probe(),
        claims=grant.claims,
        keep=candidate.keep,
        priority=candidate.priority,
        group=candidate.group,
        start_timeout_s=candidate.start_timeout_s,
        stop_timeout_s=recipe.times.stop_timeout if stop_timeout_s is None else stop_timeout_s,
        on_disconnect=recipe.clients.on_disconnect,
        reasons=(*candidate.reasons, *_threads_reason(settings, threads)),
        problems=candidate.problems,
        limits=candidate.limits,
        context=candidate.context,
    )
    return msgspec.structs.replace(plan, hash=plan_hash(plan))


def plan_hash(plan: LaunchPlan) -> str:
    """sha256 over what is launched, the same in every process and for every order of `env`."""
    launched = {name: getattr(plan, name) for name in LAUNCHED_FIELDS}
    return hashlib.sha256(msgspec.json.encode(launched, order="sorted")).hexdigest()


def _installed(candidate: Candidate, source: str, facts: Facts) -> str:
    path = facts.weights.get(source)
    if path is None:
        raise WeightsError(
            f"the weights of {candidate.model} are not installed: {source}",
            f"flexlab pull {candidate.model}",
            code="model_not_installed",
        )
    return path


def _threads_reason(settings: BackendSettings, threads: int | None) -> Iterator[Reason]:
    """Why so many; a number that somebody chose is among the candidate's reasons already."""
    if getattr(settings, "threads", None) is not None:
        return
    if threads is None:
        yield Reason(
            choice="threads: the engine chooses",
            because="how many this process may use could not be read",
            source="machine",
        )
        return
    yield Reason(
        choice=f"{threads} thread{'' if threads == 1 else 's'}",
        because="what this process may use of the CPU (affinity and control groups)",
        source="machine",
    )
