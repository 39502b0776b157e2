"""Where engines are, rendered once per endpoint, and the connections to them that are idle."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

import msgspec

from flexlab.gateway.http import HOP_BY_HOP, Head, connection_names
from flexlab.spec.instance import Endpoint

if TYPE_CHECKING:
    from flexlab.gateway.upstream import Upstream

IDLE_MAX = 256
"""Idle connections kept per engine; engines close theirs after seconds, which removes them."""
_DESTINATIONS_MAX = 512

# Set anew by us (framing, host), or the client's secrets between it and this gateway.
_NEVER_PASSED = HOP_BY_HOP | {
    b"authorization", b"x-api-key", b"content-length", b"expect", b"host", b"x-request-id",
}  # fmt: skip
_WITH_BODY = frozenset({b"POST", b"PUT", b"PATCH"})


class Destination:
    """An endpoint as the bytes that each request to it needs."""

    __slots__ = ("added", "dropped", "endpoint", "key", "prefix")

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.key = (endpoint.scheme, endpoint.host, endpoint.port, endpoint.unix_path)
        self.prefix = endpoint.path_prefix.rstrip("/").encode()
        own = [(name.lower(), value) for name, value in endpoint.headers]
        self.dropped = _NEVER_PASSED | {
            name.lower().encode() for name in (*endpoint.strip, *(name for name, _ in own))
        }
        lines = "" if "host" in dict(own) else f"host: {_host_header(endpoint)}\r\n"
        lines += "".join(f"{name}: {value}\r\n" for name, value in own)
        self.added = lines.encode("latin-1")

    def request(self, head: Head, body_bytes: int) -> bytes:
        """The head of the request as the engine gets it."""
        fields = head.fields
        own = connection_names(head.headers) if b"connection" in fields else ()
        dropped = self.dropped
        lines = [
            head.method, b" ", self.prefix, head.upstream_target, b" HTTP/1.1\r\n", self.added,
            b"x-request-id: ", head.request_id, b"\r\n",
        ]  # fmt: skip
        for name, value in head.headers:
            if name not in dropped and name not in own:
                lines += (name, b": ", value, b"\r\n")
        if head.tunnel:
            lines += (b"upgrade: ", fields[b"upgrade"], b"\r\nconnection: upgrade\r\n")
        elif b"te" in fields and b"trailers" in fields[b"te"].lower():
            lines.append(b"te: trailers\r\nconnection: te\r\n")
        if body_bytes or head.method in _WITH_BODY:
            lines.append(b"content-length: %d\r\n" % body_bytes)
        lines.append(b"\r\n")
        return b"".join(lines)


class Pool:
    """Idle connections by engine; the last one used is the first one taken."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._idle: dict[tuple[object, ...], list[Upstream]] = {}
        self._destinations: dict[int, Destination] = {}

    def destination(self, endpoint: Endpoint) -> Destination:
        """The rendered form, remembered by identity: hashing an endpoint costs more."""
        found = self._destinations.get(id(endpoint))
        if found is None or found.endpoint is not endpoint:
            if len(self._destinations) >= _DESTINATIONS_MAX:
                self._destinations.clear()
            found = self._destinations[id(endpoint)] = Destination(endpoint)
        return found

    def take(self, destination: Destination) -> Upstream | None:
        """An idle connection that still stands, as far as one can know."""
        idle = self._idle.get(destination.key)
        while idle:
            upstream = idle.pop()
            if not upstream.transport.is_closing():
                return upstream
        return None

    def put(self, upstream: Upstream) -> None:
        """Its answer is complete and the engine keeps the connection."""
        idle = self._idle.setdefault(upstream.destination.key, [])
        if len(idle) < IDLE_MAX:
            upstream.reused = True
            idle.append(upstream)
        else:
            upstream.transport.abort()

    def forget(self, upstream: Upstream) -> None:
        """It was closed while idle (or was never idle)."""
        idle = self._idle.get(upstream.destination.key)
        if idle is None:
            return
        if upstream in idle:
            idle.remove(upstream)
        if not idle:
            del self._idle[upstream.destination.key]

    @property
    def idle_count(self) -> int:
        """Connections that nobody uses now."""
        return sum(len(idle) for idle in self._idle.values())

    def close(self) -> None:
        """Close what is idle; what works for a request is that request's to close."""
        for idle in list(self._idle.values()):
            for upstream in list(idle):
                upstream.transport.abort()
        self._idle.clear()


def _host_header(endpoint: Endpoint) -> str:
    if endpoint.unix_path is not None:
        return "localhost"
    host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
    usual = 443 if endpoint.scheme == "https" else 80
    return host if endpoint.port == usual else f"{host}:{endpoint.port}"


_JSON_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")


def replace_model(body: bytes, name: str) -> bytes:
    """`body` with the value of its top-level `model` replaced, every other byte as it came.

    For engines that know the model by another name. Each occurrence of the key is replaced: which
    of two a parser takes is not ours to guess. A body without the key comes back unchanged.
    """
    pieces: list[bytes] = []
    copied = depth = 0
    value_at = -1
    for match in _JSON_TOKEN.finditer(body):
        token = match[0]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
        elif match.start() == value_at:
            pieces += (body[copied : match.start()], msgspec.json.encode(name))
            copied = match.end()
        elif depth == 1 and (colon := _COLON.match(body, match.end())) and _is_model(token):
            value_at = colon.end()
    return b"".join((*pieces, body[copied:]))


def _is_model(token: bytes) -> bool:
    if b"\\" not in token:
        return token == b'"model"'
    try:
        return bool(msgspec.json.decode(token) == "model")
    except msgspec.DecodeError:
        return False
