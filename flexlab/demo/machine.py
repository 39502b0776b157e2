"""A machine that is not here: what the demo shows, and what tests can rely on anywhere."""

from __future__ import annotations

from flexlab.core.units import GIB
from flexlab.spec.machine import RAM_POOL, Cpu, Machine, Pool

# What the embedded engine's build needs, and every x86-64 CPU since 2013 has.
_FLAGS = frozenset({"sse2", "avx", "avx2", "fma", "f16c", "bmi2"})


def demo_machine(*, ram_gib: float = 16.0, used_gib: float = 1.0, threads: int = 8) -> Machine:
    """A workstation without a GPU: so much RAM, of which so much is in use by others."""
    ram = Pool(
        id=RAM_POOL,
        kind="ram",
        total_bytes=int(ram_gib * GIB),
        used_bytes=int(used_gib * GIB),
        reserve_bytes=GIB // 2,
    )
    cpu = Cpu(name="Demo CPU", threads_total=threads, threads_usable=threads, flags=_FLAGS)
    return Machine(hostname="demo", platform="linux/amd64", cpu=cpu, pools=(ram,))


def demo_ram() -> Pool:
    """A reading of its memory, which never changes."""
    return demo_machine().pools[0]
