"""A runtime whose instances are threads with real TCP ports: for tests and for `top --demo`."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flexlab.core.errors import LaunchError
from flexlab.demo.engine import LOOPBACK, Behaviour, FakeEngine
from flexlab.demo.world import DemoInstance, DemoLog, DemoLogLines, DemoWatch, DemoWorld
from flexlab.runtimes.base import Watch
from flexlab.spec.instance import Endpoint, Found, Launch, MemoryUse, RunState, RuntimeRef, Started
from flexlab.spec.plan import API_KEY_FILE, LaunchPlan, RuntimeFacts, RuntimeName


class DemoRuntime:
    """See `runtimes.base.Runtime`."""

    def __init__(
        self, world: DemoWorld, *, name: RuntimeName = "demo", choose_port: Callable[[], int] = int
    ) -> None:
        """`name`: the runtime that it stands in for; `choose_port`: 0 takes a free one."""
        self._world = world
        self._name = name
        self._choose_port = choose_port

    @property
    def name(self) -> RuntimeName:
        """The runtime that it stands in for."""
        return self._name

    def facts(self) -> RuntimeFacts:
        """Always there."""
        return RuntimeFacts(name=self._name, available=True, version="demo")

    def start(self, plan: LaunchPlan, launch: Launch) -> Started:
        """A new thread with a port, or the one that already runs. Raises LaunchError."""
        behaviour = self._world.behaviours.get(plan.model, Behaviour())
        if behaviour.start_delay_s:
            threading.Event().wait(behaviour.start_delay_s)
        with self._world.lock:
            running = self._running(launch)
            if running is None:
                running = self._start_anew(plan, launch, behaviour)
        return Started(ref=running.ref, endpoint=_endpoint(plan, running))

    def find(self, instance: str) -> RuntimeRef | None:
        """By instance id."""
        return next(
            (one.ref for one in self._world.alive() if one.launch.instance == instance), None
        )

    def owned(self, installation: str) -> list[Found]:
        """By installation id."""
        return [
            Found(instance=one.launch.instance, installation=installation, ref=one.ref)
            for one in self._world.alive()
            if one.launch.installation == installation
        ]

    def state(self, ref: RuntimeRef) -> RunState:
        """Alive, or gone with the exit code."""
        one = self._by_ref(ref)
        if one is None:
            return RunState(alive=False, why="there is no such demo instance")
        return one.state

    def stop(self, ref: RuntimeRef, timeout_s: float) -> bool:
        """At once, after `timeout_s`, or never, as its behaviour wants."""
        one = self._by_ref(ref)
        if one is None or one.ended.is_set():
            return True
        behaviour = one.engine.behaviour
        if behaviour.ignores_term or behaviour.unstoppable:
            one.ended.wait(timeout_s)
            if behaviour.unstoppable:
                return one.ended.is_set()
            one.end()
        else:
            one.end(0, "it ended by itself (exit code 0)")
        return True

    def watch(self, ref: RuntimeRef, on_gone: Callable[[RunState], None]) -> Watch:
        """The callback comes from whichever thread ends it."""
        one = self._by_ref(ref)
        if one is not None:
            return one.watch(on_gone)
        watch = DemoWatch(on_gone)
        watch.fire(self.state(ref))
        return watch

    def memory(self, ref: RuntimeRef) -> MemoryUse | None:
        """What its behaviour says, while it runs."""
        one = self._by_ref(ref)
        if one is None or one.ended.is_set():
            return None
        held = one.engine.behaviour.memory_bytes
        return MemoryUse(resident_bytes=held, own_bytes=held)

    def logs(
        self, ref: RuntimeRef | None, log_path: str, *, tail: int, follow: bool
    ) -> DemoLogLines:
        """Kept in memory under `log_path`."""
        log = self._world.logs.setdefault(log_path, DemoLog())
        return DemoLogLines(log, tail=tail, follow=follow)

    def close(self) -> None:
        """The world goes on."""

    def _running(self, launch: Launch) -> DemoInstance | None:
        one = self._world.instance(launch.instance)
        if one is None or one.ended.is_set() or one.launch.installation != launch.installation:
            return None
        return one

    def _start_anew(self, plan: LaunchPlan, launch: Launch, behaviour: Behaviour) -> DemoInstance:
        if behaviour.fail_start is not None:
            raise LaunchError(behaviour.fail_start, "flexlab doctor", code="exec")
        key = launch.api_key if API_KEY_FILE in plan.args else ""
        port = self._choose_port()
        try:
            engine = FakeEngine(plan.served_name, behaviour, key, port)
        except OSError as error:
            raise LaunchError(
                f"port {port} on {LOOPBACK} was taken by another program ({error.strerror})",
                f"ss -ltnp 'sport = :{port}'",
                code="port_taken",
            ) from error
        log = self._world.logs.setdefault(launch.log_path, DemoLog())
        one = DemoInstance(launch, engine, log)
        self._world.instances.append(one)
        return one

    def _by_ref(self, ref: RuntimeRef) -> DemoInstance | None:
        return next((one for one in list(self._world.instances) if one.ref == ref), None)


def _endpoint(plan: LaunchPlan, one: DemoInstance) -> Endpoint:
    key = one.engine.api_key
    return Endpoint(
        host=LOOPBACK,
        port=one.engine.port,
        headers=(("authorization", f"Bearer {key}"),) if key else (),
        on_disconnect=plan.on_disconnect,
    )
