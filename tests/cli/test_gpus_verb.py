"""`flexlab gpus`: what it takes, its JSON, one card in detail, and the live view."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli_process import Flexlab, Result, command, environment
from gpu_machines import GIB, apu, card, machine, unusable
from terminal import Terminal

from flexlab.cli import gpu_detail, gpu_watch
from flexlab.cli.gpus import choose
from flexlab.core.errors import UsageError
from flexlab.gpus import isolated
from flexlab.spec.machine import (
    Aged,
    Gpu,
    GpuSample,
    Holder,
    Machine,
    MigSlice,
    Sample,
)

GPU_KEYS = {
    "index", "id", "pool", "vendor", "arch", "name", "pci_id", "pci_slot", "card", "render_minor",
    "kfd_node", "hip_index", "cu_count", "is_apu", "driver", "vram_total_bytes", "vram_used_bytes",
    "gtt_total_bytes", "pool_total_bytes", "pool_free_bytes", "busy_percent", "power_w", "temps_c",
    "mig", "usable", "best", "problems",
}  # fmt: skip

Show = Callable[..., Result]


class FakeHelper:
    """Says these samples, then ends."""

    def __init__(self, samples: tuple[Sample | None, ...]) -> None:
        self._samples = samples

    def __enter__(self) -> FakeHelper:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def samples(self, _timeout_s: float) -> Iterator[Sample | None]:
        yield from self._samples


@pytest.fixture
def show(flexlab_here: Flexlab, monkeypatch: pytest.MonkeyPatch) -> Show:
    """`show(machine, "0", samples=...)`: the command there; after the samples no helper starts."""

    def show(
        shown: Machine, *words: str, samples: tuple[Sample | None, ...] = (), **env: str
    ) -> Result:
        helpers = iter([FakeHelper(samples)])

        def open_helper(*_: object, **__: object) -> FakeHelper:
            return next(helpers, FakeHelper(()))

        monkeypatch.setattr(isolated, "detect", lambda *_, **__: shown)
        monkeypatch.setattr(gpu_detail, "open_helper", open_helper)
        monkeypatch.setattr(gpu_watch, "open_helper", open_helper)
        return flexlab_here("gpus", *words, **env)

    return show


def sample(*parts: GpuSample, seq: int = 2, holders: tuple[Holder, ...] = ()) -> Sample:
    return Sample(at=0.0, seq=seq, gpus=parts, holders=holders, holders_age_s=0.0)


def part(gpu: Gpu, age_s: float = 0.0, stale: bool = False, **numbers: float) -> GpuSample:
    values = {name: Aged(value, age_s) for name, value in numbers.items()}
    return GpuSample(id=gpu.id, values=values, stale=stale)


# --- The list -------------------------------------------------------------------------------------


def test_a_machine_without_a_gpu_is_no_error_and_shows_its_cpu(show: Show) -> None:
    shown = show(machine())
    assert shown.returncode == 0
    assert shown.stderr.startswith("no GPU was found")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["INDEX", "cpu"]


def test_json_has_every_key_of_the_contract_and_null_for_unknown(show: Show) -> None:
    dark = unusable(1, arch=None, vram_total_bytes=None)
    told = json.loads(show(machine(card(best=True), dark), "--json").stdout)
    assert set(told) == {"platform", "hostname", "gpus", "cpu", "pools", "findings"}
    assert told["cpu"]["arch"] == "cpu"
    assert told["cpu"]["flags"] == ["avx", "avx2", "fma"]
    for gpu in told["gpus"]:
        assert set(gpu) >= GPU_KEYS
    first, second = told["gpus"]
    assert first["vram_used_bytes"] == 3 * GIB // 2
    assert (first["best"], second["best"], second["usable"]) == (True, False, False)
    assert second["arch"] is second["vram_total_bytes"] is second["busy_percent"] is None
    assert second["problems"][0].keys() == {"code", "message", "hint"}


# --- Words ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [("--sysroot", "/nowhere/at/all"), ("--sysroot", ""), ("--sysroot", "/etc/passwd")],
)
def test_a_sysroot_that_is_no_folder_is_refused(
    flexlab_here: Flexlab, words: tuple[str, ...]
) -> None:
    for verb in ("gpus", "doctor"):
        shown = flexlab_here(verb, *words, "--json")
        assert shown.returncode == 2
        assert "is no folder that can be read" in shown.stderr
        assert json.loads(shown.stdout)["error"]["code"] == "usage"


def test_the_variable_for_the_sysroot_counts_and_the_option_wins(
    flexlab_here: Flexlab, home: Path, tmp_path: Path
) -> None:
    (home / "proc").mkdir()
    (home / "proc" / "cpuinfo").write_text("processor: 0\nmodel name: Recorded CPU\n")
    assert "Recorded CPU" in flexlab_here("gpus", FLEXLAB_SYSROOT=str(home)).stdout
    assert "Recorded CPU" in flexlab_here("gpus", "--sysroot", ".").stdout
    shown = flexlab_here("gpus", "--sysroot", str(tmp_path), FLEXLAB_SYSROOT=str(home))
    assert "Recorded CPU" not in shown.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--interval 2", "--interval needs --watch"),
        ("--watch --interval 0", "--interval must be at least 0.1 s, not 0"),
        ("--watch --interval soon", "'soon' is not a time"),
        ("0 1", "gpus takes one GPU; '1' is too much"),
        ("--wacth", "no option --wacth; did you mean --watch?"),
    ],
)
def test_wrong_words_are_a_usage_error(flexlab_here: Flexlab, words: str, said: str) -> None:
    shown = flexlab_here("gpus", *words.split())
    assert shown.returncode == 2
    assert said in shown.stderr


def test_a_gpu_that_does_not_exist_is_refused_and_those_that_do_are_named(show: Show) -> None:
    shown = show(machine(card(0), card(1, name="AMD Radeon W7500")), "7")
    assert shown.returncode == 2
    assert "no GPU '7' here" in shown.stderr
    assert "1 (AMD Radeon W7500)" in shown.stderr
    shown = show(machine(), "0")
    assert shown.returncode == 2
    assert "none was found" in shown.stderr


@pytest.mark.parametrize("word", ["1", "0000:04:00.0", "04:00.0", "00000000:04:00.0", "gpu-ab1"])
def test_a_gpu_goes_by_its_index_slot_and_uuid(word: str) -> None:
    chosen = choose(machine(card(0), card(1, uuid="GPU-ab1")), word)
    assert isinstance(chosen, Gpu)
    assert chosen.index == 1


def test_a_slice_leads_to_its_card() -> None:
    sliced = card(1, mig=(MigSlice(uuid="MIG-ab"),))
    assert choose(machine(card(0), sliced), "MIG-ab") is sliced


def test_a_slot_that_is_split_names_its_parts() -> None:
    slot = "0000:05:00.0"
    split = [card(i, id=f"{slot}#{i + 2}", pci_slot=slot, kfd_node=i + 2) for i in range(3)]
    assert choose(machine(*split), f"{slot}#3") is split[1]
    with pytest.raises(UsageError, match="split into 3 GPUs: 0-2"):
        choose(machine(*split), slot)


# --- One device -----------------------------------------------------------------------------------


def test_the_detail_of_a_card_tells_its_facts_its_pool_and_who_holds_it(show: Show) -> None:
    gpu = card(best=True, cu_count=96, card="card1", render_minor=129, hip_index=0)
    held = Holder(gpu=gpu.id, pid=4711, name="ollama", vram_bytes=GIB)
    other = Holder(gpu="0000:99:00.0", pid=1, name="someone", vram_bytes=GIB)
    live = sample(part(gpu, busy_percent=42.0, clock_core_mhz=2304.0), holders=(held, other))
    shown = show(machine(gpu), "0", samples=(live,))
    assert shown.returncode == 0, shown.stderr
    for words in (
        "gfx1100, 96 compute units",
        "card1, renderD129, HIP 0",
        "22.5G free of 24.0G",
        "its own memory",
        "busy 42%",
        "clock core 2304 MHz",
        "ollama, pid 4711: 1.0G",
        "llamacpp: full, All six engines are in use on this arch",
    ):
        assert words in shown.stdout
    assert "someone" not in shown.stdout


def test_the_detail_of_an_apu_shows_both_memories_and_the_rule(show: Show) -> None:
    shown = show(machine(apu()), "0", COLUMNS="120").stdout
    assert "256.0/512.0M used" in shown
    assert "1.0/16.0G used; RAM that it may map" in shown
    assert "ram: 15.0G free of 16.0G" in shown
    assert "the smaller of GTT and what the RAM has beyond the 1.0G that are kept free" in shown


def test_the_memory_of_a_unified_nvidia_card_is_called_what_it_is(show: Show) -> None:
    spark = apu(vendor="nvidia", name="NVIDIA GB10", arch="sm_121", gtt_total_bytes=None)
    shown = show(machine(spark), "0", COLUMNS="120").stdout
    assert "  RAM " in shown
    assert "VRAM" not in shown
    assert "the RAM beyond the 1.0G that are kept free" in shown


def test_who_holds_a_card_is_unknown_where_nobody_could_look(show: Show) -> None:
    assert "held by   ?" in show(machine(card()), "0").stdout
    silent = show(machine(card()), "0", samples=(None,))
    assert "held by   ?" in silent.stdout
    assert "nobody" in show(machine(card()), "0", samples=(sample(part(card())),)).stdout


def test_the_detail_as_json_holds_sample_holders_and_backends(show: Show) -> None:
    gpu = card(uuid="GPU-1")
    live = sample(part(gpu, busy_percent=42.0))
    told = json.loads(show(machine(gpu), "GPU-1", "--json", samples=(live,)).stdout)
    assert told["gpu"]["id"] == gpu.id
    assert told["sample"]["values"]["busy_percent"] == [42.0, 0.0]
    assert told["holders"] == []
    assert {backend["support"] for backend in told["backends"]} == {"full"}
    assert json.loads(show(machine(gpu), "0", "--json").stdout)["holders"] is None


def test_the_detail_of_a_card_that_cannot_be_used_says_why(show: Show) -> None:
    shown = show(machine(unusable()), "0").stdout
    assert "usable    no" in shown
    assert "render_denied: /dev/dri/renderD129 cannot be opened" in shown


def test_the_cpu_has_a_detail_too(show: Show) -> None:
    shown = show(machine(card()), "cpu").stdout
    assert "avx avx2 fma" in shown
    assert "8.0/32.0G used, of which 1.0G are kept free" in shown
    told = json.loads(show(machine(), "cpu", "--json").stdout)
    assert told["pool"]["id"] == "ram"


def test_a_detail_fits_forty_columns(show: Show) -> None:
    for word in ("0", "1", "cpu"):
        lines = show(machine(card(), unusable(1)), word, COLUMNS="40").stdout.splitlines()
        assert [line for line in lines if len(line) > 40 and len(line.split()) > 2] == []


# --- Live -----------------------------------------------------------------------------------------


def test_without_a_terminal_a_line_is_told_for_each_change_of_a_card(show: Show) -> None:
    first, second = card(0), card(1, name="AMD Radeon W7500")
    ticks = (
        sample(part(first, busy_percent=10.0), part(second, busy_percent=0.0)),
        sample(part(first, busy_percent=10.2), part(second, busy_percent=0.0)),
        sample(part(first, busy_percent=55.0), part(second, busy_percent=0.0)),
        sample(part(first, busy_percent=55.0)),
    )
    shown = show(machine(first, second), "--watch", samples=ticks)
    lines = [line.split("  ", 1)[1] for line in shown.stdout.splitlines()]
    assert [line.split(":")[0] for line in lines] == [
        "0 AMD Radeon RX 7900 XTX",
        "1 AMD Radeon W7500",
        "0 AMD Radeon RX 7900 XTX",
        "1 AMD Radeon W7500",
    ]
    assert "busy 10%" in lines[0]
    assert "busy 55%" in lines[2]
    assert lines[3].endswith(", gone")


def test_a_card_that_does_not_answer_is_told_as_stale_with_the_age_of_its_values(
    show: Show,
) -> None:
    gpu = card()
    shown = show(
        machine(gpu), "--watch", samples=(sample(part(gpu, 5.0, stale=True, busy_percent=3.0)),)
    )
    assert "busy 3%" in shown.stdout
    assert "stale 5 s" in shown.stdout


def test_one_card_alone_can_be_watched(show: Show) -> None:
    first, second = card(0), card(1)
    tick = sample(part(first), part(second), holders=(Holder(gpu=first.id, pid=1),))
    shown = show(machine(first, second), "1", "--watch", "--json", samples=(tick,))
    told = json.loads(shown.stdout.splitlines()[0])
    assert [gpu["id"] for gpu in told["gpus"]] == [second.id]
    assert told["holders"] == []


def test_live_json_is_one_sample_a_line(show: Show) -> None:
    gpu = card()
    ticks = tuple(sample(part(gpu, busy_percent=1.0), seq=seq) for seq in range(3))
    lines = show(machine(gpu), "--watch", "--json", samples=ticks).stdout.splitlines()[:3]
    assert [json.loads(line)["seq"] for line in lines] == [0, 1, 2]


def test_a_helper_that_ends_is_replaced_and_one_that_says_nothing_is_an_error(show: Show) -> None:
    shown = show(machine(card()), "--watch", samples=(sample(part(card())),))
    assert shown.returncode == 1
    assert "has ended; another one takes over" in shown.stderr
    assert "error: the process that reads the hardware gives no readings" in shown.stderr


def test_ctrl_c_ends_a_live_view_at_once_with_130(home: Path) -> None:
    with subprocess.Popen(
        command("gpus", "--watch", "--json", "--interval", "0.1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        assert process.stdout
        assert process.stderr
        assert json.loads(process.stdout.readline())["seq"] == 1
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(10) == 130
        assert time.monotonic() - began < 2
        assert process.stderr.read() == "interrupted\n"


def test_a_terminal_is_drawn_over_and_keeps_what_was_there(home: Path) -> None:
    terminal = Terminal(command("gpus", "--watch", "--interval", "0.1"), cwd=home)
    try:
        terminal.expect("\n\r\n\r")
        for _ in range(3):
            terminal.expect("\x1b[H")
            terminal.expect("INDEX")
            terminal.expect("\x1b[J")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.exit_code() == 130
    finally:
        terminal.close()


def test_a_reader_that_leaves_ends_the_live_view(home: Path) -> None:
    script = f"{' '.join(command('gpus', '--watch', '--json', '--interval', '0.1'))} | head -n 2"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment(), timeout=30
    )
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == ""


def test_a_list_imports_no_reader_of_hardware(home: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from flexlab.cli.main import run; run(['gpus', '--sysroot', sys.argv[1]]); "
        "sys.exit(str([m for m in ('pynvml', 'pydantic', 'yaml') if m in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.stderr.splitlines()[-1] == "[]"
