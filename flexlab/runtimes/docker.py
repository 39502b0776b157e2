"""Engines as containers of a Docker-compatible engine on this machine.

The only module that imports the `docker` SDK. Calls are synchronous and bounded; each thread has a
client of its own. What an engine is told is in `containers/body.py`, what its refusals mean in
`containers/words.py`. A container is ours by its label `flexlab.owner`; others are never touched.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tarfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexlab.core.errors import LaunchError
from flexlab.core.text import clean_line
from flexlab.runtimes.base import LogLines, Watch
from flexlab.runtimes.containers import abilities, body, places, pull, stats, words
from flexlab.runtimes.containers.events import EventWatcher
from flexlab.runtimes.containers.logs import ContainerLines, keep_tail
from flexlab.runtimes.exits import ended
from flexlab.runtimes.logfile import LogLines as FileLines
from flexlab.spec.engine import OUT_OF_MEMORY
from flexlab.spec.instance import (
    ContainerRef,
    Endpoint,
    Found,
    Launch,
    MemoryUse,
    RunState,
    RuntimeRef,
    Started,
)
from flexlab.spec.lab import Progress
from flexlab.spec.machine import Problem
from flexlab.spec.plan import LaunchPlan, RuntimeFacts, RuntimeName

if TYPE_CHECKING:
    from docker import APIClient

CALL_TIMEOUT_S = 20.0
GONE_CONFIRM_S = 10.0
FACTS_FRESH_S = 5.0
KEPT_LINES = 2000
REMEMBERED = 200
CONFLICT = 409


class DockerRuntime:
    """See `runtimes.base.Runtime`."""

    name: RuntimeName = "docker"

    def __init__(
        self,
        wish: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        choose_port: Callable[[], int] = lambda: 0,
    ) -> None:
        """`wish`: the address that a setting names; port 0: the engine takes a free one."""
        self._choose_port = choose_port
        self._wish = wish
        self._environ = os.environ if environ is None else environ
        self._clients = threading.local()
        self._made: list[APIClient] = []
        """Of all threads, to be closed with the runtime."""
        self._images: tuple[float, dict[str, str]] | None = None
        self._can: abilities.Abilities | None = None
        self._facts: tuple[float, RuntimeFacts] | None = None
        self._starting = threading.Lock()
        self._ended: dict[str, RunState] = {}
        """How those ended that were removed since, the newest last."""
        self._watcher = EventWatcher(self._new_client, self._state_of)

    # -- where it is

    def facts(self) -> RuntimeFacts:
        """Whether an engine answers here, and how it says its version."""
        now = time.monotonic()
        if self._facts is None or now - self._facts[0] > FACTS_FRESH_S:
            self._facts = (now, self._look())
        return self._facts[1]

    def _look(self) -> RuntimeFacts:
        found = places.search(self._environ, self._wish)
        if found.place is None:
            problems = (found.problem,) if found.problem else ()
            return RuntimeFacts(name="docker", available=False, problems=problems)
        try:
            version = self._client().version()
        except Exception as error:  # an SDK edge: many kinds of errors mean one thing
            problem = Problem(
                code="docker_not_running",
                message=f"the engine at {found.place.url} does not answer: {words.text_of(error)}",
                hint="sudo systemctl status docker",
            )
            return RuntimeFacts(name="docker", available=False, problems=(problem,))
        return RuntimeFacts(name="docker", available=True, version=str(version.get("Version")))

    def images(self) -> dict[str, str]:
        """Tag or digest -> id of every image there; empty where the engine cannot be asked."""
        now = time.monotonic()
        if self._images is None or now - self._images[0] > FACTS_FRESH_S:
            found: dict[str, str] = {}
            with contextlib.suppress(Exception):  # an SDK edge
                for image in self._client().images():
                    names = [*(image.get("RepoTags") or ()), *(image.get("RepoDigests") or ())]
                    found |= {_full_name(name): image["Id"] for name in names}
                    found |= {name: image["Id"] for name in names}
            self._images = (now, found)
        return self._images[1]

    def fetch_image(self, image: str, report: Callable[[Progress], None]) -> None:
        """Pull it, with progress over all layers. Raises LaunchError, each cause told apart."""
        client = self._new_client(None)
        try:
            pull.fetch(client, image, report)
        finally:
            client.close()
            self._images = None

    def _client(self) -> APIClient:
        """This thread's own. Raises LaunchError where no engine can be used."""
        client: APIClient | None = getattr(self._clients, "client", None)
        if client is None:
            client = self._clients.client = self._new_client(CALL_TIMEOUT_S)
            self._made.append(client)
        return client

    def _new_client(self, timeout_s: float | None) -> APIClient:
        import docker

        found = places.search(self._environ, self._wish)
        if found.place is None:
            problem = found.problem
            message = problem.message if problem else "no container engine was found"
            raise LaunchError(message, problem.hint if problem else None, code="no_engine")
        return docker.APIClient(base_url=found.place.url, version="auto", timeout=timeout_s)

    def _abilities(self, client: APIClient) -> abilities.Abilities:
        """What this engine can do, asked once."""
        if self._can is None:
            self._can = abilities.of(client.info(), client.version())
        return self._can

    # -- starting and stopping

    def start(self, plan: LaunchPlan, launch: Launch) -> Started:
        """Create, lay the key in, start; or return the one that already runs."""
        client = self._client()
        with self._starting:
            running = self._running(client, plan, launch)
            if running is not None:
                return running
            return self._start_anew(client, plan, launch)

    def _running(self, client: APIClient, plan: LaunchPlan, launch: Launch) -> Started | None:
        for found in self._list(client, body.LABEL_INSTANCE, launch.instance):
            is_ours = found["Labels"].get(body.LABEL_OWNER) == launch.installation
            if is_ours and found["State"] == "running":
                return self._started(client, plan, launch, found["Id"])
            if is_ours:
                client.remove_container(found["Id"], force=True, v=True)
        return None

    def _start_anew(self, client: APIClient, plan: LaunchPlan, launch: Launch) -> Started:
        import docker.errors
        import requests

        made: str | None = None
        try:
            made = self._create(client, plan, launch)
            if body.wants_key(plan):
                client.put_archive(made, "/", _key_archive(launch.api_key))
            client.start(made)
            return self._started(client, plan, launch, made)
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            self._remove_quietly(client, made)
            raise words.launch_error(plan.model, words.text_of(error)) from error

    def _create(self, client: APIClient, plan: LaunchPlan, launch: Launch) -> str:
        import docker.errors

        can = self._abilities(client)
        wanted = body.create_body(
            plan, launch, gpu_way=can.gpu_way, host_port=self._choose_port(), init=can.init
        )
        name = body.name_of(launch.instance)
        try:
            return str(client.create_container_from_config(wanted, name)["Id"])
        except docker.errors.APIError as error:
            if error.status_code != CONFLICT:
                raise
            # Somebody else's container has the name, perhaps another installation's.
            other = f"{name}-{launch.installation[-6:]}"
            return str(client.create_container_from_config(wanted, other)["Id"])

    def _started(
        self, client: APIClient, plan: LaunchPlan, launch: Launch, container: str
    ) -> Started:
        told = client.inspect_container(container)
        bound = (told["NetworkSettings"]["Ports"] or {}).get(f"{plan.port}/tcp") or []
        port = int(bound[0]["HostPort"]) if bound else 0
        if not port and told["State"]["Running"]:
            raise LaunchError(f"the engine published no port of {plan.model}", "flexlab doctor")
        key = (("authorization", f"Bearer {launch.api_key}"),) if body.wants_key(plan) else ()
        endpoint = Endpoint(
            host=body.LOOPBACK, port=port, headers=key, on_disconnect=plan.on_disconnect
        )
        return Started(ref=ContainerRef(id=told["Id"]), endpoint=endpoint)

    def _remove_quietly(self, client: APIClient, container: str | None) -> None:
        if container is not None:
            with contextlib.suppress(Exception):  # the cause of the failure is what counts
                client.remove_container(container, force=True, v=True)

    def stop(self, ref: RuntimeRef, timeout_s: float) -> bool:
        """Its stop signal, SIGKILL after `timeout_s`; then it is removed, its log kept."""
        import docker.errors
        import requests

        if not isinstance(ref, ContainerRef):
            return False
        client = self._new_client(timeout_s + GONE_CONFIRM_S)
        try:
            client.stop(ref.id, timeout=math.ceil(max(0.0, timeout_s)))
            self._remember(ref, self.state(ref))
            self._keep_log(client, ref)
            client.remove_container(ref.id, force=True, v=True)
        except docker.errors.NotFound:
            return True
        except (docker.errors.DockerException, requests.RequestException):
            return self.state(ref).alive is False
        finally:
            client.close()
        return True

    def _remember(self, ref: ContainerRef, state: RunState) -> None:
        if state.alive is False:
            self._ended[ref.id] = state
            while len(self._ended) > REMEMBERED:
                del self._ended[next(iter(self._ended))]

    def _keep_log(self, client: APIClient, ref: ContainerRef) -> None:
        """Its last lines outlive it: `flexlab logs` reads them from the file."""
        with contextlib.suppress(Exception):  # a log is not worth a failed stop
            path = client.inspect_container(ref.id)["Config"]["Labels"][body.LABEL_LOG]
            keep_tail(client.logs(ref.id, tail=KEPT_LINES), Path(path))

    # -- looking

    def find(self, instance: str) -> RuntimeRef | None:
        """By its label; None also where the engine cannot be asked."""
        with contextlib.suppress(Exception):  # an SDK edge
            for found in self._list(self._client(), body.LABEL_INSTANCE, instance):
                return ContainerRef(id=found["Id"])
        return None

    def owned(self, installation: str) -> list[Found]:
        """Every container of this installation that runs."""
        try:
            listed = self._list(self._client(), body.LABEL_OWNER, installation)
        except Exception:  # an SDK edge: an engine that cannot be asked has told of none
            return []
        return [
            Found(
                instance=found["Labels"].get(body.LABEL_INSTANCE, ""),
                installation=installation,
                ref=ContainerRef(id=found["Id"]),
            )
            for found in listed
            if found["State"] == "running"
        ]

    def state(self, ref: RuntimeRef) -> RunState:
        """Alive, gone with how it ended, or unknown where the engine cannot be asked."""
        import docker.errors

        if not isinstance(ref, ContainerRef):
            return RunState(alive=None, why=f"{type(ref).__name__} is not a container")
        try:
            told = self._client().inspect_container(ref.id)
        except docker.errors.NotFound:
            removed = RunState(alive=False, why="the container was removed")
            return self._ended.get(ref.id, removed)
        except Exception as error:  # an SDK edge
            return RunState(alive=None, why=f"the engine does not answer: {words.text_of(error)}")
        return _run_state(told["State"])

    def _state_of(self, container: str) -> RunState:
        return self.state(ContainerRef(id=container))

    def watch(self, ref: RuntimeRef, on_gone: Callable[[RunState], None]) -> Watch:
        """By the engine's events; one thread for all, which lives while something is watched."""
        if not isinstance(ref, ContainerRef):
            raise TypeError(f"{ref!r} is not a container")
        return self._watcher.watch(ref.id, on_gone)

    def memory(self, ref: RuntimeRef) -> MemoryUse | None:
        """What its control group holds of the host's memory."""
        if not isinstance(ref, ContainerRef):
            return None
        try:
            told = self._client().stats(ref.id, stream=False, one_shot=True)
        except Exception:  # an SDK edge
            return None
        return stats.memory_of(told)

    def logs(self, ref: RuntimeRef | None, log_path: str, *, tail: int, follow: bool) -> LogLines:
        """From the engine while the container is there, else what was kept of it."""
        if isinstance(ref, ContainerRef):
            with contextlib.suppress(Exception):  # an SDK edge: what was kept is left
                client = self._new_client(None if follow else CALL_TIMEOUT_S)
                client.inspect_container(ref.id)
                return ContainerLines(client, ref.id, tail=tail, follow=follow)
        return FileLines(Path(log_path), tail_lines=tail, follow=follow)

    def close(self) -> None:
        """End the watching thread and all connections; containers go on."""
        self._watcher.close()
        while self._made:
            with contextlib.suppress(Exception):  # whatever is left of the connection
                self._made.pop().close()

    def _list(self, client: APIClient, label: str, value: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.containers(
            all=True, filters={"label": f"{label}={value}"}
        )
        return found


def _run_state(told: Mapping[str, Any]) -> RunState:
    # "paused" is alive and answers nothing; what was only created has never lived.
    if told["Status"] in ("running", "paused", "restarting"):
        return RunState(alive=True)
    code = int(told.get("ExitCode") or 0)
    if told.get("OOMKilled"):
        return RunState(
            alive=False,
            exit_code=code,
            code=OUT_OF_MEMORY,
            why="the kernel ended it: the container's memory was used up",
        )
    if said := clean_line(str(told.get("Error") or "")):
        return RunState(alive=False, exit_code=code, why=said)
    return ended(code)


def _key_archive(api_key: str) -> bytes:
    """A tar with the key: read by whatever user the image runs as, seen by nobody outside."""
    content = f"{api_key}\n".encode()
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        folder = tarfile.TarInfo(body.KEY_FOLDER)
        folder.type, folder.mode = tarfile.DIRTYPE, 0o555
        archive.addfile(folder)
        file = tarfile.TarInfo(f"{body.KEY_FOLDER}/{body.KEY_NAME}")
        file.size, file.mode, file.mtime = len(content), 0o444, int(time.time())
        archive.addfile(file, io.BytesIO(content))
    return made.getvalue()


def _full_name(name: str) -> str:
    """As recipes may write what the engine shortens: docker.io/org/name."""
    return name if "." in name.partition("/")[0] else f"docker.io/{name}"
