"""What runs in a demo: instances, their logs and their ends.

It lives here and not in the runtime, as processes and containers do: a second `DemoRuntime` of the
same world is what a second daemon sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from flexlab.demo.engine import LOOPBACK, Behaviour, FakeEngine
from flexlab.spec.instance import DemoRef, Launch, RunState

SIGKILL_EXIT = 128 + 9


class DemoLog:
    """Lines that are kept after the end of who wrote them."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.changed = threading.Condition()

    def write(self, line: str) -> None:
        """Append one line and wake those that follow."""
        with self.changed:
            self.lines.append(line.encode())
            self.changed.notify_all()


class DemoLogLines:
    """An iterator over a DemoLog; `close()` ends it from any thread."""

    def __init__(self, log: DemoLog, *, tail: int, follow: bool) -> None:
        self._log = log
        self._at = max(0, len(log.lines) - max(0, tail))
        self._follow = follow
        self._closed = False

    def __iter__(self) -> DemoLogLines:
        return self

    def __next__(self) -> bytes:
        with self._log.changed:
            while not self._closed and self._at >= len(self._log.lines) and self._follow:
                self._log.changed.wait()
            if self._closed or self._at >= len(self._log.lines):
                raise StopIteration
            self._at += 1
            return self._log.lines[self._at - 1]

    def close(self) -> None:
        """End it; a thread that waits in `next()` returns."""
        with self._log.changed:
            self._closed = True
            self._log.changed.notify_all()


class DemoWatch:
    """See `runtimes.base.Watch`."""

    def __init__(self, on_gone: Callable[[RunState], None]) -> None:
        self._on_gone: Callable[[RunState], None] | None = on_gone

    def close(self) -> None:
        """No call back from here on."""
        self._on_gone = None

    def fire(self, state: RunState) -> None:
        """Call back, once."""
        on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone(state)


class DemoInstance:
    """One thing that runs. Tests steer it: `finish_loading()`, `end()`."""

    def __init__(self, launch: Launch, engine: FakeEngine, log: DemoLog) -> None:
        self.launch = launch
        self.engine = engine
        self.log = log
        self.ref = DemoRef(id=f"demo-{launch.instance}-{engine.port}")
        self.state = RunState(alive=True)
        self.ended = threading.Event()
        self._watches: list[DemoWatch] = []
        self._lock = threading.Lock()
        self._timers: list[threading.Timer] = []
        self.log.write(f"listening on {LOOPBACK}:{engine.port}")
        self._plan_life(engine.behaviour)

    def finish_loading(self) -> None:
        """Ready, or the failure that its behaviour wants."""
        if self.engine.behaviour.fail_load is None:
            self.log.write("model loaded")
            self.engine.ready.set()
        else:
            self.log.write(self.engine.behaviour.fail_load)
            self.end(1, "it failed (exit code 1)")

    def end(self, exit_code: int = SIGKILL_EXIT, why: str = "it was killed by SIGKILL") -> None:
        """It is gone: connections are cut, watches fire; ending twice is harmless."""
        with self._lock:
            if self.ended.is_set():
                return
            self.state = RunState(alive=False, exit_code=exit_code, why=why)
            self.ended.set()
            watches, self._watches = self._watches, []
        for timer in self._timers:
            timer.cancel()
        self.engine.close()
        self.log.write(why)
        for watch in watches:
            watch.fire(self.state)

    def watch(self, on_gone: Callable[[RunState], None]) -> DemoWatch:
        """Call back at the end, at once if it has ended."""
        watch = DemoWatch(on_gone)
        with self._lock:
            if not self.ended.is_set():
                self._watches.append(watch)
                return watch
        watch.fire(self.state)
        return watch

    def _plan_life(self, behaviour: Behaviour) -> None:
        if behaviour.load_s is not None and behaviour.load_s > 0:
            self._after(behaviour.load_s, self.finish_loading)
        if behaviour.crash_after_s is not None:
            self._after(behaviour.crash_after_s, self.end)
        if behaviour.load_s == 0:
            self.finish_loading()

    def _after(self, seconds: float, deed: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, deed)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


class DemoWorld:
    """What runs, and how each model behaves; shared by all runtimes that look at it."""

    def __init__(self, behaviours: Mapping[str, Behaviour] | None = None) -> None:
        self.behaviours: dict[str, Behaviour] = dict(behaviours or {})
        self.instances: list[DemoInstance] = []
        self.logs: dict[str, DemoLog] = {}
        self.lock = threading.Lock()

    def alive(self) -> list[DemoInstance]:
        """Everything that runs now."""
        return [one for one in list(self.instances) if not one.ended.is_set()]

    def instance(self, instance: str) -> DemoInstance | None:
        """The last one that was started under this instance id, ended or not."""
        found = [one for one in list(self.instances) if one.launch.instance == instance]
        return found[-1] if found else None

    def close(self) -> None:
        """End everything."""
        for one in self.alive():
            one.end()
