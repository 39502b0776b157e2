"""The image of llama.cpp for CPUs: built without a registry, and started as FlexLab starts it."""

from __future__ import annotations

import http.client
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import docker
import docker_lab
import pytest
from waiting import until

from flexlab import __version__
from flexlab.core import paths
from flexlab.runtimes.containers import places

pytestmark = pytest.mark.docker

IMAGE = f"flexlab/llamacpp-cpu:{__version__}"
BUILD = paths.shipped_dir("compose") / "images" / "llamacpp-cpu" / "build"
KEY = "k-of-this-test"
ROOT = Path(__file__).resolve().parents[2]


def url() -> str:
    """Where the engine that FlexLab would use listens."""
    found = places.search(os.environ)
    assert found.place is not None
    return found.place.url


@pytest.fixture(scope="module")
def client() -> Iterator[docker.APIClient]:
    docker_lab.need_engine()
    made = docker.APIClient(base_url=url(), version="auto", timeout=60)
    yield made
    made.close()


def build(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BUILD), *words],
        env=os.environ | {"DOCKER_HOST": url()},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def image(client: docker.APIClient) -> str:
    """Its name, once it is built."""
    for program in ("docker", "mmdebstrap"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    done = build()
    assert (done.returncode, done.stdout) == (0, f"{IMAGE}\n"), done.stderr
    return IMAGE


@pytest.fixture(scope="module")
def smoke_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model that there is a recipe for."""
    data = tmp_path_factory.mktemp("data")
    home = {"HOME": str(data), "FLEXLAB_DATA_DIR": str(data), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "flexlab", "pull", "smollm2"],
        env=os.environ | home,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (found,) = data.glob("**/*.gguf")
    return found


def key_file() -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        folder = tarfile.TarInfo(".flexlab")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(folder)
        file = tarfile.TarInfo(".flexlab/api-key")
        file.size, file.mode = len(KEY), 0o444
        archive.addfile(file, io.BytesIO(KEY.encode()))
    return made.getvalue()


@pytest.fixture
def container(client: docker.APIClient, image: str, smoke_model: Path) -> Iterator[str]:
    """Started with no rights at all and its port on the loopback; its id."""
    inside = "/models/model.gguf"
    host = client.create_host_config(
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        port_bindings={8080: ("127.0.0.1", None)},
        mounts=[docker.types.Mount(inside, str(smoke_model), type="bind", read_only=True)],
    )
    words = [
        "--host", "0.0.0.0", "--port", "8080", "--api-key-file", "/.flexlab/api-key",
        "--model", inside, "--alias", "smollm2", "--ctx-size", "2048", "--cache-ram", "0",
    ]  # fmt: skip
    made = client.create_container(image, words, host_config=host, ports=[8080])["Id"]
    try:
        client.put_archive(made, "/", key_file())
        client.start(made)
        yield made
    finally:
        client.remove_container(made, force=True, v=True)


def ask(client: docker.APIClient, container: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Status and answer at the published port; 0 while nobody listens."""
    (bound,) = client.port(container, 8080)
    assert bound["HostIp"] == "127.0.0.1"
    connection = http.client.HTTPConnection("127.0.0.1", int(bound["HostPort"]), timeout=60)
    with closing(connection), suppress(OSError, http.client.HTTPException):
        text = None if body is None else json.dumps(body)
        key = {"Authorization": f"Bearer {KEY}"} if body is not None else {}
        connection.request("GET" if body is None else "POST", path, text, key)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null")
    return 0, None


def inside(client: docker.APIClient, container: str, program: str) -> str:
    run = client.exec_create(container, ["python3", "-c", program])
    told: bytes = client.exec_start(run["Id"])
    return told.decode()


def test_it_answers_without_rights_and_ends_when_told(
    client: docker.APIClient, container: str
) -> None:
    until(lambda: ask(client, container, "/health")[0] == 200)
    assert ask(client, container, "/v1/models")[0] == 401
    wanted = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    status, answer = ask(client, container, "/v1/chat/completions", wanted)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 4
    told = dict(
        line.split(":", 1)
        for line in inside(client, container, "print(open('/proc/1/status').read())").splitlines()
        if ":" in line
    )
    assert "0" not in told["Uid"].split()
    assert told["CapBnd"].strip("\t 0") == ""
    assert told["NoNewPrivs"].strip() == "1"
    began = time.monotonic()
    client.stop(container, timeout=10)
    assert time.monotonic() - began < 2
    assert client.inspect_container(container)["State"]["ExitCode"] == 0


def test_a_wrong_option_is_one_sentence_and_its_exit_code(
    client: docker.APIClient, image: str
) -> None:
    made = client.create_container(image, ["--modle", "/models/a.gguf"])["Id"]
    try:
        client.start(made)
        assert client.wait(made, timeout=30)["StatusCode"] == 2
        assert b"--model" in client.logs(made)
    finally:
        client.remove_container(made, force=True, v=True)


def test_it_says_what_it_is(client: docker.APIClient, image: str) -> None:
    config = client.inspect_image(image)["Config"]
    assert config["Labels"]["org.opencontainers.image.version"] == __version__
    assert config["Labels"]["org.opencontainers.image.title"] == "flexlab/llamacpp-cpu"
    assert config["Healthcheck"]["Test"][0] == "CMD"
    assert config["User"] not in ("", "0", "root")
    assert client.inspect_image(image)["Size"] < 150_000_000


def test_what_has_not_changed_is_not_built_again(client: docker.APIClient, image: str) -> None:
    before = client.inspect_image(image)["Id"]
    done = build()
    assert done.stdout == f"{IMAGE}\n"
    assert client.inspect_image(image)["Id"] == before
    assert "--force" in done.stderr
