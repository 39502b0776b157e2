"""Servers that already run and whose life is not ours: `flexlab serve --external NAME=URL`."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Literal
from urllib.parse import urlsplit

from flexlab.core.errors import LaunchError, SettingsError
from flexlab.runtimes.base import LogLines, Watch
from flexlab.spec.instance import (
    Endpoint,
    ExternalRef,
    Found,
    Launch,
    MemoryUse,
    RunState,
    RuntimeRef,
    Started,
)
from flexlab.spec.plan import LaunchPlan, OnDisconnect, RuntimeFacts, RuntimeName

CONNECT_S = 2.0
_DEFAULT_PORTS: dict[str, int] = {"http": 80, "https": 443}


def parse_url(name: str, url: str, *, on_disconnect: OnDisconnect = "cancel") -> Endpoint:
    """The endpoint of a server's root URL. Raises SettingsError, naming what is wrong with it."""

    def wrong(why: str) -> SettingsError:
        return SettingsError(
            f"--external {name}: {url!r} {why}", f"--external {name}=http://127.0.0.1:8000"
        )

    scheme: Literal["http", "https"]
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise wrong(f"is not a URL ({error})") from None
    if parts.scheme == "http":
        scheme = "http"
    elif parts.scheme == "https":
        scheme = "https"
    else:
        raise wrong("does not begin with http:// or https://")
    if not parts.hostname or any(c.isspace() or not c.isprintable() for c in url):
        raise wrong("names no host")
    if port == 0:
        raise wrong("has port 0")
    if "@" in parts.netloc:
        url = url.replace(parts.netloc.rpartition("@")[0], "***")
        raise wrong("holds a user name or password, which would end up in logs")
    if parts.query or parts.fragment:
        raise wrong("has a query; give the server's root")
    return Endpoint(
        scheme=scheme,
        host=parts.hostname,
        port=port or _DEFAULT_PORTS[scheme],
        path_prefix=parts.path.rstrip("/"),
        on_disconnect=on_disconnect,
    )


class NothingToWatch:
    """A watch that never calls back: an external server's end is not an instance's end."""

    def close(self) -> None:
        """Harmless."""


class NoLines:
    """The log of somebody else's server: nothing that could be read here."""

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        raise StopIteration

    def close(self) -> None:
        """Nothing to end."""


class ExternalRuntime:
    """See `runtimes.base.Runtime`. Nothing is started, stopped, owned or read here."""

    name: RuntimeName = "external"

    def __init__(self, urls: Mapping[str, str]) -> None:
        """`urls`: model name -> root URL of the server that answers for it."""
        self._urls = dict(urls)
        self._endpoints = {name: parse_url(name, url) for name, url in urls.items()}

    def facts(self) -> RuntimeFacts:
        """Always there: whether a server answers is said by `state`."""
        return RuntimeFacts(name="external", available=True)

    def start(self, plan: LaunchPlan, launch: Launch) -> Started:
        """The endpoint of the server that stands for this model. Raises LaunchError."""
        endpoint = self._endpoints.get(plan.model)
        if endpoint is None:
            raise LaunchError(
                f"no external server is given for {plan.model}",
                f"flexlab serve --external {plan.model}=URL",
                code="no_engine",
            )
        return Started(ref=ExternalRef(url=self._urls[plan.model]), endpoint=endpoint)

    def find(self, instance: str) -> RuntimeRef | None:
        """None: a server of someone else's bears no instance id."""
        return None

    def owned(self, installation: str) -> list[Found]:
        """Nothing of it is ours."""
        return []

    def state(self, ref: RuntimeRef) -> RunState:
        """Alive when it accepts a connection, else unknown; its life is not ours to judge."""
        if not isinstance(ref, ExternalRef):
            return RunState(alive=None, why=f"{type(ref).__name__} is not an external server")
        try:
            endpoint = parse_url("server", ref.url)
            socket.create_connection((endpoint.host, endpoint.port), CONNECT_S).close()
        except (OSError, SettingsError, UnicodeError) as error:
            return RunState(alive=None, why=f"{ref.url} does not answer ({error})")
        return RunState(alive=True)

    def stop(self, ref: RuntimeRef, timeout_s: float) -> bool:
        """True at once; the server goes on."""
        return True

    def watch(self, ref: RuntimeRef, on_gone: Callable[[RunState], None]) -> Watch:
        """Never calls back."""
        return NothingToWatch()

    def memory(self, ref: RuntimeRef) -> MemoryUse | None:
        """Unknown: it may be on another machine."""
        return None

    def logs(self, ref: RuntimeRef | None, log_path: str, *, tail: int, follow: bool) -> LogLines:
        """None of its lines are here."""
        return NoLines()

    def close(self) -> None:
        """Nothing is held."""
