"""The hardware helper: what it says, that a hanging card costs only itself, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from flexlab.gpus import helper, inventory, sampler
from flexlab.gpus.sampler import Sampler
from flexlab.spec.machine import Gpu, GpuReading, Problem, Sample

# Cards are files below cards/: a number is the VRAM in use; `hang` never comes back; anything else
# is an error. Every scan of other processes counts up.
CARDS = """\
import os, sys, threading, types
from pathlib import Path
import flexlab.gpus
from flexlab.gpus import inventory, sampler, watch
from flexlab.spec.machine import Gpu, GpuReading, Holder

class Source:
    def __init__(self, file):
        self.gpu_id, self._file = file.name, file
    def read(self):
        os.write(1, b"a driver library has something to say\\n")
        text = self._file.read_text()
        if text == "hang":
            threading.Event().wait()
        return GpuReading(numbers={"vram_used_bytes": float(text)})

def find_gpus(root):
    files = sorted((root / "cards").iterdir())
    gpus = [Gpu(index=0, id=f.name, pool="", vendor="amd", arch=None, name="x") for f in files]
    return gpus, []

def scan(root, gpus, *, previous):
    count = previous.count + 1 if previous else 1
    holder = Holder(gpu=gpus[0].id, pid=1, vram_bytes=count)
    return types.SimpleNamespace(holders=(holder,), count=count)

inventory.find_gpus = find_gpus
inventory.sources = lambda root, gpus: [Source(root / "cards" / gpu.id) for gpu in gpus]
flexlab.gpus.holders = types.SimpleNamespace(scan=scan)
sampler.READ_DEADLINE_S = sampler.LOOK_EVERY_S = 0.2
watch.main(sys.argv[1:])
"""


class Cards:
    """A machine of files, and helpers that watch it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._script = root / "watch_cards.py"
        self._script.write_text(CARDS)
        self._folder = root / "cards"
        self._folder.mkdir()
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        self._children: list[subprocess.Popen[bytes]] = []

    def write(self, card: str, text: object) -> None:
        """In one step: a helper never sees half of it."""
        new = self.root / "new"
        new.write_text(str(text))
        new.rename(self._folder / card)

    def plug(self, card: str) -> None:
        """What the kernel shows of it on the bus."""
        (self.root / "sys/bus/pci/devices" / card).mkdir()

    def words(self, *words: str) -> list[str]:
        """A command that watches it."""
        watch = [sys.executable, "-P", str(self._script), "--sysroot", str(self.root)]
        return [*watch, "--interval", "0.1", *words]

    def watch(self, *words: str) -> subprocess.Popen[bytes]:
        """A helper; killed at the end of the test."""
        child = helper.start(self.words(*words))
        self._children.append(child)
        return child

    def close(self) -> None:
        for child in self._children:
            child.kill()
            child.wait(30)
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def cards(tmp_path: Path) -> Iterator[Cards]:
    with closing(Cards(tmp_path)) as cards:
        yield cards


def first(child: subprocess.Popen[bytes], wanted: Callable[[Sample], object]) -> Sample:
    """The first sample from now on that is `wanted`."""
    for sample in helper.Helper(child).samples(30):
        assert sample is not None, "nothing was said for 30 s"
        if wanted(sample):
            return sample
    raise AssertionError("the helper ended")


def used(sample: Sample, card: str) -> float | None:
    """VRAM in use of a card; None when it is not there, or its value is an old one."""
    gpu = next((gpu for gpu in sample.gpus if gpu.id == card), None)
    value = gpu.values.get("vram_used_bytes") if gpu and not gpu.stale else None
    return value.value if value else None


def lines_of(words: Sequence[str]) -> list[dict[str, Any]]:
    with closing(helper.Helper(helper.start(words))) as watcher:
        return [json.loads(line) for line in watcher.lines(30) if line is not None]


def test_every_tick_is_one_line_with_the_values_of_then(cards: Cards) -> None:
    cards.write("a", 1)
    child = cards.watch()
    assert first(child, lambda sample: used(sample, "a") == 1)
    cards.write("a", 2)
    sample = first(child, lambda sample: used(sample, "a") == 2)
    assert sample.gpus[0].values["vram_used_bytes"].age_s < 10


def test_it_ends_after_as_many_ticks_as_it_was_told(cards: Cards) -> None:
    cards.write("a", 1)
    lines = lines_of(cards.words("--count", "3"))
    assert [line["seq"] for line in lines] == [1, 2, 3]
    assert sorted(line["at"] for line in lines) == [line["at"] for line in lines]


def test_a_card_that_hangs_keeps_its_last_value_and_the_others_go_on(cards: Cards) -> None:
    for card in ("a", "b", "c"):
        cards.write(card, 1)
    child = cards.watch()
    first(child, lambda sample: used(sample, "b") == 1)
    cards.write("b", "hang")
    first(child, lambda sample: sample.gpus[1].stale)
    cards.write("a", 5)
    cards.write("c", 6)
    sample = first(child, lambda sample: used(sample, "a") == 5 and used(sample, "c") == 6)
    hung = sample.gpus[1]
    assert hung.stale
    assert hung.values["vram_used_bytes"].value == 1
    assert hung.values["vram_used_bytes"].age_s > 0.2
    assert hung.problem is not None
    assert hung.problem.code == "not_answering"
    later = first(child, lambda _sample: True).gpus[1]
    assert later.values["vram_used_bytes"].age_s > hung.values["vram_used_bytes"].age_s


def test_a_card_that_fails_says_why_and_recovers(cards: Cards) -> None:
    cards.write("a", "no number")
    cards.write("b", 1)
    child = cards.watch()
    sample = first(child, lambda sample: used(sample, "b") == 1)
    assert sample.gpus[0].stale
    assert sample.gpus[0].values == {}
    assert sample.gpus[0].problem is not None
    assert "no number" in sample.gpus[0].problem.message
    cards.write("a", 4)
    sample = first(child, lambda sample: used(sample, "a") == 4)
    assert sample.gpus[0].problem is None


def test_a_card_that_comes_later_is_found(cards: Cards) -> None:
    child = cards.watch()
    first(child, lambda sample: sample.gpus == ())
    cards.write("a", 3)
    cards.plug("0000:03:00.0")
    first(child, lambda sample: used(sample, "a") == 3)


def test_processes_are_scanned_more_often_when_asked(cards: Cards) -> None:
    cards.write("a", 1)
    child = cards.watch("--holders-every", "10000")
    sample = first(child, lambda sample: sample.holders)
    assert sample.holders[0].vram_bytes == 1
    assert sample.holders_age_s is not None
    assert child.stdin is not None
    child.stdin.write(b'nonsense\n{"holders_every_s": "x"}\n')
    helper.ask_holders_every(child, 0.1)
    first(child, lambda sample: (sample.holders[0].vram_bytes or 0) >= 3)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_while_a_read_hangs(cards: Cards, number: signal.Signals) -> None:
    cards.write("a", "hang")
    child = cards.watch()
    first(child, lambda sample: sample.gpus and sample.gpus[0].stale)
    child.send_signal(number)
    assert child.wait(30) == -number


def test_it_ends_when_nobody_reads_it_without_waiting_for_the_next_tick(cards: Cards) -> None:
    cards.write("a", "hang")
    child = cards.watch("--interval", "10000")
    first(child, lambda _sample: True)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait(30) == 0


def test_the_end_of_stdin_ends_it_only_if_it_is_to_die_with_its_parent(cards: Cards) -> None:
    cards.write("a", "hang")
    bound, free = cards.watch("--die-with-parent"), cards.watch()
    for child in (bound, free):
        first(child, lambda sample: sample.gpus)
        assert child.stdin is not None
        child.stdin.close()
    assert bound.wait(30) == 0
    assert first(free, lambda sample: sample.gpus[0].stale)


def test_it_dies_with_a_parent_that_is_killed(cards: Cards) -> None:
    cards.write("a", "hang")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *cards.words("--die-with-parent")],
        env=helper.environment(),
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        pid = int(parent.stdout.readline())
        parent.kill()
    until(lambda: not is_running(pid))


PARENT = """\
import sys
from flexlab.gpus import helper
child = helper.start(sys.argv[1:])
watcher = helper.Helper(child)
next(watcher.lines(30))
print(child.pid, flush=True)
for line in watcher.lines(30):
    pass
"""


def is_running(pid: int) -> bool:
    """Not gone, and no zombie that nobody collects."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_the_real_helper_watches_a_machine_without_gpus(tmp_path: Path) -> None:
    with helper.open_helper(tmp_path, interval_s=0.1, count=2) as watcher:
        samples = list(watcher.samples(30))
    assert [sample.seq for sample in samples if sample] == [1, 2]
    assert all(sample.gpus == () for sample in samples if sample)


def test_a_silent_helper_is_told_apart_from_one_that_ended() -> None:
    says = "import os; os.write(1, b'one\\ntw'); os.read(0, 1); os.write(1, b'o\\n')"
    with helper.Helper(helper.start([sys.executable, "-c", says])) as watcher:
        lines = watcher.lines(0.3)
        heard = [next(lines)]
        while heard[-1] is None:  # a slow start
            heard.append(next(lines))
        assert heard[-1] == b"one"
        assert next(lines) is None, "half a line is none"
        watcher.ask_holders_every(1)
        assert [line for line in lines if line is not None] == [b"two"]


def test_closing_does_not_wait_and_leaves_no_zombie() -> None:
    child = helper.start([sys.executable, "-c", "import signal; signal.pause()"])
    os.kill(child.pid, signal.SIGSTOP)
    helper.Helper(child).close()
    until(lambda: not Path(f"/proc/{child.pid}").exists())


def test_the_helper_loads_nothing_heavy() -> None:
    heavy = ["asyncio", "docker", "kubernetes", "textual", "typer", "pydantic", "psutil", "pynvml"]
    code = f"import sys, flexlab.gpus.watch; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=helper.environment(), capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


class FakeMachine:
    """What the inventory finds, changed by the test; its sources say what the test wants."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.time = 1000.0
        self.gpus: list[Gpu] = []
        self.searches = 0
        self.reading: Callable[[], GpuReading] = GpuReading
        (root / "sys/bus/pci/devices").mkdir(parents=True)

    def find_gpus(self, root: Path) -> tuple[list[Gpu], list[Problem]]:
        self.searches += 1
        return list(self.gpus), []

    def sources(self, root: Path, gpus: Sequence[Gpu]) -> list[FakeSource]:
        return [FakeSource(gpu.id, self) for gpu in gpus]

    def begin(self) -> Sampler:
        made = Sampler(
            self.root, holders_every_s=10.0, clock=lambda: self.time, wall=lambda: self.time
        )
        made.begin(30)
        return made

    def bus(self, *slots: str) -> None:
        for slot in slots:
            (self.root / "sys/bus/pci/devices" / slot).mkdir()


class FakeSource:
    def __init__(self, gpu_id: str, machine: FakeMachine) -> None:
        self.gpu_id = gpu_id
        self._machine = machine
        self._reads = 0

    def read(self) -> GpuReading:
        self._reads += 1
        reading = self._machine.reading()
        return GpuReading(
            numbers=reading.numbers | {"reads": self._reads},
            asleep=reading.asleep,
            throttle=reading.throttle,
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    fake = FakeMachine(tmp_path)
    monkeypatch.setattr(inventory, "find_gpus", fake.find_gpus)
    monkeypatch.setattr(inventory, "sources", fake.sources)
    monkeypatch.setattr(sampler, "_scan", lambda root, gpus, previous: None)
    return fake


def gpu(gpu_id: str, **facts: Any) -> Gpu:
    return Gpu(index=0, id=gpu_id, pool="", vendor="amd", arch=None, name="x", **facts)


def reads(sample: Sample) -> dict[str, float]:
    """How often each card's source was asked, as long as it is one source."""
    return {gpu.id: gpu.values["reads"].value for gpu in sample.gpus if "reads" in gpu.values}


def test_a_reading_is_passed_on_but_for_numbers_that_json_does_not_have(
    machine: FakeMachine,
) -> None:
    machine.gpus = [gpu("a")]
    machine.reading = lambda: GpuReading(
        numbers={"power_w": 12.5, "temp_edge_c": float("nan"), "clock_core_mhz": float("inf")},
        asleep=True,
        throttle=("thermal",),
    )
    (part,) = machine.begin().tick().gpus
    assert set(part.values) == {"power_w", "reads"}
    assert part.asleep
    assert part.throttle == ("thermal",)
    assert not part.stale


def test_a_card_that_came_is_found_and_the_others_keep_their_counters(
    machine: FakeMachine,
) -> None:
    machine.gpus = [gpu("a")]
    ticks = machine.begin()
    ticks.tick()
    machine.gpus = [gpu("a"), gpu("b")]
    machine.bus("0000:03:00.0")
    machine.time += sampler.LOOK_EVERY_S
    sample = until(lambda: (s := ticks.tick()) and "b" in reads(s) and s)
    assert reads(sample)["a"] > reads(sample)["b"]
    assert machine.searches == 2


def test_a_card_that_changed_gets_a_new_source(machine: FakeMachine) -> None:
    machine.gpus = [gpu("a")]
    ticks = machine.begin()
    ticks.tick()
    machine.gpus = [gpu("a", driver="vfio-pci")]
    machine.bus("0000:03:00.0")
    machine.time += sampler.LOOK_EVERY_S
    before = ticks.tick()
    after = until(lambda: (s := ticks.tick()) and reads(s)["a"] == 1 and s)
    assert reads(before)["a"] > reads(after)["a"]


def test_a_bus_that_stays_as_it_is_is_not_searched_again(machine: FakeMachine) -> None:
    machine.gpus = [gpu("a")]
    ticks = machine.begin()
    for _ in range(50):
        machine.time += sampler.LOOK_EVERY_S
        ticks.tick()
        ticks._finder.wait(30)
    assert machine.searches == 1


def test_when_all_cards_fail_they_are_searched_anew_ever_more_rarely(
    machine: FakeMachine,
) -> None:
    machine.gpus = [gpu("a"), gpu("b")]
    ticks = machine.begin()
    ticks.tick()

    def gone() -> GpuReading:
        raise OSError(19, "No such device")

    machine.reading = gone
    searched_at: list[float] = []
    begun_s = machine.time
    for _ in range(300):
        machine.time += 1
        before = machine.searches
        assert all(part.stale for part in ticks.tick().gpus)
        ticks._finder.wait(30)
        if machine.searches > before:
            searched_at.append(machine.time - begun_s)
    gaps = [after - before for before, after in pairwise(searched_at)]
    first_s, longest_s = sampler.FAILING_S
    assert searched_at[0] <= first_s + 2
    assert gaps == sorted(gaps)
    assert longest_s <= gaps[-1] <= longest_s + 2
    machine.reading = GpuReading
    sample = until(lambda: (s := ticks.tick()) and not s.gpus[0].stale and s)
    assert sample.gpus[1].problem is None


def test_the_first_sample_does_not_wait_for_a_search_that_hangs(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def slow(root: Path) -> tuple[list[Gpu], list[Problem]]:
        release.wait(30)
        return [gpu("a")], []

    monkeypatch.setattr(inventory, "find_gpus", slow)
    ticks = Sampler(machine.root, holders_every_s=10.0)
    ticks.begin(0.05)
    try:
        assert ticks.tick().gpus == ()
    finally:
        release.set()
    assert until(lambda: ticks.tick().gpus)
