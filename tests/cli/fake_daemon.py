"""A daemon that holds nothing: it speaks the control API on a real unix socket and answers chats
on a real TCP port, from what a test tells it to say.

Used in the test's own process (class FakeDaemon), and, put in the place of flexlab.daemon.main by
`site/sitecustomize.py`, by commands that start a daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socketserver
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import parse_qs

import msgspec

from flexlab import __version__
from flexlab.core import paths
from flexlab.spec.lab import Event, InstanceView, ModelView, PoolView, Progress, Snapshot, UpStep

MODEL = "smollm2-135m"
ALIAS = "smollm2"
ANSWER = "one two three"


def model_view(**more: Any) -> ModelView:
    fields: dict[str, Any] = {
        "name": MODEL,
        "aliases": (ALIAS,),
        "word": "ready",
        "since": time.time() - 60,
        "why": "asked for by up",
        "installed": True,
        "capabilities": ("chat", "completions"),
        "instances": ("i1",),
        "idle_since": time.time() - 30,
        "unload_at": time.time() + 600,
    }
    return ModelView(**{**fields, **more})


def instance_view(**more: Any) -> InstanceView:
    fields: dict[str, Any] = {
        "id": "i1",
        "model": MODEL,
        "variant": "cpu",
        "backend": "llamacpp",
        "runtime": "process",
        "arch": "x86_64",
        "devices": ("cpu",),
        "state": "ready",
        "since": time.time() - 60,
        "why": "answers",
        "claims": {"ram": 400 * 1024**2},
        "ready_at": time.time() - 60,
        "load_s": 1.5,
    }
    return InstanceView(**{**fields, **more})


class FakeDaemon:
    """Start it with `with`. `requests` are the control requests it saw: (method path, body)."""

    def __init__(self, *, version: str = __version__) -> None:
        self.version = version
        self.requests: list[tuple[str, Any]] = []
        self.models: tuple[ModelView, ...] = (model_view(),)
        self.instances: tuple[InstanceView, ...] = (instance_view(),)
        self.steps: list[UpStep] = [up_ready()]
        self.hang_after_steps = False
        self.errors: dict[str, tuple[int, dict[str, Any]]] = {}
        """Path -> status and error that it answers with."""
        self.answers: dict[str, Any] = {}
        self.events: list[Event] = []
        self.events_end = threading.Event()
        """Until it is set, whoever follows the events is told of more."""
        self.log_lines = ["first", "second"]
        self.withdrawn = threading.Event()
        self.ended = threading.Event()
        self.chats: list[dict[str, Any]] = []
        self.pieces: list[str] = list(ANSWER)
        self.chat_hangs = False
        """Whether a streamed answer never ends after its pieces."""
        self.chat_came = threading.Event()
        self.chat_left = threading.Event()
        self.chat_waits: threading.Event | None = None
        """Until it is set, an answer does not begin."""
        self.finish_reason = "stop"
        self.started_at = time.time() - 90
        self.pending: tuple[str, ...] = ()
        """Settings that count from its next start on."""

    def __enter__(self) -> FakeDaemon:
        paths.private_dir(paths.state_dir())
        self._lock = paths.lock_file().open("a+")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        socket_path = paths.socket_path()
        paths.private_dir(socket_path.parent)
        socket_path.unlink(missing_ok=True)
        self._gateway = _GatewayServer(("127.0.0.1", 0), _gateway_handler(self))
        self.address = f"http://127.0.0.1:{self._gateway.server_address[1]}"
        self._control = _ControlServer(str(socket_path), _control_handler(self))
        for server in (self._gateway, self._control):
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        self._lock.truncate(0)
        self._lock.write(
            json.dumps(
                {
                    "pid": os.getpid(),
                    "socket": str(socket_path),
                    "version": self.version,
                    "address": self.address,
                }
            )
        )
        self._lock.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if not self.ended.is_set():
            self.ended.set()
            for server in (self._control, self._gateway):
                server.shutdown()
                server.server_close()
            self._lock.close()

    def snapshot(self) -> Snapshot:
        return Snapshot(
            flexlab_version=self.version,
            hostname="box",
            installation="test",
            pid=os.getpid(),
            started_at=self.started_at,
            at=time.time(),
            address=self.address,
            models=self.models,
            instances=self.instances,
            pools=(
                PoolView(
                    id="ram",
                    kind="ram",
                    total_bytes=8 * 1024**3,
                    used_bytes=1024**3,
                    reserve_bytes=0,
                    foreign_bytes=None,
                    free_bytes=7 * 1024**3,
                ),
            ),
        )

    def bodies(self, path: str) -> list[Any]:
        """The bodies of the requests to `path`, oldest first."""
        return [body for seen, body in self.requests if seen == path]


def up_ready(**more: Any) -> UpStep:
    return UpStep(kind="ready", model=model_view(), instance=instance_view(**more))


def up_story() -> list[UpStep]:
    """A first start: findings, a download, loading, ready."""
    weights = Progress(phase="weights", text="smollm2-135m", done_bytes=50, total_bytes=100)
    return [
        UpStep(kind="event", text="Test CPU, 2 threads, 8.0G memory"),
        UpStep(kind="event", text="variant cpu: no GPU was found"),
        UpStep(kind="progress", progress=weights),
        UpStep(kind="event", text="loading"),
        up_ready(ready_at=time.time() + 3600),
    ]


class _Quiet(socketserver.BaseServer):
    """Clients that leave in the middle are what the tests are about."""

    def handle_error(self, *_: object) -> None:
        pass


class _GatewayServer(_Quiet, ThreadingHTTPServer):
    pass


class _ControlServer(_Quiet, socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 32


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: ClassVar[FakeDaemon]

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return "test"

    def body(self) -> Any:
        length = int(self.headers.get("Content-Length") or 0)
        return json.loads(self.rfile.read(length)) if length else None

    def answer(self, payload: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("x-flexlab-version", self.fake.version)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def stream(self, lines: Iterator[bytes], kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in lines:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.write(b"0\r\n\r\n")


def _control_handler(daemon: FakeDaemon) -> type[_Handler]:
    class Control(_Handler):
        fake = daemon

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            daemon.requests.append((f"GET {path}", self.path))
            if self.refused(path):
                return
            if path == "/snapshot":
                self.answer(msgspec.json.encode(daemon.snapshot()))
            elif path == "/status":
                self.answer(json.dumps(_status(daemon)).encode())
            elif path == "/requests":
                self.answer(json.dumps(daemon.answers["/requests"]).encode())
            elif path == "/why":
                self.answer(json.dumps(daemon.answers["/why"]).encode())
            elif path == "/events":
                self.stream(self.events(), "application/x-ndjson")
            elif path == "/logs":
                self.stream((line.encode() + b"\n" for line in daemon.log_lines), "text/plain")

        def do_POST(self) -> None:
            body = self.body()
            daemon.requests.append((f"POST {self.path}", body))
            if self.refused(self.path):
                return
            if self.path in ("/up", "/restart"):
                self.up()
            elif self.path == "/shutdown":
                self.answer(
                    json.dumps(daemon.answers.get("/shutdown", {"stopping": True})).encode()
                )
                if daemon.answers.get("/shutdown", {"stopping": True})["stopping"]:
                    threading.Thread(target=daemon.close).start()
            else:
                self.answer(json.dumps(daemon.answers[self.path]).encode())

        def refused(self, path: str) -> bool:
            if path in daemon.errors:
                status, error = daemon.errors[path]
                self.answer(json.dumps({"error": error}).encode(), status)
            return path in daemon.errors

        def events(self) -> Iterator[bytes]:
            """Those after the one that is asked for; with `follow` more, until a test ends it."""
            asked = parse_qs(self.path.partition("?")[2])
            after, follow = int(asked["after"][0]), asked["follow"] == ["1"]
            while True:
                for event in [event for event in daemon.events if event.id > after]:
                    yield msgspec.json.encode(event) + b"\n"
                    after = event.id
                if not follow or daemon.events_end.wait(0.02):
                    return

        def up(self) -> None:
            if not daemon.hang_after_steps:
                steps = (msgspec.json.encode(step) + b"\n" for step in daemon.steps)
                self.stream(steps, "application/x-ndjson")
                return
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for step in daemon.steps:
                line = msgspec.json.encode(step) + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            with contextlib.suppress(OSError):
                self.rfile.read(1)  # ends when the client leaves
            daemon.withdrawn.set()

    return Control


def _gateway_handler(daemon: FakeDaemon) -> type[_Handler]:
    class Gateway(_Handler):
        fake = daemon

        def do_POST(self) -> None:
            body = self.body()
            daemon.chats.append(body)
            daemon.chat_came.set()
            if self.path in daemon.errors:
                status, error = daemon.errors[self.path]
                self.answer(json.dumps({"error": error}).encode(), status)
                return
            if daemon.chat_waits is not None:
                assert daemon.chat_waits.wait(20)
            if body.get("stream") and daemon.chat_hangs:
                self.send_response(200)
                self.end_headers()
                self.wfile.writelines(list(_sse(daemon))[: len(daemon.pieces)])
                with contextlib.suppress(OSError):
                    self.rfile.read(1)  # ends when the client leaves
                daemon.chat_left.set()
            elif body.get("stream"):
                self.stream(_sse(daemon), "text/event-stream")
            else:
                message = {"role": "assistant", "content": "".join(daemon.pieces)}
                self.answer(json.dumps({"choices": [{"message": message}]}).encode())

    return Gateway


def _sse(daemon: FakeDaemon) -> Iterator[bytes]:
    for piece in daemon.pieces:
        yield _data({"choices": [{"index": 0, "delta": {"content": piece}}]})
    yield _data({"choices": [{"index": 0, "delta": {}, "finish_reason": daemon.finish_reason}]})
    usage = {"prompt_tokens": 7, "completion_tokens": len(daemon.pieces)}
    yield _data({"choices": [], "usage": usage, "timings": {"predicted_per_second": 42.5}})
    yield b"data: [DONE]\n\n"


def _data(event: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _status(daemon: FakeDaemon) -> dict[str, Any]:
    return {
        "flexlab_version": daemon.version,
        "pid": os.getpid(),
        "address": daemon.address,
        "started_at": daemon.started_at,
        "pending": daemon.pending,
        "installation": "test",
        "holds": len(daemon.instances),
    }


def run(
    loaded: object, *, externals: Mapping[str, str], detached: bool, ready_fd: int | None
) -> int:
    """In the place of flexlab.daemon.main.run; FAKE_DAEMON says how it behaves."""
    how = os.environ.get("FAKE_DAEMON", "")
    if how == "dies":
        raise SystemExit("the fake daemon died on purpose")
    if how == "port":
        hint = "flexlab serve --port 8485"
        problem = {"code": "port_taken", "message": "port 8484 is taken by nc", "hint": hint}
        _report(ready_fd, {"error": {**problem, "exit_code": 1}})
        return 1
    daemon = FakeDaemon()
    daemon.steps = up_story()
    if how == "empty":
        daemon.models, daemon.instances, daemon.hang_after_steps = (), (), True
        daemon.steps = daemon.steps[:-1]
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=daemon.close).start())
    try:
        daemon.__enter__()
    except BlockingIOError:
        _report(ready_fd, {"already": True})
        return 0
    _report(ready_fd, {"ready": True})
    # Bounded, so that a failed test leaves nothing behind for long.
    daemon.ended.wait(60)
    daemon.close()
    return 0


def _report(ready_fd: int | None, value: object) -> None:
    if ready_fd is not None:
        with os.fdopen(ready_fd, "wb") as pipe:
            pipe.write(json.dumps(value).encode() + b"\n")
