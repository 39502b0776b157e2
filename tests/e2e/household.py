"""One user's FlexLab: commands to run, requests to send, processes to look for."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = subprocess.CompletedProcess[str]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Process:
    """One running process of this home."""

    pid: int
    words: str


class Household:
    """A home, a port and a data folder of its own."""

    def __init__(self, home: Path, *, port: int, data: Path) -> None:
        self.home = home
        self.port = port
        self.data = data

    # -- commands

    def env(self, **more: str) -> dict[str, str]:
        """What a command of this user sees."""
        return {
            **os.environ,
            "HOME": str(self.home),
            "FLEXLAB_PORT": str(self.port),
            "FLEXLAB_DATA_DIR": str(self.data),
            "TERM": "dumb",
            "COLUMNS": "80",
            "PYTHONPATH": str(ROOT),
            **more,
        }

    def flexlab(self, *words: str, timeout: float = 120, stdin: str = "", **env: str) -> Result:
        """Run it to its end."""
        return subprocess.run(
            [sys.executable, "-m", "flexlab", *words],
            env=self.env(**env),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.home,
        )

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        """Start it and go on."""
        return subprocess.Popen(
            [sys.executable, "-m", "flexlab", *words],
            env=self.env(**env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
        )

    def up(self, *words: str) -> Result:
        """`flexlab up smollm2`, which must succeed."""
        done = self.flexlab("up", "smollm2", *words, timeout=300)
        assert done.returncode == 0, done.stderr
        return done

    # -- requests

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Through the gateway: status and JSON; (0, why) when nobody listens."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"null")
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def chat(self, **more: Any) -> tuple[int, Any]:
        """One question to the model."""
        messages = [{"role": "user", "content": "Count from one to ten."}]
        body = {"model": "smollm2", "messages": messages, "max_tokens": 8, **more}
        return self.ask("POST", "/v1/chat/completions", body)

    # -- processes

    def processes(self, *words: str) -> list[Process]:
        """Those of this home whose command line holds all the words."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                mine = f"HOME={self.home}\0".encode() in (folder / "environ").read_bytes() + b"\0"
            except (OSError, UnicodeDecodeError):
                continue
            if mine and "flexlab" in line and all(word in line for word in words):
                found.append(Process(int(folder.name), line))
        return found

    def daemons(self) -> list[Process]:
        """`flexlab serve`."""
        return self.processes(" serve")

    def engines(self) -> list[Process]:
        """Embedded engines."""
        return self.processes("flexlab.engines.llamacpp")
