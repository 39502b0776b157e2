"""The README shows only commands that a test runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flexlab.cli.main import VERBS

sys.path.insert(0, str(Path(__file__).parent.parent / "e2e"))

from readme_commands import COMMANDS, README, commands_in


def test_every_command_of_the_readme_is_run_by_the_end_to_end_test() -> None:
    listed = [(command.language, command.text) for command in COMMANDS]
    assert commands_in(README.read_text(encoding="utf-8")) == listed


def test_the_readme_has_no_code_that_is_not_looked_at() -> None:
    fences = re.findall(r"^```(\w*)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences) <= {"", "sh", "python", "text"}
    assert len(fences) == 2 * sum(1 for fence in fences if fence)


def test_what_cannot_be_run_in_a_test_is_still_part_of_the_command() -> None:
    for command in COMMANDS:
        assert command.as_run


def test_the_readme_names_every_verb() -> None:
    text = README.read_text(encoding="utf-8")
    for verbs in VERBS.values():
        for verb in verbs:
            assert f"`{verb}`" in text, verb
