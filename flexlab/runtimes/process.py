"""Engines as processes of this user: own session, own log file, and no tie to the daemon.

An engine outlives the daemon on purpose (no pipe to it, no parent-death signal): the next daemon
finds it by the words in its environment and adopts it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flexlab.core.errors import LaunchError
from flexlab.core.units import MIB
from flexlab.runtimes import logfile, proc
from flexlab.runtimes.base import Watch
from flexlab.runtimes.children import children
from flexlab.runtimes.engine_env import engine_environment, python_command
from flexlab.runtimes.exits import ended
from flexlab.runtimes.pidwatch import ProcessWatcher
from flexlab.runtimes.preflight import process_facts
from flexlab.spec.instance import (
    Endpoint,
    Found,
    Launch,
    MemoryUse,
    ProcessRef,
    RunState,
    RuntimeRef,
    Started,
)
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT, LaunchPlan, RuntimeFacts, RuntimeName

LOOPBACK = "127.0.0.1"
KILL_CONFIRM_S = 10.0
MARKED_S = 1.0
LLAMACPP_MODULE = "flexlab.engines.llamacpp"
LOG_MAX_BYTES = 16 * MIB


def free_port() -> int:
    """A loopback port that nobody has now; another program may still be quicker."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


class ProcessRuntime:
    """See `runtimes.base.Runtime`."""

    name: RuntimeName = "process"

    def __init__(
        self,
        module_for: Mapping[str, str] | None = None,
        *,
        log_max_bytes: int = LOG_MAX_BYTES,
        choose_port: Callable[[], int] = free_port,
    ) -> None:
        """`module_for`: backend name -> engine module, for plans without a command."""
        self._module_for = {"llamacpp": LLAMACPP_MODULE} if module_for is None else module_for
        self.log_max_bytes = log_max_bytes
        self._choose_port = choose_port
        self._starting = threading.Lock()
        self._watcher = ProcessWatcher()

    def facts(self) -> RuntimeFacts:
        """What is installed and what is missing."""
        return process_facts()

    def start(self, plan: LaunchPlan, launch: Launch) -> Started:
        """Start it, or return the one that already runs. Raises LaunchError."""
        # One at a time, or two starts of one instance could both find nothing running.
        with self._starting:
            return self._running(plan, launch) or self._start_anew(plan, launch)

    def find(self, instance: str) -> RuntimeRef | None:
        """By FLEXLAB_INSTANCE in the environment of this user's processes."""
        return next((one.ref for one in proc.bearers() if one.instance == instance), None)

    def owned(self, installation: str) -> list[Found]:
        """By FLEXLAB_OWNER in the environment of this user's processes."""
        return [
            Found(instance=one.instance, installation=one.owner, ref=one.ref)
            for one in proc.bearers()
            if one.owner == installation
        ]

    def state(self, ref: RuntimeRef) -> RunState:
        """Alive or gone; a process is never unknown, except one that is none."""
        if not isinstance(ref, ProcessRef):
            return RunState(alive=None, why=f"{type(ref).__name__} is not a process")
        exit_code = children.exit_code(ref)
        if exit_code is not None:
            return ended(exit_code)
        if proc.is_alive(ref):
            return RunState(alive=True)
        if ref.boot_id != proc.boot_id():
            return RunState(alive=False, why="the machine was restarted")
        return RunState(
            alive=False, why="it ended; how is unknown, since an earlier daemon had started it"
        )

    def stop(self, ref: RuntimeRef, timeout_s: float) -> bool:
        """SIGTERM to its session, SIGKILL to whoever is left after `timeout_s`."""
        if not isinstance(ref, ProcessRef):
            return False
        for member in proc.living_members(ref):
            proc.send_signal(member, signal.SIGTERM)
        _wait_until_gone([ref], timeout_s)
        deadline = time.monotonic() + KILL_CONFIRM_S
        # Again and again: one that is being killed may have forked just before.
        while left := proc.living_members(ref):
            for member in left:
                proc.send_signal(member, signal.SIGKILL)
            gone = _wait_until_gone(left, deadline - time.monotonic())
            if not gone or time.monotonic() > deadline:
                return False
        children.exit_code(ref)
        return True

    def watch(self, ref: RuntimeRef, on_gone: Callable[[RunState], None]) -> Watch:
        """By pidfd; the callback comes from the runtime's one watching thread."""
        if not isinstance(ref, ProcessRef):
            raise TypeError(f"{ref!r} is not a process")
        return self._watcher.watch(ref, lambda: on_gone(self.state(ref)))

    def memory(self, ref: RuntimeRef) -> MemoryUse | None:
        """Of the process and what it started in its session."""
        if not isinstance(ref, ProcessRef):
            return None
        return proc.memory(proc.living_members(ref))

    def logs(
        self, ref: RuntimeRef | None, log_path: str, *, tail: int, follow: bool
    ) -> logfile.LogLines:
        """Its log file's lines; the iterator's `close()` ends a follow from any thread."""
        return logfile.LogLines(Path(log_path), tail_lines=tail, follow=follow)

    def close(self) -> None:
        """End the watching thread; engines go on."""
        self._watcher.close()

    def _running(self, plan: LaunchPlan, launch: Launch) -> Started | None:
        for one in proc.bearers():
            if (one.instance, one.owner) == (launch.instance, launch.installation):
                _, _, port = one.endpoint.rpartition(":")
                endpoint = _endpoint(plan, launch, int(port) if port.isdigit() else 0)
                return Started(ref=one.ref, endpoint=endpoint)
        return None

    def _start_anew(self, plan: LaunchPlan, launch: Launch) -> Started:
        command = self._command(plan)
        port = self._choose_port()
        _require_free(port)
        environment = engine_environment(plan, launch, f"{LOOPBACK}:{port}", os.environ)
        key_fd = _key_pipe(launch.api_key) if API_KEY_FILE in command else None
        try:
            words = _fill(command, port, key_fd)
            ref = self._spawn(words, environment, Path(launch.log_path), key_fd)
        finally:
            if key_fd is not None:
                os.close(key_fd)
        return Started(ref=ref, endpoint=_endpoint(plan, launch, port))

    def _command(self, plan: LaunchPlan) -> tuple[str, ...]:
        if plan.command is not None:
            return (*plan.command, *plan.args)
        module = self._module_for.get(plan.backend)
        if module is None:
            raise LaunchError(
                f"backend {plan.backend} cannot run as a process",
                f"flexlab up {plan.model} --runtime docker",
                code="no_engine",
            )
        return (*python_command(module), *plan.args)

    def _spawn(
        self, words: Sequence[str], environment: dict[str, str], log_path: Path, key_fd: int | None
    ) -> ProcessRef:
        try:
            log_fd = logfile.open_for_engine(log_path, self.log_max_bytes)
        except OSError as error:
            raise LaunchError(
                f"cannot write the engine's log {log_path}: {error.strerror}",
                f"ls -ld {log_path.parent} && df -h {log_path.parent}",
                code="log",
            ) from error
        try:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                cwd="/",  # never keeps a folder or a mount of the user's busy
                env=environment,
                pass_fds=() if key_fd is None else (key_fd,),
                start_new_session=True,
                umask=0o077,
            )
        except OSError as error:
            raise LaunchError(
                f"cannot start {words[0]}: {error.strerror}", "flexlab doctor", code="exec"
            ) from error
        finally:
            os.close(log_fd)
        # A child that was not reaped is in /proc, even if it has ended already.
        ref = proc.identify(child.pid)
        if ref is None:
            child.kill()
            child.wait()
            raise LaunchError("/proc cannot be read here", "flexlab doctor", code="proc")
        children.add(ref, child)
        _wait_until_marked(ref)
        return ref


def _wait_until_marked(ref: ProcessRef) -> None:
    """Until its environment can be read, by which the next start must find it.

    Popen returns when exec closes its pipe, some microseconds before the kernel shows the new
    environment.
    """
    deadline = time.monotonic() + MARKED_S
    while proc.is_alive(ref) and not proc.is_marked(ref.pid) and time.monotonic() < deadline:
        time.sleep(0.0005)


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on {LOOPBACK} was taken by another program ({error.strerror})",
                f"ss -ltnp 'sport = :{port}'",
                code="port_taken",
            ) from error


def _key_pipe(api_key: str) -> int:
    """The reading end of a pipe that holds the key: it can be read once, by whoever inherits it."""
    read_fd, write_fd = os.pipe()
    try:
        os.write(write_fd, f"{api_key}\n".encode())  # far below a pipe's buffer: never blocks
    finally:
        os.close(write_fd)
    return read_fd


def _fill(command: Sequence[str], port: int, key_fd: int | None) -> list[str]:
    # Whole words only: a chat template may well hold "{host}".
    values = {HOST: LOOPBACK, PORT: str(port), API_KEY_FILE: f"/dev/fd/{key_fd}"}
    return [values.get(word, word) for word in command]


def _endpoint(plan: LaunchPlan, launch: Launch, port: int) -> Endpoint:
    has_key = API_KEY_FILE in (*(plan.command or ()), *plan.args)
    return Endpoint(
        host=LOOPBACK,
        port=port,
        headers=(("authorization", f"Bearer {launch.api_key}"),) if has_key else (),
        on_disconnect=plan.on_disconnect,
    )


def _wait_until_gone(refs: Sequence[ProcessRef], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    for ref in refs:
        pidfd = proc.open_pidfd(ref)
        if pidfd is None:
            continue
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return False
        finally:
            os.close(pidfd)
    return True
