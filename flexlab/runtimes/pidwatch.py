"""One thread that waits for the end of any number of processes, children and adopted ones alike."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from collections.abc import Callable

from flexlab.runtimes import proc
from flexlab.spec.instance import ProcessRef


class ProcessWatch:
    """One observation; see `runtimes.base.Watch`."""

    def __init__(
        self, watcher: ProcessWatcher, ref: ProcessRef, on_end: Callable[[], None]
    ) -> None:
        self.ref = ref
        self._watcher = watcher
        self._on_end: Callable[[], None] | None = on_end

    def close(self) -> None:
        """End it; harmless when it has ended, and callable from the callback itself."""
        self._on_end = None
        self._watcher.forget(self)

    def fire(self) -> None:
        """Call back, unless closed."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            # A loop that was closed in the meantime (call_soon_threadsafe): nobody listens.
            with contextlib.suppress(RuntimeError):
                on_end()


class ProcessWatcher:
    """Starts its thread with the first watch; `close()` ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._selector: selectors.BaseSelector | None = None
        self._thread: threading.Thread | None = None
        self._wake_fd = -1
        self._pidfds: dict[ProcessWatch, int] = {}
        self._gone: list[ProcessWatch] = []
        self._closed = False

    def watch(self, ref: ProcessRef, on_end: Callable[[], None]) -> ProcessWatch:
        """`on_end()` once, in the watcher's thread, when `ref` ends (at once if it has)."""
        watch = ProcessWatch(self, ref, on_end)
        with self._lock:
            if self._closed:
                return watch
            selector = self._running_selector()
            pidfd = proc.open_pidfd(ref)
            if pidfd is None:
                self._gone.append(watch)
                os.eventfd_write(self._wake_fd, 1)
            else:
                self._pidfds[watch] = pidfd
                selector.register(pidfd, selectors.EVENT_READ, watch)
        return watch

    def forget(self, watch: ProcessWatch) -> None:
        """Let go of its descriptor, if it still has one."""
        with self._lock:
            pidfd = self._pidfds.pop(watch, None)
            if pidfd is not None and self._selector is not None:
                self._selector.unregister(pidfd)
                os.close(pidfd)

    def close(self) -> None:
        """End the thread; watches that are still open are never called back."""
        with self._lock:
            thread = self._thread
            if thread is not None and not self._closed:
                os.eventfd_write(self._wake_fd, 1)
            self._closed = True
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _running_selector(self) -> selectors.BaseSelector:
        if self._selector is None:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector = selectors.DefaultSelector()
            self._selector.register(self._wake_fd, selectors.EVENT_READ)
            self._thread = threading.Thread(
                target=self._run, args=(self._selector,), name="flexlab-pidwatch", daemon=True
            )
            self._thread.start()
        return self._selector

    def _run(self, selector: selectors.BaseSelector) -> None:
        while True:
            ready = selector.select()
            with self._lock:
                if self._closed:
                    self._release(selector)
                    return
                ended, self._gone = self._gone, []
                # Looked at again: a descriptor that was closed and reused while select() returned
                # would otherwise report the end of one process as that of another.
                ended += [
                    key.data
                    for key, _ in ready
                    if key.data in self._pidfds and not proc.is_alive(key.data.ref)
                ]
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            for watch in ended:
                self.forget(watch)
                watch.fire()

    def _release(self, selector: selectors.BaseSelector) -> None:
        selector.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        os.close(self._wake_fd)
