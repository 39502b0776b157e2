"""What goes over the control socket, beside snapshot, events and steps (spec.lab)."""

from __future__ import annotations

import msgspec

from flexlab.core.errors import FlexLabError, UnknownModel
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
