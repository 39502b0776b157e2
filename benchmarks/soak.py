"""Rough use for minutes: two real models of which only one fits, and everything that breaks.

    python benchmarks/soak.py [--minutes N] [--clients N] [--seed N] [--data FOLDER] [--json]

A home of its own with a real daemon and real engines. Clients mix both models, streamed and not,
and hang up at random, queued and in the middle of an answer. Engines are killed (SIGKILL), and in
the middle the daemon is (kill -9); the next `flexlab up` takes over what still runs. In the end:
every request had an answer or an error within its bound, no stream ended in silence while its
daemon lived, nothing waits or is claimed, no engine runs that no record owns, and the daemon holds
no more file descriptors than one that did little. Exit 1 where one of these does not hold.
`--data` is a data folder in which the weights may be already.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests/e2e")]

import yaml  # noqa: E402
from household import Household  # noqa: E402

MODELS = ("soak-one", "soak-two")
QUEUE_TIMEOUT_S, DRAIN_S = 60, 10
BOUND_S = 120.0
"""By then every request has ended: its time in the queue, one drain, and the answer itself."""
KILL_EVERY_S = 7.0
SETTINGS = f"""\
ram_limit: 500MB
linger: 500ms
min_residency: 2s
drain_limit: {DRAIN_S}s
queue_timeout: {QUEUE_TIMEOUT_S}s
back_off_first: 500ms
back_off_max: 2s
settled: 1s
"""
"""Short turns, and short times in which nothing is tried: otherwise little would happen."""
FD_SLACK = 2
"""Sockets of a client that is just leaving."""


class Soak:
    """One run; `found` are the violations."""

    def __init__(self, lab: Household, seed: int, clients: int) -> None:
        self.lab, self.seed, self.clients = lab, seed, clients
        self.ends: Counter[str] = Counter()
        """How requests ended."""
        self.longest_s = 0.0
        self.deeds: Counter[str] = Counter()
        self.found: list[str] = []
        self.figures: dict[str, float] = {}
        self._over = threading.Event()
        self._daemon_dies = threading.Event()
        self._lock = threading.Lock()

    # -- one request

    def _client(self, number: int) -> None:
        dice = random.Random(f"client {self.seed} {number}")
        while not self._over.is_set():
            begun = time.monotonic()
            end = self._request(dice)
            seconds = time.monotonic() - begun
            with self._lock:
                self.ends[end] += 1
                self.longest_s = max(self.longest_s, seconds)
                if seconds > BOUND_S or end == "no answer":
                    self.found.append(f"a request had no end within {seconds:.0f} s")
                if end == "ended in silence" and not self._daemon_dies.is_set():
                    self.found.append("a stream ended in silence")
            self._over.wait(dice.uniform(0.0, 0.5) if end != "refused connection" else 0.5)

    def _request(self, dice: random.Random) -> str:
        streams = dice.random() < 0.6
        hangs_up = dice.choice(("queued", "answered")) if dice.random() < 0.25 else None
        patience_s = dice.uniform(0.02, 1.0) if hangs_up == "queued" else BOUND_S
        body = {
            "model": dice.choice(MODELS),
            "messages": [{"role": "user", "content": "Count from one to ten."}],
            "max_tokens": dice.randint(1, 40),
            "stream": streams,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.lab.port, timeout=patience_s)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            answer = connection.getresponse()
            if hangs_up == "answered":
                answer.read(dice.randint(1, 200))
                return "hung up in an answer"
            return _end_of(answer.status, answer.read(), streams)
        except TimeoutError:
            return "hung up in the queue" if hangs_up == "queued" else "no answer"
        except ConnectionRefusedError:
            return "refused connection"
        except (OSError, http.client.HTTPException):
            return "broken connection"
        finally:
            connection.close()

    # -- the whole

    def run(self, minutes: float) -> None:
        self.figures["fds in quiet, before"] = self._fds_in_quiet()
        half_s = minutes * 30.0
        threads = [
            threading.Thread(target=self._client, args=(number,)) for number in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            self._kill_engines(half_s)
            self._kill_daemon()
            self._kill_engines(half_s)
        finally:
            self._over.set()
            for thread in threads:
                thread.join(BOUND_S + 30)
        if any(thread.is_alive() for thread in threads):
            self.found.append("a client still waits")
        self._judge()

    def _fds_in_quiet(self) -> int:
        """Of the daemon, after both models have answered and are gone again."""
        for model in MODELS:
            done = self.lab.flexlab("up", model, timeout=300)
            if done.returncode:
                raise SystemExit(f"flexlab up {model}: {done.stderr}")
            self.lab.chat(model=model)
        return self._fds_after_down()

    def _fds_after_down(self) -> int:
        stopped = self.lab.flexlab("down", "--all", timeout=120)
        if stopped.returncode:
            self.found.append(f"flexlab down --all: {stopped.stderr.strip()}")
        (daemon,) = self.lab.daemons()
        folder = Path(f"/proc/{daemon.pid}/fd")
        return _settled(lambda: len(list(folder.iterdir())))

    def _kill_engines(self, seconds: float) -> None:
        dice = random.Random(f"kills {self.seed} {seconds} {self.deeds.total()}")
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._over.wait(min(left, KILL_EVERY_S * dice.uniform(0.5, 1.5)))
            engines = self.lab.engines()
            if engines and time.monotonic() < end:
                _kill(dice.choice(engines).pid)
                self.deeds["engines killed"] += 1

    def _kill_daemon(self) -> None:
        self._daemon_dies.set()
        before = {engine.pid for engine in self.lab.engines()}
        running = [model for model in MODELS if self.lab.processes("engines.llamacpp", model)]
        ready = before & self._pids_in_records(ready=True)
        for daemon in self.lab.daemons():
            _kill(daemon.pid)
            self.deeds["daemons killed"] += 1
        begun = time.monotonic()
        rising = self.lab.flexlab("up", *(running or MODELS)[:1], timeout=300)
        self.figures["s from kill -9 to the next `up`'s end"] = time.monotonic() - begun
        if rising.returncode:
            self.found.append(f"flexlab up after the kill: {rising.stderr.strip()}")
        told = self.lab.flexlab("events", "--json").stdout
        adopted = told.count("was adopted")
        self.figures["engines that were ready at the kill"] = len(ready)
        self.figures["of these, taken over"] = adopted
        if adopted < len(ready):
            self.found.append("an engine that was ready when the daemon died was not taken over")
        self._daemon_dies.clear()

    # -- the end

    def _judge(self) -> None:
        shown = _settled(self._busy)
        if shown:
            self.found.append(f"{shown} requests are in flight or wait, and no client is there")
        owned = self._pids_in_records()
        strays = [e.pid for e in self.lab.engines() if e.pid not in owned]
        if strays:
            self.found.append(f"engines that no record owns: {strays}")
        fds = self._fds_after_down()
        self.figures["fds in quiet, after"] = fds
        if fds > self.figures["fds in quiet, before"] + FD_SLACK:
            self.found.append("the daemon holds more file descriptors than before")
        claims = [pool for pool in self._snapshot().get("pools", ()) if pool["claims"]]
        if claims:
            self.found.append(f"claims are left: {claims}")
        if left := self.lab.engines():
            self.found.append(f"engines run after `down --all`: {left}")
        if not self.ends["answer"]:
            self.found.append("nothing was answered at all")

    def _snapshot(self) -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(self.lab.flexlab("ps", "--json").stdout)
        return shown

    def _busy(self) -> int:
        models = self._snapshot()["models"]
        return sum(model["in_flight"] + model["waiting"] for model in models)

    def _pids_in_records(self, *, ready: bool = False) -> set[int]:
        found: set[int] = set()
        for path in self.lab.home.rglob("instances/*.json"):
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(path.read_text())
                if record.get("ready_at") is not None or not ready:
                    found.add(int((record.get("ref") or {}).get("pid", 0)))
        return found


def _end_of(status: int, body: bytes, streams: bool) -> str:
    if status != 200:
        with contextlib.suppress(ValueError, LookupError, TypeError):
            return f"error {status} {json.loads(body)['error']['code']}"
        return f"error {status} without a code"
    if not streams:
        return "answer" if b'"choices"' in body else "an answer without content"
    if b'"error"' in body:
        return "error in the stream"
    return "answer" if b"[DONE]" in body else "ended in silence"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _settled(what: Callable[[], int], limit_s: float = 15.0) -> int:
    """Once it is the same twice, or 0; what is just leaving has a moment to leave."""
    pause, end = threading.Event(), time.monotonic() + limit_s
    last = what()
    while time.monotonic() < end and last:
        pause.wait(1.0)
        if (now := what()) == last:
            break
        last = now
    return last


def write_home(home: Path) -> None:
    """Settings, and one set of weights under two names."""
    config = home / ".config/flexlab"
    recipes = config / "recipes/models"
    recipes.mkdir(parents=True)
    (config / "settings.yaml").write_text(SETTINGS)
    shipped = yaml.safe_load((REPOSITORY / "recipes/models/smollm2-135m.yaml").read_text())
    shipped["variants"] = shipped["variants"][:1]
    shipped["variants"][0]["settings"] = {
        "context_size": 2048, "parallel": 4, "cache_ram_mib": 0
    }  # fmt: skip
    del shipped["aliases"]
    for name in MODELS:
        (recipes / f"{name}.yaml").write_text(yaml.safe_dump(shipped | {"name": name}))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """0 when all of it holds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for name in [name for name in os.environ if name.lower() in ("http_proxy", "all_proxy")]:
        del os.environ[name]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_home(home)
        lab = Household(home, port=_free_port(), data=options.data or home / "data")
        soak = Soak(lab, options.seed, options.clients)
        try:
            fetched = lab.flexlab("pull", MODELS[0], timeout=600)
            if fetched.returncode:
                raise SystemExit(f"flexlab pull: {fetched.stderr}")
            soak.run(options.minutes)
        finally:
            lab.flexlab("down", "--all", "--daemon", "--force", timeout=120)
        if left := lab.processes():
            soak.found.append(f"still there in the end: {left}")
    _show(soak, as_json=options.json)
    return 1 if soak.found else 0


def _show(soak: Soak, *, as_json: bool) -> None:
    soak.figures["longest request, s"] = soak.longest_s
    rows = {**dict(soak.ends.most_common()), **soak.deeds, **soak.figures}
    if as_json:
        print(json.dumps(rows | {"violations": soak.found}, indent=2))
        return
    for what, count in rows.items():
        print(f"{what:44} {count:>10,.6g}")
    for sentence in sorted(set(soak.found)):
        print(f"VIOLATION: {sentence} ({soak.found.count(sentence)} x)")
    print("all of it holds" if not soak.found else "")


if __name__ == "__main__":
    sys.exit(main())
