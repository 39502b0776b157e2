"""What is told of a model by `ps`: rows of its table, a line, JSON."""

from __future__ import annotations

import time

from flexlab.cli.table import Column
from flexlab.core.text import clean_line
from flexlab.core.units import show_bytes, show_seconds
from flexlab.spec.lab import InstanceView, ModelView, Snapshot

COLUMNS = (
    Column("MODEL", flexible=True),
    Column("STATE"),
    Column("BACKEND", drop=7),
    Column("DEVICE", drop=3),
    Column("MEM", drop=2, right=True),
    Column("IN-FLIGHT", drop=6, right=True),
    Column("IDLE/UNTIL", drop=4),
    Column("WHY", drop=5, flexible=True),
)
NONE = "no model is running; flexlab up MODEL starts one"


def is_active(model: ModelView) -> bool:
    """Whether there is more to tell of it than that it could be started."""
    return bool(model.instances or model.waiting or model.word not in ("cold", "off"))


def as_json(snapshot: Snapshot, models: list[ModelView]) -> dict[str, object]:
    """The stable shape of `ps --json`."""
    return {
        "daemon": {
            "pid": snapshot.pid,
            "version": snapshot.flexlab_version,
            "address": snapshot.address,
            "started_at": snapshot.started_at,
        },
        "models": models,
        "instances": snapshot.instances,
        "pools": snapshot.pools,
        "gpus": snapshot.gpus,
    }


def rows(model: ModelView, snapshot: Snapshot) -> list[list[str]]:
    """One row per instance; a model without one has a row of its own."""
    instances = _instances(model, snapshot)
    if not instances:
        return [[model.name, model.word, "", "", "", _count(model), _until(model), model.why]]
    return [_instance_row(model, instance, snapshot) for instance in instances]


def tell(model: ModelView, snapshot: Snapshot) -> str:
    """All that is worth a line of its own when it changes: no ages, no readings."""
    facts: list[str] = [model.word]
    for instance in _instances(model, snapshot):
        state = "" if instance.state == model.word else f" {instance.state}"
        where = "the CPU" if instance.devices == ("cpu",) else _devices(instance, snapshot)
        facts.append(f"{instance.backend} on {where}{state}" if where else instance.backend + state)
    if model.in_flight or model.waiting:
        facts.append(f"in flight {_count(model)}")
    if model.keep == "warm":
        facts.append("kept")
    if model.pinned:
        facts.append("pinned")
    why = next((_why(instance) for instance in _instances(model, snapshot)), "") or model.why
    return f"{model.name}: {', '.join(facts)}" + (f" ({clean_line(why)})" if why else "")


def _instances(model: ModelView, snapshot: Snapshot) -> list[InstanceView]:
    return [found for found in snapshot.instances if found.id in model.instances]


def _devices(instance: InstanceView, snapshot: Snapshot) -> str:
    names = {gpu.id: gpu.name for gpu in snapshot.gpus}
    return ", ".join(names.get(device, device) for device in instance.devices)


def _why(instance: InstanceView) -> str:
    return "; ".join(condition.why for condition in instance.conditions) or instance.why


def _instance_row(model: ModelView, instance: InstanceView, snapshot: Snapshot) -> list[str]:
    held = sum((instance.measured_bytes or instance.claims).values())
    return [
        model.name,
        model.word,
        instance.backend,
        _devices(instance, snapshot),
        show_bytes(held or None),
        _count(model),
        _until(model),
        _why(instance) or model.why,
    ]


def _count(model: ModelView) -> str:
    return f"{model.in_flight}+{model.waiting}" if model.waiting else str(model.in_flight)


def _until(model: ModelView) -> str:
    """`idle 2 s, unloads in 14m`, `next try in 4 s`, `kept, pinned`: how long it stays so."""
    parts = []
    if model.idle_since is not None:
        parts.append(f"idle {_span(time.time() - model.idle_since)}")
        if model.unload_at is not None:
            parts.append(f"unloads in {_span(model.unload_at - time.time())}")
    elif model.until is not None:
        left = _span(model.until - time.time())
        parts.append(f"next try in {left}" if model.word == "failed" else f"at most {left}")
    if model.keep == "warm":
        parts.append("kept")
    if model.pinned:
        parts.append("pinned")
    return ", ".join(parts)


def _span(seconds: float) -> str:
    """Whole seconds below a minute, then minutes, hours: a glance needs no more."""
    whole = max(0, round(seconds))
    return show_seconds(whole if whole < 60 else whole // 60 * 60)
