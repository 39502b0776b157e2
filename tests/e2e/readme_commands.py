"""The commands in the README, and how a test runs each of them.

Every command of the README must stand in COMMANDS (a default test compares), and
`tests/e2e/test_readme.py` runs them all, in this order, in a copy of the checkout with a home of
its own. `as_run` is the command with what a test cannot do taken out, and why. Output that the
README shows (`text` blocks) is held by `tests/cli/test_readme_plans.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"
_BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """One command; its output must hold `expect`."""

    text: str
    expect: str
    language: str = "sh"
    left_out: tuple[tuple[str, str], ...] = ()
    """(What, its replacement), for what needs root or would run this very test again."""

    @property
    def as_run(self) -> str:
        """What the test really runs."""
        text = self.text
        for what, replacement in self.left_out:
            assert what in text, f"{what!r} is not in {text!r}"
            text = text.replace(what, replacement)
        return text


COMMANDS = (
    Command(
        "sudo apt-get install -y python3-venv libgomp1 && python3 -m venv .venv && "
        ".venv/bin/pip install '.[embedded]' && .venv/bin/flexlab up smollm2",
        expect="flexlab down smollm2-135m",
        left_out=(("sudo apt-get install -y python3-venv libgomp1 && ", ""),),
    ),
    Command("flexlab run smollm2 'Say hello in five words.'", expect="\n"),
    Command("flexlab ps", expect="smollm2-135m"),
    Command("flexlab down --all --daemon", expect="smollm2-135m is stopped"),
    Command("flexlab up smollm2", expect="/v1"),
    Command(
        "curl http://127.0.0.1:8484/v1/chat/completions -H 'Content-Type: application/json' "
        '-d \'{"model": "smollm2", "messages": [{"role": "user", "content": "Say hello."}]}\'',
        expect='"completion_tokens"',
    ),
    Command(
        """from openai import OpenAI

client = OpenAI(base_url="http://127.0.0.1:8484/v1", api_key="unused")
answer = client.chat.completions.create(
    model="smollm2", messages=[{"role": "user", "content": "Say hello."}]
)
print(answer.choices[0].message.content)""",
        expect="\n",
        language="python",
    ),
    Command("flexlab plan smollm2", expect="smollm2-135m: would start"),
    Command("flexlab recipes", expect="smollm2-135m"),
    Command(
        "python3 -m venv .venv && .venv/bin/pip install -e '.[embedded,dev]' && .venv/bin/pytest",
        expect="tests/cli/test_readme_commands.py",
        left_out=((".venv/bin/pytest", ".venv/bin/pytest --collect-only -q"),),
    ),
)


def commands_in(text: str) -> list[tuple[str, str]]:
    """(Language, command) of every `sh` line and `python` block, in order."""
    found = []
    for language, block in _BLOCK.findall(text):
        if language == "python":
            found.append((language, block.strip()))
        else:
            found += [(language, line) for line in block.splitlines() if line.strip()]
    return found
