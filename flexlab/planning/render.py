"""A candidate and its grant become a launch plan: words, environment, times. Pure.

The plan never holds a port or a key: HOST, PORT and API_KEY_FILE stand for them as whole words, so
that a path or a name that contains such text stays what it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import msgspec

from flexlab import backends
from flexlab.backends.base import Backend, BackendSettings, Prepares, Site
from flexlab.core.errors import WeightsError
from flexlab.planning import container, images
from flexlab.planning.devices import Device, cpu_of, gpu_devices
from flexlab.planning.question import Locate, by_name
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.spec.machine import Machine
from flexlab.spec.plan import Candidate, Facts, Grant, LaunchPlan, Reason, Step

CONTAINERS = ("docker", "k3s")
LAUNCHED_FIELDS = (
    "model", "variant", "backend", "runtime", "arch", "served_name", "image", "command", "args",
    "env", "env_cleared", "devices", "group_add", "mounts", "shm_bytes", "port", "after_start",
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
    locate: Locate = by_name,
) -> LaunchPlan:
    """How `candidate` is launched in what it was granted.

    Raises WeightsError when its weights are not installed (facts.weights says where they are).
    """
    engine = backends.get(candidate.backend)
    recipe = backend_recipe(candidate.backend)
    settings = engine.settings_type.model_validate(candidate.settings)
    paths = {w.source: _installed(candidate, w.source, facts) for w in candidate.weights}
    cards = _cards(machine, grant.devices)
    device = cards[0]
    gpu = gpu_recipe(device.arch) if device.gpu else None
    in_container = candidate.runtime in CONTAINERS
    threads = machine.cpu.threads_usable if device.gpu is None else None
    site = _site(candidate, grant, device, recipe, paths, threads, in_container=in_container)
    args = engine.argv(settings, site)
    env = {**recipe.env, **engine.env(settings, site)}
    plan = LaunchPlan(
        model=candidate.model,
        variant=candidate.variant,
        backend=candidate.backend,
        runtime=candidate.runtime,
        arch=candidate.arch,
        served_name=candidate.model,
        image=candidate.image,
        args=args,
        env=env,
        devices=grant.devices,
        ready=recipe.ready.probe(),
        claims=grant.claims,
        keep=candidate.keep,
        priority=candidate.priority,
        group=candidate.group,
        start_timeout_s=candidate.start_timeout_s,
        stop_timeout_s=recipe.times.stop_timeout if stop_timeout_s is None else stop_timeout_s,
        on_disconnect=recipe.clients.on_disconnect,
        reasons=(*candidate.reasons, *_threads_reason(settings, device, threads)),
        problems=candidate.problems,
        limits=candidate.limits,
        context=candidate.context,
        admissions=candidate.admissions,
        memory_key=candidate.memory_key,
        slots=candidate.slots,
        after_start=_after_start(engine, settings, site),
    )
    if in_container:
        told = container.parts(
            candidate,
            cards,
            recipe,
            gpu,
            args=args,
            own_env=env,
            weights=paths,
            models_dir=facts.models_dir,
            locate=locate,
        )
        plan = _contained(plan, told)
    return msgspec.structs.replace(plan, hash=plan_hash(plan))


def _after_start(engine: Backend, settings: BackendSettings, site: Site) -> tuple[Step, ...]:
    """Only of engines that answer before they have a model."""
    return engine.after_start(settings, site) if isinstance(engine, Prepares) else ()


def _cards(machine: Machine, ids: tuple[str, ...]) -> tuple[Device, ...]:
    """The devices of a grant; one whose devices are gone is rendered as the CPU's."""
    known = {device.id: device for device in gpu_devices(machine)}
    return tuple(known[one] for one in ids if one in known) or (cpu_of(machine),)


def _site(
    candidate: Candidate,
    grant: Grant,
    device: Device,
    recipe: BackendRecipe,
    paths: dict[str, str],
    threads: int | None,
    *,
    in_container: bool,
) -> Site:
    path = ""
    if candidate.weights:
        source = candidate.weights[0].source
        path = paths[source]
        if in_container and recipe.container is not None:
            path = container.inside(source, recipe.container)
    image = images.facts_of(recipe, candidate.image or "", device.arch)
    return Site(
        model_path=path,
        served_name=candidate.model,
        threads=threads,
        gpus=len(grant.devices) if device.gpu else 0,
        claim_bytes=grant.claims.get(device.pool) if device.gpu else None,
        total_bytes=device.total_bytes if device.gpu else None,
        build=image.build if image else None,
    )


def _contained(plan: LaunchPlan, told: container.Parts) -> LaunchPlan:
    return msgspec.structs.replace(
        plan,
        args=told.args,
        command=told.environment.command,
        env=told.environment.variables,
        env_cleared=told.environment.cleared,
        device_nodes=told.device_nodes,
        gpu_uuids=told.gpu_uuids,
        group_add=told.group_add,
        mounts=told.mounts,
        shm_bytes=told.shm_bytes,
        port=told.port,
        reasons=(*plan.reasons, *told.environment.reasons),
    )


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


def _threads_reason(
    settings: BackendSettings, device: Device, threads: int | None
) -> Iterator[Reason]:
    """Why so many; a number that somebody chose is among the candidate's reasons already."""
    if device.gpu is not None or getattr(settings, "threads", None) is not None:
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
