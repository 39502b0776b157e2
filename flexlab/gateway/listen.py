"""Opening the gateway's port, and saying who holds it when it is taken."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from flexlab.core.errors import ProxyError
from flexlab.core.text import clean_line

BACKLOG = 1024
_LISTENING = "0A"
_PORTS_TRIED = 100


class Address(NamedTuple):
    """Where the gateway listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class PortOwner(NamedTuple):
    """The process that listens on a port."""

    pid: int
    command: str


async def listen(
    loop: asyncio.AbstractEventLoop,
    protocol: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
) -> tuple[asyncio.Server, Address]:
    """A server on host and port (0: any free one). Raises ProxyError with the next command."""
    try:
        server = await loop.create_server(protocol, host, port, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ProxyError(
            f"cannot listen on {host!r}: {error.strerror}", "flexlab serve --host 127.0.0.1"
        ) from error
    except OSError as error:
        raise _explained(error, host, port) from error
    return server, Address(host, server.sockets[0].getsockname()[1])


def _explained(error: OSError, host: str, port: int) -> ProxyError:
    # uvloop and asyncio wrap the error in one of their own; the number stays.
    if error.errno == errno.EADDRINUSE:
        owner = port_owner(port)
        who = f"by pid {owner.pid} ({owner.command})" if owner else "by another process"
        free = next_free_port(host, port + 1)
        other = free if free else "N"
        hint = f"FLEXLAB_PORT={other} before the command, or flexlab serve --port {other}"
        return ProxyError(f"port {port} is taken {who}", hint, code="port_taken")
    if error.errno == errno.EACCES:
        return ProxyError(
            f"this user may not listen on port {port}", "use a port above 1023, e.g. --port 8484"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return ProxyError(f"{host} is not an address of this machine", "--host 127.0.0.1")
    return ProxyError(f"cannot listen on {host}:{port}: {error.strerror or error}", "--port N")


def next_free_port(host: str, first: int) -> int | None:
    """The first port from `first` on that can be bound now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in range(first, min(first + _PORTS_TRIED, 65536)):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    return None


def port_owner(port: int, proc: Path = Path("/proc")) -> PortOwner | None:
    """Who listens on this TCP port; None if nobody does, or the process is not ours to see."""
    inodes = set(_listening_inodes(port, proc))
    if not inodes:
        return None
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in proc.glob("[0-9]*"):
        if wanted & set(_open_files(folder)):
            return PortOwner(int(folder.name), _command(folder))
    return None


def _open_files(folder: Path) -> Iterator[str]:
    """What a process has open, as far as it may be seen; some of it closes meanwhile."""
    try:
        entries = list((folder / "fd").iterdir())
    except OSError:
        return
    for entry in entries:
        with suppress(OSError):
            yield os.readlink(entry)


def _listening_inodes(port: int, proc: Path) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        try:
            rows = (proc / "net" / table).read_text(encoding="ascii").splitlines()[1:]
        except (OSError, UnicodeDecodeError):
            continue
        for row in rows:
            words = row.split()
            if len(words) > 9 and words[3] == _LISTENING:
                match = re.search(r":([0-9A-F]{4})$", words[1])
                if match and int(match[1], 16) == port:
                    yield words[9]


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        text = clean_line(b" ".join(words).decode(errors="replace"))
        return text[:80] or (folder / "comm").read_text(errors="replace").strip()
    except OSError:
        return "unknown command"
