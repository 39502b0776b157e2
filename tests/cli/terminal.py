"""A command in a pseudo-terminal, and what a person types and sees there."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from pathlib import Path

from cli_process import environment


class Terminal:
    """A command that believes a person types into it."""

    def __init__(
        self, words: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        self.fd, child = pty.openpty()
        self.seen = ""
        self.process = subprocess.Popen(
            words,
            stdin=child,
            stdout=child,
            stderr=child,
            env=env or environment(TERM="xterm"),
            cwd=cwd,
            start_new_session=True,
        )
        os.close(child)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def expect(self, text: str, deadline_s: float = 20) -> None:
        """Reads until `text` has been shown since the last `expect`."""
        deadline = time.monotonic() + deadline_s
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} was not shown, but {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
        self.seen = self.seen.split(text, 1)[1]

    def until_it_waits(self, deadline_s: float = 20) -> None:
        """Until the program sleeps: a signal that comes between the prompt and the waiting for
        a key is noticed by CPython's readline with the next key only."""
        deadline = time.monotonic() + deadline_s
        stat = Path(f"/proc/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            assert time.monotonic() < deadline, "it never waits"

    def exit_code(self) -> int:
        return self.process.wait(20)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
