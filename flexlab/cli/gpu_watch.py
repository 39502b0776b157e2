"""`flexlab gpus --watch`: the table again and again, or a line for each change.

The readings come from the hardware helper, a process of its own: this one touches no driver, so
that Ctrl-C ends it at once whatever a card does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from flexlab.cli import output
from flexlab.cli.gpu_rows import COLUMNS, device_rows, tell_cpu, tell_gpu
from flexlab.core.errors import DetectionError
from flexlab.core.text import os_sentence
from flexlab.core.units import show_seconds
from flexlab.gpus import inventory, pools
from flexlab.gpus.helper import Helper, open_helper
from flexlab.gpus.isolated import Sizes
from flexlab.gpus.memory import sample_ram
from flexlab.spec.machine import RAM_POOL, GpuSample, Machine, Sample

SILENCE_S = 15.0
"""A tick that is late by so much will not come; before the first one GPUs are searched for."""


class Watch:
    """Shows a machine's GPUs as the helper's samples come."""

    def __init__(self, root: Path, machine: Machine, ram_sizes: Sizes, interval_s: float) -> None:
        self._root = root
        self._machine = machine
        self._ram_sizes = ram_sizes
        self._interval_s = interval_s
        self._seen: set[str] = set()
        self._told: dict[str, str] = {}

    def run(self, *, as_json: bool) -> None:
        """Until Ctrl-C. Raises DetectionError when no helper gives a sample."""
        draws = output.can_redraw() and not as_json
        if draws:
            output.begin_drawing()
            output.redraw(self._table(self._machine, {}))
        while self._follow_helper(as_json=as_json, draws=draws):
            output.say("the process that reads the hardware has ended; another one takes over")
        raise DetectionError(
            "the process that reads the hardware gives no readings",
            "flexlab gpus shows what there is; dmesg | tail says what the drivers complain of",
        )

    def _follow_helper(self, *, as_json: bool, draws: bool) -> bool:
        """Until it ends or falls silent; whether it has given any sample."""
        given = False
        with self._open_helper() as helper:
            for sample in helper.samples(self._interval_s + SILENCE_S):
                if sample is None:
                    break
                given = True
                if as_json:
                    output.answer_json_line(self._part(sample))
                elif draws:
                    output.redraw(self._table(*self._take(sample)))
                else:
                    self._tell_changes(sample)
        return given

    def _open_helper(self) -> Helper:
        try:
            return open_helper(self._root, interval_s=self._interval_s)
        except OSError as error:
            raise DetectionError(
                f"the hardware cannot be read: {os_sentence(error)}", "flexlab doctor"
            ) from error

    def _part(self, sample: Sample) -> Sample:
        """What is said of the GPUs that are shown."""
        ids = {gpu.id for gpu in self._machine.gpus}
        ids |= {part.uuid for gpu in self._machine.gpus for part in gpu.mig}
        return replace(
            sample,
            gpus=tuple(part for part in sample.gpus if part.id in ids),
            holders=tuple(holder for holder in sample.holders if holder.gpu in ids),
        )

    def _take(self, sample: Sample) -> tuple[Machine, dict[str, str]]:
        """The machine with the values of a sample, and what is odd: GPU id -> its state."""
        parts = {part.id: part for part in sample.gpus}
        self._seen |= parts.keys()
        read = [inventory.with_sample(gpu, parts.get(gpu.id)) for gpu in self._machine.gpus]
        ram = sample_ram(
            self._root,
            reserve_bytes=self._ram_sizes.ram_reserve_bytes,
            budget_bytes=self._ram_sizes.ram_budget_bytes,
        )
        others = (pool for pool in self._machine.pools if pool.id != RAM_POOL)
        gpus = tuple(pools.assign(read, ram).gpus)
        odd = {gpu.id: _odd(parts.get(gpu.id)) for gpu in gpus if gpu.id in self._seen}
        states = {gpu_id: state for gpu_id, state in odd.items() if state}
        return replace(self._machine, gpus=gpus, pools=(ram, *others)), states

    def _table(self, machine: Machine, states: Mapping[str, str]) -> list[str]:
        return output.table_lines(COLUMNS, device_rows(machine, states))

    def _tell_changes(self, sample: Sample) -> None:
        """A line for each GPU of which something else is to be told than before.

        The CPU's memory changes with every tick: it is told only where there is nothing else.
        """
        machine, states = self._take(sample)
        lines = {gpu.id: tell_gpu(gpu, states.get(gpu.id)) for gpu in machine.gpus}
        lines = lines or {RAM_POOL: tell_cpu(machine.cpu, machine.pool(RAM_POOL))}
        clock = time.strftime("%H:%M:%S", time.localtime(sample.at))
        for key, line in lines.items():
            if self._told.get(key) != line:
                self._told[key] = line
                output.answer(f"{clock}  {line}")
        output.flush()


def _odd(part: GpuSample | None) -> str | None:
    """What is to be said in place of the state of a card that was there."""
    if part is None:
        return "gone"
    if not part.stale:
        return None
    age_s = max((aged.age_s for aged in part.values.values()), default=None)
    return "not answering" if age_s is None else f"stale {show_seconds(age_s)}"
