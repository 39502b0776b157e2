"""One request from its turn on the client's connection to the last byte of its answer.

    start ─► route ─► Answer ───────────────────────────────────► end
              ▲   └─► (wait for) Lease ─► connection ─► upstream ─► end
              └── once, when it is preempted before its answer began

`end` runs exactly once on every path, and with it the lease is released: the answer is complete,
the client left, the engine broke or went silent, the scheduler cut it, or nothing was granted.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Protocol

import msgspec

from flexlab.gateway.http import (
    Answer,
    Head,
    error_answer,
    refusal_answer,
)
from flexlab.gateway.observe import How, Record
from flexlab.gateway.pool import Destination, replace_model
from flexlab.gateway.upstream import TUNNEL, UNCHUNKED, UNTIL_CLOSE, Upstream, connect, in_words
from flexlab.spec.lease import Lease, Refused
from flexlab.spec.plan import Refusal

if TYPE_CHECKING:
    from flexlab.gateway.proxy import Gateway

log = logging.getLogger(__name__)


class ClientSide(Protocol):
    """What an exchange needs of the client's connection."""

    write_paused: bool

    @property
    def writer(self) -> Callable[[bytes], object]: ...
    def write(self, data: bytes) -> None: ...
    def answer_ended(self, keep: bool) -> None: ...
    def cut(self, *, reset: bool) -> None: ...
    def open_tunnel(self, upstream: Upstream) -> None: ...
    def pause_reading(self, paused: bool) -> None: ...


class Exchange:
    """One request; `client` becomes None when its client has left."""

    __slots__ = (
        "_connecting", "_destination", "_ended", "_gateway", "_lease", "_retried",
        "_second_chance", "_timer", "_waiting", "body", "client", "early", "head", "record",
        "upstream",
    )  # fmt: skip

    def __init__(self, gateway: Gateway, client: ClientSide, head: Head) -> None:
        self._gateway = gateway
        self.client: ClientSide | None = client
        self.head = head
        self.body = b""
        """As it came, until its answer begins."""
        self.early: Answer | None = None
        """Decided from the head alone; the body was not read."""
        self.record: Record
        self.upstream: Upstream | None = None
        self._lease: Lease | None = None
        self._waiting: asyncio.Future[Lease] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._destination: Destination
        self._timer: asyncio.TimerHandle | None = None
        self._retried = False
        self._second_chance = True
        self._ended = False

    # -- from the turn to the engine

    def start(self) -> None:
        """Its turn has come: everything before it on this connection is answered."""
        self.record = Record(self.head, len(self.body), monotonic())
        self._gateway.begin(self)
        self._go_on(self.early if self.early is not None else self._route())

    def _go_on(self, outcome: Lease | asyncio.Future[Lease] | Answer) -> None:
        if isinstance(outcome, Answer):
            self._answer(outcome, "local")
        elif isinstance(outcome, asyncio.Future):
            self._waiting = outcome
            self.record.asked = self.head.model
            outcome.add_done_callback(self._woken)
        else:
            self._granted(outcome)

    def _route(self) -> Lease | asyncio.Future[Lease] | Answer:
        try:
            return self._gateway.routes.route(self.head, self.body)
        except Refused as no:
            return refusal_answer(no.refusal)
        except Exception:
            # The edge of one request: whatever is wrong with it, the others go on.
            log.exception("request %s failed in the gateway", self.head.request_id.decode())
            return error_answer(500, "internal_error", "the gateway failed; its log has the cause")

    def _woken(self, future: asyncio.Future[Lease]) -> None:
        """The wait is over: a lease, a refusal, or withdrawn (by whichever side)."""
        self._waiting = None
        if future.cancelled():
            self._refuse(error_answer(503, "withdrawn", "the wait for the model was ended"))
            return
        error = future.exception()
        if error is None:
            self._granted(future.result())
        elif isinstance(error, Refused):
            self._refuse(refusal_answer(error.refusal))
        else:
            log.error("a wait for a lease failed", exc_info=error)
            self._refuse(error_answer(500, "internal_error", "the gateway failed; see its log"))

    def _granted(self, lease: Lease) -> None:
        if self._ended:  # the client left in the very moment in which the lease came
            lease.release()
            return
        self._lease = lease
        record = self.record
        record.model = self.head.model = lease.model
        record.granted_at = monotonic()
        lease.on_cut(self._cut)
        if self._lease is not lease:  # cut in the same breath
            return
        pool = self._gateway.pool
        self._destination = destination = pool.destination(lease.endpoint)
        self._reach(pool.take(destination))

    def _reach(self, upstream: Upstream | None) -> None:
        if upstream is None:
            self._connecting = self._gateway.loop.create_task(self._open())
            return
        client = self.client
        assert client is not None
        self.upstream = upstream
        destination, body = self._destination, self.body
        name = destination.endpoint.upstream_name
        if name is not None and body:
            body = replace_model(body, name)
        upstream.begin(self, client.writer, destination.request(self.head, len(body)), body)
        if client.write_paused:
            upstream.pause()
        header_s = destination.endpoint.header_s
        if header_s is not None:
            self._timer = self._gateway.loop.call_later(header_s, self._head_is_late)

    async def _open(self) -> None:
        try:
            upstream = await connect(self._gateway.pool, self._destination)
        except TimeoutError:
            self._connecting = None
            limit_s = self._destination.endpoint.connect_s
            self._backend_failed(504, "backend_timeout", f"no connection after {limit_s:g} s")
        except OSError as error:
            self._connecting = None
            self._backend_failed(502, "backend_unreachable", f"no connection: {in_words(error)}")
        else:
            self._connecting = None
            self._reach(upstream)

    # -- what the upstream reports

    def answer_begins(self, status: int) -> None:
        """The engine's head is here; from now on a failure cannot be retried."""
        self.record.status = status
        self.body = b""
        if self._timer is not None:
            self._stop_timer()
        idle_s = self._destination.endpoint.idle_s
        if idle_s is not None and self.upstream is not None:
            loop = self._gateway.loop
            self.upstream.timed = True
            self.upstream.heard_at = monotonic()
            self._timer = loop.call_later(idle_s, self._check_silence)

    def completed(self) -> None:
        """The last byte of the answer was written (or, for a client that left, read)."""
        client, self.client = self.client, None
        self.upstream = None
        self._end("done" if client is not None else "drained")
        if client is not None:
            client.answer_ended(self.head.keep)

    def upgraded(self) -> None:
        """101 was passed: from now on bytes go both ways. An open websocket holds no model."""
        self.record.status = 101
        self.body = b""
        client, upstream = self.client, self.upstream
        self._end("upgraded")
        if client is None or upstream is None:
            self.abort()
        else:
            client.open_tunnel(upstream)

    def tunnel_closed(self) -> None:
        """The engine closed its side of a tunnel."""
        client, self.client = self.client, None
        self.upstream = None
        if client is not None:
            client.cut(reset=False)

    def pause_client(self, paused: bool) -> None:
        """Back-pressure from the engine's side of a tunnel."""
        if self.client is not None:
            self.client.pause_reading(paused)

    def upstream_lost(self, cause: str) -> None:
        """The connection ended before the answer did."""
        upstream = self.upstream
        stale = upstream is not None and upstream.reused and upstream.untouched
        if stale and not self._retried and self.client is not None:
            # The engine had closed a kept connection before it saw the request: once more, on a
            # new one. Any other failure may have had effects, and is the client's to judge.
            assert upstream is not None
            self._retried = True
            upstream.asker = None
            self.upstream = None
            self._stop_timer()
            self._reach(None)
        else:
            self.upstream_failed(cause)

    def upstream_failed(self, cause: str) -> None:
        """The answer cannot be completed."""
        self._backend_failed(502, "backend_failed", cause)

    # -- time limits

    def _head_is_late(self) -> None:
        limit_s = self._destination.endpoint.header_s
        self._backend_failed(504, "backend_timeout", f"no answer after {limit_s:g} s")

    def _check_silence(self) -> None:
        upstream, limit_s = self.upstream, self._destination.endpoint.idle_s
        assert upstream is not None
        assert limit_s is not None
        loop = self._gateway.loop
        quiet_s = 0.0 if upstream.paused else monotonic() - upstream.heard_at
        if quiet_s >= limit_s:
            self._backend_failed(504, "backend_timeout", f"silent for {limit_s:g} s")
        else:
            self._timer = loop.call_later(limit_s - quiet_s, self._check_silence)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- the other ends

    def client_left(self) -> None:
        """Withdraw from the queue, or stop the engine's work (or read it to its end)."""
        self.client = None
        upstream = self.upstream
        if (
            upstream is not None
            and not self._ended
            and self._destination.endpoint.on_disconnect == "drain"
        ):
            upstream.drain_into_nothing()
        else:
            self.abort()

    def abort(self) -> None:
        """Let go of everything at once."""
        upstream, self.upstream = self.upstream, None
        self._end("client_gone")
        if upstream is not None:
            upstream.drop()

    def _cut(self, why: Refusal) -> None:
        """The scheduler takes the instance away before the answer is complete."""
        if self._ended:
            return
        has_begun = self.record.status is not None
        again = why.code == "preempted" and self._second_chance
        if again and not has_begun and self.client is not None:
            self._queue_again()
            return
        no = why if why.status >= 500 else msgspec.structs.replace(why, status=503)
        if has_begun and no.retry_after_s is not None:  # no header can say it any more
            retry = f"retry in {math.ceil(no.retry_after_s)} s"
            no = msgspec.structs.replace(no, hint=f"{no.hint}; {retry}" if no.hint else retry)
        self._break_off(refusal_answer(no), "cut")

    def _queue_again(self) -> None:
        """Preempted before its answer began: once more, at the head of the queue (rule 9)."""
        self._second_chance = self._retried = False
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.drop()
        self._let_go()
        record, now = self.record, monotonic()
        record.lost_s = now - (record.granted_at or now)
        record.granted_at = None
        self.head.since = self._gateway.loop.time() - (now - record.started)
        self._go_on(self._route())

    def cancel(self) -> None:
        """The user of the lab ends it: an error for its client, or an event and a cut."""
        message = "the request was cancelled by the user of this lab"
        # OpenAI's own clients would send it again by themselves.
        once = (b"x-should-retry", b"false")
        self._break_off(error_answer(503, "cancelled", message, once), "cancelled")

    def _backend_failed(self, status: int, code: str, cause: str) -> None:
        model = self.head.model or "the model"
        message = f"the backend of {model} failed: {cause}"
        self._break_off(error_answer(status, code, message), "broken")

    def _refuse(self, answer: Answer) -> None:
        if not self._ended:
            self._answer(answer, "local")

    def _break_off(self, instead: Answer, how: How) -> None:
        """Answer with an error if nothing was sent; else say so in the stream, and cut it."""
        if self._ended:
            return
        upstream, self.upstream = self.upstream, None
        sent = upstream is not None and upstream.head_sent
        event = (
            upstream.frame_event(b"data: %s\n\n" % instead.body) if upstream is not None else None
        )
        unframed = upstream is not None and upstream.mode in (UNTIL_CLOSE, UNCHUNKED)
        if upstream is not None:
            upstream.drop()
        client = self.client
        if client is None:
            self._end(how)
        elif not sent:
            self._answer(instead, how)
        else:
            if event is not None:
                client.write(event)
            self.client = None
            self._end(how)
            # Without framing, closing is how an answer ends: only a reset says that it is cut.
            client.cut(reset=unframed and event is None)

    def _answer(self, answer: Answer, how: How) -> None:
        client, self.client = self.client, None
        self.record.status = answer.status
        self.record.asked = self.head.model
        self.record.bytes_out = len(answer.body)
        self._end(how)
        if client is not None:
            client.write(self._gateway.render(answer, self.head))
            client.answer_ended(self.head.keep)

    def _end(self, how: How) -> None:
        if self._ended:
            return
        self._ended = True
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            waiting.cancel()
        self._let_go()
        self._gateway.finish(self, how)

    def _let_go(self) -> None:
        """Of the engine: no time limit, no attempt to connect, no lease."""
        if self._timer is not None:
            self._stop_timer()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    @property
    def is_queued(self) -> bool:
        """It waits for a model."""
        return self._waiting is not None

    @property
    def is_tunnel(self) -> bool:
        """Bytes go both ways, whatever they are."""
        return self.upstream is not None and self.upstream.mode == TUNNEL
