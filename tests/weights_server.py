"""A small file server on real TCP for the tests of weights: ranges, faults, and a memory."""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

BLOCK_BYTES = 64 * 1024
GIVE_UP_S = 30.0


@dataclass
class Asked:
    """One request as it came."""

    path: str
    headers: dict[str, str]

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Fault:
    """How the next answer for a path goes wrong."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut_after: int | None = None
    """Close the connection after so many bytes of the body."""
    hold_after: int | None = None
    """Send so many bytes, then wait for `gate` (or for the end of the server)."""
    gate: threading.Event = field(default_factory=threading.Event)
    ranges: bool = True
    body: bytes | None = None


class Server(ThreadingHTTPServer):
    """`files` and `pages` by path; `faults` are used up one by one, in order."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.kinds: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.asked: list[Asked] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def asked_for(self, path: str) -> list[Asked]:
        return [one for one in self.asked if one.path.partition("?")[0] == path]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is what these tests are about, and no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append(Asked(self.path, headers))
        path = self.path.partition("?")[0]
        faults = self.server.faults.get(path, [])
        fault = faults.pop(0) if faults else Fault()
        content = fault.body if fault.body is not None else self.server.files.get(path)
        if fault.status is not None or content is None:
            self._answer(fault.status or 404, b"no", fault.headers)
            return
        self._send_file(path, content, fault, headers)

    def _send_file(self, path: str, content: bytes, fault: Fault, asked: Mapping[str, str]) -> None:
        etag = '"' + hashlib.sha256(content).hexdigest()[:16] + '"'
        headers = {"ETag": etag, "Content-Type": self.server.kinds.get(path, "text/html")}
        match = re.fullmatch(r"bytes=(\d+)-", asked.get("range", ""))
        if match and fault.ranges and asked.get("if-range", etag) == etag:
            start = int(match[1])
            if start >= len(content):
                self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
                return
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self._head(206, len(content) - start, {**headers, **fault.headers})
            self._body(content[start:], fault)
        else:
            self._head(200, len(content), {**headers, **fault.headers})
            self._body(content, fault)

    def _body(self, body: bytes, fault: Fault) -> None:
        stop = len(body) if fault.cut_after is None else fault.cut_after
        hold = len(body) if fault.hold_after is None else fault.hold_after
        for start in range(0, min(stop, hold), BLOCK_BYTES):
            self.wfile.write(body[start : min(start + BLOCK_BYTES, stop, hold)])
        if hold < len(body):
            self.wfile.flush()
            fault.gate.wait(GIVE_UP_S)
            if not self.server.closing.is_set():
                self.wfile.write(body[hold:])
        if stop < len(body):
            self.close_connection = True

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self._head(status, len(body), headers)
        self.wfile.write(body)

    def _head(self, status: int, length: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def forget_network_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index, proxy, login or certificate of this machine."""
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name in ("NETRC", "HUGGING_FACE_HUB_TOKEN", "SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)


@contextmanager
def running() -> Iterator[Server]:
    """A server that listens until the block ends; handlers that hold are let go."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        for faults in server.faults.values():
            for fault in faults:
                fault.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()
