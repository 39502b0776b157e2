"""The data plane as a whole: it listens, and owns every request that is in progress.

    client ─► downstream.Client ─► exchange.Exchange ─► upstream.Upstream ─► engine
                                        │ Routes.judge(head), Routes.route(head, body) -> Lease
All of it are protocol objects on the daemon's loop; nothing here awaits in the way of a request.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from time import monotonic
from typing import Protocol

from flexlab.gateway.downstream import Client
from flexlab.gateway.exchange import Exchange
from flexlab.gateway.http import Answer, Head, render
from flexlab.gateway.listen import Address, listen
from flexlab.gateway.observe import How, Observer
from flexlab.gateway.pool import Pool
from flexlab.spec.lease import Lease

MAX_BODY_BYTES = 1 << 30
CLIENT_IDLE_S = 300.0
"""A connection that says nothing this long, with no request in progress, is closed."""
_SWEEP_S = 30.0
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class Routes(Protocol):
    """What decides over requests; both calls must be quick and never block."""

    observer: Observer

    def judge(self, head: Head) -> Answer | None:
        """From the head alone, before the body is read: an answer, or None to go on."""

    def route(self, head: Head, body: bytes) -> Lease | asyncio.Future[Lease] | Answer:
        """Where the request goes. May raise (or resolve to) spec.lease.Refused."""


class Gateway:
    """Listens, and owns everything that is in progress."""

    def __init__(
        self,
        routes: Routes,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        self.routes = routes
        self.observer = routes.observer
        self.loop = loop if loop is not None else asyncio.get_running_loop()
        self.max_body_bytes = max_body_bytes
        self.pool = Pool(self.loop)
        self.stopping = False
        self.clients: set[Client] = set()
        self._active: set[Exchange] = set()
        self._quiet = asyncio.Event()
        self._empty = asyncio.Event()
        self.address: Address
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        # Unlike over restarts, and as cheap as counting.
        self._id_prefix = os.urandom(5).hex().encode()
        self._ids = itertools.count(1)

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the base URL; raises ProxyError that says who has the port."""
        self._server, self.address = await listen(self.loop, lambda: Client(self), host, port)
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)
        return self.address.url

    async def stop_accepting(self) -> None:
        """No new connections and no second request on those that stand."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.close_if_idle()

    async def drain(self, timeout_s: float) -> bool:
        """Wait for the requests in progress; False when some still are after `timeout_s`."""
        await self.stop_accepting()
        if self._active:
            self._quiet.clear()
            try:
                await asyncio.wait_for(self._quiet.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    async def close(self) -> None:
        """Cut what is left, release every lease, close every socket."""
        await self.stop_accepting()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for client in list(self.clients):
            client.abort()
        for exchange in list(self._active):  # those that are read to the end for nobody
            exchange.abort()
        self.pool.close()
        if self._server is not None:
            await self._server.wait_closed()
        if self.clients:  # each leaves with its connection_lost, which the loop calls next
            self._empty.clear()
            await self._empty.wait()

    def in_progress(self) -> list[Exchange]:
        """The requests that are not answered to the end yet, the oldest first."""
        return sorted(self._active, key=lambda exchange: exchange.record.started)

    # -- for exchanges and clients

    def left(self, client: Client) -> None:
        """A client's connection is gone."""
        self.clients.discard(client)
        if not self.clients:
            self._empty.set()

    def begin(self, exchange: Exchange) -> None:
        """A request is in progress."""
        self._active.add(exchange)
        self.observer.in_flight += 1

    def finish(self, exchange: Exchange, how: How) -> None:
        """It has ended."""
        self._active.discard(exchange)
        self.observer.finish(exchange.record, how, monotonic())
        if self.stopping and not self._active:
            self._quiet.set()

    def render(self, answer: Answer, head: Head) -> bytes:
        """Bytes of an answer of ours to this request."""
        return render(answer, head, keep=head.keep)

    def request_id(self, asked: bytes | None) -> bytes:
        """The client's own X-Request-ID if it is sane, else a new one."""
        if asked is not None and _REQUEST_ID.fullmatch(asked):
            return asked
        return b"%s-%x" % (self._id_prefix, next(self._ids))

    def _sweep(self) -> None:
        before = monotonic() - CLIENT_IDLE_S
        for client in list(self.clients):
            if client.heard_at < before:
                client.close_if_idle()
        self._sweeper = self.loop.call_later(_SWEEP_S, self._sweep)
