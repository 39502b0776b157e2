"""What the scheduler decides and has others do."""

from __future__ import annotations

from typing import Protocol

from flexlab.spec.lab import EventKind
from flexlab.spec.plan import Placement, Wishes


class Effects(Protocol):
    """What the scheduler has done for it. Calls return at once; each ends in exactly one event."""

    def prepare(self, model: str, wishes: Wishes, *, download: bool) -> None:
        """Plan, and fetch weights if `download`: ends in `prepared` or `prepare_failed`."""

    def cancel_prepare(self, model: str) -> None:
        """Give up preparing: still ends in `prepare_failed` (code `cancelled`) or `prepared`."""

    def start(self, instance: str, placement: Placement) -> None:
        """Launch: `launched`, then `ready`; or `start_failed`."""

    def stop(self, instance: str) -> None:
        """Stop and confirm: ends in `gone` or `stop_unconfirmed`."""

    def wake_at(self, when: float) -> None:
        """Call `tick` at this time of the loop's clock; replaces an earlier wish."""

    def note(
        self,
        kind: EventKind,
        text: str,
        *,
        model: str | None = None,
        instance: str | None = None,
        state: str | None = None,
        why: str | None = None,
        by: str | None = None,
        seconds: float | None = None,
        size: int | None = None,
    ) -> None:
        """Keep an event; `size` in bytes."""

    def remember_use(self, memory_key: str, peak: dict[str, int]) -> None:
        """What an instance that served really took at most, in bytes per pool (rule 2)."""

    def remember_shortage(self, memory_key: str, claims: dict[str, int]) -> None:
        """It died for lack of memory with these claims: what was measured is worth nothing."""
