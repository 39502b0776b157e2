"""Verbs that need no daemon: weights, recipes, settings, completion, the doctor."""

from __future__ import annotations

import json
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_process import Flexlab
from fake_daemon import FakeDaemon

from flexlab.core import paths

SMALLEST_GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.fixture
def gguf(home: Path) -> Path:
    """A file of the user's own, in the folder that commands run in."""
    file = home / "my-model.gguf"
    file.write_bytes(SMALLEST_GGUF)
    return file


@pytest.fixture
def installed(home: Path) -> Path:
    """Something in the models folder that FlexLab did not put there."""
    file = paths.data_dir() / "models" / "pypi" / "stray.gguf"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"x" * 2048)
    return file


def test_pull_of_a_path_of_yours_uses_it_in_place(flexlab_here: Flexlab, gguf: Path) -> None:
    shown = flexlab_here("pull", "./my-model.gguf", "--json")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["models"][0]["paths"] == [str(gguf)]
    shown = flexlab_here("rm", "./my-model.gguf", "--yes")
    assert shown.returncode == 0, shown.stderr
    assert gguf.exists()


def test_a_path_that_is_not_there_is_a_usage_error(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("pull", "nowhere.gguf")
    assert shown.returncode == 2
    assert "nowhere.gguf" in shown.stderr


def test_pull_names_the_variants_that_there_are(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("pull", "smollm2", "--variant", "q4")
    assert shown.returncode == 2
    assert "q4-1" in shown.stderr


def test_save_keeps_a_recipe_that_passes_the_check(flexlab_here: Flexlab, gguf: Path) -> None:
    shown = flexlab_here("pull", "my-model.gguf", "--save")
    assert shown.returncode == 0, shown.stderr
    [file] = paths.user_recipes_dir().rglob("*.yaml")
    assert flexlab_here("recipes", "check", str(file)).returncode == 0
    assert "my-model" in flexlab_here("recipes").stdout
    assert "my-model" in flexlab_here("completion", "models").stdout.split()


def test_ls_shows_files_sizes_and_free_space(flexlab_here: Flexlab, installed: Path) -> None:
    shown = flexlab_here("ls", "--json")
    listed = json.loads(shown.stdout)
    assert listed["free_bytes"] > 0
    assert [entry["size_bytes"] for entry in listed["weights"]] == [2048]
    assert "2K used" in flexlab_here("ls").stdout


def test_rm_asks_and_without_an_answer_deletes_nothing(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    shown = flexlab_here("rm", "smollm2")
    assert shown.returncode == 2
    assert "nobody is here to ask" in shown.stderr
    assert "flexlab rm smollm2-135m --yes" in shown.stderr
    assert daemon.bodies("POST /rm") == []


def test_rm_of_a_name_that_is_none_says_so_before_it_asks(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("rm", "smolm2")
    assert shown.returncode == 2
    assert "no model named 'smolm2'; did you mean smollm2" in shown.stderr


def test_rm_asks_nobody_where_nothing_is_installed(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("rm", "smollm2", "--json")
    assert shown.returncode == 0
    [removed] = json.loads(shown.stdout)["models"]
    assert removed == {"model": "smollm2-135m", "removed": [], "freed_bytes": 0}


def test_rm_with_a_daemon_leaves_the_decision_to_it(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    problem = {"code": "running", "message": "smollm2-135m runs", "hint": "flexlab down smollm2"}
    daemon.errors["/rm"] = (409, {**problem, "exit_code": 1})
    shown = flexlab_here("rm", "smollm2", "--yes")
    assert shown.returncode == 1
    assert "hint: flexlab down smollm2" in shown.stderr


def test_recipes_show_prints_a_recipe_that_passes_the_check(
    flexlab_here: Flexlab, home: Path
) -> None:
    file = home / "models" / "smollm2-135m.yaml"
    file.parent.mkdir()
    file.write_text(flexlab_here("recipes", "show", "smollm2").stdout)
    checked = flexlab_here("recipes", "check", str(file))
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout == f"{file}: ok\n"


def test_recipes_check_reports_every_problem_of_every_file(
    flexlab_here: Flexlab, home: Path
) -> None:
    for name in ("one", "two"):
        (home / f"{name}.yaml").write_text(f"name: {name}\nalias: [x]\n")
    shown = flexlab_here("recipes", "check", "one.yaml", "two.yaml", "--json")
    assert shown.returncode == 2
    assert "one.yaml:2" in shown.stderr
    assert "two.yaml:2" in shown.stderr
    assert "aliases" in shown.stderr
    assert json.loads(shown.stdout)["error"]["code"] == "recipe"


def test_recipes_check_without_a_file_checks_all_of_yours(flexlab_here: Flexlab) -> None:
    assert flexlab_here("recipes", "check").returncode == 0
    folder = paths.user_recipes_dir() / "models"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("name: broken\nalias: [x]\n")
    for words in ((), (str(paths.user_recipes_dir()),)):
        shown = flexlab_here("recipes", "check", *words)
        assert shown.returncode == 2
        assert "broken.yaml:2" in shown.stderr
        assert "hint: flexlab recipes check" not in shown.stderr


def test_a_broken_recipe_is_one_line_in_a_list(flexlab_here: Flexlab) -> None:
    folder = paths.user_recipes_dir() / "models"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("name: broken\nalias: [x]\ncontext: many\n")
    [line] = flexlab_here("recipes").stderr.splitlines()
    assert f"flexlab recipes check {folder / 'broken.yaml'}" in line
    told = flexlab_here("doctor", "--offline").stdout
    assert told.count("warn  recipes") == 1


def test_a_wrong_recipe_of_yours_is_skipped_and_said(flexlab_here: Flexlab) -> None:
    folder = paths.user_recipes_dir() / "models"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("name: [")
    shown = flexlab_here("recipes")
    assert shown.returncode == 0
    assert "smollm2-135m" in shown.stdout
    assert "broken.yaml" in shown.stderr


def test_doctor_finds_nothing_wrong_with_a_daemon_that_runs(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    shown = json.loads(flexlab_here("doctor", "--offline", "--json").stdout)
    levels = {finding["subject"]: finding["level"] for finding in shown["findings"]}
    assert levels["daemon"] == levels["settings"] == levels["recipes"] == "ok"


@pytest.fixture
def taken() -> Iterator[tuple[int, int]]:
    """A process of another program that listens, and its port."""
    script = (
        "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        yield process.pid, int(process.stdout.readline())
        process.kill()


def test_doctor_exits_1_and_names_the_mend(flexlab_here: Flexlab, taken: tuple[int, int]) -> None:
    pid, port = taken
    shown = flexlab_here(
        "doctor", "--offline", FLEXLAB_PORT=str(port), FLEXLAB_DATA_DIR="/dev/null/x"
    )
    assert shown.returncode == 1
    assert f"fail  port: 127.0.0.1:{port} is taken by pid {pid} (" in shown.stdout
    [free] = re.findall(r"-> FLEXLAB_PORT=(\d+) flexlab up MODEL", shown.stdout)
    socket.create_server(("127.0.0.1", int(free))).close()
    assert "fail  data folder" in shown.stdout
    assert "FLEXLAB_DATA_DIR=" in shown.stdout


def test_doctor_fails_where_weights_cannot_be_put(flexlab_here: Flexlab, home: Path) -> None:
    (home / "file").write_text("a file, where a folder is wanted")
    shown = flexlab_here("doctor", "--offline", FLEXLAB_MODELS_DIR=str(home / "file"))
    assert shown.returncode == 1
    assert "fail  models folder" in shown.stdout


def test_doctor_survives_wrong_settings(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("doctor", "--offline", FLEXLAB_PORT="x")
    assert shown.returncode == 1
    assert "fail  settings: FLEXLAB_PORT" in shown.stdout


def test_version_names_engine_and_daemon(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    from flexlab import __version__

    shown = json.loads(flexlab_here("version", "--json").stdout)
    assert shown["flexlab"] == shown["daemon"] == __version__
