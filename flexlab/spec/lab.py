"""The wire types: what the daemon shows of itself (snapshot) and what happened (events)."""

from __future__ import annotations

from typing import Literal

import msgspec

from flexlab.spec.instance import Condition, InstanceState
from flexlab.spec.machine import Gpu, GpuSample, PoolKind
from flexlab.spec.plan import Keep, Refusal

SNAPSHOT_SCHEMA = 1
HISTORY_SCHEMA = 1

ModelWord = Literal[
    "cold",
    "queued",
    "preparing",
    "loading",
    "ready",
    "degraded",
    "draining",
    "preempted",
    "failed",
    "off",
    "unknown",
]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How far something is. Totals and rates are None while unknown; `done` never decreases."""

    phase: Literal["weights", "image", "verify", "loading", "waiting"]
    text: str
    done_bytes: int | None = None
    total_bytes: int | None = None
    bytes_per_s: float | None = None
    eta_s: float | None = None


class PoolView(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's account: free = total - reserve - foreign - sum of claims."""

    id: str
    kind: PoolKind
    total_bytes: int | None
    used_bytes: int | None
    reserve_bytes: int
    foreign_bytes: int | None
    free_bytes: int | None
    usable_bytes: int | None = None
    """What could ever be given out: total less reserve, or less than that by a setting."""
    claims: dict[str, int] = {}
    """Instance id -> bytes."""
    sampled_at: float | None = None


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One running (or starting, or stopping) backend."""

    id: str
    model: str
    variant: str
    backend: str
    runtime: str
    arch: str
    devices: tuple[str, ...]
    state: InstanceState
    since: float
    why: str
    until: float | None = None
    conditions: tuple[Condition, ...] = ()
    claims: dict[str, int] = {}
    measured_bytes: dict[str, int] = {}
    endpoint: str | None = None
    ref: str | None = None
    image: str | None = None
    plan_hash: str = ""
    log_path: str | None = None
    ready_at: float | None = None
    load_s: float | None = None
    in_flight: int = 0
    group: str | None = None
    group_with_card: bool = False
    idle_since: float | None = None
    """Unix seconds; None while it works or loads."""
    turn_ends_at: float | None = None
    """Unix seconds; until then an equal model has to wait (rule 6)."""


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    """One model: a recipe, a derived recipe, or an external server."""

    name: str
    aliases: tuple[str, ...] = ()
    word: ModelWord
    since: float
    why: str
    until: float | None = None
    installed: bool = False
    weight_bytes: int | None = None
    capabilities: tuple[str, ...] = ()
    context: int | None = None
    keep: Keep = "cold"
    pinned: bool = False
    enabled: bool = True
    priority: int = 100
    in_flight: int = 0
    waiting: int = 0
    instances: tuple[str, ...] = ()
    progress: Progress | None = None
    tokens_per_s: float | None = None
    ttft_s: float | None = None
    idle_since: float | None = None
    unload_at: float | None = None
    starts: int = 0
    preempted: int = 0
    crashes: int = 0
    last_load_s: float | None = None
    problem: Refusal | None = None


class HolderView(msgspec.Struct, frozen=True, kw_only=True):
    """A process that holds memory of a GPU (or of a MIG slice); `instance` where it is ours."""

    gpu: str
    pid: int
    name: str | None = None
    vram_bytes: int | None = None
    gtt_bytes: int | None = None
    busy_percent: float | None = None
    instance: str | None = None
    model: str | None = None
    cgroup: str | None = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The whole lab at one moment; self-contained, so that a recording replays."""

    schema: int = SNAPSHOT_SCHEMA
    flexlab_version: str
    hostname: str
    installation: str
    pid: int
    started_at: float
    at: float
    address: str
    """The gateway's base URL."""
    gpus: tuple[Gpu, ...] = ()
    pools: tuple[PoolView, ...] = ()
    models: tuple[ModelView, ...] = ()
    instances: tuple[InstanceView, ...] = ()
    requests_total: int = 0
    last_event: int = 0
    gpu_samples: tuple[GpuSample, ...] = ()
    """Every reading of every GPU with its age."""
    holders: tuple[HolderView, ...] = ()


EventKind = Literal[
    "daemon",
    "model",
    "instance",
    "preempt",
    "weights",
    "refused",
    "memory",
    "settings",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that happened: what, to whom, why, because of whom, at what cost."""

    id: int
    at: float
    kind: EventKind
    text: str
    """One sentence for people."""
    model: str | None = None
    instance: str | None = None
    state: str | None = None
    why: str | None = None
    by: str | None = None
    """The model that caused it, where one did."""
    seconds: float | None = None
    bytes: int | None = None


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """An instance came into a state, at a Unix time."""

    at: float
    state: str
    """As of instances, and `gone` once that is confirmed, or `stuck`."""
    why: str = ""
    by: str | None = None
    """The model that it yields to."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One instance from its start on, with all that it went through: a bar of a timeline."""

    instance: str
    model: str
    devices: tuple[str, ...]
    began_at: float
    ended_at: float | None = None
    """None while it is there."""
    steps: tuple[RunStep, ...] = ()


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one GPU or model over time, by name; None where one was not known.

    Of a GPU: `used_bytes busy_percent temperature_c power_w`. Of a model: `in_flight waiting`, and
    `tokens_per_s` while it could answer. A name of which nothing was ever known is absent.
    """

    id: str
    values: dict[str, tuple[float | None, ...]]


class History(msgspec.Struct, frozen=True, kw_only=True):
    """The last minutes or hours; self-contained, so that a recording replays.

    Value i of every series is of the `step_s` seconds from `begin + i * step_s` (Unix time) on.
    """

    schema: int = HISTORY_SCHEMA
    at: float
    begin: float
    step_s: float
    gpus: tuple[Series, ...] = ()
    models: tuple[Series, ...] = ()
    runs: tuple[Run, ...] = ()


class UpStep(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the answer to `up`: a change, a progress tick, the end."""

    kind: Literal["event", "progress", "ready", "refused"]
    text: str = ""
    progress: Progress | None = None
    model: ModelView | None = None
    instance: InstanceView | None = None
    refusal: Refusal | None = None
