"""Verbs that need no daemon: weights, recipes, settings, completion, the doctor."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from cli_process import Flexlab, command, environment
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
    assert json.loads(shown.stdout)[0]["paths"] == [str(gguf)]
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


def test_rm_asks_and_without_an_answer_deletes_nothing(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("rm", "smollm2")
    assert shown.returncode == 2
    assert "flexlab rm smollm2 --yes" in shown.stderr


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


def test_a_wrong_recipe_of_yours_is_skipped_and_said(flexlab_here: Flexlab) -> None:
    folder = paths.user_recipes_dir() / "models"
    folder.mkdir(parents=True)
    (folder / "broken.yaml").write_text("name: [")
    shown = flexlab_here("recipes")
    assert shown.returncode == 0
    assert "smollm2-135m" in shown.stdout
    assert "broken.yaml" in shown.stderr


def test_config_show_says_what_decided_a_value(flexlab_here: Flexlab) -> None:
    paths.config_dir().mkdir(parents=True)
    paths.settings_file().write_text("port: 9000\nidle_timeout: 5min\n")
    shown = json.loads(flexlab_here("config", "show", "--json", FLEXLAB_PORT="9001").stdout)
    assert shown["port"] == {"value": 9001, "source": "FLEXLAB_PORT", "key": "port"}
    assert shown["idle_timeout_s"]["value"] == 300
    assert shown["idle_timeout_s"]["source"] == "settings.yaml:2"


def test_config_check_reports_all_that_is_wrong(flexlab_here: Flexlab) -> None:
    paths.config_dir().mkdir(parents=True)
    paths.settings_file().write_text("prot: 1\nidle_timeout: soon\n")
    shown = flexlab_here("config", "check")
    assert shown.returncode == 2
    assert "settings.yaml:1" in shown.stderr
    assert "settings.yaml:2" in shown.stderr


def test_config_path_works_while_the_settings_are_wrong(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("config", "path", "--json", FLEXLAB_PORT="x")
    assert json.loads(shown.stdout)["settings"] == str(paths.settings_file())


def test_doctor_finds_nothing_wrong_with_a_daemon_that_runs(
    flexlab_here: Flexlab, daemon: FakeDaemon
) -> None:
    shown = json.loads(flexlab_here("doctor", "--offline", "--json").stdout)
    levels = {finding["subject"]: finding["level"] for finding in shown["findings"]}
    assert levels["daemon"] == levels["settings"] == levels["recipes"] == "ok"


def test_doctor_exits_1_and_names_the_mend(flexlab_here: Flexlab, home: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        shown = flexlab_here(
            "doctor", "--offline", FLEXLAB_PORT=port, FLEXLAB_DATA_DIR="/dev/null/x"
        )
    assert shown.returncode == 1
    assert f"fail  port: 127.0.0.1:{port} cannot be used" in shown.stdout
    assert "fail  data folder" in shown.stdout
    assert "FLEXLAB_DATA_DIR=" in shown.stdout


def test_doctor_survives_wrong_settings(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("doctor", "--offline", FLEXLAB_PORT="x")
    assert shown.returncode == 1
    assert "fail  settings: FLEXLAB_PORT" in shown.stdout


def test_bash_completes_verbs_models_and_files(home: Path, gguf: Path) -> None:
    script = """
        source <(flexlab completion bash)
        complete_words() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _flexlab; echo "${COMPREPLY[*]}"
        }
        complete_words flexlab comp
        complete_words flexlab up smollm2-
        complete_words flexlab recipes ch
        complete_words flexlab up my-
        complete_words flexlab --debug
    """
    bin_folder = home / "bin"
    bin_folder.mkdir()
    (bin_folder / "flexlab").write_text(f'#!/bin/sh\nexec {" ".join(command())} "$@"\n')
    (bin_folder / "flexlab").chmod(0o755)
    env = environment()
    done = subprocess.run(
        ["bash", "-c", script],
        env={**env, "PATH": f"{bin_folder}:{env['PATH']}"},
        capture_output=True,
        text=True,
        cwd=home,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "completion",
        "smollm2-135m",
        "check",
        "my-model.gguf",
        "",
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_valid(flexlab_here: Flexlab, home: Path, shell: str) -> None:
    script = flexlab_here("completion", shell)
    assert script.returncode == 0
    assert "doctor" in script.stdout
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its syntax is not checked")
    file = home / "script"
    file.write_text(script.stdout)
    checked = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_version_names_engine_and_daemon(flexlab_here: Flexlab, daemon: FakeDaemon) -> None:
    from flexlab import __version__

    shown = json.loads(flexlab_here("version", "--json").stdout)
    assert shown["flexlab"] == shown["daemon"] == __version__
