"""A port that is taken: by whom, and which one is free."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_lab import FakeLab, Listening

from flexlab.core.errors import ProxyError
from flexlab.gateway.listen import Address, next_free_port, port_owner
from flexlab.gateway.proxy import Gateway
from flexlab.gateway.routes import Router

LISTENER = """
import socket, sys
s = socket.socket({family}); s.bind(("{host}", 0)); s.listen()
print(s.getsockname()[1], flush=True); sys.stdin.read()
"""


def gateway() -> Gateway:
    return Gateway(Router(FakeLab(), Listening()))


@pytest.mark.parametrize(
    ("family", "host"), [("socket.AF_INET", "127.0.0.1"), ("socket.AF_INET6", "::1")]
)
async def test_a_taken_port_names_its_owner_and_a_free_one(family: str, host: str) -> None:
    code = LISTENER.format(family=family, host=host)
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs meanwhile
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        port = int(owner.stdout.readline())
        with pytest.raises(ProxyError) as caught:
            await gateway().start(host, port)
        assert f"port {port} is taken by pid {owner.pid} (" in caught.value.message
        assert "python" in caught.value.message
        assert "\n" not in caught.value.message
        assert caught.value.code == "port_taken"
        hint = re.search(r"--port (\d+)", caught.value.hint or "")
        assert hint
        free = gateway()
        assert await free.start(host, int(hint[1])) == Address(host, int(hint[1])).url
        await free.close()
        owner.communicate()
    assert port_owner(port) is None


async def test_addresses_that_cannot_be_listened_on() -> None:
    for host in ("192.0.2.1", "no-such-host.invalid"):
        with pytest.raises(ProxyError) as caught:
            await gateway().start(host, 0)
        assert host in caught.value.message
        assert "--host" in (caught.value.hint or "")


def test_what_proc_does_not_tell_is_not_known(tmp_path: Path) -> None:
    assert port_owner(1, tmp_path) is None
    (tmp_path / "net").mkdir()
    row = "   0: 0100007F:2124 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 4711 1"
    (tmp_path / "net" / "tcp").write_text(f"head\nbroken\n{row}\n")
    assert port_owner(0x2124, tmp_path) is None
    process = tmp_path / "99"
    (process / "fd").mkdir(parents=True)
    os.symlink("socket:[4711]", process / "fd" / "5")
    (process / "cmdline").write_bytes(b"evil\x1b[31m\0--port\0" + b"x" * 200)
    owner = port_owner(0x2124, tmp_path)
    assert owner is not None
    assert owner.pid == 99
    assert owner.command.startswith("evil --port xxx")
    assert len(owner.command) == 80
    assert port_owner(0x2125, tmp_path) is None


def test_no_free_port_left() -> None:
    assert next_free_port("127.0.0.1", 65536) is None


@pytest.mark.parametrize(
    ("address", "url"),
    [
        (Address("127.0.0.1", 8484), "http://127.0.0.1:8484"),
        (Address("0.0.0.0", 80), "http://127.0.0.1:80"),
        (Address("::", 80), "http://[::1]:80"),
        (Address("gpu.lan", 80), "http://gpu.lan:80"),
    ],
)
def test_the_base_url_can_be_pasted(address: Address, url: str) -> None:
    assert address.url == url


async def test_start_and_end_leave_no_task_behind() -> None:
    before = asyncio.all_tasks()
    listening = gateway()
    await listening.start("127.0.0.1", 0)
    await listening.close()
    assert asyncio.all_tasks() == before
