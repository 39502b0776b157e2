"""Routes, models by name, and errors in the shape that every OpenAI client knows."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from gateway_lab import CHAT, Rig, chat, request

from flexlab.spec.lab import ModelView
from flexlab.spec.plan import Refusal


async def test_models_are_those_that_are_installed(rig: Rig) -> None:
    rig.lab.views += [
        ModelView(name="org/m2:q4", aliases=("m2",), word="cold", since=0, why="", installed=True),
        ModelView(name="absent", word="cold", since=0, why=""),
    ]
    for path in ("/v1/models", "/models", "/v1/models?x=1"):
        listed = json.loads((await rig.ask(request(path))).body)
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["m1", "org/m2:q4"]
        assert all(model["object"] == "model" for model in listed["data"])
    for name in ("org/m2:q4", "org%2Fm2%3Aq4", "m2"):
        one = json.loads((await rig.ask(request(f"/v1/models/{name}"))).body)
        assert one["id"] == "org/m2:q4"
        assert one["state"] == "cold"
    unknown = await rig.ask(request("/v1/models/org/m3:q4"))
    assert unknown.error["code"] == "model_not_found"
    assert "org/m2:q4" in unknown.error["message"]
    absent = await rig.ask(request("/v1/models/absent"))
    assert (absent.status, absent.error["code"]) == (404, "model_not_installed")
    assert "flexlab pull absent" in absent.error["message"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"model=m1", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"messages": []}', "missing_model"),
        (b'{"model": ""}', "missing_model"),
        (b'{"model": 7}', "invalid_type"),
        (b'{"model": null}', "invalid_type"),
        (b"[]", "invalid_type"),
        (b'"m1"', "invalid_type"),
        (b'{"a":' + b"[" * 100_000, "invalid_json"),
    ],
    ids=range(11),
)
async def test_a_body_that_names_no_model_is_a_400(rig: Rig, body: bytes, code: str) -> None:
    wire = await rig.connect()
    wire.send(request(CHAT, body) + chat())
    got = await wire.answer()
    assert got.status == 400
    assert got.error["code"] == code
    assert got.error["type"] == "invalid_request_error"
    assert (await wire.answer()).status == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/embeddings"])
async def test_inference_goes_to_the_model_that_the_body_names(rig: Rig, path: str) -> None:
    body = b'{"model": "m1", "input": "x", "prompt": "x", "unknown": {"model": "no"}}'
    got = await rig.ask(request(path + "?a=b", body))
    assert got.status == 200
    assert rig.upstream.seen[0].target == path + "?a=b"
    assert rig.upstream.seen[0].body == body
    assert rig.lab.asked == ["m1"]


@pytest.mark.parametrize("name", ["org/model", "org/model:q4", "模型", "a b?c", 'quo"te\\'])
async def test_any_name_reaches_its_model(rig: Rig, name: str) -> None:
    rig.serve(name)
    assert (await rig.ask(chat(model=name))).status == 200
    long = json.dumps({"model": name, "pad": "x" * 70_000}, ensure_ascii=False)
    assert (await rig.ask(request(CHAT, long))).status == 200
    for path in (quote(name), quote(name, safe="")):
        got = await rig.ask(request(f"/upstream/{path}/x%2Fy/echo?q=/upstream"))
        assert got.body.startswith(b"GET /x%2Fy/echo?q=/upstream\n")
    assert rig.lab.asked == [name] * 4


async def test_the_longest_known_name_wins_on_the_raw_route(rig: Rig) -> None:
    rig.serve("org")
    rig.serve("org/model")
    await rig.ask(request("/upstream/org/model/echo"))
    await rig.ask(request("/upstream/org/models/echo"))
    assert rig.lab.asked == ["org/model", "org"]
    assert rig.upstream.seen[1].target == "/models/echo"
    got = await rig.ask(request("/upstream/nobody/echo"))
    assert got.error["code"] == "model_not_found"


async def test_a_refusal_of_the_lab_is_an_openai_error(rig: Rig) -> None:
    rig.lab.behaviour["absent"] = Refusal(
        code="model_not_installed", message="absent is not installed", hint="flexlab pull absent",
        status=404,
    )  # fmt: skip
    got = await rig.ask(chat(model="absent"))
    assert got.status == 404
    assert got.error == {
        "message": "absent is not installed (flexlab pull absent)",
        "type": "invalid_request_error", "code": "model_not_installed", "param": "model",
    }  # fmt: skip
    rig.lab.behaviour["backing-off"] = Refusal(code="backing_off", message="it crashed")
    got = await rig.ask(chat(model="backing-off"))
    assert got.status == 503
    assert got.names["retry-after"] == "1"
    assert got.error["type"] == "server_error"


async def test_wrong_paths_and_methods_say_what_there_is(rig: Rig) -> None:
    got = await rig.ask(request("/v1/chat/completion", b"{}"))
    assert got.status == 404
    assert CHAT in got.error["message"]
    got = await rig.ask(request(CHAT))
    assert got.status == 405
    assert got.names["allow"] == "POST, OPTIONS"
    got = await rig.ask(request("/v1/models", b"{}"))
    assert (got.status, got.names["allow"]) == (405, "GET, HEAD, OPTIONS")
    got = await rig.ask(request("/v1/models", method="OPTIONS"))
    assert (got.status, got.names["allow"]) == (204, "GET, HEAD, OPTIONS")


async def test_a_fault_of_ours_is_a_500_and_costs_one_request(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.lab.models = lambda: 1 / 0
    wire = await rig.connect()
    wire.send(request("/v1/models") + chat())
    got = await wire.answer()
    assert got.error["code"] == "internal_error"
    assert "ZeroDivisionError" in caplog.text
    assert (await wire.answer()).status == 200


async def test_health(rig: Rig) -> None:
    health = json.loads((await rig.ask(request("/health"))).body)
    assert health["status"] == "ok"
    assert health["uptime_s"] > 0


SAMPLE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)*\})? ([0-9.e+-]+|\+Inf)')


async def test_metrics_count_what_happened(rig: Rig) -> None:
    odd = 'a"b\\c\nd'
    rig.serve(odd)
    await rig.ask(chat(model=odd))
    await rig.ask(chat("events=5"))
    await rig.ask(chat("events=6 cut=2"))
    await rig.ask(chat(model="unknown"))
    await rig.ask(request("/nowhere/1"))
    got = await rig.ask(request("/metrics"))
    assert got.names["content-type"].startswith("text/plain; version=0.0.4")
    lines = got.body.decode().splitlines()
    assert all(line.startswith("# ") or SAMPLE.fullmatch(line) for line in lines)
    for wanted in (
        f'flexlab_requests_total{{model="m1",route="{CHAT}",status="200"}} 2',
        f'flexlab_requests_total{{model="",route="{CHAT}",status="404"}} 1',
        'flexlab_requests_total{model="",route="unknown",status="404"} 1',
        'flexlab_requests_ended_total{how="broken"} 1',
        'flexlab_tokens_total{model="m1"} 7',  # five by usage, two counted
        'flexlab_tokens_total{model="a\\"b\\\\c\\nd"} 3',
        'flexlab_time_to_first_token_seconds_count{model="m1"} 2',
        'flexlab_request_duration_seconds_bucket{model="m1",le="+Inf"} 2',
        'flexlab_models{state="ready"} 2',
        "flexlab_requests_in_flight 1",
    ):
        assert wanted in lines


async def test_the_last_requests_are_remembered(rig: Rig) -> None:
    for _ in range(70):
        await rig.ask(chat("events=2", "X-Request-ID: mine"))
    recent = rig.gateway.observer.recent
    assert len(recent) == rig.gateway.observer.requests_total == 70
    last = recent[-1]
    assert (last.model, last.route, last.status, last.how) == ("m1", CHAT, 200, "done")
    assert (last.request_id, last.client, last.method) == (b"mine", "127.0.0.1", b"POST")
    assert (last.events, last.tokens_in, last.tokens_out) == (3, 7, 2)
    assert last.bytes_in > 50
    assert last.bytes_out > 200
    assert last.ttft_s is not None
    assert last.duration_s is not None
    assert 0 <= last.ttft_s <= last.duration_s < 5
