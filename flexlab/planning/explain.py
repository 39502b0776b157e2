"""A plan, a candidate or a refusal in plain sentences, one a line. Pure."""

from __future__ import annotations

from flexlab.core.text import clean_line
from flexlab.core.units import show_bytes
from flexlab.spec.machine import Gpu, Machine, Pool
from flexlab.spec.plan import Candidate, Candidates, LaunchPlan, Refusal


def describe(machine: Machine) -> list[str]:
    """What was found: `CPU: Xeon, 2 threads; RAM 23.4G, 22.1G free`, GPUs, then the findings."""
    cpu = machine.cpu
    parts = [f"CPU: {cpu.name or 'model unknown'}, {_threads(cpu.threads_usable)}"]
    if cpu.threads_total and cpu.threads_usable and cpu.threads_usable < cpu.threads_total:
        parts[0] += f" of {cpu.threads_total}"
    pool = machine.pool(cpu.pool)
    parts.append("RAM unknown" if pool is None else _ram(pool))
    gpus = [_gpu(gpu) for gpu in machine.gpus]
    told = [finding.message for finding in machine.findings]
    return [clean_line(line) for line in ("; ".join(parts), *gpus, *told)]


def explain(subject: Candidates | Candidate | LaunchPlan | Refusal) -> list[str]:
    """What was chosen and why, what is given smaller than wanted, what is wrong and its mend."""
    if isinstance(subject, Candidates):
        if subject.items:
            return explain(subject.items[0])
        return explain(subject.refusal) if subject.refusal else []
    if isinstance(subject, Refusal):
        return [clean_line(line) for line in _refusal(subject)]
    lines = [f"{r.choice}, because {r.because} ({r.source})" for r in subject.reasons]
    lines += [f"{one.what}: {one.given} instead of {one.wanted}" for one in subject.limits]
    lines += [f"{problem.message}: {problem.hint}" for problem in subject.problems]
    return [clean_line(line) for line in lines]


def _refusal(refusal: Refusal) -> list[str]:
    if not refusal.problems:
        return [f"{refusal.message}: {refusal.hint}" if refusal.hint else refusal.message]
    return [f"{each.message}: {each.hint}" for each in refusal.problems]


def _gpu(gpu: Gpu) -> str:
    size = "memory unknown" if gpu.pool_total_bytes is None else show_bytes(gpu.pool_total_bytes)
    line = f"GPU {gpu.index}: {gpu.name}, {gpu.arch or 'arch unknown'}, {size}"
    return line if gpu.usable else f"{line}; not usable: {gpu.problems[0].message}"


def _threads(count: int | None) -> str:
    if count is None:
        return "threads unknown"
    return "1 thread" if count == 1 else f"{count} threads"


def _ram(pool: Pool) -> str:
    if pool.total_bytes is None:
        return "RAM unknown"
    if pool.used_bytes is None:
        return f"RAM {show_bytes(pool.total_bytes)}"
    free = show_bytes(max(0, pool.total_bytes - pool.used_bytes))
    return f"RAM {show_bytes(pool.total_bytes)}, {free} free"
