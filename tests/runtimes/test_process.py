"""The process runtime with real processes: a small engine of the tests' own."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from contract import Callbacks, LifeContract, PlanFor, Quirk, ask, until
from hypothesis import given
from hypothesis import strategies as st

from flexlab.core.errors import LaunchError
from flexlab.runtimes import preflight, proc
from flexlab.runtimes.base import Runtime
from flexlab.runtimes.engine_env import engine_environment, is_secret, python_command, python_path
from flexlab.runtimes.process import ProcessRuntime
from flexlab.spec.instance import DemoRef, Launch, ProcessRef, Started
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT, LaunchPlan, Probe

HERE = Path(__file__).parent
MODULES = {"fake": "fake_engine"}


def plan(quirk: str = "good", **more: object) -> LaunchPlan:
    words = {
        "model": "m",
        "variant": "v",
        "backend": "fake",
        "runtime": "process",
        "arch": "cpu",
        "served_name": "m",
        "args": (
            "--host", HOST, "--port", PORT, "--api-key-file", API_KEY_FILE, "--quirk", quirk,
        ),
        "env": {"PYTHONPATH": str(HERE)},
        "ready": Probe(path="/health"),
    }  # fmt: skip
    return LaunchPlan(**{**words, **more})  # type: ignore[arg-type]


def environ(ref: object) -> dict[str, str]:
    assert isinstance(ref, ProcessRef)
    block = Path(f"/proc/{ref.pid}/environ").read_text(encoding="utf-8")
    return dict(entry.split("=", 1) for entry in block.split("\0") if "=" in entry)


class ProcessFixtures:
    @pytest.fixture
    def another(self) -> Iterator[Callable[[], Runtime]]:
        made: list[Runtime] = []

        def make() -> Runtime:
            made.append(ProcessRuntime(MODULES))
            return made[-1]

        yield make
        for runtime in made:
            runtime.close()

    @pytest.fixture
    def runtime(self, another: Callable[[], Runtime]) -> Runtime:
        return another()


class TestProcessRuntime(ProcessFixtures, LifeContract):
    @pytest.fixture
    def plan_for(self) -> PlanFor:
        def build(quirk: Quirk) -> LaunchPlan:
            return plan(quirk)

        return build

    @pytest.fixture
    def runtime_on_port(self) -> Callable[[int], Runtime]:
        return lambda port: ProcessRuntime(MODULES, choose_port=lambda: port)

    def kill(self, started: Started) -> None:
        assert isinstance(started.ref, ProcessRef)
        os.kill(started.ref.pid, signal.SIGKILL)

    def readable_by_others(self, started: Started, launch: Launch) -> bytes:
        assert isinstance(started.ref, ProcessRef)
        seen = [Path(f"/proc/{started.ref.pid}/{name}") for name in ("cmdline", "environ")]
        return b"".join(path.read_bytes() for path in [*seen, Path(launch.log_path)])

    def test_a_port_that_is_taken_meanwhile_is_the_reason_that_is_given(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        command = (sys.executable, "-c", "raise SystemExit(91)")
        started = runtime.start(plan(command=command, args=()), launch)
        state = self.gone(runtime, started.ref)
        assert (state.code, state.exit_code) == ("port_taken", 91)

    def test_an_engine_of_an_earlier_daemon_is_watched_and_stopped(
        self, runtime: Runtime, launch: Launch, tmp_path: Path
    ) -> None:
        started = _start_in_another_process(launch)
        assert runtime.find(launch.instance) == started.ref
        callbacks = Callbacks()
        runtime.watch(started.ref, callbacks)
        assert runtime.stop(started.ref, 5.0)
        until(lambda: callbacks.states)
        assert callbacks.states[0].alive is False
        assert callbacks.states[0].exit_code is None
        assert "earlier daemon" in (callbacks.states[0].why or "")

    def test_nothing_of_its_process_group_is_left(self, runtime: Runtime, launch: Launch) -> None:
        started = runtime.start(plan("has_child"), launch)
        until(lambda: ask(started.endpoint, "/health"))
        (line,) = [
            line
            for line in runtime.logs(started.ref, launch.log_path, tail=9, follow=False)
            if line.startswith(b"child")
        ]
        child = proc.identify(int(line.split()[1]))
        assert child is not None
        assert [found.ref for found in runtime.owned(launch.installation)] == [started.ref]
        assert runtime.stop(started.ref, 5.0)
        assert not proc.is_alive(child)

    def test_what_a_dead_engine_left_behind_is_found_and_ended(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        started = runtime.start(plan("has_child"), launch)
        until(lambda: ask(started.endpoint, "/health"))
        self.kill(started)
        self.gone(runtime, started.ref)
        (orphan,) = runtime.owned(launch.installation)
        assert orphan.ref != started.ref
        assert runtime.stop(started.ref, 5.0)
        assert runtime.owned(launch.installation) == []

    def test_it_has_a_session_of_its_own_and_no_tie_to_us(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        started = runtime.start(plan(), launch)
        until(lambda: ask(started.endpoint, "/health"))
        assert isinstance(started.ref, ProcessRef)
        pid = started.ref.pid
        assert os.getsid(pid) == pid
        assert Path(f"/proc/{pid}/cwd").resolve() == Path("/")
        files = {os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)}
        assert files == {"/dev/null", launch.log_path}

    def test_its_environment_holds_no_secrets_and_says_whose_it_is(
        self, runtime: Runtime, launch: Launch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setenv("AWS_PROFILE", "work")
        monkeypatch.setenv("HTTPS_PROXY", "http://me:secret@proxy:3128")
        monkeypatch.setenv("LANG", "C.UTF-8")
        monkeypatch.setenv("CLEARED", "1")
        started = runtime.start(plan(env_cleared=("CLEARED",)), launch)
        seen = environ(started.ref)
        assert not {"HF_TOKEN", "AWS_PROFILE", "HTTPS_PROXY", "CLEARED"} & set(seen)
        assert seen["LANG"] == "C.UTF-8"
        assert seen["HF_HUB_OFFLINE"] == "1"
        assert seen["FLEXLAB_INSTANCE"] == launch.instance
        assert seen["FLEXLAB_OWNER"] == launch.installation

    def test_its_log_is_private_and_kept_small(self, launch: Launch) -> None:
        log = Path(launch.log_path)
        log.write_bytes(b"old line\n" * 1000)
        runtime = ProcessRuntime(MODULES, log_max_bytes=900)
        until(lambda: ask(runtime.start(plan(), launch).endpoint, "/health"))
        kept = log.with_name(log.name + ".1")
        assert kept.read_bytes() == b"old line\n" * 100
        assert stat.S_IMODE(kept.stat().st_mode) == 0o600
        assert b"old" not in log.read_bytes()
        assert b"listening" in log.read_bytes()

    def test_a_log_that_cannot_be_written_is_a_launch_error(
        self, runtime: Runtime, launch: Launch, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(LaunchError) as caught:
            runtime.start(plan(), _with_log(launch, tmp_path / "file" / "x.log"))
        assert caught.value.code == "log"
        assert runtime.owned(launch.installation) == []

    def test_a_program_that_is_not_there_is_a_launch_error(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        with pytest.raises(LaunchError, match="cannot start /no/such/program"):
            runtime.start(plan(command=("/no/such/program",)), launch)
        assert runtime.owned(launch.installation) == []

    def test_a_backend_without_an_engine_program_is_a_launch_error(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        with pytest.raises(LaunchError, match="vllm cannot run as a process"):
            runtime.start(plan(backend="vllm"), launch)

    def test_running_engines_do_not_trouble_the_garbage_collector(
        self, runtime: Runtime, launch: Launch
    ) -> None:
        started = runtime.start(plan(), launch)
        runtime.close()
        gc.collect()  # a Popen that is dropped while its child runs would warn
        assert runtime.state(started.ref).alive is True

    def test_no_descriptor_is_left_open(self, runtime: Runtime, launch: Launch) -> None:
        before = len(os.listdir("/proc/self/fd"))
        started = runtime.start(plan(), launch)
        watches = [runtime.watch(started.ref, Callbacks()) for _ in range(3)]
        watches[0].close()
        runtime.stop(started.ref, 5.0)
        runtime.close()
        assert len(os.listdir("/proc/self/fd")) == before


def _with_log(launch: Launch, path: Path) -> Launch:
    return Launch(
        instance=launch.instance,
        installation=launch.installation,
        api_key=launch.api_key,
        log_path=str(path),
    )


def _start_in_another_process(launch: Launch) -> Started:
    """As an earlier daemon would: started by a process that is gone by now."""
    import msgspec

    program = (
        "import sys, msgspec\n"
        "from flexlab.runtimes.process import ProcessRuntime\n"
        "from flexlab.spec.instance import Launch\n"
        "from flexlab.spec.plan import LaunchPlan\n"
        "plan, launch = (msgspec.json.decode(word, type=kind)\n"
        "                for word, kind in zip(sys.argv[1:], (LaunchPlan, Launch)))\n"
        "started = ProcessRuntime({'fake': 'fake_engine'}).start(plan, launch)\n"
        "sys.stdout.buffer.write(msgspec.json.encode(started))\n"
    )
    words = [msgspec.json.encode(value).decode() for value in (plan(), launch)]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, check=True, timeout=30
    )
    return msgspec.json.decode(done.stdout, type=Started)


class TestIdentity:
    """A pid that was given to someone else never costs that one its life."""

    @pytest.fixture
    def stranger(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen(["sleep", "1000"], start_new_session=True) as process:
            yield process
            process.kill()

    def stale(self, pid: int) -> ProcessRef:
        now = proc.identify(pid)
        assert now is not None
        return ProcessRef(pid=pid, start_ticks=now.start_ticks - 1, boot_id=now.boot_id)

    def test_a_reused_pid_is_gone_and_its_owner_untouched(
        self, stranger: subprocess.Popen[bytes]
    ) -> None:
        runtime = ProcessRuntime()
        ref = self.stale(stranger.pid)
        callbacks = Callbacks()
        assert runtime.state(ref).alive is False
        assert runtime.stop(ref, 0.0) is True
        assert runtime.memory(ref) is None
        runtime.watch(ref, callbacks)
        assert callbacks.first.wait(10)
        runtime.close()
        assert stranger.poll() is None

    def test_after_a_reboot_everything_is_gone(self, stranger: subprocess.Popen[bytes]) -> None:
        now = proc.identify(stranger.pid)
        assert now is not None
        ref = ProcessRef(pid=now.pid, start_ticks=now.start_ticks, boot_id="another boot")
        state = ProcessRuntime().state(ref)
        assert (state.alive, state.why) == (False, "the machine was restarted")
        assert ProcessRuntime().stop(ref, 0.0) is True
        assert stranger.poll() is None

    def test_a_session_that_is_not_the_engines_own_is_spared(
        self, launch_environment: dict[str, str]
    ) -> None:
        # A terminal (the shell) in which somebody started an engine by hand.
        shell = subprocess.Popen(
            ["sh", "-c", "FLEXLAB_INSTANCE=by-hand sleep 1000 & echo $!; wait; exec sleep 1000"],
            start_new_session=True,
            stdout=subprocess.PIPE,
            env=launch_environment,
        )
        with shell:
            assert shell.stdout is not None
            ref = proc.identify(int(shell.stdout.readline()))
            assert ref is not None
            until(lambda: ProcessRuntime().find("by-hand") == ref)
            assert ProcessRuntime().stop(ref, 5.0)
            assert shell.poll() is None
            shell.kill()

    @pytest.fixture
    def launch_environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"]}

    def test_a_reference_of_another_runtime_is_unknown(self) -> None:
        assert ProcessRuntime().state(DemoRef(id="x")).alive is None

    def test_names_with_spaces_and_parentheses_are_read(self, tmp_path: Path) -> None:
        program = tmp_path / "a) S 1 (b"
        program.symlink_to("/bin/sleep")
        with subprocess.Popen([str(program), "1000"], start_new_session=True) as process:
            try:
                until(lambda: "a) S" in Path(f"/proc/{process.pid}/stat").read_text())
                found = proc.read_stat(process.pid)
                assert found is not None
                assert found.session == process.pid
                assert found.start_ticks > 0
            finally:
                process.kill()


class TestEnvironment:
    @pytest.mark.parametrize(
        ("name", "secret"),
        [
            ("HF_TOKEN", True),
            ("HUGGING_FACE_HUB_TOKEN", True),
            ("OPENAI_API_KEY", True),
            ("my_secret", True),
            ("PGPASSWORD", True),
            ("AWS_REGION", True),
            ("TOKENIZERS_PARALLELISM", False),
            ("MAX_TOKENS", False),
            ("KEYBOARD", False),
            ("PATH", False),
        ],
    )
    def test_secrets_are_known_by_name(self, name: str, secret: bool) -> None:
        assert is_secret(name, "value") is secret

    @given(st.dictionaries(st.text("ABCKEY_TOKNSR", min_size=1), st.text(max_size=9)))
    def test_our_words_always_win_and_secrets_never_pass(self, inherited: dict[str, str]) -> None:
        launch = Launch(instance="i", installation="o", api_key="k", log_path="l")
        made = engine_environment(plan(), launch, "127.0.0.1:1", inherited)
        assert made["FLEXLAB_INSTANCE"] == "i"
        assert made["FLEXLAB_ENDPOINT"] == "127.0.0.1:1"
        assert not any(is_secret(name, value) for name, value in made.items())

    def test_a_relative_python_path_still_holds_in_another_folder(self) -> None:
        entries = python_path("lib").split(os.pathsep)
        assert str(Path.cwd() / "lib") in entries
        assert all(Path(entry).is_absolute() for entry in entries)

    def test_engines_are_found_from_any_folder(self, tmp_path: Path) -> None:
        # What lies in the current folder must not be taken for a module either.
        (tmp_path / "flexlab").mkdir()
        (tmp_path / "flexlab" / "__init__.py").write_text("raise SystemExit('the wrong one')")
        environment = {**os.environ, "PYTHONPATH": python_path("")}
        done = subprocess.run(
            [*python_command("flexlab.engines.llamacpp"), "--help"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "--ctx-size" in done.stdout


class TestFacts:
    def test_the_pin_is_the_one_of_the_project(self) -> None:
        project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
        least, below = (
            ".".join(map(str, bound))
            for bound in (preflight.EMBEDDED_AT_LEAST, preflight.EMBEDDED_BELOW)
        )
        pin = f"{preflight.EMBEDDED_PACKAGE}>={least},<{below}"
        assert project["project"]["optional-dependencies"]["embedded"] == [pin]

    @pytest.mark.parametrize(
        ("version", "codes"),
        [
            (None, ["embedded_missing"]),
            ("2026.10.11549", []),
            ("2026.10.11600.post1", []),
            ("2026.11.1", ["embedded_version"]),
            ("2025.1", ["embedded_version"]),
        ],
    )
    def test_a_missing_or_strange_engine_is_said(
        self, version: str | None, codes: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preflight, "_installed_version", lambda: version)
        monkeypatch.setattr(preflight, "_libgomp_problem", lambda: None)
        facts = ProcessRuntime().facts()
        assert [problem.code for problem in facts.problems] == codes
        assert all("flexlab[embedded]" in problem.hint for problem in facts.problems)
        assert facts.available is (version is not None)

    def test_the_engine_itself_is_not_loaded(self) -> None:
        program = (
            "import sys; from flexlab.runtimes.process import ProcessRuntime\n"
            "ProcessRuntime().facts()\n"
            "assert 'xllamacpp' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
