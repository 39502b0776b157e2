"""The docker runtime with a real engine: containers of an image that is made here."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import docker
import docker_lab
import pytest
from contract import LifeContract, PlanFor, Quirk, ask, until

from flexlab.runtimes.base import Runtime
from flexlab.runtimes.containers import body, places
from flexlab.runtimes.docker import DockerRuntime
from flexlab.spec.instance import ContainerRef, Launch, Started
from flexlab.spec.plan import API_KEY_FILE, LaunchPlan, Probe

pytestmark = [
    pytest.mark.docker,
    # The SDK leaves sockets of streams that were broken off to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def plan(quirk: str = "good", **more: object) -> LaunchPlan:
    words: dict[str, Any] = {
        "model": "m",
        "variant": "v",
        "backend": "fake",
        "runtime": "docker",
        "arch": "x86_64",
        "served_name": "m",
        "image": docker_lab.python_image(),
        "command": (docker_lab.python_in_image(), docker_lab.ENGINE),
        "args": (
            "--host", "0.0.0.0", "--port", "8080", "--api-key-file", API_KEY_FILE,
            "--quirk", quirk,
        ),
        "port": 8080,
        "ready": Probe(path="/health"),
    }  # fmt: skip
    return LaunchPlan(**{**words, **more})


@pytest.fixture
def client() -> Iterator[docker.APIClient]:
    found = places.search(os.environ)
    assert found.place is not None
    made = docker.APIClient(base_url=found.place.url, version="auto")
    yield made
    made.close()


class TestDocker(LifeContract):
    @pytest.fixture(autouse=True)
    def engine(self) -> None:
        docker_lab.need_engine()

    @pytest.fixture
    def another(self) -> Iterator[Callable[[], Runtime]]:
        made: list[Runtime] = []

        def make() -> Runtime:
            made.append(DockerRuntime())
            return made[-1]

        yield make
        for runtime in made:
            runtime.close()

    @pytest.fixture
    def runtime(self, another: Callable[[], Runtime]) -> Runtime:
        return another()

    @pytest.fixture
    def plan_for(self) -> PlanFor:
        def make(quirk: Quirk) -> LaunchPlan:
            return plan(quirk)

        return make

    @pytest.fixture
    def runtime_on_port(self) -> Iterator[Callable[[int], Runtime]]:
        made: list[Runtime] = []

        def make(port: int) -> Runtime:
            made.append(DockerRuntime(choose_port=lambda: port))
            return made[-1]

        yield make
        for runtime in made:
            runtime.close()

    @pytest.fixture(autouse=True)
    def nothing_is_left(
        self, another: Callable[[], Runtime], installation: str, client: docker.APIClient
    ) -> Iterator[None]:
        yield
        label = f"{body.LABEL_OWNER}={installation}"
        for found in client.containers(all=True, filters={"label": label}):
            client.remove_container(found["Id"], force=True, v=True)

    def kill(self, started: Started) -> None:
        assert isinstance(started.ref, ContainerRef)
        found = places.search(os.environ)
        assert found.place is not None
        made = docker.APIClient(base_url=found.place.url, version="auto")
        made.kill(started.ref.id)
        made.close()

    def readable_by_others(self, started: Started, launch: Launch) -> bytes:
        assert isinstance(started.ref, ContainerRef)
        found = places.search(os.environ)
        assert found.place is not None
        made = docker.APIClient(base_url=found.place.url, version="auto")
        seen = json.dumps(made.inspect_container(started.ref.id)).encode()
        made.close()
        return seen + subprocess.run(["ps", "axwwe"], capture_output=True).stdout

    def test_it_gets_what_the_plan_says_and_nothing_else(
        self, runtime: Runtime, launch: Launch, client: docker.APIClient
    ) -> None:
        started = runtime.start(plan(env={"A": "1"}, shm_bytes=64 << 20, group_add=(44,)), launch)
        assert isinstance(started.ref, ContainerRef)
        told = client.inspect_container(started.ref.id)
        host = told["HostConfig"]
        assert host["Privileged"] is False
        assert host["CapDrop"] == ["ALL"]
        assert host["SecurityOpt"] == ["no-new-privileges"]
        assert host["RestartPolicy"]["Name"] == "no"
        assert host["ShmSize"] == 64 << 20
        assert host["GroupAdd"] == ["44"]
        assert not host["Devices"]
        assert "A=1" in told["Config"]["Env"]
        (bound,) = told["NetworkSettings"]["Ports"]["8080/tcp"]
        assert bound["HostIp"] == "127.0.0.1"
        assert told["Config"]["Labels"][body.LABEL_OWNER] == launch.installation

    def test_what_was_baked_in_is_cleared_by_its_command(
        self, runtime: Runtime, launch: Launch, tmp_path: object
    ) -> None:
        """`env -u` in front of the program, as planning writes it, needs a real `env`."""
        python = docker_lab.python_in_image()
        told = plan(command=(python, "-c", "import os; print(sorted(os.environ))"), args=())
        started = runtime.start(told, launch)
        until(lambda: runtime.state(started.ref).alive is False)
        (line,) = list(runtime.logs(started.ref, launch.log_path, tail=5, follow=False))
        assert b"HSA_OVERRIDE_GFX_VERSION" not in line

    def test_a_device_that_is_not_there_is_one_sentence_and_leaves_nothing(
        self, runtime: Runtime, launch: Launch, client: docker.APIClient
    ) -> None:
        from flexlab.core.errors import LaunchError

        with pytest.raises(LaunchError) as caught:
            runtime.start(plan(device_nodes=("/dev/kfd-that-is-not-there",)), launch)
        assert "/dev/kfd-that-is-not-there" in caught.value.message
        label = f"{body.LABEL_INSTANCE}={launch.instance}"
        assert client.containers(all=True, filters={"label": label}) == []

    def test_an_nvidia_gpu_without_the_toolkit_is_one_sentence_and_leaves_nothing(
        self, runtime: Runtime, launch: Launch, client: docker.APIClient
    ) -> None:
        from flexlab.core.errors import LaunchError

        if "nvidia" in client.info()["Runtimes"]:
            pytest.skip("this engine can hand over NVIDIA GPUs")
        with pytest.raises(LaunchError) as caught:
            runtime.start(plan(gpu_uuids=("GPU-1",)), launch)
        assert caught.value.code == "no_nvidia_runtime"
        assert "nvidia-container-toolkit" in (caught.value.hint or "")
        label = f"{body.LABEL_INSTANCE}={launch.instance}"
        assert client.containers(all=True, filters={"label": label}) == []

    def test_its_last_words_outlive_it(self, runtime: Runtime, launch: Launch) -> None:
        started = runtime.start(plan(), launch)
        until(lambda: ask(started.endpoint, "/health"))
        assert runtime.stop(started.ref, 5.0)
        lines = list(runtime.logs(started.ref, launch.log_path, tail=50, follow=False))
        assert any(b"listening" in line for line in lines)

    def test_a_container_of_somebody_elses_with_our_name_is_left_alone(
        self, runtime: Runtime, launch: Launch, client: docker.APIClient
    ) -> None:
        image, python = docker_lab.python_image(), docker_lab.python_in_image()
        name = body.name_of(launch.instance)
        theirs = client.create_container(image, [python, "-c", "0"], name=name)["Id"]
        try:
            started = runtime.start(plan(), launch)
            assert until(lambda: ask(started.endpoint, "/health")) == 200
            assert client.inspect_container(theirs)["State"]["Status"] == "created"
        finally:
            client.remove_container(theirs, force=True)

    def test_a_start_without_an_engine_says_where_it_looked(self, launch: Launch) -> None:
        from flexlab.core.errors import LaunchError

        runtime = DockerRuntime(environ={"DOCKER_HOST": "/nowhere/docker.sock"})
        assert runtime.facts().available is False
        with pytest.raises(LaunchError) as caught:
            runtime.start(plan(), launch)
        assert "/nowhere/docker.sock" in caught.value.message
