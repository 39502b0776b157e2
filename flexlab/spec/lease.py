"""The only thing that keeps a model busy. In flight = leases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flexlab.spec.instance import Endpoint
from flexlab.spec.plan import Refusal


class Refused(Exception):
    """What a waiter gets instead of a lease; never shown as such, `refusal` is."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class Lease(Protocol):
    """Held by a request, a job, or an `up` that waits. Release exactly once, on every path."""

    @property
    def model(self) -> str: ...

    @property
    def instance(self) -> str: ...

    @property
    def endpoint(self) -> Endpoint: ...

    def release(self) -> None:
        """The work is over; releasing twice is harmless."""

    def on_cut(self, callback: Callable[[Refusal], None]) -> None:
        """`callback(why)` is called at most once: the instance must go before the work ends."""
