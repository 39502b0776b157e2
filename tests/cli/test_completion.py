"""What Tab offers, in the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import Flexlab, command, environment
from fake_daemon import FakeDaemon, model_view
from terminal import Terminal

Shell = Callable[..., str]


@pytest.fixture
def env(home: Path) -> dict[str, str]:
    """Where `flexlab` is a command, in a home with a model's file."""
    bin_folder = home / "bin"
    bin_folder.mkdir()
    (bin_folder / "flexlab").write_text(f'#!/bin/sh\nexec {" ".join(command())} "$@"\n')
    (bin_folder / "flexlab").chmod(0o755)
    (home / "my model.gguf").touch()
    found = environment()
    return {**found, "PATH": f"{bin_folder}:{found['PATH']}"}


def completed_by_bash(env: dict[str, str], home: Path, *lines: str) -> list[str]:
    """Per line (words, the last of which is to be completed): what is offered."""
    asked = "\n".join(f"complete_words {line}" for line in lines)
    script = f"""
        source <(flexlab completion bash)
        complete_words() {{
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
            _flexlab; echo "${{COMPREPLY[*]}}"
        }}
        {asked}
    """
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, cwd=home)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_bash_completes_verbs_options_values_and_models(env: dict[str, str], home: Path) -> None:
    offers = {
        "flexlab comp": "completion",
        "flexlab up smollm2-": "smollm2-135m",
        "flexlab recipes ch": "check",
        "flexlab recipes show smollm2-": "smollm2-135m",
        "flexlab recipes --js": "--json",
        "flexlab config pa": "path",
        "flexlab config path ''": "",
        "flexlab up --no-k": "--no-keep",
        "flexlab up --runtime ''": "process docker",
        "flexlab up --runtime = p": "process",
        "flexlab up --set a = b smollm2-": "smollm2-135m",
        "flexlab run smollm2-": "smollm2-135m",
        "flexlab run smollm2 smollm2-": "",
        "flexlab up smollm2 smollm2-": "",
        "flexlab help comp": "completion",
        "flexlab disab": "disable",
        "flexlab events --fo": "--follow",
        "flexlab why smollm2-": "smollm2-135m",
        "flexlab keep smollm2 smollm2-": "smollm2-135m",
        "flexlab gpus --wa": "--watch",
        "flexlab gpus --interval 2 --sys": "--sysroot",
    }
    assert completed_by_bash(env, home, *offers) == list(offers.values())


def test_bash_offers_what_runs_where_that_is_meant(
    env: dict[str, str], home: Path, daemon: FakeDaemon
) -> None:
    derived = model_view(name="my-model", aliases=())
    cold = model_view(name="cold-one", aliases=(), word="cold", instances=())
    daemon.models = (derived, cold, model_view(name="$(touch pwned)", aliases=()))
    offered = completed_by_bash(env, home, "flexlab down ''", "flexlab logs ''")
    assert offered == ["my-model", "my-model"]
    assert not (home / "pwned").exists()


def test_bash_completes_files_with_spaces_and_folders(env: dict[str, str], home: Path) -> None:
    terminal = Terminal(["bash", "--norc", "-i"], env={**env, "PS1": "$ "}, cwd=home)
    try:
        terminal.type("source <(flexlab completion bash); echo rea''dy\n")
        terminal.expect("ready")
        terminal.type("flexlab recipes check my\t")
        terminal.expect("my\\ model.gguf")
        terminal.type("\x15flexlab doctor --sysroot bi\t")
        terminal.expect("bin/")
    finally:
        terminal.close()


def test_fish_completes_as_bash_does(env: dict[str, str], home: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    offers = {
        "flexlab comp": "completion",
        "flexlab recipes show smollm2-": "smollm2-135m",
        "flexlab up --no-k": "--no-keep",
        "flexlab up --runtime ": "docker\nprocess",
        "flexlab run smollm2 smollm2-": "",
        "flexlab recipes check my": "my model.gguf",
    }
    script = "flexlab completion fish | source\n" + "\n".join(
        f"complete -C '{line}' | string split -f 1 \\t; echo ." for line in offers
    )
    done = subprocess.run(
        ["fish", "-N", "-c", script], env=env, capture_output=True, text=True, cwd=home
    )
    assert done.stderr == ""
    offered = [words.strip() for words in done.stdout.split(".\n")]
    # The last one holds a dot of its own only in its middle.
    assert offered[:-1] == list(offers.values())


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
