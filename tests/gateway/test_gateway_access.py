"""Which hosts and web pages may ask, judged before anything else happens."""

from __future__ import annotations

import pytest
from gateway_lab import CHAT, Listening, Rig, chat, request
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gateway.access import Access, host_name
from flexlab.gateway.http import Head

PREFLIGHT = ("Access-Control-Request-Method: POST",)


def judged(access: Access, *headers: tuple[bytes, bytes], method: bytes = b"GET") -> int | None:
    """The status of the refusal (or of a preflight's answer); None: it may go on."""
    answer = access.judge(Head(method, b"/health", list(headers)))
    return None if answer is None else answer.status


@pytest.mark.parametrize(
    ("listening", "host", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1:8484", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "LocalHost:9", True),
        ("127.0.0.1", "flexlab.localhost:8484", True),
        ("127.0.0.1", "[::1]:8484", True),
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "evil.example", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "127.0.0.1.evil.example:8484", False),
        ("127.0.0.1", "192.168.1.5", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "local host", False),
        ("127.0.0.1", "user@localhost", False),
        ("127.0.0.1", "[::1", False),
        ("127.0.0.1", "[::1]x", False),
        ("192.168.1.5", "192.168.1.5:8484", True),
        ("192.168.1.5", "192.168.1.6:8484", False),
        ("gpu.lan", "gpu.lan:8484", True),
        ("gpu.lan", "GPU.lan.", True),
        ("gpu.lan", "other.lan", False),
        ("0.0.0.0", "192.168.1.5:8484", True),
        ("::", "[fe80::1]:8484", True),
        ("0.0.0.0", "evil.example", False),
    ],
)
def test_host_must_be_a_name_that_we_listen_as(listening: str, host: str, allowed: bool) -> None:
    access = Access(listening)
    for _ in range(2):  # the second answer comes from memory
        assert judged(access, (b"host", host.encode())) == (None if allowed else 403)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://[::1]:5173", True),
        ("http://app.localhost", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://localhost@evil.example", False),
        ("null", False),
        ("file://", False),
        ("chrome-extension://localhost", False),
        ("", False),
        ("http://[::1", False),
        ("https://chat.example.org", True),
        ("https://CHAT.example.org", True),
        ("http://chat.example.org", False),
        ("https://chat.example.org:8443", False),
        ("http://gpu.lan:8484", True),  # the page came from this very gateway
    ],
)
def test_a_foreign_origin_is_refused(origin: str, allowed: bool) -> None:
    access = Access("gpu.lan", ("https://chat.example.org",))
    headers = (b"host", b"gpu.lan:8484"), (b"origin", origin.encode())
    assert judged(access, *headers) == (None if allowed else 403)
    preflight = (*headers, (b"access-control-request-method", b"POST"))
    assert judged(access, *preflight, method=b"OPTIONS") == (204 if allowed else 403)


def test_any_origin_can_be_allowed() -> None:
    access = Access(allow_origins=("*",))
    assert judged(access, (b"host", b"localhost"), (b"origin", b"null")) is None


@given(st.binary(max_size=60))
def test_no_host_or_origin_raises(value: bytes) -> None:
    access = Access()
    judged(access, (b"host", value), (b"origin", value))
    name = host_name(value)
    assert name is None or name == name.lower()


async def test_a_foreign_page_reaches_no_route_and_no_model(rig: Rig) -> None:
    for path in (CHAT, "/nowhere"):
        got = await rig.ask(request(path, b'{"model":"m1"}', "Origin: https://evil.example"))
        assert got.status == 403
        assert got.error["code"] == "origin_not_allowed"
        assert "allow_origins" in got.error["message"]
        assert "access-control-allow-origin" not in got.names
    rebound = chat().replace(b"Host: 127.0.0.1", b"Host: evil.example")
    assert (await rig.ask(rebound)).error["code"] == "host_not_allowed"
    assert rig.lab.asked == []


@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/v1/audio/speech", "/anything"])
async def test_preflight_loads_no_model_and_echoes_what_is_asked_for(rig: Rig, path: str) -> None:
    asked = "Access-Control-Request-Headers: x-stainless-os, authorization,, bad name, \x01"
    got = await rig.ask(
        request(path, None, "Origin: http://localhost:3000", *PREFLIGHT, asked[:-2],
                "Access-Control-Request-Private-Network: true", method="OPTIONS")
    )  # fmt: skip
    assert got.status == 204
    assert got.names["access-control-allow-origin"] == "http://localhost:3000"
    assert got.names["access-control-allow-headers"] == "x-stainless-os, authorization"
    assert "POST" in got.names["access-control-allow-methods"]
    assert got.names["access-control-allow-private-network"] == "true"
    assert rig.lab.asked == []


async def test_a_preflight_from_elsewhere_is_refused(rig: Rig) -> None:
    got = await rig.ask(
        request(CHAT, None, "Origin: https://evil.example", *PREFLIGHT, method="OPTIONS")
    )
    assert got.status == 403


@pytest.mark.parametrize(
    "ask",
    [
        chat("", "Origin: http://localhost:3000"),
        chat("events=2", "Origin: http://localhost:3000"),
        chat("", "Origin: http://localhost:3000", model="unknown"),
        request("/v1/models", None, "Origin: http://localhost:3000"),
        request("/nowhere", None, "Origin: http://localhost:3000"),
        request("/upstream/m1/hop", None, "Origin: http://localhost:3000"),  # has one of its own
    ],
)
async def test_real_answers_have_the_cors_header_exactly_once(rig: Rig, ask: bytes) -> None:
    got = await rig.ask(ask)
    assert got.all("access-control-allow-origin") == ["http://localhost:3000"]
    assert got.names["vary"] == "Origin"


async def test_an_engines_own_cors_header_does_not_open_the_lab(rig: Rig) -> None:
    got = await rig.ask(request("/upstream/m1/hop"))
    assert "access-control-allow-origin" not in got.names


async def test_the_raw_route_is_closed_where_others_can_reach_us() -> None:
    async with Rig(Listening(host="0.0.0.0")) as rig:
        got = await rig.ask(request("/upstream/m1/echo"))
        assert got.status == 403
        assert got.error["code"] == "loopback_only"
        assert (await rig.ask(chat())).status == 200
