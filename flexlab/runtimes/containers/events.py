"""Who ended, by the engine's event stream: one thread, which lives while something is watched.

The stream breaks when the engine restarts. Then the state of everything watched is asked for again
and again until the engine answers: what ended meanwhile is told, what goes on stays watched.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from flexlab.spec.instance import RunState

log = logging.getLogger(__name__)
RETRY_S = 1.0
FILTERS = {"type": "container", "event": ["die", "oom", "destroy"]}
OnGone = Callable[[RunState], None]


class ContainerWatch:
    """One observation; `close()` ends it and is harmless when it has ended."""

    def __init__(self, watcher: EventWatcher, container: str, on_gone: OnGone) -> None:
        self._watcher = watcher
        self.container = container
        self._on_gone: OnGone | None = on_gone
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            self._on_gone = None
        self._watcher.forget(self)

    def tell(self, state: RunState) -> None:
        """Once."""
        with self._lock:
            on_gone, self._on_gone = self._on_gone, None
        if on_gone is not None:
            on_gone(state)


class EventWatcher:
    """Watches any number of containers of one engine."""

    def __init__(
        self,
        connect: Callable[[float | None], Any],
        state_of: Callable[[str], RunState],
    ) -> None:
        """`connect(timeout)` makes a client; `state_of(container)` never raises."""
        self._connect = connect
        self._state_of = state_of
        self._lock = threading.Lock()
        self._watched: list[ContainerWatch] = []
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()
        self._stream: Any = None

    def watch(self, container: str, on_gone: OnGone) -> ContainerWatch:
        """`on_gone` is called once, from any thread, when it ends (at once if it has)."""
        made = ContainerWatch(self, container, on_gone)
        with self._lock:
            self._watched.append(made)
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._run, name="container events", daemon=True
                )
                self._thread.start()
        # It may have ended before the stream began, or before it was watched.
        self._judge(container)
        return made

    def forget(self, watch: ContainerWatch) -> None:
        """Nobody asks for it any more."""
        with self._lock, contextlib.suppress(ValueError):
            self._watched.remove(watch)

    def close(self) -> None:
        """End the thread; nobody is told anything any more."""
        self._closed.set()
        with self._lock:
            stream, self._stream = self._stream, None
            self._watched.clear()
            thread = self._thread
        if stream is not None:
            with contextlib.suppress(Exception):  # whatever is left of the connection
                stream.close()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._listen()
            except Exception as error:  # an SDK edge: the stream broke, or the engine is away
                log.debug("the engine's events broke off: %s", error)
            self._closed.wait(RETRY_S)
            for container in self._containers():
                self._judge(container)

    def _listen(self) -> None:
        """Until the stream ends."""
        client = self._connect(None)
        try:
            stream = client.events(filters=FILTERS, decode=True)
            with self._lock:
                self._stream = stream
            if self._closed.is_set():
                stream.close()
                return
            for container in self._containers():  # what ended while nobody listened
                self._judge(container)
            for event in stream:
                self._judge(str(event.get("id") or event.get("Actor", {}).get("ID", "")))
        finally:
            client.close()

    def _containers(self) -> set[str]:
        with self._lock:
            return {watch.container for watch in self._watched}

    def _judge(self, container: str) -> None:
        with self._lock:
            concerned = [watch for watch in self._watched if watch.container == container]
        if not concerned:
            return
        state = self._state_of(container)
        if state.alive is not False:
            return
        for watch in concerned:
            self.forget(watch)
            watch.tell(state)
