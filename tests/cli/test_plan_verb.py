"""`flexlab plan`: what would be launched, why, and what would have to change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_process import Flexlab
from gpu_trees import Tree

KEYS = {
    "verdict", "model", "variant", "backend", "support", "arch", "platform", "runtime", "gpus",
    "image", "command", "args", "env", "env_cleared", "devices", "group_add", "mounts",
    "shm_bytes", "port", "group", "keep", "priority", "memory", "limits", "certificates",
    "reasons", "problems", "alternatives", "would_displace", "evidence",
}  # fmt: skip


@pytest.fixture
def cpu_only(tmp_path: Path) -> str:
    return str(Tree(tmp_path / "machine").cpu().ram().root)


@pytest.fixture
def plan(flexlab_here: Flexlab) -> Callable[..., Any]:
    """`plan(*words)`: the answer as JSON."""

    def ask(*words: str) -> Any:
        done = flexlab_here("plan", "smollm2", "--json", *words)
        assert done.stderr == ""
        told = json.loads(done.stdout)
        assert done.returncode == {"ok": 0, "swap": 0, "refused": 3}[told["verdict"]]
        return told

    return ask


Plan = Callable[..., Any]


def test_a_plan_has_every_key_and_a_reason_for_every_choice(plan: Plan, cpu_only: str) -> None:
    told = plan("--sysroot", cpu_only)
    assert told.keys() == KEYS
    assert (told["verdict"], told["model"], told["backend"]) == ("ok", "smollm2-135m", "llamacpp")
    assert all(one["choice"] and one["because"] and one["source"] for one in told["reasons"])
    assert told["memory"]["need_bytes"] == sum(told["memory"]["terms"].values())


def test_another_machine_is_planned_for_docker_aloud(plan: Plan, cpu_only: str) -> None:
    told = plan("--sysroot", cpu_only)
    assert told["runtime"] == "docker"
    assert "runtime_assumed" in {problem["code"] for problem in told["problems"]}
    assert told["image"].startswith("flexlab/llamacpp-cpu:")
    assert "image_build_needed" in {problem["code"] for problem in told["problems"]}
    assert told["command"] is None  # the image's own entrypoint
    (mount,) = told["mounts"]
    assert mount["read_only"]
    assert mount["target"] in told["args"]
    assert told["port"] == 8080
    assert told["args"][told["args"].index("--host") + 1] == "0.0.0.0"


def test_an_engine_that_this_cpu_cannot_run_is_refused_with_the_way_out(
    plan: Plan, tmp_path: Path
) -> None:
    tree = Tree(tmp_path / "machine").cpu().ram()
    info = tree.root / "proc/cpuinfo"
    info.write_text(info.read_text().replace("avx2", ""))
    root = str(tree.root)
    told = plan("--sysroot", root, "--runtime", "process")
    assert told["verdict"] == "refused"
    (problem,) = [one for one in told["problems"] if one["code"] == "cpu_flags_missing"]
    assert "avx2" in problem["message"]
    assert "docker" in problem["hint"]
    in_docker = plan("--sysroot", root)
    assert in_docker["verdict"] == "ok"
    assert in_docker["image"].startswith("ghcr.io/ggml-org/llama.cpp:server-b")
    passed_over = [one for one in in_docker["reasons"] if "llamacpp-cpu" in one["choice"]]
    assert ["avx2" in one["because"] for one in passed_over] == [True]


@pytest.mark.parametrize(
    ("machine", "image"),
    [
        ("cpu-xeon-l5640-noavx", "ghcr.io/ggml-org/llama.cpp:"),
        ("cpu-ryzen1600-hd6670", "flexlab/llamacpp-cpu:"),
    ],
)
def test_the_image_for_the_cpu_is_one_that_this_cpu_can_run(
    plan: Plan, machine: str, image: str
) -> None:
    root = Path(__file__).parents[3] / "shared/fixtures/gpu" / machine
    if not root.is_dir():
        pytest.skip("no recorded machines beside the repository")
    told = plan("--sysroot", str(root), "--gpu", "cpu")
    assert told["image"].startswith(image)


def test_a_model_that_is_too_big_says_what_would_fit(plan: Plan, tmp_path: Path) -> None:
    root = str(Tree(tmp_path / "small").cpu().ram(600 * 2**20, 500 * 2**20).root)
    told = plan("--sysroot", root, "--set", "context_size=8192")
    assert told["verdict"] == "refused"
    assert {problem["code"] for problem in told["problems"]} >= {"too_big"}
    assert told["arch"] == "x86_64"
    assert told["backend"] == "llamacpp"


def test_the_users_image_beats_the_recipes(plan: Plan, cpu_only: str) -> None:
    told = plan("--sysroot", cpu_only, "--image", "mine/llama:1")
    assert told["image"] == "mine/llama:1"
    assert any(one["source"] == "option --image" for one in told["reasons"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["smollm3"], "smollm2"),
        (["smollm2", "--set", "contxt_size=1"], "context_size"),
        (["smollm2", "--backend", "lamacpp"], "llamacpp"),
        (["smollm2", "--gpu", "7"], "7"),
        (["smollm2", "--runtime", "dokcer"], "docker"),
        ([], "MODEL"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(
    flexlab_here: Flexlab, words: list[str], says: str, cpu_only: str
) -> None:
    done = flexlab_here("plan", *words, "--sysroot", cpu_only)
    assert done.returncode == 2
    assert done.stdout == ""
    assert says in done.stderr


def test_people_read_sentences(flexlab_here: Flexlab, cpu_only: str) -> None:
    done = flexlab_here("plan", "smollm2", "--sysroot", cpu_only)
    assert done.returncode == 0
    assert done.stdout.startswith("smollm2-135m: would start\n")
    assert "docker is assumed" in " ".join(done.stdout.split())


def test_a_container_without_an_engine_is_refused_with_the_mend(plan: Plan) -> None:
    told = plan("--runtime", "docker")
    assert told["verdict"] == "refused"
    (problem,) = [one for one in told["problems"] if one["code"] == "docker_missing"]
    assert "/nowhere/docker.sock" in problem["message"]
    assert told["args"]
