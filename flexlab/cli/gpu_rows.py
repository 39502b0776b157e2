"""A machine's devices as rows of a table: what `flexlab gpus` shows of each.

`?` is a value that the card has and that is not known, `-` one that it does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from flexlab.cli import output
from flexlab.cli.table import Column
from flexlab.core.units import show_bytes
from flexlab.spec.machine import CHIP_TEMPS, RAM_POOL, Cpu, Gpu, Machine, MigSlice, Pool, Problem

COLUMNS = (
    Column("INDEX"),
    Column("NAME", flexible=True),
    Column("ARCH", drop=2),
    Column("MEMORY", right=True),
    Column("BUSY", drop=3, right=True),
    Column("TEMP", drop=4, right=True),
    Column("POWER", drop=5, right=True),
    Column("STATE", drop=1),
)
CPU_INDEX = "cpu"
UNKNOWN = "?"
_MAKERS = ("AMD", "NVIDIA", "Intel")
_NO_MARKS = str.maketrans("", "", "®™")


def device_rows(machine: Machine, states: Mapping[str, str] | None = None) -> list[list[str]]:
    """One row per GPU and MIG slice, and the CPU as the last.

    `states`: GPU id -> what is to be said of it instead of its own state.
    """
    told = states or {}
    rows = [row for gpu in machine.gpus for row in gpu_rows(gpu, told.get(gpu.id))]
    return [*rows, cpu_row(machine.cpu, machine.pool(RAM_POOL))]


def gpu_rows(gpu: Gpu, state: str | None = None) -> Iterator[list[str]]:
    """The card, then its MIG slices."""
    yield [
        f"{gpu.index}*" if gpu.best else str(gpu.index),
        short_name(gpu.name),
        gpu.arch or UNKNOWN,
        show_memory(gpu),
        show_busy(gpu),
        show_temp(gpu),
        show_power(gpu),
        state or show_state(gpu),
    ]
    for part in gpu.mig:
        memory = show_use(part.vram_used_bytes, part.vram_total_bytes)
        yield [_branch(), slice_name(part), "", memory, "", "", "", ""]


def cpu_row(cpu: Cpu, ram: Pool | None) -> list[str]:
    """The CPU with the host's RAM."""
    memory = show_use(ram.used_bytes, ram.total_bytes) if ram else UNKNOWN
    name = short_name(cpu.name or "CPU")
    return [CPU_INDEX, name, CPU_INDEX, memory, "", "", "", show_threads(cpu)]


def short_name(name: str) -> str:
    """`Radeon RX 7900 XTX` of `AMD Radeon RX 7900 XTX`: what tells cards apart stands last, and
    would be cut first."""
    maker, _, rest = name.translate(_NO_MARKS).replace("(R)", "").replace("(TM)", "").partition(" ")
    return rest if maker in _MAKERS and rest else f"{maker} {rest}".strip()


def tell_gpu(gpu: Gpu, state: str | None = None) -> str:
    """The card with its slices on one line, without what is not known."""
    memory = [show_memory(gpu)]
    memory += [
        f"{slice_name(part)} {show_use(part.vram_used_bytes, part.vram_total_bytes)}"
        for part in gpu.mig
    ]
    busy, temp, power = show_busy(gpu), show_temp(gpu), show_power(gpu)
    now = [f"busy {busy}" if busy not in ("", UNKNOWN) else "", temp, power]
    known = [words for words in (*memory, *now) if words not in ("", UNKNOWN)]
    return f"{gpu.index} {gpu.name}: {', '.join((*known, state or show_state(gpu)))}"


def tell_cpu(cpu: Cpu, ram: Pool | None) -> str:
    """The CPU on one line."""
    memory = show_use(ram.used_bytes, ram.total_bytes) if ram else UNKNOWN
    return f"{CPU_INDEX} {cpu.name or 'CPU'}: {memory}, {show_threads(cpu)}"


def show_threads(cpu: Cpu) -> str:
    """`16 threads`, or `4 of 16 threads` where this process may use only some."""
    usable = UNKNOWN if cpu.threads_usable is None else str(cpu.threads_usable)
    if cpu.threads_total in (None, cpu.threads_usable):
        return f"{usable} threads"
    return f"{usable} of {cpu.threads_total} threads"


def slice_name(part: MigSlice) -> str:
    """`MIG 3g.20gb (gi 1)`: its profile and GPU instance, as far as they are known."""
    instance = "" if part.gi is None else f"(gi {part.gi})"
    return " ".join(word for word in ("MIG", part.profile, instance) if word)


def show_memory(gpu: Gpu) -> str:
    """Its own memory as used/total; where it has none, the pool that it shares with the CPU."""
    if gpu.pool != RAM_POOL:
        return show_use(gpu.vram_used_bytes, gpu.vram_total_bytes)
    total, free = gpu.pool_total_bytes, gpu.pool_free_bytes
    used = None if total is None or free is None else total - free
    return f"shared {show_use(used, total)}"


def show_use(used_bytes: int | None, total_bytes: int | None) -> str:
    """`1.5/24.0G`, `15.2M/24.0G`, `?/24.0G`; `?` where nothing is known."""
    if used_bytes is None and total_bytes is None:
        return UNKNOWN
    used, total = show_bytes(used_bytes), show_bytes(total_bytes)
    if used[-1:] == total[-1:]:
        used = used[:-1]
    return f"{used}/{total}"


def show_busy(gpu: Gpu) -> str:
    return _reading(gpu, gpu.busy_percent, "%")


def show_temp(gpu: Gpu) -> str:
    """Of the chip as a whole; where only spots are measured, of the hottest."""
    temps = gpu.temps_c
    chip = next((temps[name] for name in CHIP_TEMPS if name in temps), None)
    return _reading(gpu, max(temps.values(), default=None) if chip is None else chip, "C")


def show_power(gpu: Gpu) -> str:
    return _reading(gpu, gpu.power_w, "W")


def _reading(gpu: Gpu, value: float | None, unit: str) -> str:
    if value is not None:
        return f"{value:.0f}{unit}"
    return UNKNOWN if gpu.usable and not gpu.asleep else ""


def show_state(gpu: Gpu) -> str:
    """One word: why it cannot be used, or whether it is the one that is taken first."""
    if not gpu.usable:
        return gpu.problems[0].code if gpu.problems else "unusable"
    words = ["best"] if gpu.best else []
    words += ["asleep"] if gpu.asleep else []
    return ", ".join(words) or "ok"


def problems_of(gpus: Iterable[Gpu]) -> list[tuple[list[Gpu], Problem]]:
    """Every problem once, with the GPUs that have it, in the order in which they come up."""
    having: dict[Problem, list[Gpu]] = {}
    for gpu in gpus:
        for problem in gpu.problems:
            having.setdefault(problem, []).append(gpu)
    return [(gpus_, problem) for problem, gpus_ in having.items()]


def name_gpus(gpus: Sequence[Gpu]) -> str:
    """`0 Radeon RX 7900 XTX`, or `0-3, 6` for several."""
    if len(gpus) == 1:
        return f"{gpus[0].index} {gpus[0].name}"
    return _ranges([gpu.index for gpu in gpus])


def _ranges(numbers: Sequence[int]) -> str:
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def _branch() -> str:
    return "└" if output.answers_in_unicode() else "`-"
