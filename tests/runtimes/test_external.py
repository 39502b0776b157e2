"""Servers that already run: their URL is judged, their life is left alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from contract import PlanFor, Quirk, RuntimeContract, ask
from hypothesis import given
from hypothesis import strategies as st

from flexlab.core.errors import LaunchError, SettingsError
from flexlab.runtimes.base import Runtime
from flexlab.runtimes.external import ExternalRuntime, parse_url
from flexlab.spec.instance import ExternalRef, Launch
from flexlab.spec.plan import LaunchPlan, Probe


class Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path.startswith("/silent"):
            return
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def plan(model: str) -> LaunchPlan:
    return LaunchPlan(
        model=model,
        variant="external",
        backend="external",
        runtime="external",
        arch="unknown",
        served_name=model,
        ready=Probe(path="/health"),
    )


class TestExternalRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self, another: Callable[[], Runtime]) -> Runtime:
        return another()

    @pytest.fixture
    def another(self, server: str) -> Callable[[], Runtime]:
        return lambda: ExternalRuntime({"good": server, "silent": f"{server}/silent/"})

    @pytest.fixture
    def plan_for(self) -> PlanFor:
        def build(quirk: Quirk) -> LaunchPlan:
            return plan(quirk)

        return build

    def test_a_stop_leaves_the_server_alone(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        started = runtime.start(plan_for("good"), launch)
        assert runtime.stop(started.ref, 0.0)
        assert ask(started.endpoint, "/health") == 200
        assert runtime.state(started.ref).alive is True

    def test_it_never_gets_our_key(
        self, runtime: Runtime, plan_for: PlanFor, launch: Launch
    ) -> None:
        assert runtime.start(plan_for("good"), launch).endpoint.headers == ()

    def test_a_model_without_a_server_is_refused_with_the_option(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        with pytest.raises(LaunchError) as caught:
            runtime.start(plan("other"), launch)
        assert caught.value.hint == "flexlab serve --external other=URL"


def test_a_server_that_does_not_answer_is_unknown_not_gone() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        url = f"http://127.0.0.1:{server.server_port}"
    state = ExternalRuntime({"m": url}).state(ExternalRef(url=url))
    assert state.alive is None
    assert state.why is not None
    assert url in state.why


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000", ("http", "127.0.0.1", 8000, "")),
        ("http://gpu-box:8000/", ("http", "gpu-box", 8000, "")),
        ("https://gpu-box/llm/", ("https", "gpu-box", 443, "/llm")),
        ("http://[::1]:8000/a/b", ("http", "::1", 8000, "/a/b")),
        ("http://gpu-box", ("http", "gpu-box", 80, "")),
    ],
)
def test_a_url_becomes_an_endpoint(url: str, shown: tuple[str, str, int, str]) -> None:
    endpoint = parse_url("m", url)
    assert (endpoint.scheme, endpoint.host, endpoint.port, endpoint.path_prefix) == shown


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("127.0.0.1:8000", "http://"),
        ("ftp://box", "http://"),
        ("http://", "no host"),
        ("http://box:99999", "not a URL"),
        ("http://box:0", "port 0"),
        ("http://user:secret@box", "password"),
        ("http://box/?key=1", "query"),
        ("http://[::1", "not a URL"),
    ],
)
def test_a_wrong_url_is_a_sentence(url: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why) as caught:
        ExternalRuntime({"m": url})
    assert caught.value.hint == "--external m=http://127.0.0.1:8000"
    assert "secret" not in caught.value.message


@given(st.text(max_size=40) | st.builds("http://{}".format, st.text(max_size=40)))
def test_no_text_is_more_than_refused(url: str) -> None:
    try:
        endpoint = parse_url("m", url)
    except SettingsError:
        return
    assert endpoint.host
    assert 0 < endpoint.port < 65536
