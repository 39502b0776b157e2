"""Why a model is in the state that it is in, in sentences. Reads the state; changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from flexlab.core.units import say_bytes, show_seconds
from flexlab.scheduler.passes import Passes
from flexlab.scheduler.state import Instance, Model


def why(state: Passes, name: str, now: float) -> list[str]:
    """What it waits for, who holds what, and until when at the latest. `now`: loop time.

    Raises KeyError for a model that is not registered.
    """
    model = state.models[name]
    instances = list(state.instances_of(name))
    sentences = [*_instances(state, model, instances, now)]
    sentences += _waiting(state, model, now)
    if not instances and not model.waiters:
        sentences += _cold(state, model, now)
    sentences += _standing(model)
    return sentences


def _instances(state: Passes, model: Model, instances: list[Instance], now: float) -> Iterator[str]:
    for instance in instances:
        where = ", ".join("the CPU" if d == "cpu" else d for d in instance.candidate.devices)
        since = show_seconds(now - instance.since)
        yield (
            f"{instance.id} is {instance.state} for {since} on {where}: {instance.why}"
            + _until(instance.until, now)
        )
        held = ", ".join(f"{say_bytes(instance.held(pool))} of {pool}" for pool in instance.claims)
        measured = " (measured)" if instance.measured else " (estimated)"
        yield f"it holds {held}{measured}"
        for condition in instance.conditions.values():
            yield f"it is {condition.kind}: {condition.why}"
        if instance.leases:
            count = len(instance.leases)
            yield f"it works on {count} request{'' if count == 1 else 's'}"
        elif (unload := state.unload_at(instance)) is not None:
            yield f"it is idle and unloads in {show_seconds(max(0.0, unload - now))}"
        if instance.drained_for is not None:
            yield f"it makes room for {instance.drained_for}"
        for other in state.waiting():
            if instance.id in other.blocked_by and instance.drained_for != other.name:
                yield f"{other.name} (priority {other.priority}) waits for it to finish"


def _waiting(state: Passes, model: Model, now: float) -> Iterator[str]:
    if not model.waiters:
        return
    count = len(model.waiters)
    latest = max(waiter.deadline for waiter in model.waiters)
    yield (
        f"{count} request{'' if count == 1 else 's'} wait{'s' if count == 1 else ''}"
        + _until(latest, now)
    )
    if model.preparing is not None:
        what = "its weights are being fetched" if model.preparing.download else "it is planned"
        yield what
    if model.waits_for is not None:
        yield f"it {model.waits_for}" if model.waits_for.startswith("waits") else model.waits_for
    for name in sorted(model.blocked_by):
        holder = state.instances.get(name)
        if holder is None:
            continue
        held = ", ".join(f"{say_bytes(holder.held(p))} of {p}" for p in holder.claims)
        yield f"{holder.model} holds {held} and is {holder.state}" + _until(holder.until, now)
    ahead = [
        other.name
        for other in state.waiting()
        if other is not model and (-other.priority, other.oldest) < (-model.priority, model.oldest)
    ]
    if ahead:
        yield f"ahead of it in the queue: {', '.join(ahead)}"


def _cold(state: Passes, model: Model, now: float) -> Iterator[str]:
    if not model.enabled:
        yield "it is disabled: flexlab enable lets it start again"
        return
    if model.preempted_by is not None:
        back = "it comes back by itself" if model.is_warm else "its next request brings it back"
        yield f"it made room for {model.preempted_by}; {back}"
    elif model.held_down:
        yield "its user stopped it; the next request or flexlab up starts it"
    elif model.problem is not None:
        yield f"the last time: {model.problem.message}"
    else:
        yield "nobody asked for it: the next request or flexlab up starts it"
    if model.failures and now < model.back_off_until:
        yield (
            f"it failed {model.failures} times and is not tried for another "
            f"{show_seconds(model.back_off_until - now)}; flexlab up tries at once"
        )
    if model.is_warm and model.awaits_memory:
        yield "it is kept warm and waits until its memory is free"
    if model.keep == "warm" and not model.is_member:
        yield "it is to be kept warm, but does not fit beside the other warm models"


def _standing(model: Model) -> Iterator[str]:
    facts = [f"priority {model.priority}", f"keep {model.keep}"]
    if model.pinned:
        facts.append("pinned: never made to yield")
    if model.max_in_flight is not None:
        facts.append(f"at most {model.max_in_flight} requests at a time")
    if model.replicas > 1:
        facts.append(f"up to {model.replicas} instances")
    yield "; ".join(facts)


def _until(when: float | None, now: float) -> str:
    return "" if when is None else f", for another {show_seconds(max(0.0, when - now))} at most"
