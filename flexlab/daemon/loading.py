"""From launched to ready: ask the engine until it answers, it dies, or its time is up.

The time is renewed by progress (new log lines, memory that grows), at most to four times of it
(rule 11): a slow disk is not a failure, a silent engine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from flexlab import backends
from flexlab.core.errors import LaunchError
from flexlab.core.text import clean, clean_line
from flexlab.daemon.registry import Registry
from flexlab.daemon.tasks import Threads
from flexlab.runtimes.base import Runtime
from flexlab.spec.engine import sentence_in
from flexlab.spec.instance import Endpoint, LaunchRecord, RunState
from flexlab.spec.plan import LaunchPlan, Step

if TYPE_CHECKING:
    import httpx

RENEWALS = 4
STEP_SILENCE_S = 300.0
"""Of a step after the start: a pull tells how far it is every second."""
Answer = Literal["ready", "loading", "failed", "closed"]
LOG_TAIL_LINES = 60
VAGUE = "load_failed"
"""What our engines say when the library told them no cause: its log may have it."""


class Loading:
    """Waits for engines; owns the HTTP client that asks them."""

    def __init__(
        self, runtimes: Mapping[str, Runtime], threads: Threads, registry: Registry
    ) -> None:
        self._runtimes = runtimes
        self._threads = threads
        self._registry = registry
        self._client: httpx.AsyncClient | None = None

    async def until_ready(self, record: LaunchRecord, died: asyncio.Future[RunState]) -> None:
        """Return once it answers. Raises LaunchError with the root cause."""
        assert record.endpoint is not None
        loop = asyncio.get_running_loop()
        bound_s = record.plan.start_timeout_s
        deadline, latest = loop.time() + bound_s, loop.time() + RENEWALS * bound_s
        seen = await self._signs(record)
        next_look = loop.time() + 1.0
        steps = list(record.plan.after_start)
        while True:
            if died.done():
                raise await self._failure(record, died.result())
            answer = await self.ask(record.plan, record.endpoint)
            if answer in ("ready", "loading") and steps:
                # It answers, and has no model yet: it is brought one, step by step.
                await self._bring(record, steps.pop(0))
                deadline = min(latest, loop.time() + bound_s)
                continue
            if answer == "ready":
                return
            if answer == "failed":
                raise await self._failure(record, None)
            now = loop.time()
            if now >= next_look:
                next_look = now + 1.0
                signs = await self._signs(record)
                if signs != seen:
                    seen, deadline = signs, min(latest, now + bound_s)
            if now >= deadline:
                raise await self._failure(record, None, late_s=bound_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(record.plan.ready.interval_s):
                    await asyncio.shield(died)

    async def ask(self, plan: LaunchPlan, endpoint: Endpoint) -> Answer:
        """What its probe says: `ready`, `loading`, `failed`, or `closed`: nobody listens there.

        An engine that accepts and says nothing is `loading`: it may merely be busy.
        """
        if self._client is None:
            # Importing httpx and building its TLS context would hold the loop for 40 ms.
            self._client = await self._threads.call("worker", _new_client)
        import httpx

        url = f"{endpoint.url}{plan.ready.path}"
        try:
            reply = await self._client.get(
                url, headers=dict(endpoint.headers), timeout=plan.ready.timeout_s
            )
        except httpx.ConnectError:
            return "closed"
        except httpx.HTTPError:
            return "loading"
        return backends.get(plan.backend).judge_ready(reply.status_code, reply.content)

    async def _bring(self, record: LaunchRecord, step: Step) -> None:
        """One step after the start, to its end. Raises LaunchError with what the engine said."""
        import httpx

        assert self._client is not None
        assert record.endpoint is not None
        url, headers = f"{record.endpoint.url}{step.path}", dict(record.endpoint.headers)
        said = ""
        try:
            async with self._client.stream(
                "POST", url, json=step.body, headers=headers, timeout=STEP_SILENCE_S
            ) as reply:
                async for line in reply.aiter_lines():
                    said = line or said
            if reply.status_code < 400 and '"error"' not in said:
                return
        except httpx.HTTPError as error:
            said = said or str(error) or type(error).__name__
        raise LaunchError(
            f"{record.plan.model}: the engine could not {step.kind} the model: "
            f"{clean_line(said)[:300]}",
            f"flexlab logs {record.plan.model}",
            code=f"{step.kind}_failed",
        )

    async def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            await self._client.aclose()

    async def _signs(self, record: LaunchRecord) -> tuple[int, int]:
        """(log bytes, memory in 64 MiB steps): what changes while an engine is at work."""
        runtime = self._runtimes[record.plan.runtime]
        use = None
        if record.ref is not None:
            use = await self._threads.call(runtime.name, runtime.memory, record.ref)
        try:
            size = os.stat(record.log_path).st_size
        except OSError:
            size = 0
        return size, (use.resident_bytes if use else 0) >> 26

    async def _failure(
        self, record: LaunchRecord, state: RunState | None, *, late_s: float | None = None
    ) -> LaunchError:
        """The first cause that the log shows, else what the runtime says."""
        plan = record.plan
        runtime = self._runtimes[plan.runtime]
        lines = await self._threads.call(
            runtime.name,
            lambda: list(
                runtime.logs(record.ref, record.log_path, tail=LOG_TAIL_LINES, follow=False)
            ),
        )
        text = clean(b"\n".join(lines).decode(errors="replace"))
        hint = f"flexlab logs {plan.model}"
        said = sentence_in(text.splitlines())
        own = None
        if state is not None and state.code is not None:
            own = LaunchError(said or state.why or "it ended", hint, code=state.code)
        if own is not None and own.code != VAGUE:
            return own
        patterns = self._registry.backend(plan.backend).patterns
        problem = backends.get(plan.backend).explain(text, patterns)
        if problem is not None:
            return LaunchError(problem.message, problem.hint or hint, code=problem.code)
        if own is not None:
            return own
        if state is not None:
            why = state.why or "it ended"
            lines_said = [clean_line(line) for line in text.splitlines()]
            last = next((line for line in reversed(lines_said) if line not in ("", why)), "")
            tail = f"; its last words: {last[:200]}" if last else ""
            return LaunchError(f"the engine of {plan.model} did not start: {why}{tail}", hint)
        if late_s is not None:
            why = f"not ready after {late_s:.0f} s without a sign of progress"
            return LaunchError(f"{plan.model}: {why}", hint, code="start_timeout")
        return LaunchError(f"the engine of {plan.model} says that it failed", hint)


def _new_client() -> httpx.AsyncClient:
    import httpx

    return httpx.AsyncClient(trust_env=False)
