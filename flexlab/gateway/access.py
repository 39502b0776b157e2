"""Who may ask at all: judged from the head alone, before the body is read or a route is looked up.

Two rules keep web pages out of a lab that listens on loopback without keys:
- Host must be a name that we listen as. A page that rebinds its own DNS name to 127.0.0.1 passes
  the browser's same-origin check, but its Host header still bears that name.
- A foreign Origin is refused, preflight or not. Origins on loopback are the user's own tools.

Pure: no sockets, no clock. Keys with scopes will be judged in `judge`, after these two.
"""

from __future__ import annotations

import ipaddress
import re
import socket

from flexlab.gateway.http import Answer, Head, error_answer

_METHODS = b"GET, POST, PUT, PATCH, DELETE, HEAD, OPTIONS"
_HEADER_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}")
_ECHOED_NAMES_MAX = 64
_REMEMBERED_MAX = 256
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<authority>[^/?#@\s]+)", re.IGNORECASE)
WILDCARDS = frozenset({"0.0.0.0", "::", ""})


class Access:
    """The rules for one listener. `allow_origins` come on top of loopback; `*` allows any."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        allow_origins: tuple[str, ...] = (),
        names: tuple[str, ...] = (),
    ) -> None:
        self._origins = frozenset(origin.rstrip("/").lower() for origin in allow_origins)
        self._any_address = host in WILDCARDS
        self._names = {name.lower() for name in (host, *names) if name}
        if self._any_address:
            own = socket.gethostname().lower()
            self._names |= {own, f"{own.partition('.')[0]}.local"}
        self.loopback = is_loopback(host)
        """Only programs of this machine can reach the listener."""
        self._known_hosts: set[bytes] = set()

    def judge(self, head: Head) -> Answer | None:
        """A refusal, a preflight's answer, or None: go on. Sets `head.answer_headers`."""
        host = head.fields.get(b"host")
        if host is None or len(head.fields) != len(head.headers):
            refusal = _judge_host_count(head)
            if refusal is not None:
                return refusal
        if host is not None and host not in self._known_hosts:
            if not self._listens_as(host):
                return _misdirected(host)
            if len(self._known_hosts) < _REMEMBERED_MAX:
                self._known_hosts.add(host)
        origin = head.fields.get(b"origin")
        if origin is None:
            return None
        if not self._welcomes(origin, host):
            return _foreign(origin)
        head.answer_headers = (
            b"access-control-allow-origin: %s\r\n"
            b"access-control-expose-headers: x-request-id, retry-after\r\n"
            b"vary: Origin\r\n" % origin
        )
        if head.method == b"OPTIONS" and b"access-control-request-method" in head.fields:
            return _preflight(head)
        return None

    def _listens_as(self, host: bytes) -> bool:
        name = host_name(host)
        if name is None:
            return False
        if is_loopback(name) or name in self._names:
            return True
        # An address is not a name: nobody can rebind it.
        return self._any_address and _is_address(name)

    def _welcomes(self, origin: bytes, host: bytes | None) -> bool:
        text = origin.decode("latin-1").lower()
        if "*" in self._origins or text.rstrip("/") in self._origins:
            return True
        match = _ORIGIN.fullmatch(text)
        if match is None or match["scheme"] not in ("http", "https"):
            return False
        name = host_name(match["authority"].encode("latin-1"))
        own = host is not None and match["authority"] == host.decode("latin-1").lower()
        return own or (name is not None and is_loopback(name))


def host_name(authority: bytes) -> str | None:
    """The name or address in `name:port`, lower-case and without brackets; None if malformed."""
    text = authority.decode("latin-1").strip().lower()
    if text.startswith("["):
        address, bracket, port = text[1:].partition("]")
        if not bracket or (port and not re.fullmatch(r":\d*", port)) or not _is_address(address):
            return None
        return address
    name, _, port = text.partition(":")
    if not re.fullmatch(r"[\w.-]+", name) or not re.fullmatch(r"\d*", port):
        return None
    return name.rstrip(".") or None


def is_loopback(name: str) -> bool:
    """`localhost`, a name under it, or an address of this machine alone."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _judge_host_count(head: Head) -> Answer | None:
    """RFC 9112, 3.2: exactly one Host; only HTTP/1.0 may leave it out."""
    count = sum(1 for name, _ in head.headers if name == b"host")
    if count > 1 or (count == 0 and b"host" not in head.fields and head.version != "1.0"):
        return error_answer(400, "bad_host", "a request must have exactly one Host header")
    return None


def _misdirected(host: bytes) -> Answer:
    name = host.decode("latin-1")
    return error_answer(
        403,
        "host_not_allowed",
        f"this gateway does not listen as {name!r}; ask it by the address that it was started with "
        "(flexlab serve --host)",
    )


def _foreign(origin: bytes) -> Answer:
    name = origin.decode("latin-1")
    return error_answer(
        403,
        "origin_not_allowed",
        f"web pages from {name!r} may not use this gateway; allow them with the setting "
        "allow_origins",
    )


def _preflight(head: Head) -> Answer:
    asked = head.fields.get(b"access-control-request-headers", b"").split(b",")
    names = [name.strip() for name in asked[:_ECHOED_NAMES_MAX]]
    echoed = b", ".join(name for name in names if _HEADER_NAME.fullmatch(name))
    headers = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", b"600"),
    ]
    if echoed:
        headers.append((b"access-control-allow-headers", echoed))
    if head.fields.get(b"access-control-request-private-network") == b"true":
        headers.append((b"access-control-allow-private-network", b"true"))
    head.route = "preflight"
    return Answer(204, headers=tuple(headers))
