"""What people see of requests, and what they hear when they cancel one."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from cli_process import Flexlab
from fake_daemon import FakeDaemon

from flexlab.spec.control import RequestView


def request(**more: Any) -> dict[str, Any]:
    """One as the daemon tells it: a stream that runs, unless told otherwise."""
    fields: dict[str, Any] = {
        "id": "a1b2c3d4e5-1f",
        "state": "running",
        "method": "POST",
        "route": "/v1/chat/completions",
        "client": "127.0.0.1",
        "model": "smollm2-135m",
        "started_at": 1_700_000_000.0,
        "waited_s": 4.0,
        "ttft_s": 4.25,
        "duration_s": 75.0,
        "status": 200,
        "tokens_out": 120,
        "tokens_per_s": 42.53,
    }
    view: dict[str, Any] = msgspec.to_builtins(RequestView(**{**fields, **more}))
    return view


def came(daemon: FakeDaemon, *requests: dict[str, Any]) -> None:
    daemon.answers["/requests"] = {"requests": list(requests)}


def test_a_row_tells_who_asks_what_and_how_it_goes(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    queued = {"status": None, "ttft_s": None, "tokens_out": None, "tokens_per_s": None}
    came(
        daemon,
        request(),
        request(id="waits", state="queued", waited_s=0.25, duration_s=0.25, **queued),
        request(id="over", state="done", how="cut"),
        request(id="whole", state="done", how="done", tokens_per_s=None),
    )
    shown = flexlab_here("requests", COLUMNS="200")
    assert shown.returncode == 0
    assert shown.stderr == ""
    _, running, waits, over, whole = shown.stdout.splitlines()
    for cell in ("a1b2c3d4e5-1f", "running", "/v1/chat/completions", "127.0.0.1"):
        assert cell in running
    for cell in ("smollm2-135m", "4 s", "4.2 s", "120 at 42.5/s", "1m 15s", "200"):
        assert cell in running
    assert waits.split()[:2] == ["waits", "queued"]
    assert "250 ms" in waits
    assert over.endswith("200 cut")
    assert whole.endswith("200")
    assert " at " not in whole


def test_a_narrow_terminal_keeps_the_id_the_state_and_the_time(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    came(daemon, request())
    lines = flexlab_here("requests", COLUMNS="40").stdout.splitlines()
    assert all(len(line) <= 40 for line in lines)
    assert lines[0].split() == ["ID", "STATE", "TIME"]
    assert lines[1].split()[:2] == ["a1b2c3d4e5-1f", "running"]


def test_how_many_of_the_ended_ones_is_asked_of_the_daemon(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    came(daemon)
    flexlab_here("requests", "--last", "3")
    assert daemon.bodies("GET /requests") == ["/requests?last=3"]
    assert flexlab_here("requests", "--last", "-1").returncode == 2
    assert flexlab_here("requests", "--last", "few").returncode == 2


def test_nothing_in_flight_is_said_beside_those_that_ended(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    came(daemon)
    none = flexlab_here("requests")
    assert (none.returncode, none.stdout) == (0, "")
    assert none.stderr == "no request is in flight\n"
    came(daemon, request(state="done", how="done"))
    ended = flexlab_here("requests")
    assert ended.stderr == "no request is in flight\n"
    assert "a1b2c3d4e5-1f" in ended.stdout


def test_control_characters_of_a_request_do_not_reach_the_terminal(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    came(daemon, request(model="\x1b[31mred\nline"))
    shown = flexlab_here("requests", COLUMNS="200").stdout
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 2


def test_as_json_requests_are_told_whole(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    came(daemon, request())
    told = json.loads(flexlab_here("requests", "--json").stdout)
    assert told == {"requests": [request()]}


def test_without_a_daemon_there_are_no_requests_and_none_to_cancel(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("requests", "--json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout) == {"requests": []}
    assert "not running" in shown.stderr
    shown = flexlab_here("cancel", "x")
    assert (shown.returncode, shown.stdout) == (4, "")
    assert "not running" in shown.stderr


def cancelled(daemon: FakeDaemon, **more: Any) -> None:
    view = request(state="done", how="cancelled", **more)
    daemon.answers["/cancel"] = {"request": view}


def test_cancel_says_what_was_ended(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    cancelled(daemon)
    shown = flexlab_here("cancel", "a1b2", "a1b2", "c3…")
    assert shown.returncode == 0
    assert [body["id"] for body in daemon.bodies("POST /cancel")] == ["a1b2", "c3"]
    assert shown.stdout.splitlines()[0] == (
        "a1b2c3d4e5-1f is cancelled: /v1/chat/completions to smollm2-135m after 1m 15s"
    )


def test_cancel_as_json_gives_the_requests(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    cancelled(daemon)
    [view] = json.loads(flexlab_here("cancel", "a1b2", "--json").stdout)["cancelled"]
    assert (view["id"], view["how"]) == ("a1b2c3d4e5-1f", "cancelled")


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_wrong_id_is_exit_2_with_the_daemons_words(
    flexlab_here: Flexlab, daemon: FakeDaemon, more: tuple[str, ...]
) -> None:
    problem = {"code": "usage", "message": "no request 'x' is in flight", "exit_code": 2}
    daemon.errors["/cancel"] = (400, {**problem, "hint": "flexlab requests lists them"})
    shown = flexlab_here("cancel", "x", "y", *more)
    assert shown.returncode == 2
    assert shown.stderr.count("no request 'x' is in flight") == 2, "of each that was asked for"
    assert "flexlab requests lists them" in shown.stderr
    assert len(daemon.bodies("POST /cancel")) == 2
    if more:
        assert json.loads(shown.stdout)["error"]["code"] == "usage"


def test_cancel_without_an_id_gives_the_usage(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("cancel")
    assert shown.returncode == 2
    assert "usage: flexlab cancel ID..." in shown.stderr
