"""What `flexlab plan` answers: candidates, place and render in a row, on the machine as it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from flexlab.cli import output
from flexlab.core.errors import UsageError
from flexlab.core.settings import load_settings
from flexlab.core.text import clean_line
from flexlab.core.units import show_bytes
from flexlab.gpus import isolated
from flexlab.planning.candidates import candidates
from flexlab.planning.conditions import WRONG_WISH
from flexlab.planning.devices import gpu_devices
from flexlab.planning.render import render
from flexlab.recipes.catalogue import Catalogue
from flexlab.recipes.schema import ModelRecipe
from flexlab.runtimes.preflight import process_facts
from flexlab.scheduler.place import Asker, Occupancy, Room, place
from flexlab.scheduler.policy import Policy
from flexlab.scheduler.state import PoolAccount
from flexlab.spec.machine import Gpu, Machine, Pool, Problem
from flexlab.spec.plan import (
    Admission,
    Candidate,
    Candidates,
    Facts,
    Grant,
    Keep,
    LaunchPlan,
    Limit,
    Mount,
    Placement,
    Reason,
    Refusal,
    RuntimeFacts,
    RuntimeName,
    Support,
    Wait,
    Wishes,
)
from flexlab.spec.source import parse_source
from flexlab.weights.store import Store

Verdict = Literal["ok", "swap", "refused"]
HERE = Path("/")


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pool that the model itself lives in, in bytes."""

    need_bytes: int | None
    free_bytes: int | None
    terms: dict[str, int]


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `flexlab plan --json`; a refused one is as full as it can be."""

    verdict: Verdict
    model: str
    variant: str | None
    backend: str | None
    support: Support | None
    arch: str | None
    platform: str | None
    runtime: RuntimeName | None
    gpus: tuple[Gpu, ...] = ()
    image: str | None = None
    command: tuple[str, ...] | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    env_cleared: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    group_add: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()
    shm_bytes: int | None = None
    port: int | None = None
    group: str | None = None
    keep: Keep = "cold"
    priority: int = 100
    memory: Memory
    limits: tuple[Limit, ...] = ()
    certificates: tuple[Admission, ...] = ()
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Problem, ...] = ()
    alternatives: tuple[dict[str, Any], ...] = ()


def plan_here(word: str, root: Path, wishes: Wishes) -> Planned:
    """What would be launched on the machine below `root`. Raises UsageError for a wrong wish."""
    catalogue = Catalogue.load()
    recipe = catalogue.resolve(word)
    settings = load_settings().settings
    here = root == HERE
    machine = isolated.detect(
        root,
        ram_reserve_bytes=settings.ram_reserve_bytes if here else None,
        ram_budget_bytes=settings.ram_limit_bytes if here else None,
    )
    wishes, assumed = _with_runtime(root, wishes, settings.runtime)
    facts = _facts(root, recipe, Store(settings.models_dir))
    found = candidates(
        recipe,
        machine,
        facts,
        wishes,
        backend_recipe=catalogue.backend,
        where=catalogue.where(recipe),
        default_runtime=settings.runtime,
        gpu_recipe=catalogue.gpu,
        certificates=catalogue.certificates(),
    )
    _complain(found)
    answer = place(found, _occupancy(machine), Policy(), Asker(priority=recipe.priority))
    problems = [*assumed]
    if isinstance(answer, Placement):
        candidate: Candidate | None = answer.candidate
        verdict: Verdict = "swap" if answer.victims else "ok"
    else:
        candidate = found.items[0] if found.items else found.closest
        verdict = "refused"
        problems += _refused(found, answer)
    launch = None
    if candidate is not None:
        claims = {need.pool: need.total_bytes for need in candidate.needs}
        launch = render(
            candidate,
            Grant(devices=candidate.devices, claims=claims),
            machine=machine,
            facts=facts,
            backend_recipe=catalogue.backend,
            gpu_recipe=catalogue.gpu,
        )
        problems += [problem for problem in launch.problems if problem not in problems]
    others = [one for one in found.items if one is not candidate]
    return _planned(verdict, recipe, machine, candidate, launch, problems, others)


def _complain(found: Candidates) -> None:
    """A wish for what does not exist is the asker's mistake, and exits as one."""
    refusal = found.refusal
    if refusal is not None and all(each.code in WRONG_WISH for each in refusal.problems):
        raise UsageError(refusal.message, refusal.hint, code=refusal.code)


def _with_runtime(
    root: Path, wishes: Wishes, setting: RuntimeName | None
) -> tuple[Wishes, list[Problem]]:
    """Of another machine nobody can say what runs on it: docker is assumed, aloud.

    What `up` of this version would not start is said, too.
    """
    if root == HERE and wishes.runtime == "docker":
        planned_only = Problem(
            code="runtime_planned_only",
            message="this version plans containers and does not start them yet",
            hint="--runtime process plans what flexlab up would start",
        )
        return wishes, [planned_only]
    if root == HERE or wishes.runtime is not None or setting is not None:
        return wishes, []
    problem = Problem(
        code="runtime_assumed",
        message="that machine's runtimes cannot be asked: docker is assumed",
        hint="--runtime process plans for the embedded engine",
    )
    return replace(wishes, runtime="docker"), [problem]


def _facts(root: Path, recipe: ModelRecipe, store: Store) -> Facts:
    """Of this machine: its runtimes and installed weights; of another one nothing is known.

    Weights that are not here get the place where they would be, so that a plan is whole.
    """
    weights: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for weight in {w.source: w for v in recipe.variants for w in v.plan_weights()}.values():
        path = store.installed(weight) if root == HERE else None
        if path is not None and path.is_file():
            sizes[weight.source] = path.stat().st_size
        name = PurePosixPath(parse_source(weight.source).uri).name
        weights[weight.source] = str(path or store.models_dir / name)
    process = process_facts() if root == HERE else RuntimeFacts(name="process", available=True)
    docker = RuntimeFacts(name="docker", available=True)
    runtimes = {"process": process, "docker": docker}
    return Facts(runtimes=runtimes, weights=weights, weight_bytes=sizes)


def _occupancy(machine: Machine) -> Occupancy:
    return Occupancy(rooms={pool.id: _room(pool) for pool in machine.pools})


def _room(pool: Pool) -> Room:
    """As the scheduler accounts it, with all that is used taken for others'."""
    account = PoolAccount.of(pool)
    account.foreign_bytes = pool.used_bytes
    free = None if pool.used_bytes is None else account.free_bytes(0)
    return Room(usable_bytes=account.usable_bytes, free_bytes=free)


def _refused(found: Candidates, answer: Wait | Refusal) -> Iterator[Problem]:
    refusal = found.refusal
    holders = "flexlab gpus and flexlab ps show who holds the memory"
    if refusal is not None and refusal.problems:
        yield from refusal.problems
    elif isinstance(answer, Wait):
        yield Problem(code="no_memory", message=answer.why, hint=holders)
    else:
        yield Problem(code=answer.code, message=answer.message, hint=answer.hint or holders)


def _planned(
    verdict: Verdict,
    recipe: ModelRecipe,
    machine: Machine,
    candidate: Candidate | None,
    launch: LaunchPlan | None,
    problems: list[Problem],
    others: list[Candidate],
) -> Planned:
    if candidate is None or launch is None:
        return Planned(
            verdict=verdict, model=recipe.name, variant=None, backend=None, support=None,
            arch=None, platform=machine.platform, runtime=None, problems=tuple(problems),
            memory=Memory(need_bytes=None, free_bytes=None, terms={}),
        )  # fmt: skip
    need = candidate.needs[0]
    pool = machine.pool(need.pool)
    return Planned(
        verdict=verdict,
        model=recipe.name,
        variant=candidate.variant,
        backend=candidate.backend,
        support=candidate.support,
        arch=candidate.arch,
        platform=machine.platform,
        runtime=candidate.runtime,
        gpus=tuple(_gpus(machine, candidate)),
        image=launch.image,
        command=launch.command,
        args=launch.args,
        env=launch.env,
        env_cleared=launch.env_cleared,
        devices=launch.device_nodes or launch.gpu_uuids,
        group_add=launch.group_add,
        mounts=launch.mounts,
        shm_bytes=launch.shm_bytes,
        port=launch.port,
        group=candidate.group,
        keep=candidate.keep,
        priority=candidate.priority,
        memory=Memory(
            need_bytes=need.total_bytes,
            free_bytes=_room(pool).free_bytes if pool else None,
            terms=need.terms,
        ),
        limits=launch.limits,
        certificates=launch.admissions,
        reasons=launch.reasons,
        problems=tuple(dict.fromkeys(problems)),
        alternatives=tuple(_alternative(one) for one in others),
    )


def _gpus(machine: Machine, candidate: Candidate) -> Iterator[Gpu]:
    for device in gpu_devices(machine):
        if device.id in candidate.devices and device.gpu is not None:
            yield device.gpu


def _alternative(candidate: Candidate) -> dict[str, Any]:
    return {
        "variant": candidate.variant,
        "backend": candidate.backend,
        "arch": candidate.arch,
        "devices": candidate.devices,
        "support": candidate.support,
        "image": candidate.image,
    }


def show(planned: Planned) -> None:
    """For people: the verdict, the choices each with its reason, and what is in the way."""
    words: Mapping[Verdict, str] = {
        "ok": "would start", "swap": "would start after others yield", "refused": "cannot run here",
    }  # fmt: skip
    output.answer(f"{clean_line(planned.model)}: {words[planned.verdict]}")
    for reason in planned.reasons:
        output.answer_labelled("  why", f"{reason.choice}: {reason.because} ({reason.source})", 10)
    if planned.verdict != "refused":
        if planned.image:
            output.answer_labelled("  image", planned.image, 10)
        if planned.command:
            output.answer_labelled("  command", " ".join(planned.command), 10)
        output.answer_labelled("  args", " ".join(planned.args), 10)
        for name, value in planned.env.items():
            output.answer_labelled("  env", f"{name}={value}", 10)
        for name in planned.env_cleared:
            output.answer_labelled("  cleared", name, 10)
        for device in planned.devices:
            output.answer_labelled("  device", device, 10)
        need, free = planned.memory.need_bytes, planned.memory.free_bytes
        output.answer_labelled("  memory", f"{show_bytes(need)} of {show_bytes(free)} free", 10)
    for limit in planned.limits:
        output.answer_labelled("  limit", f"{limit.what}: {limit.given}, not {limit.wanted}", 10)
    for problem in planned.problems:
        output.answer_labelled("  problem", f"{problem.code}: {problem.message}", 10)
        output.answer_labelled("", f"-> {problem.hint}", 10)
