"""What the README shows of plans on cards is what `flexlab plan` answers there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_process import Flexlab
from gpu_trees import Tree, nvidia_row

README = Path(__file__).parents[2] / "README.md"
SHOWN = {
    command: lines.splitlines()
    for command, lines in re.findall(
        r"^```text\n\$ ([^\n]*)\n(.*?)^```$", README.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
}
CUT = " …"


def radeon_7900(machine: Tree) -> None:
    machine.amd()


def radeon_vii(machine: Tree) -> None:
    machine.amd(device=0x66AF, revision=0xC1, gfx=90006, vram=16368 * 2**20)


def geforce_980_ti(machine: Tree) -> None:
    card = {"name": "NVIDIA GeForce GTX 980 Ti", "memory_total": "6144", "compute_cap": "5.2"}
    machine.nvidia_csv(nvidia_row(**card))


MACHINES: dict[str, Callable[[Tree], None]] = {
    "flexlab plan qwen3-8b --backend vllm --runtime docker": radeon_7900,
    "flexlab plan mistral-7b --runtime docker": radeon_vii,
    "flexlab plan qwen3-1.7b --backend vllm --runtime docker": geforce_980_ti,
}


def test_every_output_in_the_readme_is_looked_at() -> None:
    assert SHOWN.keys() == MACHINES.keys()
    assert README.read_text("utf-8").count("```text") == len(MACHINES)


@pytest.mark.parametrize("command", MACHINES)
def test_a_plan_in_the_readme_is_what_is_answered_there(
    command: str, flexlab_here: Flexlab, tmp_path: Path
) -> None:
    machine = Tree(tmp_path / "machine").cpu().ram()
    MACHINES[command](machine)
    words = shlex.split(command)[1:]
    told = flexlab_here(*words, "--sysroot", str(machine.root), COLUMNS="1000")
    assert told.stderr == ""
    rest = iter(told.stdout.splitlines())
    for line in SHOWN[command]:
        # In the same order; the README leaves lines out, and ends of lines.
        assert any(answers(line, answer) for answer in rest), f"{line!r} in\n{told.stdout}"


def answers(shown: str, answer: str) -> bool:
    """Whether a line of the README is this line of an answer."""
    if shown.endswith(CUT):
        return answer.startswith(shown.removesuffix(CUT))
    return answer == shown
