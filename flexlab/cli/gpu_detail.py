"""`flexlab gpus GPU`: all that is known of one device."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import asdict

from flexlab import daemons
from flexlab.cli import output
from flexlab.cli.gpu_rows import UNKNOWN, show_threads, show_use, slice_name
from flexlab.cli.gpu_support import BackendSupport, backend_support
from flexlab.core.errors import FlexLabError
from flexlab.core.text import clean_line, os_sentence
from flexlab.core.units import show_bytes
from flexlab.gpus.helper import open_helper
from flexlab.gpus.pools import shares_ram
from flexlab.spec.lab import HolderView
from flexlab.spec.machine import RAM_POOL, DeviceNode, Gpu, GpuSample, Holder, Machine

LIVE_PATIENCE_S = 6.0
"""A search for GPUs and one scan of all processes; 0.1 s where no driver is slow."""
DAEMON_PATIENCE_S = 2.0
_TICK_S = 0.1
_LABEL_CELLS = 12

Line = tuple[str, str]
"""What it is, and its value."""


class Live(NamedTuple):
    """What the helper says of one card; None where it does not."""

    sample: GpuSample | None = None
    holders: tuple[HolderView, ...] | None = None


def show_cpu(machine: Machine) -> None:
    """The CPU and the host's RAM."""
    cpu, ram = machine.cpu, machine.pool(RAM_POOL)
    output.answer(clean_line(cpu.name or "CPU"))
    _answer([("platform", machine.platform or UNKNOWN), ("threads", show_threads(cpu))])
    _answer([("flags", " ".join(sorted(cpu.flags)) or UNKNOWN)])
    if ram is not None:
        kept = f", of which {show_bytes(ram.reserve_bytes)} are kept free"
        _answer([("memory", f"{show_use(ram.used_bytes, ram.total_bytes)} used{kept}")])
        if ram.budget_bytes is not None:
            _answer([("models", f"at most {show_bytes(ram.budget_bytes)} (setting ram_limit)")])


def show_gpu(root: Path, machine: Machine, gpu: Gpu, *, as_json: bool) -> None:
    """One GPU, who holds its memory, and what each backend can do on it."""
    live, backends, rule = read_live(root, gpu), _backends(gpu), pool_rule(gpu, machine)
    if as_json:
        told = {"gpu": gpu, "pool_rule": rule, "sample": live.sample, "holders": live.holders}
        output.answer_json({**told, "backends": backends})
        return
    output.answer(f"{gpu.index} {clean_line(gpu.name)}")
    _answer(_facts(gpu))
    _answer([*_memory(gpu), ("", rule)])
    _answer([("now", _now(gpu, live.sample))])
    _answer(("node", _show_node(node)) for node in gpu.nodes)
    _answer(("held by", line) for line in _holder_lines(gpu, live.holders))
    _answer(("backend", f"{each.backend}: {each.support}, {each.because}") for each in backends)
    for problem in gpu.problems:
        _answer([("problem", f"{problem.code}: {problem.message}"), ("", f"-> {problem.hint}")])


def _answer(lines: Iterable[Line]) -> None:
    for label, value in lines:
        output.answer_labelled(f"  {label}", value, _LABEL_CELLS)


def _facts(gpu: Gpu) -> Iterator[Line]:
    yield "id", gpu.id
    units = "" if gpu.cu_count is None else f", {gpu.cu_count} compute units"
    yield "arch", (gpu.arch or UNKNOWN) + units
    if gpu.pci_id:
        yield "PCI", gpu.pci_id + (f", revision {gpu.revision}" if gpu.revision else "")
    if gpu.uuid:
        yield "UUID", gpu.uuid
    if gpu.is_apu or gpu.unified:
        yield "kind", "integrated: it has no memory chips of its own"
    version = f" {gpu.driver_version}" if gpu.driver_version else ""
    speaks = f", CUDA up to {gpu.cuda_version}" if gpu.cuda_version else ""
    yield "driver", f"{gpu.driver or 'none'}{version}{speaks}"
    if numbers := ", ".join(_numbers(gpu)):
        yield "numbers", numbers
    if not gpu.usable:
        yield "usable", "no"
    elif gpu.best:
        yield "usable", "yes; the one that a model for a single GPU gets"
    else:
        yield "usable", "yes"


def _numbers(gpu: Gpu) -> Iterator[str]:
    """How others call it. None of these is stable over a restart."""
    if gpu.card:
        yield gpu.card
    if gpu.render_minor is not None:
        yield f"renderD{gpu.render_minor}"
    if gpu.kfd_node is not None:
        yield f"KFD node {gpu.kfd_node}"
    if gpu.hip_index is not None:
        yield f"HIP {gpu.hip_index}"


def _memory(gpu: Gpu) -> Iterator[Line]:
    if gpu.vram_total_bytes is not None or not shares_ram(gpu):
        # What other makers' integrated GPUs call their memory is the RAM itself.
        label = "RAM" if shares_ram(gpu) and gpu.vendor != "amd" else "VRAM"
        yield label, f"{show_use(gpu.vram_used_bytes, gpu.vram_total_bytes)} used"
    if gpu.gtt_total_bytes is not None:
        use = show_use(gpu.gtt_used_bytes, gpu.gtt_total_bytes)
        yield "GTT", f"{use} used; RAM that it may map"
    for part in gpu.mig:
        use = show_use(part.vram_used_bytes, part.vram_total_bytes)
        yield "slice", f"{slice_name(part)}: {use} used, {part.uuid}"
    if not gpu.mig:
        room = f"{show_bytes(gpu.pool_free_bytes)} free of {show_bytes(gpu.pool_total_bytes)}"
        yield "pool", f"{gpu.pool}: {room}"


def pool_rule(gpu: Gpu, machine: Machine) -> str:
    """How the size of its pool came about, in a sentence; the rules are those of gpus.pools."""
    if gpu.mig:
        return "each slice is a pool of its own: models get slices, not the card"
    if not shares_ram(gpu):
        if gpu.is_apu or gpu.unified:
            return "what the firmware set aside for it: no less than what it may map of the RAM"
        return "its own memory"
    ram = machine.pool(RAM_POOL)
    kept = show_bytes(ram.reserve_bytes if ram else None)
    if gpu.vendor == "amd":
        return f"the smaller of GTT and what the RAM has beyond the {kept} that are kept free"
    return f"the RAM beyond the {kept} that are kept free"


def _now(gpu: Gpu, sample: GpuSample | None) -> str:
    if gpu.asleep:
        return "asleep; its sensors are not read, since that would wake it"
    read = {name: aged.value for name, aged in sample.values.items()} if sample else {}
    known = {"busy_percent": gpu.busy_percent, "power_w": gpu.power_w}
    known |= {f"temp_{name}_c": value for name, value in gpu.temps_c.items()}
    values = {name: value for name, value in known.items() if value is not None} | read
    told = [words for name, value in values.items() if (words := _show_value(name, value))]
    if sample is not None and sample.throttle:
        told.append(f"slowed down ({', '.join(sample.throttle)})")
    return ", ".join(told) or UNKNOWN


_UNITS = {"percent": "%", "w": " W", "c": " C", "mhz": " MHz", "rpm": " rpm"}


def _show_value(name: str, value: float) -> str | None:
    """`temp_edge_c` and 61.0 -> `edge 61 C`; None for bytes, which stand elsewhere."""
    words, _, unit = name.rpartition("_")
    if unit not in _UNITS:
        return None
    return f"{words.removeprefix('temp_').replace('_', ' ')} {value:.0f}{_UNITS[unit]}"


def _show_node(node: DeviceNode) -> str:
    return node.path if node.gid is None else f"{node.path}, group {node.gid}"


def _holder_lines(gpu: Gpu, holders: tuple[HolderView, ...] | None) -> Iterator[str]:
    if holders is None:
        yield UNKNOWN
    elif not holders:
        yield "nobody, as far as this user may see"
    for holder in sorted(holders or (), key=lambda holder: -(holder.vram_bytes or 0)):
        gtt = f" and {show_bytes(holder.gtt_bytes)} of GTT" if holder.gtt_bytes else ""
        on = f" on {holder.gpu}" if holder.gpu != gpu.id else ""
        who = holder.name or "a process of another container"
        pid = f", pid {holder.pid}" if holder.pid else ""
        model = f", model {holder.model}" if holder.model else ""
        yield f"{who}{pid}{model}: {show_bytes(holder.vram_bytes)}{gtt}{on}"


def read_live(root: Path, gpu: Gpu) -> Live:
    """What the helper sees, since looking for oneself may hang with a driver.

    Rates are differences of counters, and there from the second tick on.
    """
    live = Live()
    ours = _ours() if root == Path("/") else {}
    ids = {gpu.id, *(part.uuid for part in gpu.mig)}
    until = time.monotonic() + LIVE_PATIENCE_S
    try:
        with open_helper(root, interval_s=_TICK_S) as helper:
            for sample in helper.samples(LIVE_PATIENCE_S):
                if sample is None:
                    break
                scanned = sample.holders_age_s is not None
                held = tuple(_view(one, ours) for one in sample.holders if one.gpu in ids)
                part = next((part for part in sample.gpus if part.id == gpu.id), None)
                live = Live(part, held if scanned else None)
                if (scanned and sample.seq > 1) or time.monotonic() > until:
                    break
    except OSError as error:
        output.say(f"warning: no live readings: {os_sentence(error)}")
    return live


def _ours() -> dict[int, HolderView]:
    """By pid, what a running daemon knows of its own engines; nothing where there is none."""
    try:
        daemon = daemons.find(wait_s=0)
        views = daemon.snapshot(timeout_s=DAEMON_PATIENCE_S).holders if daemon else ()
    except FlexLabError:
        return {}
    return {view.pid: view for view in views if view.instance is not None}


def _view(holder: Holder, ours: Mapping[int, HolderView]) -> HolderView:
    known = ours.get(holder.pid)
    return HolderView(
        **asdict(holder),
        instance=known.instance if known else None,
        model=known.model if known else None,
    )


def _backends(gpu: Gpu) -> list[BackendSupport]:
    from flexlab.recipes.catalogue import Catalogue

    try:
        return backend_support(Catalogue.load(), gpu)
    except FlexLabError as error:
        output.say(f"warning: what backends can do on it is not known: {error}")
        return []
