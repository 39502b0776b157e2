"""A whole daemon in the test's own loop: real sockets, real scheduler, engines of the demo."""

from __future__ import annotations

import asyncio
import http.client
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import soon

from flexlab.core import paths
from flexlab.daemon.lockfile import Lock
from flexlab.daemon.service import Service
from flexlab.demo.world import DemoWorld

RECIPE = """\
name: {name}
description: For tests.
license: Apache-2.0
capabilities: [chat]
aliases: [{name}-alias]
context: 8192
variants:
  - name: only
    backend: llamacpp
    weights:
      - source: file://{weights}
        size: 1000
    devices: [cpu]
    settings: {{context_size: {context}, parallel: 1, cache_ram_mib: 0}}
    evidence: tested
    reason: It is there.
    source: this test
    date: 2026-01-31
"""


class Lab:
    """One daemon, and how its clients see it."""

    def __init__(self, service: Service, world: DemoWorld, lock: Lock) -> None:
        self.service = service
        self.world = world
        self.lock = lock

    async def get(self, path: str) -> tuple[int, Any]:
        """GET from the gateway: status and JSON."""
        return await asyncio.to_thread(self._ask, "GET", path, None)

    async def chat(self, model: str, **more: Any) -> tuple[int, Any]:
        """A chat request through the gateway: status and JSON."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], **more}
        return await asyncio.to_thread(self._ask, "POST", "/v1/chat/completions", body)

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        """POST to the gateway: status and JSON."""
        return await asyncio.to_thread(self._ask, "POST", path, body)

    async def stream(self, model: str, **more: Any) -> bytes:
        """A streamed chat through the gateway, to its end."""
        messages = [{"role": "user", "content": "hi"}]
        body = json.dumps({"model": model, "messages": messages, "stream": True, **more})

        def read() -> bytes:
            address = self.service.gateway.address
            connection = http.client.HTTPConnection(address.host, address.port, timeout=20)
            try:
                connection.request("POST", "/v1/chat/completions", body)
                return connection.getresponse().read()
            finally:
                connection.close()

        return await asyncio.to_thread(read)

    def _ask(self, method: str, path: str, body: object) -> tuple[int, Any]:
        address = self.service.gateway.address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=20)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()

    async def until(self, what: Callable[[], object], limit_s: float = 10.0) -> None:
        """Wait until it is true."""
        await soon(what, limit_s)

    def running(self) -> list[str]:
        """Models of what really runs."""
        alive = self.world.alive()
        return [one.launch.instance.rpartition("-")[0] for one in alive]


def write_recipe(home: Path, name: str, *, context: int = 1024, installed: bool = True) -> Path:
    """A model of the user's own, with (or without) its file."""
    weights = home / f"{name}.gguf"
    if installed:
        weights.write_bytes(gguf())
    folder = paths.user_recipes_dir() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(RECIPE.format(name=name, weights=weights, context=context))
    return recipe


def gguf() -> bytes:
    """The smallest file that is one: a header that names an architecture, and no tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    pair = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    return (head + pair).ljust(1000, b"\0")


Start = Callable[..., Any]
