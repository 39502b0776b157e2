"""A candidate becomes a launch plan, whose hash says whether two launches are the same thing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import SOURCE, ask, backend_recipe, facts, machine

from flexlab.core.errors import WeightsError
from flexlab.planning.render import LAUNCHED_FIELDS, plan_hash, render
from flexlab.spec.plan import (
    API_KEY_FILE,
    HOST,
    PORT,
    Candidate,
    Facts,
    Grant,
    LaunchPlan,
    Limit,
    Mount,
    Probe,
    Reason,
    Step,
    Wishes,
)

GRANT = Grant(devices=("cpu",), claims={"ram": 300_000_000})


def rendered(
    candidate: Candidate | None = None, known: Facts | None = None, threads: int | None = 4
) -> LaunchPlan:
    here = machine(threads=threads)
    return render(
        candidate or ask(here=here).items[0],
        GRANT,
        machine=here,
        facts=known or facts(),
        backend_recipe=backend_recipe,
    )


def value(plan: LaunchPlan, option: str) -> str:
    return plan.args[plan.args.index(option) + 1]


def test_the_plan_holds_what_the_engine_needs_and_no_port_or_key() -> None:
    plan = rendered()
    assert value(plan, "--model") == "/models/small.gguf"
    assert value(plan, "--alias") == plan.served_name == "small"
    assert value(plan, "--threads") == "4"
    assert [value(plan, o) for o in ("--host", "--port", "--api-key-file")] == [
        HOST, PORT, API_KEY_FILE,
    ]  # fmt: skip
    assert plan.env["OMP_WAIT_POLICY"] == "passive"
    assert plan.ready.path == "/health"
    assert plan.claims == GRANT.claims
    assert plan.command is None
    assert plan.start_timeout_s == 600
    assert plan.on_disconnect == "cancel"


def test_context_is_per_request() -> None:
    wishes = Wishes(settings={"context_size": "2048", "parallel": "4"})
    plan = rendered(ask(wishes=wishes).items[0])
    assert (value(plan, "--ctx-size"), value(plan, "--parallel")) == ("8192", "4")
    assert plan.context == 2048


def test_unknown_threads_are_left_to_the_engine_and_that_is_said() -> None:
    plan = rendered(threads=None)
    assert "--threads" not in plan.args
    assert any("engine chooses" in reason.choice for reason in plan.reasons)


def test_threads_that_were_asked_for_beat_what_was_found() -> None:
    plan = rendered(ask(wishes=Wishes(settings={"threads": "1"})).items[0])
    assert value(plan, "--threads") == "1"
    told = [(r.because, r.source) for r in plan.reasons if "thread" in r.choice]
    assert told == [("asked for", "option --set")]


@pytest.mark.parametrize(
    "path", ["/m/{port}/a b {host}.gguf", "/m/ü '\"$x`y`\n.gguf", "/{port}", "/m/%s{0}{}.gguf"]
)
def test_a_path_is_data_whatever_it_looks_like(path: str) -> None:
    plan = rendered(known=facts(weights={SOURCE: path}))
    assert value(plan, "--model") == path
    assert [word for word in plan.args if word == PORT] == [PORT]


def test_weights_that_are_not_here_cannot_be_launched() -> None:
    with pytest.raises(WeightsError) as caught:
        rendered(known=facts(weights={}))
    assert caught.value.hint == "flexlab pull small"


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "import sys, msgspec\n"
        "from flexlab.planning.render import plan_hash\n"
        "from flexlab.spec.plan import LaunchPlan\n"
        "print(plan_hash(msgspec.json.decode(sys.stdin.buffer.read(), type=LaunchPlan)))"
    )
    plan = rendered()
    found = subprocess.run(
        [sys.executable, "-c", code],
        input=msgspec.json.encode(plan),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout.decode().strip() == plan.hash


def test_the_order_of_variables_does_not_change_the_hash() -> None:
    plan = rendered()
    one = msgspec.structs.replace(plan, env={"A": "1", "B": "2"})
    two = msgspec.structs.replace(plan, env={"B": "2", "A": "1"})
    assert plan_hash(one) == plan_hash(two)


WORDS = st.text(max_size=8)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "model": WORDS, "variant": WORDS, "backend": WORDS, "arch": WORDS, "served_name": WORDS,
    "runtime": st.sampled_from(["docker", "k3s", "demo"]),
    "image": WORDS, "command": st.lists(WORDS).map(tuple), "args": st.lists(WORDS).map(tuple),
    "env": st.dictionaries(WORDS, WORDS), "env_cleared": st.lists(WORDS, min_size=1).map(tuple),
    "devices": st.lists(WORDS).map(tuple), "group_add": st.lists(st.integers(0, 9), min_size=1),
    "mounts": st.tuples(st.builds(Mount, source=WORDS, target=WORDS, read_only=st.booleans())),
    "shm_bytes": st.integers(0, 9), "port": st.integers(1, 9),
    "after_start": st.tuples(st.builds(Step, kind=st.just("pull"), path=WORDS, body=st.just({}))),
}  # fmt: skip


def test_every_launched_field_is_tried() -> None:
    assert set(CHANGES) == set(LAUNCHED_FIELDS)


@given(data=st.data(), name=st.sampled_from(LAUNCHED_FIELDS))
def test_changing_anything_launched_changes_the_hash(data: st.DataObject, name: str) -> None:
    plan = rendered()
    changed = data.draw(CHANGES[name])
    if changed == getattr(plan, name):
        return
    assert plan_hash(msgspec.structs.replace(plan, **{name: changed})) != plan.hash


def test_moving_a_word_between_fields_changes_the_hash() -> None:
    plan = rendered()
    one = msgspec.structs.replace(plan, args=("a", "b"), command=("c",))
    two = msgspec.structs.replace(plan, args=("b",), command=("c", "a"))
    assert plan_hash(one) != plan_hash(two)


@pytest.mark.parametrize(
    "change",
    [
        {"reasons": (Reason(choice="a", because="b", source="c"),)},
        {"limits": (Limit(what="a", wanted="b", given="c"),)},
        {"claims": {"ram": 1}},
        {"priority": 7, "keep": "warm", "group": "g"},
        {"ready": Probe(path="/other"), "start_timeout_s": 1.0, "stop_timeout_s": 1.0},
        {"on_disconnect": "drain", "problems": (), "hash": "x", "context": 7},
    ],
)
def test_why_and_how_long_do_not_change_the_hash(change: dict[str, Any]) -> None:
    plan = rendered()
    assert plan_hash(msgspec.structs.replace(plan, **change)) == plan.hash
