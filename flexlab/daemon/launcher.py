"""Effects become deeds: what the scheduler decided is done here, and reported back once each.

Blocking work runs in threads, each runtime in its own pool. A deed that fails turns into an event;
one that was given up in the middle is undone (a late start is stopped).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping

import msgspec

from flexlab import __version__
from flexlab.core import paths
from flexlab.core.errors import FlexLabError, LaunchError
from flexlab.core.settings import Settings
from flexlab.daemon.claims import Claims
from flexlab.daemon.enginelogs import new_log, prune
from flexlab.daemon.events import EventLog
from flexlab.daemon.fetching import fetch
from flexlab.daemon.files import Records
from flexlab.daemon.loading import Loading
from flexlab.daemon.registry import Registry, installed_only
from flexlab.daemon.tasks import Tasks, Threads
from flexlab.runtimes.base import FetchesImages, Runtime, Watch
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import NEVER
from flexlab.spec.instance import Launch, LaunchRecord, RunState, RuntimeRef, Started
from flexlab.spec.lab import Progress
from flexlab.spec.plan import Candidate, Candidates, LaunchPlan, Placement, Refusal, Wishes

log = logging.getLogger(__name__)
PORT_TRIES = 3
CANCELLED = Refusal(code="cancelled", message="nobody waits for it any more")


def refusal_of(error: FlexLabError, *, status: int = 503) -> Refusal:
    """A FlexLabError as waiters hear it."""
    return Refusal(code=error.code, message=error.message, hint=error.hint, status=status)


def show_ref(ref: RuntimeRef) -> str:
    """For people: `pid 4711`, a container's short id, an object's name, a URL."""
    match msgspec.to_builtins(ref):
        case {"pid": pid}:
            return f"pid {pid}"
        case {"id": str(word)}:
            return word[:12]
        case {"namespace": namespace, "name": name}:
            return f"{namespace}/{name}"
        case {"url": url}:
            return str(url)
    return "?"


class Launcher:
    """Implements scheduler.Effects; `scheduler` is set once both exist."""

    scheduler: Scheduler

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        runtimes: Mapping[str, Runtime],
        records: Records,
        events: EventLog,
        installation: str,
        claims: Claims,
    ) -> None:
        self.threads = Threads()
        self.tasks = Tasks()
        self.loading = Loading(runtimes, self.threads, registry)
        self.held: dict[str, LaunchRecord] = {}
        """Record of every instance that was launched and is not confirmed gone."""
        self.settings = settings
        self._registry = registry
        self._runtimes = runtimes
        self._records = records
        self.note = events.add
        self._installation = installation
        self._claims = claims
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._stopping: set[str] = set()
        self._late: set[str] = set()
        """Those whose start does not come back; what it may still start is stopped then."""
        self._died: dict[str, asyncio.Future[RunState]] = {}
        self._watches: dict[str, Watch] = {}
        self._timer: asyncio.TimerHandle | None = None

    # -- scheduler.Effects

    def prepare(self, model: str, wishes: Wishes, *, download: bool) -> None:
        work = self._prepare(model, wishes, download)
        task = self._preparing[model] = self.tasks.spawn(f"prepare {model}", work)
        task.add_done_callback(lambda done: self._never_ran(model, done))

    def _never_ran(self, model: str, task: asyncio.Task[None]) -> None:
        """Cancelled before its first step: nobody else reports it."""
        if self._preparing.get(model) is task:
            del self._preparing[model]
            self.scheduler.prepare_failed(model, CANCELLED)

    def cancel_prepare(self, model: str) -> None:
        if task := self._preparing.get(model):
            task.cancel()

    def start(self, instance: str, placement: Placement) -> None:
        work = self._start(instance, placement)
        self._starting[instance] = self.tasks.spawn(f"start {instance}", work)

    def stop(self, instance: str) -> None:
        if instance in self._late:  # its start still hangs in a thread: no more can be done
            loop = asyncio.get_running_loop()
            loop.call_soon(self.scheduler.stop_unconfirmed, instance)
        elif instance not in self._stopping:
            self._stopping.add(instance)
            self.tasks.spawn(f"stop {instance}", self._stop(instance))

    def wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when != NEVER:
            self._timer = asyncio.get_running_loop().call_at(when, self.scheduler.tick)

    def remember_use(self, memory_key: str, peak: dict[str, int]) -> None:
        self._claims.remember_use(memory_key, peak)
        self._keep_claims()

    def remember_shortage(self, memory_key: str, claims: dict[str, int]) -> None:
        self._claims.remember_shortage(memory_key, claims)
        self._keep_claims()

    def _keep_claims(self) -> None:
        work = self.threads.call("worker", self._claims.write, self._claims.encoded())
        self.tasks.spawn("keep claims", work)

    # -- preparing

    async def _prepare(self, model: str, wishes: Wishes, download: bool) -> None:
        try:
            answer = await self._plan(model, wishes, download)
        except asyncio.CancelledError:
            answer = CANCELLED
        except FlexLabError as error:
            answer = refusal_of(error)
        except Exception as error:  # an edge: a launcher effect
            log.exception("preparing %s failed", model)
            answer = Refusal(code="defect", message=f"planning {model} failed: {error!r}")
        self._preparing.pop(model, None)
        if isinstance(answer, Refusal):
            self.scheduler.prepare_failed(model, answer)
        else:
            self.scheduler.prepared(model, answer)

    async def _plan(self, model: str, wishes: Wishes, download: bool) -> Candidates | Refusal:
        planned = await self.threads.call("worker", self._registry.plan, model, wishes)
        if planned.candidates.refusal is not None:
            return planned.candidates.refusal
        if planned.missing_image and download:
            await self._fetch_image(model, planned.candidates.items[0], planned.missing_image)
        if planned.missing and download:
            began = time.monotonic()
            await fetch(
                planned.missing,
                self.settings.models_dir,
                lambda progress: self.scheduler.progress(model, progress),
            )
            took_s = time.monotonic() - began
            self.note("weights", f"fetched the weights of {model}", model=model, seconds=took_s)
        if (planned.missing or planned.missing_image) and download:
            planned = await self.threads.call("worker", self._registry.plan, model, wishes)
            if planned.candidates.refusal is not None:
                return planned.candidates.refusal
        return installed_only(planned, self._registry.store)

    async def _fetch_image(self, model: str, candidate: Candidate, image: str) -> None:
        """Raises LaunchError; of an image of our own, how it is built."""
        own = next((p for p in candidate.problems if p.code == "image_build_needed"), None)
        if own is not None:
            raise LaunchError(own.message, own.hint, code=own.code)
        runtime = self._runtimes[candidate.runtime]
        if not isinstance(runtime, FetchesImages):
            return
        began = time.monotonic()
        loop = asyncio.get_running_loop()

        def report(progress: Progress) -> None:
            loop.call_soon_threadsafe(self.scheduler.progress, model, progress)

        await self.threads.call(runtime.name, runtime.fetch_image, image, report)
        took_s = time.monotonic() - began
        self.note("weights", f"fetched the image {image}", model=model, seconds=took_s)

    # -- starting

    async def _start(self, instance: str, placement: Placement) -> None:
        began = time.monotonic()
        try:
            plan = await self.threads.call(
                "worker", self._registry.render, placement.candidate, placement.grant
            )
            for tries_left in reversed(range(PORT_TRIES)):
                try:
                    await self._launch(instance, plan)
                    await self.loading.until_ready(self.held[instance], self._died[instance])
                    break
                except LaunchError as error:
                    # Somebody else was faster to bind the port that was free a moment ago.
                    if error.code != "port_taken" or not tries_left:
                        raise
                    await self._confirm_gone(instance)
            load_s = time.monotonic() - began
            await self._note_ready(instance, load_s)
            if self._died[instance].done():
                cause = self._died[instance].result().why or "it ended"
                raise LaunchError(f"the engine died as it became ready: {cause}")
            self.scheduler.ready(instance, load_s)
        except asyncio.CancelledError:
            pass  # `_stop` gave it up, and undoes what was started
        except FlexLabError as error:
            self.scheduler.start_failed(instance, refusal_of(error, status=502))
        except OSError as error:
            hint = f"is {paths.state_dir()} full or read-only?"
            unrecorded = LaunchError(f"the launch cannot be recorded: {error}", hint)
            self.scheduler.start_failed(instance, refusal_of(unrecorded))
        except Exception as error:  # an edge: a launcher effect
            log.exception("starting %s failed", instance)
            why = Refusal(code="defect", message=f"the start failed: {error!r}")
            self.scheduler.start_failed(instance, why)
        finally:
            self._starting.pop(instance, None)
            self._died.pop(instance, None)  # from here on its end is an end, not a failed start

    async def _note_ready(self, instance: str, load_s: float) -> None:
        """In the record too; an engine that answers is not ended because the disk is full."""
        try:
            await self._write(instance, ready_at=time.time(), load_s=load_s)
        except OSError as error:
            log.warning("a daemon after this one will end %s: %s", instance, error)

    async def _launch(self, instance: str, plan: LaunchPlan) -> None:
        """Record, start, record again. The record comes first: a crash between finds its trace."""
        record = self.held[instance] = self._new_record(instance, plan)
        await self._write(instance)
        started = await self._run(record)
        await self._write(instance, ref=started.ref, endpoint=started.endpoint)
        self.watch(instance)
        self.scheduler.launched(
            instance,
            started.endpoint,
            ref=show_ref(started.ref),
            image=plan.image,
            plan_hash=plan.hash,
            log_path=record.log_path,
        )

    async def _run(self, record: LaunchRecord) -> Started:
        runtime = self._runtimes[record.plan.runtime]
        launch = Launch(
            instance=record.instance,
            installation=self._installation,
            api_key=record.api_key,
            log_path=record.log_path,
        )
        start = asyncio.ensure_future(
            self.threads.call(runtime.name, runtime.start, record.plan, launch)
        )
        try:
            return await asyncio.shield(start)
        except asyncio.CancelledError:
            # The thread goes on whatever we do: `_stop` must learn what it started.
            with contextlib.suppress(FlexLabError):
                late = await start
                self._remember(record.instance, ref=late.ref, endpoint=late.endpoint)
            raise

    def _new_record(self, instance: str, plan: LaunchPlan) -> LaunchRecord:
        return LaunchRecord(
            flexlab_version=__version__,
            instance=instance,
            installation=self._installation,
            model=plan.model,
            created_at=time.time(),
            plan=plan,
            api_key=secrets.token_urlsafe(24),
            log_path=str(new_log(instance)),
            recipe=self._registry.sources.get(plan.model),
        )

    def _remember(self, instance: str, **changes: object) -> LaunchRecord:
        record = msgspec.structs.replace(self.held[instance], **changes)
        self.held[instance] = record
        return record

    async def _write(self, instance: str, **changes: object) -> None:
        record = self._remember(instance, **changes)
        await self.threads.call("worker", self._records.write, record)

    # -- watching and stopping

    def watch(self, instance: str, *, loading: bool = True) -> None:
        """Hear when it ends by itself; `loading` False for one that was adopted ready."""
        record = self.held[instance]
        assert record.ref is not None
        loop = asyncio.get_running_loop()
        if earlier := self._watches.pop(instance, None):
            earlier.close()
        if loading:
            self._died[instance] = loop.create_future()

        def on_gone(state: RunState) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended before it
                loop.call_soon_threadsafe(self._ended, instance, record.ref, state)

        runtime = self._runtimes[record.plan.runtime]
        self._watches[instance] = runtime.watch(record.ref, on_gone)

    def _ended(self, instance: str, ref: RuntimeRef | None, state: RunState) -> None:
        held = self.held.get(instance)
        if instance in self._stopping or held is None or held.ref != ref:
            return
        died = self._died.get(instance)
        if died is not None:
            if not died.done():
                died.set_result(state)
            return
        self._forget(instance)
        self.scheduler.gone(instance, state)

    def _forget(self, instance: str) -> None:
        record = self.held.pop(instance, None)
        model = record.model if record else None
        self._died.pop(instance, None)
        if watch := self._watches.pop(instance, None):
            watch.close()
        self.tasks.spawn(f"forget {instance}", self._tidy(instance, model, record))

    async def _tidy(self, instance: str, model: str | None, record: LaunchRecord | None) -> None:
        if record is not None and record.ref is not None:
            # What ended by itself may have left something: a container that does not run.
            runtime = self._runtimes[record.plan.runtime]
            await self.threads.call(runtime.name, runtime.stop, record.ref, 0.0)
        await self.threads.call("worker", self._records.remove, instance)
        if model is not None:
            await self.threads.call("worker", prune, model)

    async def _stop(self, instance: str) -> None:
        gone = False
        try:
            start = self._starting.get(instance)
            if start is not None:
                start.cancel()
                _, hangs = await asyncio.wait([start], timeout=self.settings.stop_timeout_s)
                if hangs:
                    self._late.add(instance)
                    self.scheduler.stop_unconfirmed(instance)
                    await asyncio.wait([start])
            gone = await self._confirm_gone(instance)
        except Exception:  # an edge: a launcher effect
            log.exception("stopping %s failed", instance)
        finally:
            self._stopping.discard(instance)
            self._late.discard(instance)
        if gone:
            self._forget(instance)
            self.scheduler.gone(instance, RunState(alive=False))
        else:
            self.scheduler.stop_unconfirmed(instance)

    async def _confirm_gone(self, instance: str) -> bool:
        record = self.held.get(instance)
        if record is None or record.ref is None:
            return True
        runtime = self._runtimes[record.plan.runtime]
        timeout_s = record.plan.stop_timeout_s
        if await self.threads.call(runtime.name, runtime.stop, record.ref, timeout_s):
            return True
        state = await self.threads.call(runtime.name, runtime.state, record.ref)
        return state.alive is False

    async def close(self) -> None:
        """Let go of everything here; what runs goes on."""
        if self._timer is not None:
            self._timer.cancel()
        for watch in self._watches.values():
            watch.close()
        await self.tasks.close()
        await self.loading.close()
        self.threads.close()
