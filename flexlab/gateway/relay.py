"""The head of an engine's answer as the client gets it: what passes, what is ours, what is added.

Pure. Names are lower-case bytes.
"""

from __future__ import annotations

from flexlab.gateway.http import CORS_ANSWER_NAMES, HOP_BY_HOP, Head, Headers, connection_names

_PASSED_WHEN_JUDGED = frozenset({
    b"content-length", b"content-type", b"content-encoding", b"cache-control",
    b"x-accel-buffering", b"trailer",
})  # fmt: skip
_JUDGED = HOP_BY_HOP | CORS_ANSWER_NAMES | _PASSED_WHEN_JUDGED | {b"x-request-id"}


class Malformed(Exception):
    """An answer that cannot be passed on; the text says what is wrong with it."""


class AnswerHead:
    """What an answer's headers say of its body, and the lines of those that pass."""

    __slots__ = ("chunked", "closing", "length", "lines", "sse")

    def __init__(self, status_line: bytes, headers: Headers) -> None:
        """Raises Malformed. `status_line` is without its version, with its line end."""
        self.lines = lines = [b"HTTP/1.1", status_line]
        self.length: int | None = None
        self.chunked = self.sse = self.closing = False
        own: frozenset[bytes] | tuple[()] = ()
        encoded = False
        for name, _ in headers:
            if name == b"connection":
                own = connection_names(headers)
                self.closing = b"close" in own
        for name, value in headers:
            if name in _JUDGED:
                if name == b"content-length":
                    self.length = int(value)
                elif name == b"content-type":
                    self.sse = value[:17].lower() == b"text/event-stream"
                elif name == b"content-encoding":
                    encoded = True
                elif name == b"transfer-encoding":
                    if value.lower() != b"chunked":
                        raise Malformed("its answer has a transfer coding other than chunked")
                    self.chunked = True
                if name not in _PASSED_WHEN_JUDGED:
                    continue
            elif name in own:
                continue
            lines += (name, b": ", value, b"\r\n")
        if self.sse:
            self._ask_for_no_buffering(headers)
            self.sse = not encoded

    def _ask_for_no_buffering(self, headers: Headers) -> None:
        """A proxy before us must not hold tokens back; the engine's own words win."""
        names = {name for name, _ in headers}
        if b"cache-control" not in names:
            self.lines.append(b"cache-control: no-cache\r\n")
        if b"x-accel-buffering" not in names:
            self.lines.append(b"x-accel-buffering: no\r\n")

    def render(self, head: Head, *, framed: bool) -> bytes:
        """All of it; `framed` False leaves the transfer coding out (no body may follow)."""
        lines = self.lines
        if self.chunked and framed and head.version != "1.0":
            lines.append(b"transfer-encoding: chunked\r\n")
        if not head.keep:
            lines.append(b"connection: close\r\n")
        elif head.version == "1.0":
            lines.append(b"connection: keep-alive\r\n")
        lines += (head.answer_headers, b"x-request-id: ", head.request_id, b"\r\n\r\n")
        return b"".join(lines)


def interim_head(status_line: bytes, headers: Headers) -> bytes:
    """A 1xx answer, passed on."""
    hop = HOP_BY_HOP | connection_names(headers)
    lines = [b"HTTP/1.1", status_line]
    lines.extend(b"%s: %s\r\n" % header for header in headers if header[0] not in hop)
    lines.append(b"\r\n")
    return b"".join(lines)


def switching_head(status_line: bytes, headers: Headers, head: Head) -> bytes:
    """A 101 answer: the one place where `upgrade` passes."""
    own = connection_names(headers)
    lines = [b"HTTP/1.1", status_line]
    for name, value in headers:
        if name == b"upgrade" or (name not in _JUDGED and name not in own):
            lines += (name, b": ", value, b"\r\n")
    lines += (b"connection: upgrade\r\n", head.answer_headers)
    lines += (b"x-request-id: ", head.request_id, b"\r\n\r\n")
    return b"".join(lines)
