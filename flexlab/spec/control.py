"""What goes over the control socket, beside snapshot, events and steps (spec.lab)."""

from __future__ import annotations

from typing import Literal

import msgspec

from flexlab.core.errors import FlexLabError, UnknownModel
from flexlab.spec.lab import ModelView
from flexlab.spec.plan import Keep, Wishes


class WireProblem(msgspec.Struct, frozen=True, kw_only=True):
    """An error as the daemon writes it, on its socket and over the ready pipe."""

    code: str = "failed"
    message: str = "the daemon gave no reason"
    hint: str | None = None
    exit_code: int = 1
    near: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: FlexLabError) -> WireProblem:
        """What `error` says."""
        return cls(
            code=error.code,
            message=error.message,
            hint=error.hint,
            exit_code=error.exit_code,
            near=error.near if isinstance(error, UnknownModel) else (),
        )


class Ready(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The one line on the ready pipe: it listens, another one already does, or why not."""

    ready: bool = False
    already: bool = False
    error: WireProblem | None = None


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`holds` counts instances and waiters: with none, a daemon may end unnoticed."""

    flexlab_version: str
    pid: int
    address: str
    started_at: float
    installation: str
    holds: int
    pending: tuple[str, ...] = ()
    """Settings of the file that count from the daemon's next start on."""


class UpRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A wish to have a model running; withdrawn when the connection closes."""

    model: str
    wishes: Wishes = Wishes()
    keep: Keep | None = None
    pin: bool | None = None


class DownRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Models to stop: by name, or all."""

    models: tuple[str, ...] = ()
    all: bool = False
    force: bool = False


class StoppedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One instance that was stopped; `confirmed` False: it does not go away."""

    model: str
    instance: str
    seconds: float
    confirmed: bool = True


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `down`."""

    stopped: tuple[StoppedModel, ...] = ()
    not_running: tuple[str, ...] = ()


class ShutdownRequest(msgspec.Struct, frozen=True, kw_only=True):
    """End of the daemon; instances go on unless `stop_models`."""

    stop_models: bool = False
    only_if_idle: bool = False
    why: str = ""


class RmRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Weights to delete."""

    model: str


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `rm`."""

    removed: tuple[str, ...] = ()
    freed_bytes: int = 0


class HoldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a user decides about models; None leaves it. Kept beyond the daemon."""

    models: tuple[str, ...]
    keep: Keep | None = None
    pin: bool | None = None
    enabled: bool | None = None


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: how those models stand now."""

    models: tuple[ModelView, ...] = ()


class RestartRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A model to start anew: drained first, then up as it was wished for before."""

    model: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Why a model is in its state: sentences for people, the view for programs."""

    model: ModelView
    sentences: tuple[str, ...]


RequestState = Literal["queued", "running", "done"]


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request to the gateway. Times are Unix seconds, durations seconds."""

    id: str
    state: RequestState
    method: str
    route: str
    client: str
    model: str | None = None
    started_at: float = 0.0
    waited_s: float | None = None
    """For the model, before an engine had it."""
    ttft_s: float | None = None
    duration_s: float | None = None
    """Until now, while it runs."""
    status: int | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_per_s: float | None = None
    """After the first token; of a streamed answer only."""
    bytes_in: int = 0
    bytes_out: int = 0
    how: str | None = None
    """How it ended (gateway.observe.How)."""


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """Those in flight, the oldest first, then the last that ended, the newest first."""

    requests: tuple[RequestView, ...] = ()


class CancelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to end, by its id (or a beginning of it that only one has)."""

    id: str


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a cancel."""

    request: RequestView
