"""`flexlab gpus`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from msgspec.structs import replace

from flexlab.cli import output
from flexlab.cli.common import (
    JsonOption,
    SysrootOption,
    machine_root,
    typed,
    verb_app,
    watch_interval_s,
)
from flexlab.cli.gpu_rows import (
    COLUMNS,
    CPU_INDEX,
    device_rows,
    name_gpus,
    problems_of,
)
from flexlab.cli.variables import warn_of_variables
from flexlab.core import paths
from flexlab.core.errors import FlexLabError, UsageError
from flexlab.gpus import isolated
from flexlab.gpus.bus import plain_slot
from flexlab.gpus.helper import INTERVAL_S
from flexlab.gpus.isolated import Sizes
from flexlab.spec.machine import Cpu, Gpu, Machine

NO_GPU = "no GPU was found; flexlab doctor says what was looked at"

app = verb_app()


@app.command()
def gpus(
    gpu: Annotated[
        str | None,
        typer.Argument(
            metavar="[GPU]",
            help="One of them, by its index, id, PCI slot or UUID: all that is known of it.",
            show_default=False,
        ),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Live, until Ctrl-C.")] = False,
    interval: Annotated[
        str | None,
        typer.Option("--interval", metavar="S", help="Between two readings; 1 s if not given."),
    ] = None,
    sysroot: SysrootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show this machine's GPUs: memory, load, and why one cannot be used.

    The star marks the one that a model for a single GPU would get.
    """
    interval_s = watch_interval_s(interval, INTERVAL_S, watch=watch, command="flexlab gpus --watch")
    root = machine_root(sysroot)
    warn_of_variables()
    sizes = ram_sizes(root)
    machine = isolated.detect(root, **sizes._asdict())
    chosen = None if gpu is None else choose(machine, typed(gpu))
    if watch:
        from flexlab.cli.gpu_watch import Watch

        shown = machine if chosen is None else only(machine, chosen)
        Watch(root, shown, sizes, interval_s).run(as_json=as_json)
    elif chosen is not None:
        _show_one(root, machine, chosen, as_json=as_json)
    elif as_json:
        output.answer_json(machine_as_json(machine))
    else:
        _show(machine)


def ram_sizes(root: Path) -> Sizes:
    """What the settings say of this machine's RAM; a recorded machine has no settings.

    Wrong settings are said and left out: they are no reason to show no GPU.
    """
    told = any(os.environ.get(f"FLEXLAB_{name}") for name in ("RAM_RESERVE", "RAM_LIMIT"))
    if root != Path("/") or not (told or paths.settings_file().exists()):
        return Sizes(None, None)
    # pydantic, only where there is something to judge.
    from flexlab.core.settings import load_settings

    try:
        settings = load_settings().settings
    except FlexLabError as error:
        output.say(f"warning: the settings do not count here: {error}")
        return Sizes(None, None)
    return Sizes(settings.ram_reserve_bytes, settings.ram_limit_bytes)


def choose(machine: Machine, word: str) -> Gpu | Cpu:
    """The device that `word` names. Raises UsageError, naming those that exist."""
    if word.lower() == CPU_INDEX:
        return machine.cpu
    named = [gpu for gpu in machine.gpus if word.lower() in _names(gpu)]
    if not named:
        slot = plain_slot(word)  # also that of several partitions
        named = [gpu for gpu in machine.gpus if slot is not None and gpu.pci_slot == slot]
    if len(named) == 1:
        return named[0]
    if named:
        raise UsageError(
            f"{word} is split into {len(named)} GPUs: {name_gpus(named)}",
            f"flexlab gpus {named[0].index}",
        )
    there = ", ".join(f"{gpu.index} ({gpu.name})" for gpu in machine.gpus)
    raise UsageError(
        f"no GPU {word!r} here; " + (f"there are {there}" if there else "none was found"),
        "flexlab gpus lists them",
    )


def _names(gpu: Gpu) -> set[str]:
    told = (str(gpu.index), gpu.id, gpu.uuid, *(part.uuid for part in gpu.mig))
    return {name.lower() for name in told if name}


def only(machine: Machine, chosen: Gpu | Cpu) -> Machine:
    """The machine with that device alone."""
    shown = (chosen,) if isinstance(chosen, Gpu) else ()
    return replace(machine, gpus=shown, findings=())


def machine_as_json(machine: Machine) -> dict[str, object]:
    """The stable shape; what is unknown is null."""
    return {
        "platform": machine.platform,
        "hostname": machine.hostname,
        "gpus": machine.gpus,
        "cpu": cpu_as_json(machine.cpu),
        "pools": machine.pools,
        "findings": machine.findings,
    }


def cpu_as_json(cpu: Cpu) -> Mapping[str, object]:
    """As a device among the GPUs: with the arch that recipes call it by."""
    told: dict[str, Any] = msgspec.structs.asdict(cpu)
    return {"arch": CPU_INDEX, **told, "flags": sorted(cpu.flags)}


def _show_one(root: Path, machine: Machine, chosen: Gpu | Cpu, *, as_json: bool) -> None:
    from flexlab.cli import gpu_detail

    if isinstance(chosen, Gpu):
        gpu_detail.show_gpu(root, machine, chosen, as_json=as_json)
    elif as_json:
        output.answer_json({"cpu": cpu_as_json(chosen), "pool": machine.pool(chosen.pool)})
    else:
        gpu_detail.show_cpu(machine)


def _show(machine: Machine) -> None:
    if not machine.gpus:
        output.say(NO_GPU)
    output.answer_table(COLUMNS, device_rows(machine))
    problems = problems_of(machine.gpus)
    if problems or machine.findings:
        output.answer()
    for having, problem in problems:
        output.answer_folded(f"{name_gpus(having)}: {problem.message}")
        output.answer_folded(f"   -> {problem.hint}")
    for found in machine.findings:
        output.answer_folded(found.message)
        output.answer_folded(f"   -> {found.hint}")
