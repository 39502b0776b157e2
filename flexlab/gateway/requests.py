"""The requests of a gateway as people see them, and how one of them is ended."""

from __future__ import annotations

import time
from itertools import islice
from time import monotonic

from flexlab.core.errors import UsageError
from flexlab.gateway.exchange import Exchange
from flexlab.gateway.observe import Record
from flexlab.gateway.proxy import Gateway
from flexlab.spec.control import RequestState, RequestView

_NAMED_MAX = 10
"""Ids that are listed where a word could mean several."""


def observed(gateway: Gateway, last: int) -> tuple[RequestView, ...]:
    """Those in flight, the oldest first, then the last so many that ended, the newest first."""
    going = [_in_flight(exchange) for exchange in gateway.in_progress()]
    ended = [view(record, "done") for record in islice(reversed(gateway.observer.recent), last)]
    return (*going, *ended)


def cancel_one(gateway: Gateway, word: str) -> RequestView:
    """End the request of this id, or the only one whose id begins so, and show how it ended.

    Clients may give the same id to several: the oldest is meant. Raises UsageError.
    """
    found = _meant(gateway, word)
    found.cancel()
    return view(found.record, "done")


def view(record: Record, state: RequestState) -> RequestView:
    """One request now."""
    now = monotonic()
    ended_at = now if record.duration_s is None else record.started + record.duration_s
    return RequestView(
        id=record.request_id.decode(),
        state=state,
        method=record.method.decode("latin-1"),
        route=record.route,
        client=record.client,
        model=record.model or record.asked,
        started_at=time.time() - (now - record.started),
        waited_s=record.waited_s(ended_at),
        ttft_s=record.ttft_s,
        duration_s=ended_at - record.started,
        status=record.status,
        tokens_in=record.tokens_in,
        tokens_out=record.tokens or None,
        tokens_per_s=record.tokens_per_s(ended_at),
        bytes_in=record.bytes_in,
        bytes_out=record.bytes_out,
        how=record.how,
    )


def _in_flight(exchange: Exchange) -> RequestView:
    return view(exchange.record, "queued" if exchange.is_queued else "running")


def _meant(gateway: Gateway, word: str) -> Exchange:
    going = gateway.in_progress()
    asked = word.encode(errors="replace")
    for exchange in going:
        if exchange.record.request_id == asked:
            return exchange
    alike = [exchange for exchange in going if asked and _id(exchange).startswith(asked)]
    if not alike:
        over = any(record.request_id == asked for record in gateway.observer.recent)
        told = f"request {word} has ended already" if over else f"no request {word!r} is in flight"
        raise UsageError(told, "flexlab requests lists them")
    if len(alike) > 1:
        ids = sorted({_id(exchange).decode() for exchange in alike})
        named = ", ".join(ids[:_NAMED_MAX])
        if len(ids) > _NAMED_MAX:
            named += f" and {len(ids) - _NAMED_MAX} more"
        raise UsageError(
            f"{len(alike)} requests have ids that begin with {word}: {named}",
            "flexlab cancel takes a whole id, or more of it",
        )
    return alike[0]


def _id(exchange: Exchange) -> bytes:
    return exchange.record.request_id
