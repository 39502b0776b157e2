"""The edge: help, mistakes, exit codes, and streams that cannot show everything."""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pytest
from cli_process import Flexlab, command, environment

from flexlab.cli import main
from flexlab.core.errors import FitError

HEAVY = (
    "textual",
    "docker",
    "kubernetes",
    "huggingface_hub",
    "xllamacpp",
    "httpx",
    "pydantic",
    "yaml",
    "rich",
)

NEED_A_MODEL = ("up", "run", "pull", "rm", "down", "logs", "pin", "disable", "restart", "why")


def test_a_bare_command_prints_the_help(flexlab: Flexlab) -> None:
    bare, asked = flexlab(), flexlab("--help")
    assert bare.returncode == asked.returncode == 0
    assert bare.stdout == asked.stdout
    for verb in ("up", "doctor", "completion"):
        assert f"  {verb}" in bare.stdout


@pytest.mark.parametrize("verb", [name for verbs in main.VERBS.values() for name in verbs])
def test_every_verb_has_a_help_page(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main.run([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: flexlab {verb}")


def test_an_unknown_verb_suggests_the_near_one(flexlab: Flexlab) -> None:
    shown = flexlab("pul")
    assert shown.returncode == 2
    assert "did you mean pull" in shown.stderr
    assert shown.stdout == ""


@pytest.mark.parametrize(
    "words",
    [
        *((verb,) for verb in NEED_A_MODEL),
        ("up", "--bogus"),
        ("--bogus",),
    ],
)
def test_wrong_words_give_the_usage_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main.run(list(words)) == 2
    said = capsys.readouterr().err
    assert "usage: flexlab" in said
    assert "hint: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("up --jsn", "no option --jsn; did you mean --json?"),
        ("up smollm2 extra", "up takes one MODEL; 'extra' is too much"),
        ("ps extra", "ps takes no arguments; 'extra' is too much"),
        ("run smollm2 --temperature warm", "--temperature wants a number, not 'warm'"),
        ("logs smollm2 -n few", "--lines wants a whole number, not 'few'"),
        ("run smollm2 --max-tokens 0", "--max-tokens must be at least 1, not 0"),
        ("up smollm2 --runtime", "--runtime wants a value"),
        ("recipes show", "MODEL is missing"),
        ("recipes chek", "no command named 'chek'; did you mean check?"),
        ("config", "config wants one of: path, show, check"),
        ("stop smollm2", "no command named 'stop'; did you mean down?"),
        ("list", "no command named 'list'; did you mean ls?"),
    ],
)
def test_what_is_wrong_with_the_words_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    assert main.run(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}\n")


def test_help_is_a_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["help"], ["--help"], ["help", "down"], ["down", "--help"]):
        assert main.run(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("Usage: flexlab down [OPTIONS] [MODEL]...") == 2
    assert shown.count("Usage: flexlab [OPTIONS] COMMAND") == 2
    assert main.run(["help", "dwon"]) == 2


def test_errors_are_json_too_when_json_was_asked_for(flexlab: Flexlab) -> None:
    shown = flexlab("down", "--json")
    error = json.loads(shown.stdout)["error"]
    assert error["code"] == "usage"
    assert error["exit_code"] == shown.returncode == 2
    assert shown.stderr.startswith("error: ")


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("ps",), ("gpus",)])
def test_light_verbs_import_nothing_heavy(home: Path, words: tuple[str, ...]) -> None:
    script = (
        "import sys; from flexlab.cli.main import run; code = run(sys.argv[2:]); "
        "found = set(sys.argv[1].split(',')) & set(sys.modules); "
        "sys.exit(f'imported {found}' if found else code)"
    )
    done = subprocess.run(
        [*command()[:1], "-c", script, ",".join(HEAVY), *words],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr


def test_an_error_keeps_its_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise FitError("it does not fit", "close something")

    monkeypatch.setattr(main, "app", refuse)
    assert main.run(["ps"]) == 3
    assert capsys.readouterr().err == "error: it does not fit\nhint: close something\n"


def test_a_bug_is_one_sentence_and_a_traceback_only_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ValueError("surprise")

    monkeypatch.setattr(main, "app", fail)
    assert main.run(["ps"]) == 1
    said = capsys.readouterr().err
    assert "surprise" in said
    assert "--debug" in said
    assert "Traceback" not in said
    main.run(["--debug", "ps"])
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    "env",
    [
        {"LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "ascii"},
        {"COLUMNS": "40", "NO_COLOR": "1"},
        {"COLUMNS": "0"},
        {"TERM": ""},
    ],
)
def test_poor_terminals_raise_nothing(flexlab: Flexlab, env: dict[str, str]) -> None:
    for words in (("--help",), ("recipes",), ("ps", "--json"), ("config", "show")):
        shown = flexlab(*words, **env)
        assert shown.returncode == 0, shown.stderr
        assert "Error" not in shown.stderr


def test_a_reader_that_leaves_early_is_no_error(home: Path) -> None:
    script = f"{' '.join(command('--help'))} | head -n 1"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment())
    assert done.stdout.startswith("Usage:")
    assert done.stderr == ""


def test_without_any_stdout_it_still_ends_quietly(home: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", f"{' '.join(command('--version'))} >&-"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert "Traceback" not in done.stderr


def test_a_read_only_home_is_a_sentence(home: Path, flexlab: Flexlab) -> None:
    blocked = home / "file"
    blocked.write_text("a file, where a folder is wanted")
    shown = flexlab("up", "smollm2", XDG_STATE_HOME=str(blocked))
    assert shown.returncode == 4
    assert "Traceback" not in shown.stderr
    assert "FLEXLAB_STATE_DIR" in shown.stderr


def test_in_a_real_terminal_lines_stay_within_its_width(home: Path) -> None:
    parent, child = pty.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 10, 40, 0, 0))
    env = {key: value for key, value in environment(TERM="xterm").items() if key != "COLUMNS"}
    done = subprocess.run(
        command("recipes"), stdin=child, stdout=child, stderr=child, env=env, timeout=30
    )
    os.close(child)
    shown = b""
    try:
        while chunk := os.read(parent, 4096):
            shown += chunk
    except OSError:
        pass  # how a pseudo-terminal says end of file
    os.close(parent)
    assert done.returncode == 0, shown
    assert max(len(line) for line in shown.decode().splitlines()) <= 40
    assert "smollm2-135m" in shown.decode()
