"""`flexlab ps`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.common import JsonOption, verb_app
from flexlab.cli.table import Column
from flexlab.cli.variables import warn_of_variables
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
NOTHING: dict[str, object] = {
    "daemon": None,
    "models": [],
    "instances": [],
    "pools": [],
    "gpus": [],
}

app = verb_app()


@app.command()
def ps(
    show_all: Annotated[
        bool, typer.Option("--all", "-a", help="Models that are not running, too.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show what runs, where, since when and why.

    Without a daemon nothing can run: that is said on stderr and is no error.
    """
    warn_of_variables()
    daemon = daemons.find()
    if daemon is None:
        output.say("the daemon is not running; flexlab up MODEL starts it")
        if left := daemons.left_running():
            output.say(f"an earlier one may have left running: {', '.join(left)}")
        if as_json:
            output.answer_json(NOTHING)
        return
    snapshot = daemon.snapshot()
    models = [model for model in snapshot.models if show_all or _is_active(model)]
    if as_json:
        output.answer_json(_as_json(snapshot, models))
    elif models:
        output.answer_table(COLUMNS, [row for model in models for row in _rows(model, snapshot)])
        _say_what_failed(models)
    else:
        output.say("no model is running; flexlab up MODEL starts one")


def _is_active(model: ModelView) -> bool:
    return bool(model.instances or model.waiting or model.word not in ("cold", "off"))


def _as_json(snapshot: Snapshot, models: list[ModelView]) -> dict[str, object]:
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


def _rows(model: ModelView, snapshot: Snapshot) -> list[list[str]]:
    """One row per instance; a model without one has a row of its own."""
    instances = [found for found in snapshot.instances if found.id in model.instances]
    if not instances:
        return [[model.name, model.word, "", "", "", _count(model), _until(model), model.why]]
    return [_instance_row(model, instance, snapshot) for instance in instances]


def _instance_row(model: ModelView, instance: InstanceView, snapshot: Snapshot) -> list[str]:
    names = {gpu.id: gpu.name for gpu in snapshot.gpus}
    devices = ", ".join(names.get(device, device) for device in instance.devices)
    held = sum((instance.measured_bytes or instance.claims).values())
    conditions = "; ".join(condition.why for condition in instance.conditions)
    return [
        model.name,
        model.word,
        instance.backend,
        devices,
        show_bytes(held or None),
        _count(model),
        _until(model),
        conditions or instance.why or model.why,
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


def _say_what_failed(models: list[ModelView]) -> None:
    """Whole, while the table may have had no room for it."""
    for model in models:
        if model.word == "failed":
            output.say(f"{model.name} failed: {clean_line(model.why)} (flexlab logs {model.name})")
