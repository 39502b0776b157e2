"""The Runtime protocol: how a plan becomes something that runs, and how it is found again.

All methods are synchronous and may block; the launcher calls them in threads of the runtime's own
pool, never on the loop. Answers are spec types. `tests/runtimes/contract.py` holds every runtime
to what stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, runtime_checkable

from flexlab.spec.instance import Found, Launch, MemoryUse, RunState, RuntimeRef, Started
from flexlab.spec.lab import Progress
from flexlab.spec.plan import LaunchPlan, RuntimeFacts, RuntimeName


class Watch(Protocol):
    """A running observation; `close()` ends it and is harmless when it has ended."""

    def close(self) -> None: ...


class LogLines(Protocol):
    """Lines without their newline; any thread may `close()` while another waits in `next()`."""

    def __iter__(self) -> Iterator[bytes]: ...

    def __next__(self) -> bytes: ...

    def close(self) -> None: ...


class Runtime(Protocol):
    """process | docker | k3s | external | demo."""

    @property
    def name(self) -> RuntimeName: ...

    def facts(self) -> RuntimeFacts:
        """Whether it can be used here and what is missing; never raises."""

    def start(self, plan: LaunchPlan, launch: Launch) -> Started:
        """Start it and return at once; readiness is the caller's to probe.

        Starting an instance id that already runs returns the running one. Raises LaunchError
        (with the cause in one sentence) and then leaves nothing behind.
        """

    def find(self, instance: str) -> RuntimeRef | None:
        """The running thing that bears this instance id, for a start that was cut half-way."""

    def owned(self, installation: str) -> list[Found]:
        """Everything of this installation that runs."""

    def state(self, ref: RuntimeRef) -> RunState:
        """Alive, gone (with exit code and why), or unknown. Never raises."""

    def stop(self, ref: RuntimeRef, timeout_s: float) -> bool:
        """Ask it to end, kill it after `timeout_s`; True once confirmed gone, False when not
        confirmed 10 s after that. Stopping what is gone is True."""

    def watch(self, ref: RuntimeRef, on_gone: Callable[[RunState], None]) -> Watch:
        """`on_gone(state)` is called once, from any thread, when it ends (at once if it has)."""

    def memory(self, ref: RuntimeRef) -> MemoryUse | None:
        """Host memory that it holds now, its children included; None if unknown."""

    def logs(self, ref: RuntimeRef | None, log_path: str, *, tail: int, follow: bool) -> LogLines:
        """Lines of its output, oldest first: the last `tail`, then as they come if `follow`."""

    def close(self) -> None:
        """Let go of threads and connections; what runs goes on."""


@runtime_checkable
class FetchesImages(Protocol):
    """A runtime whose plans name images."""

    def images(self) -> dict[str, str]:
        """Tag or digest -> id of every image there; never raises."""

    def fetch_image(self, image: str, report: Callable[[Progress], None]) -> None:
        """Pull it; `report` is called from this thread. Raises LaunchError."""
