"""What both sides of the gateway know of HTTP: a request's head, answers of our own, header rules.

Pure: nothing here reads a socket. Header names are lower-case bytes throughout; targets and header
values stay the bytes that arrived.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from flexlab.core.units import show_bytes
from flexlab.spec.plan import Refusal

HEAD_LIMIT_BYTES = 64 * 1024
"""Of one head; also how much may arrive without a byte of body (trailers, chunk extensions)."""

HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate",
    b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""RFC 9110, 7.6.1: meant for the next hop only. `Connection` may name more."""

CORS_ANSWER_NAMES = frozenset({
    b"access-control-allow-origin", b"access-control-allow-credentials",
    b"access-control-allow-methods", b"access-control-allow-headers",
    b"access-control-expose-headers", b"access-control-max-age",
    b"access-control-allow-private-network",
})  # fmt: skip
"""The gateway alone speaks CORS: a second Access-Control-Allow-Origin makes browsers refuse."""

Headers = list[tuple[bytes, bytes]]


class Answer(msgspec.Struct, frozen=True):
    """An answer that the gateway gives by itself: lists, health, errors."""

    status: int
    body: bytes = b""
    content_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Head:
    """One request's head, and below it what the rules and the router found out about it."""

    __slots__ = (
        "answer_headers", "client", "fields", "headers", "keep", "method", "model", "path", "query",
        "request_id", "route", "rule", "since", "target", "tunnel", "upgrade", "upstream_target",
        "version",
    )  # fmt: skip

    def __init__(
        self, method: bytes, target: bytes, headers: Headers, version: str = "1.1", client: str = ""
    ) -> None:
        self.method = method
        self.target = target
        self.headers = headers
        self.fields = dict(headers)
        """The last value of each name: for names that come once, and to see whether one came."""
        self.version = version
        self.client = client
        """Who asks: the peer's address."""
        self.keep = True
        """The client's connection stays open after this answer."""
        self.upgrade = False
        """The client asks for another protocol (a websocket)."""
        if target[:1] != b"/":
            target = _without_authority(target, self.fields)
        self.upstream_target = target
        """Path and query as the engine gets them."""
        self.path, _, self.query = target.partition(b"?")
        self.request_id = b""
        self.route = ""
        """A word for metrics: the path pattern of the route, never the path itself."""
        self.rule: object = None
        """The router's own note, from its look at the head to its look at the body."""
        self.model: str | None = None
        """As it was asked for, and once it is granted by its name."""
        self.since: float | None = None
        """Loop time of its first coming, for a request that was cut and asks again (rule 9)."""
        self.tunnel = False
        """The route lets an upgrade through."""
        self.answer_headers = b""
        """Rendered lines that go into whatever answer this gets (CORS)."""

    @property
    def body_expected(self) -> bool:
        """Whether bytes of a body follow this head."""
        length = self.fields.get(b"content-length")
        return b"transfer-encoding" in self.fields or (length is not None and int(length) > 0)


def _without_authority(target: bytes, fields: dict[bytes, bytes]) -> bytes:
    """Origin form of an absolute target; its authority replaces Host (RFC 9112, 3.2.2)."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    cut = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    fields[b"host"] = rest[:cut]
    path = rest[cut:]
    return path if path[:1] == b"/" else b"/" + path


def connection_names(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The header names that this message's own Connection header makes hop-by-hop."""
    found: set[bytes] = set()
    for name, value in headers:
        if name == b"connection":
            found.update(word.strip() for word in value.lower().split(b","))
    return frozenset(found)


def json_answer(value: object, status: int = 200, *headers: tuple[bytes, bytes]) -> Answer:
    """`value` as JSON."""
    return Answer(status, msgspec.json.encode(value), headers=headers)


def error_body(status: int, code: str, message: str, param: str | None = None) -> bytes:
    """OpenAI's error shape, which every OpenAI client knows how to show."""
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
        status, "server_error" if status >= 500 else "invalid_request_error"
    )
    return msgspec.json.encode(
        {"error": {"message": message, "type": kind, "code": code, "param": param}}
    )


def error_answer(
    status: int, code: str, message: str, *headers: tuple[bytes, bytes], param: str | None = None
) -> Answer:
    """An error in OpenAI's shape."""
    return Answer(status, error_body(status, code, message, param), headers=headers)


def body_too_large(limit_bytes: int) -> Answer:
    """413, with the limit and its name."""
    limit = show_bytes(limit_bytes)
    message = f"the request body is larger than {limit}, this gateway's max_body_bytes"
    return error_answer(413, "request_too_large", message)


def head_too_large() -> Answer:
    """431."""
    return error_answer(431, "head_too_large", "the request head is larger than 64 KiB")


def refusal_message(refusal: Refusal) -> str:
    """The sentence and what to do about it, for a client that shows `message` only."""
    return f"{refusal.message} ({refusal.hint})" if refusal.hint else refusal.message


def refusal_answer(refusal: Refusal) -> Answer:
    """The scheduler's no; 503 and 429 without a time to retry at get one second."""
    retry_s = refusal.retry_after_s
    if retry_s is None and refusal.status in (429, 503):
        retry_s = 1.0
    headers = () if retry_s is None else ((b"retry-after", b"%d" % max(1, math.ceil(retry_s))),)
    param = "model" if refusal.status == 404 else None
    message = refusal_message(refusal)
    return error_answer(refusal.status, refusal.code, message, *headers, param=param)


_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %s\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}


def render(answer: Answer, head: Head | None, *, keep: bool) -> bytes:
    """The bytes of an answer of ours; `head` is None when the request could not be read."""
    lines = [_STATUS_LINES.get(answer.status, b"HTTP/1.1 %d Status\r\n" % answer.status)]
    if answer.status != 204:
        lines.append(b"content-type: %s\r\n" % answer.content_type)
        lines.append(b"content-length: %d\r\n" % len(answer.body))
    lines.extend(b"%s: %s\r\n" % header for header in answer.headers)
    if head is not None:
        lines += (head.answer_headers, b"x-request-id: ", head.request_id, b"\r\n")
    if not keep:
        lines.append(b"connection: close\r\n")
    elif head is not None and head.version == "1.0":
        lines.append(b"connection: keep-alive\r\n")
    lines.append(b"\r\n")
    if answer.status != 204 and (head is None or head.method != b"HEAD"):
        lines.append(answer.body)
    return b"".join(lines)
