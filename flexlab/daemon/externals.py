"""Servers that run elsewhere: FlexLab routes to them and has no part in their lives."""

from __future__ import annotations

import asyncio
import time

from flexlab.daemon.tasks import Threads
from flexlab.runtimes.base import Runtime
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import Instance
from flexlab.spec.instance import Condition, Launch, RuntimeRef
from flexlab.spec.plan import Candidate, LaunchPlan, Probe


class Externals:
    """The external models of one daemon."""

    def __init__(self, runtime: Runtime | None, scheduler: Scheduler, threads: Threads) -> None:
        self._runtime = runtime
        self._scheduler = scheduler
        self._threads = threads
        self._refs: dict[str, RuntimeRef] = {}

    def attach(self, name: str, installation: str) -> None:
        """Ready for as long as we run; whether it answers, requests show. Raises SettingsError."""
        assert self._runtime is not None
        launch = Launch(
            instance=f"external-{name}", installation=installation, api_key="", log_path=""
        )
        started = self._runtime.start(_plan(name), launch)
        self._refs[launch.instance] = started.ref
        now = asyncio.get_running_loop().time()
        self._scheduler.adopt(
            Instance(
                id=launch.instance,
                model=name,
                candidate=_candidate(name),
                claims={},
                state="ready",
                since=now,
                why="runs elsewhere; FlexLab only routes to it",
                endpoint=started.endpoint,
                ref=started.endpoint.url,
                ready_at=now,
                idle_since=now,
                external=True,
            )
        )

    async def look(self) -> None:
        """Whether they still take connections: said, never acted upon."""
        assert self._runtime is not None
        for name, ref in self._refs.items():
            instance = self._scheduler.instances[name]
            state = await self._threads.call("external", self._runtime.state, ref)
            if state.alive:
                instance.conditions.pop("unknown", None)
            elif "unknown" not in instance.conditions:
                why = state.why or "it takes no connections"
                condition = Condition(kind="unknown", since=time.time(), why=why)
                self._scheduler.mark(name, condition)


def _candidate(name: str) -> Candidate:
    return Candidate(
        model=name,
        variant="external",
        backend="external",
        runtime="external",
        arch="?",
        support="unknown",
        devices=(),
        needs=(),
        weights=(),
    )


def _plan(name: str) -> LaunchPlan:
    return LaunchPlan(
        model=name,
        variant="external",
        backend="external",
        runtime="external",
        arch="?",
        served_name=name,
        ready=Probe(path="/health"),
    )
