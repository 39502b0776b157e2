"""What would be launched here for one model: candidates, place and render in a row."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
from msgspec.structs import replace

from flexlab.core.errors import UsageError
from flexlab.forecast.here import Here
from flexlab.planning.candidates import candidates
from flexlab.planning.conditions import WRONG_WISH
from flexlab.planning.devices import gpu_devices
from flexlab.planning.render import render
from flexlab.recipes.schema import ModelRecipe
from flexlab.scheduler.place import Asker, place
from flexlab.scheduler.policy import Policy
from flexlab.spec.machine import CPU_DEVICE, Gpu, Machine, Problem
from flexlab.spec.plan import (
    Admission,
    Candidate,
    Candidates,
    Evidence,
    Facts,
    Grant,
    Keep,
    LaunchPlan,
    Limit,
    Mount,
    Placement,
    Reason,
    Refusal,
    RuntimeName,
    Support,
    Wait,
    Wishes,
)

Verdict = Literal["ok", "swap", "refused"]
_POLICY = Policy()


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pool that the model itself lives in, in bytes."""

    need_bytes: int | None
    free_bytes: int | None
    terms: dict[str, int]


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """Another way that is open here, and the wish that leads to it."""

    variant: str
    backend: str
    arch: str
    devices: tuple[str, ...]
    support: Support
    image: str | None
    command: str


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
    would_displace: tuple[str, ...] = ()
    """Models that would have to make room."""
    evidence: Evidence | None = None
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Problem, ...] = ()
    alternatives: tuple[Alternative, ...] = ()


def plan(here: Here, recipe: ModelRecipe, asked: Wishes) -> Planned:
    """What would be launched. Raises UsageError for a wish that names what does not exist."""
    wishes, notes = here.with_runtime(asked)
    problems: list[Problem] = []
    found, facts = candidates_here(here, recipe, wishes)
    _complain(found)
    answer = place(found, here.occupancy, _POLICY, Asker(priority=recipe.priority))
    verdict: Verdict = "refused"
    candidate: Candidate | None = found.items[0] if found.items else found.closest
    displaced: tuple[str, ...] = ()
    if isinstance(answer, Placement):
        candidate = answer.candidate
        verdict = "swap" if answer.victims else "ok"
        displaced = _models(here, answer.victims)
    elif isinstance(answer, Wait):
        # It runs once others are done: they yield as soon as scheduling lets them.
        candidate, verdict = answer.candidate, "swap"
        displaced = _models(here, answer.blocked_by)
        problems.append(_waits(answer))
    else:
        problems += _refused(found, answer)
    if candidate is None:
        nothing = _nothing(recipe, here.machine, [*problems, *notes])
        return replace(nothing, alternatives=tuple(_ways_out(here, recipe, wishes)))
    launch = _render(here, candidate, facts)
    problems += [*launch.problems, *notes]
    others = [one for one in found.items if one is not candidate]
    ways = _alternatives(here, recipe, others, wishes)
    if verdict == "refused":
        ways += _ways_out(here, recipe, wishes)
    return replace(
        _planned(here.machine, candidate, launch),
        verdict=verdict,
        memory=_memory(here, candidate),
        would_displace=displaced,
        problems=tuple(dict.fromkeys(problems)),
        alternatives=tuple(ways),
    )


def candidates_here(here: Here, recipe: ModelRecipe, wishes: Wishes) -> tuple[Candidates, Facts]:
    """What could run here, and what was known of the software for it."""
    weights = [weight for variant in recipe.variants for weight in variant.plan_weights()]
    installed = here.weights(weights)
    facts = here.facts(weights, installed)
    catalogue = here.catalogue
    found = candidates(
        recipe,
        here.machine,
        facts,
        wishes,
        backend_recipe=catalogue.backend,
        default_runtime=here.settings.runtime,
        shapes=installed.headers,
        broken=installed.broken,
        gpu_recipe=catalogue.gpu,
        certificates=catalogue.certificates_of,
        locate=catalogue.where,
    )
    return found, facts


def _complain(found: Candidates) -> None:
    """A wish for what does not exist is the asker's mistake, and exits as one."""
    refusal = found.refusal
    if refusal is not None and all(each.code in WRONG_WISH for each in refusal.problems):
        raise UsageError(refusal.message, refusal.hint, code=refusal.code)


def _models(here: Here, instances: tuple[str, ...]) -> tuple[str, ...]:
    names = {one.instance: one.model for one in here.occupancy.occupants}
    return tuple(dict.fromkeys(names[one] for one in instances if one in names))


def _waits(answer: Wait) -> Problem:
    return Problem(
        code="waits", message=answer.why, hint="flexlab up waits for that; flexlab ps shows them"
    )


def _refused(found: Candidates, answer: Refusal) -> Iterator[Problem]:
    refusal = found.refusal
    if refusal is not None and refusal.problems:
        yield from refusal.problems
    else:
        holders = "flexlab gpus and flexlab ps show who holds the memory"
        yield Problem(code=answer.code, message=answer.message, hint=answer.hint or holders)


def _ways_out(here: Here, recipe: ModelRecipe, wishes: Wishes) -> list[Alternative]:
    """Where it is refused: what would work without some of the wishes, the nearest first."""
    plain = Wishes(runtime=wishes.runtime)
    looser = [
        replace(wishes, settings={}, image=None),
        replace(plain, gpu=wishes.gpu),
        plain,
        replace(plain, allow_experimental=True),
        replace(plain, gpu=CPU_DEVICE),
    ]
    for tried in looser:
        if tried == wishes:
            continue
        found, _ = candidates_here(here, recipe, tried)
        if ways := _alternatives(here, recipe, found.items, tried):
            return ways
    return []


def _alternatives(
    here: Here, recipe: ModelRecipe, candidates: Iterable[Candidate], wishes: Wishes
) -> list[Alternative]:
    """Those that there is room for. Of the same way on several cards of one arch, the first says
    it for all."""
    firsts: dict[tuple[str, str, str, int], Candidate] = {}
    for one in candidates:
        if _has_room(here, recipe, one):
            firsts.setdefault((one.variant, one.arch, one.support, len(one.devices)), one)
    return [_alternative(here, one, wishes) for one in firsts.values()]


def _has_room(here: Here, recipe: ModelRecipe, candidate: Candidate) -> bool:
    """Now, or once others have made room."""
    alone = Candidates(model=recipe.name, items=(candidate,))
    answer = place(alone, here.occupancy, _POLICY, Asker(priority=recipe.priority))
    return not isinstance(answer, Refusal)


def _alternative(here: Here, candidate: Candidate, wishes: Wishes) -> Alternative:
    words = [f"flexlab plan {candidate.model} --variant {candidate.variant}"]
    if wishes.runtime is not None:
        words.append(f"--runtime {wishes.runtime}")
    if candidate.support in ("experimental", "unknown"):
        words.append("--allow-experimental")
    # Several cards are taken by themselves where one is too small, the CPU where there is no GPU.
    if len(candidate.devices) == 1 and (here.machine.gpus or wishes.gpu is not None):
        words.append(f"--gpu {candidate.devices[0]}")
    if wishes.image is not None:
        words.append(f"--image {wishes.image}")
    words += [f"--set {shlex.quote(f'{name}={text}')}" for name, text in wishes.settings.items()]
    return Alternative(
        variant=candidate.variant,
        backend=candidate.backend,
        arch=candidate.arch,
        devices=candidate.devices,
        support=candidate.support,
        image=candidate.image,
        command=" ".join(words),
    )


def _render(here: Here, candidate: Candidate, facts: Facts) -> LaunchPlan:
    claims = {need.pool: need.total_bytes for need in candidate.needs}
    return render(
        candidate,
        Grant(devices=candidate.devices, claims=claims),
        machine=here.machine,
        facts=facts,
        backend_recipe=here.catalogue.backend,
        gpu_recipe=here.catalogue.gpu,
        locate=here.catalogue.where,
    )


def _memory(here: Here, candidate: Candidate) -> Memory:
    need = candidate.needs[0]
    room = here.occupancy.rooms.get(need.pool)
    return Memory(
        need_bytes=need.total_bytes,
        free_bytes=room.free_bytes if room else None,
        terms=need.terms,
    )


def _nothing(recipe: ModelRecipe, machine: Machine, problems: list[Problem]) -> Planned:
    """Not even a candidate that came close."""
    return Planned(
        verdict="refused",
        model=recipe.name,
        variant=None,
        backend=None,
        support=None,
        arch=None,
        platform=machine.platform,
        runtime=None,
        problems=tuple(problems),
        memory=Memory(need_bytes=None, free_bytes=None, terms={}),
    )


def _planned(machine: Machine, candidate: Candidate, launch: LaunchPlan) -> Planned:
    devices = gpu_devices(machine)
    return Planned(
        verdict="refused",
        model=candidate.model,
        variant=candidate.variant,
        backend=candidate.backend,
        support=candidate.support,
        arch=candidate.arch,
        platform=machine.platform,
        runtime=candidate.runtime,
        gpus=tuple(d.gpu for d in devices if d.gpu is not None and d.id in candidate.devices),
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
        memory=Memory(need_bytes=None, free_bytes=None, terms={}),
        limits=launch.limits,
        certificates=launch.admissions,
        evidence=candidate.evidence,
        reasons=launch.reasons,
    )
