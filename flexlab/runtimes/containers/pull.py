"""Pulling an image: what the engine reports layer by layer, as one progress.

Layers that are complete are kept by the engine: a pull that broke off goes on where it was.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flexlab.core.errors import LaunchError
from flexlab.runtimes.containers.words import pull_problem, text_of
from flexlab.spec.lab import Progress

REPORT_EVERY_S = 0.2


class Layers:
    """What is known of all layers of one pull; `done` never decreases."""

    def __init__(self, image: str) -> None:
        self._image = image
        self._total: dict[str, int] = {}
        self._done: dict[str, int] = {}
        self._highest = 0
        self._began = time.monotonic()

    def take(self, event: Mapping[str, Any]) -> None:
        """One line of the engine's answer."""
        layer, status = str(event.get("id") or ""), str(event.get("status") or "")
        detail = event.get("progressDetail") or {}
        if status == "Downloading" and detail.get("total"):
            self._total[layer] = int(detail["total"])
            self._done[layer] = int(detail.get("current") or 0)
        elif status in ("Download complete", "Pull complete", "Already exists"):
            self._done[layer] = self._total.get(layer, 0)

    def progress(self) -> Progress:
        """Bytes of compressed layers; the total is what the engine has told of so far."""
        done, total = sum(self._done.values()), sum(self._total.values())
        self._highest = max(self._highest, done)
        seconds = time.monotonic() - self._began
        rate = self._highest / seconds if seconds > 1 else None
        left = (total - self._highest) / rate if rate and total else None
        return Progress(
            phase="image",
            text=f"pulling {self._image}",
            done_bytes=self._highest,
            total_bytes=total or None,
            bytes_per_s=rate,
            eta_s=left,
        )


def fetch(client: Any, image: str, report: Callable[[Progress], None]) -> None:
    """Pull `image` by the SDK's low-level client. Raises LaunchError."""
    layers = Layers(image)
    last = 0.0
    try:
        for event in _events(client, image):
            if text := event.get("error"):
                raise _failed(image, None, str(text))
            layers.take(event)
            if time.monotonic() - last >= REPORT_EVERY_S:
                last = time.monotonic()
                report(layers.progress())
    except LaunchError:
        raise
    except Exception as error:  # an SDK edge: HTTP errors, and connections that break
        response = getattr(error, "response", None)
        status = getattr(response, "status_code", None)
        raise _failed(image, status, text_of(error)) from error
    report(layers.progress())


def _events(client: Any, image: str) -> Iterator[Mapping[str, Any]]:
    name, _, digest = image.partition("@")
    if digest:
        repository = re.sub(r":[\w.-]+$", "", name)
        yield from client.pull(repository, tag=digest, stream=True, decode=True)
        return
    repository, _, tag = image.rpartition(":")
    yield from client.pull(repository, tag=tag, stream=True, decode=True)


def _failed(image: str, status: int | None, text: str) -> LaunchError:
    code, message, hint = pull_problem(image, status, text)
    return LaunchError(message, hint, code=code)
