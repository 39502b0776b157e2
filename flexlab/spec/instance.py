"""A plan that was launched: its endpoint, its record on disk, what its runtime says of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from flexlab.spec.plan import LaunchPlan, OnDisconnect

InstanceState = Literal["starting", "loading", "ready", "draining", "stopping", "failed", "gone"]
ConditionKind = Literal["degraded", "unknown", "stale", "stuck"]

RECORD_SCHEMA = 1


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """Beside the state: since when, why, and until when at the latest (None: no bound)."""

    kind: ConditionKind
    since: float
    why: str
    until: float | None = None


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What the proxy gets from a runtime: where the engine listens and how to talk to it."""

    scheme: Literal["http", "https"] = "http"
    host: str = "127.0.0.1"
    port: int = 0
    unix_path: str | None = None
    path_prefix: str = ""
    """Put before the client's path, as it came."""
    headers: tuple[tuple[str, str], ...] = ()
    """Added to every request (the engine's key); a client's header of the same name is dropped."""
    strip: tuple[str, ...] = ()
    """Lower-case names of client headers that never reach the engine."""
    upstream_name: str | None = None
    """The engine's own name of the model, where it cannot be started under ours."""
    connect_s: float = 5.0
    header_s: float | None = None
    idle_s: float | None = None
    on_disconnect: OnDisconnect = "cancel"

    @property
    def url(self) -> str:
        """For people and probes; without the headers."""
        if self.unix_path:
            return f"unix:{self.unix_path}{self.path_prefix}"
        return f"{self.scheme}://{self.host}:{self.port}{self.path_prefix}"


class ProcessRef(msgspec.Struct, frozen=True, kw_only=True, tag="process"):
    """A process that cannot be mistaken for another: pid, start time, boot."""

    pid: int
    start_ticks: int
    boot_id: str


class ContainerRef(msgspec.Struct, frozen=True, kw_only=True, tag="docker"):
    """A container by its full id."""

    id: str


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True, tag="k3s"):
    """A Kubernetes object."""

    namespace: str
    name: str
    uid: str


class ExternalRef(msgspec.Struct, frozen=True, kw_only=True, tag="external"):
    """A server that already runs and whose life is not ours."""

    url: str


class DemoRef(msgspec.Struct, frozen=True, kw_only=True, tag="demo"):
    """An instance of the demo runtime."""

    id: str


RuntimeRef = ProcessRef | ContainerRef | ObjectRef | ExternalRef | DemoRef


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime needs to start a plan, beside the plan."""

    instance: str
    installation: str
    api_key: str
    log_path: str


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """A runtime's answer to a start: how to find it again, and where it listens."""

    ref: RuntimeRef
    endpoint: Endpoint


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """What a runtime says of one instance. `alive` None: the runtime cannot be asked now."""

    alive: bool | None
    exit_code: int | None = None
    """128 + n where signal n ended it, as shells say it; None when nobody saw it end."""
    why: str | None = None
    code: str | None = None
    """A stable word where the cause is known, such as `port_taken` (see spec.engine)."""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Host memory of one instance."""

    resident_bytes: int
    """All of it that is in memory, weights mapped from files included."""
    own_bytes: int
    """Without pages of files: what the system counts as used, and cannot take back."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Something that runs and bears an instance id; `installation` says whose it is."""

    instance: str
    installation: str
    ref: RuntimeRef


class LaunchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`instances/<id>.json`, mode 0600: written before the start, completed after it."""

    schema: int = RECORD_SCHEMA
    flexlab_version: str
    instance: str
    installation: str
    model: str
    created_at: float
    plan: LaunchPlan
    api_key: str
    log_path: str
    ref: RuntimeRef | None = None
    endpoint: Endpoint | None = None
    ready_at: float | None = None
    load_s: float | None = None
    recipe: str | None = None
    """A derived model's source, so that a later daemon knows the model again."""
