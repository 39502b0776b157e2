"""A fake engine on real TCP: /health while loading and after, chat and completions as llama.cpp.

It answers counted words instead of thoughts, so that structure, usage and order can be asserted.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import msgspec

from flexlab.core.units import MIB

LOOPBACK = "127.0.0.1"
DEFAULT_MAX_TOKENS = 16
BODY_LIMIT_BYTES = 8 * MIB


class Behaviour(msgspec.Struct, frozen=True, kw_only=True):
    """How one model's fake engine behaves; the defaults are those of a good one."""

    load_s: float | None = 0.0
    """None: it loads until `finish_loading()`."""
    start_delay_s: float = 0.0
    """How long `start` itself takes."""
    fail_start: str | None = None
    """`start` raises LaunchError with this sentence."""
    fail_load: str | None = None
    """It ends with exit code 1 instead of becoming ready, with this last log line."""
    crash_after_s: float | None = None
    """Killed by SIGKILL this long after it was started."""
    ignores_term: bool = False
    unstoppable: bool = False
    """Not even killing ends it, as with a process in uninterruptible sleep."""
    silent: bool = False
    """Accepts connections and never answers."""
    memory_bytes: int = 512 * MIB
    token_s: float = 0.0
    """Pause before each word of an answer."""


class FakeEngine:
    """One listening engine. `close()` cuts every connection, as the death of a process does."""

    def __init__(self, name: str, behaviour: Behaviour, api_key: str, port: int = 0) -> None:
        """Raises OSError when the port is taken."""
        self.name = name
        self.behaviour = behaviour
        self.api_key = api_key
        self.ready = threading.Event()
        self.closed = threading.Event()
        self.answered = 0
        self.abandoned = 0
        """Answers whose client left before the end."""
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener = socket.create_server((LOOPBACK, port))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name=f"demo-{name}", daemon=True).start()

    def close(self) -> None:
        """Stop listening and cut what is open; closing twice is harmless."""
        with self._lock:
            self.closed.set()
            open_now = [self._listener, *self._connections]
        for connection in open_now:
            # shutdown() wakes the threads that wait on it, close() alone does not.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def count(self, *, finished: bool) -> None:
        """One more answer: to its end, or up to where its client left."""
        with self._lock:
            if finished:
                self.answered += 1
            else:
                self.abandoned += 1

    def _accept(self) -> None:
        while not self.closed.is_set():
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._converse, args=(connection, address), daemon=True).start()

    def _converse(self, connection: socket.socket, address: tuple[str, int]) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            if self.closed.is_set():
                return
            if self.behaviour.silent:
                self.closed.wait()
                return
            _Handler(connection, address, self)
        except OSError:
            pass  # the client left, or the engine died
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def __init__(
        self, connection: socket.socket, address: tuple[str, int], engine: FakeEngine
    ) -> None:
        self.engine = engine
        super().__init__(connection, address, None)  # type: ignore[arg-type]

    def log_message(self, *_: object) -> None:
        """Silent: the runtime writes the demo's log."""

    def do_GET(self) -> None:
        if self.path == "/health":
            if self.engine.ready.is_set():
                self._json(200, {"status": "ok"})
            else:
                self._error(503, "unavailable_error", "Loading model")
        elif self._allowed():
            if self.path == "/v1/models":
                model = {"id": self.engine.name, "object": "model", "owned_by": "demo"}
                self._json(200, {"object": "list", "data": [model]})
            else:
                self._error(404, "not_found_error", "File Not Found")

    def do_POST(self) -> None:
        length = min(int(self.headers.get("content-length") or 0), BODY_LIMIT_BYTES)
        body = self.rfile.read(length)
        if not self._allowed():
            return
        routes = {"/v1/chat/completions": True, "/v1/completions": False}
        if self.path not in routes:
            self._error(404, "not_found_error", "File Not Found")
            return
        try:
            request = json.loads(body)
            chat = routes[self.path]
            if not isinstance(request["messages" if chat else "prompt"], list if chat else str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            self._error(400, "invalid_request_error", "Failed to parse the request")
            return
        self._answer(request, chat=chat)

    def _allowed(self) -> bool:
        key = self.engine.api_key
        if key and self.headers.get("authorization") != f"Bearer {key}":
            self._error(401, "authentication_error", "Invalid API Key")
            return False
        if not self.engine.ready.is_set():
            self._error(503, "unavailable_error", "Loading model")
            return False
        return True

    def _answer(self, request: dict[str, Any], *, chat: bool) -> None:
        count = int(request.get("max_tokens") or DEFAULT_MAX_TOKENS)
        usage = {"prompt_tokens": 8, "completion_tokens": count, "total_tokens": 8 + count}
        base = {
            "id": f"demo-{self.engine.answered}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": request.get("model", self.engine.name),
        }
        finished = False
        try:
            if request.get("stream"):
                self._stream(base, usage, count, request, chat=chat)
            else:
                text = "".join(self._words(count))
                said = (
                    {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
                )
                choice = {"index": 0, "finish_reason": "length", **said}
                self._json(200, {**base, "choices": [choice], "usage": usage})
            finished = True
        finally:
            self.engine.count(finished=finished)

    def _stream(
        self, base: dict[str, Any], usage: dict[str, int], count: int, request: dict[str, Any], *,
        chat: bool,
    ) -> None:  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chunk = {**base, "object": "chat.completion.chunk"} if chat else base
        for word in self._words(count):
            said = {"delta": {"content": word}} if chat else {"text": word}
            choice = {"index": 0, "finish_reason": None, **said}
            self._event(json.dumps({**chunk, "choices": [choice]}))
        empty: dict[str, object] = {"delta": {}} if chat else {"text": ""}
        last = {"index": 0, "finish_reason": "length", **empty}
        self._event(json.dumps({**chunk, "choices": [last]}))
        if (request.get("stream_options") or {}).get("include_usage"):
            self._event(json.dumps({**chunk, "choices": [], "usage": usage}))
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _words(self, count: int) -> Iterator[str]:
        for number in range(1, count + 1):
            # Also the end of the engine: a real one stops in the middle of a word too.
            if self.engine.closed.wait(self.engine.behaviour.token_s):
                raise ConnectionAbortedError("the engine was stopped")
            yield f"{number} "

    def _event(self, data: str) -> None:
        payload = f"data: {data}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(payload), payload))

    def _json(self, status: int, value: object) -> None:
        payload = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def _error(self, status: int, kind: str, message: str) -> None:
        self._json(status, {"error": {"code": status, "type": kind, "message": message}})
