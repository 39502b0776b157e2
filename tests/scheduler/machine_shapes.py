"""Machines and models of the virtual lab: pools, ways to run a model, memory as it really is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flexlab.scheduler.state import PoolAccount
from flexlab.spec.instance import MemoryUse
from flexlab.spec.plan import Candidate, Candidates, Need, RuntimeName, Weight

GIB = 1024**3


@dataclass(frozen=True)
class Way:
    """One way to run a model."""

    needs: Mapping[str, float]
    """Pool -> GiB."""
    group: str | None = None
    with_card: bool = False
    preference: int = 0
    runtime: RuntimeName = "process"
    slots: int | None = None


def on(pool: str, gib: float, **more: Any) -> Way:
    """In one pool only."""
    return Way({pool: gib}, **more)


def over(pools: Iterable[str], gib: float, **more: Any) -> Way:
    """So much in each of several pools: a model over several cards."""
    return Way(dict.fromkeys(pools, gib), **more)


def candidate(model: str, gib: float = 1.0, *, way: Way | None = None, **more: Any) -> Candidate:
    """What planning would say of it; without a `way`, a CPU candidate."""
    way = way or on("ram", gib)
    cards = tuple(pool for pool in way.needs if pool != "ram")
    facts: dict[str, Any] = {
        "variant": "v",
        "backend": "llamacpp",
        "runtime": way.runtime,
        "arch": "gfx1100" if cards else "cpu",
        "support": "full",
        "devices": cards or ("cpu",),
        "needs": tuple(
            Need(pool=pool, total_bytes=int(size * GIB)) for pool, size in way.needs.items()
        ),
        "weights": (Weight(source=f"file:///{model}.gguf"),),
        "group": way.group,
        "group_with_card": way.with_card,
        "preference": way.preference,
        "slots": way.slots,
        "memory_key": f"{model}-key",
    }
    return Candidate(model=model, **(facts | more))


def candidates(model: str, ways: Iterable[Way]) -> Candidates:
    """All of them, in this order."""
    return Candidates(model=model, items=tuple(candidate(model, way=way) for way in ways))


def ram(gib: float, **more: Any) -> PoolAccount:
    """The host's memory."""
    return PoolAccount("ram", "ram", int(gib * GIB), **more)


def card(name: str, gib: float, **more: Any) -> PoolAccount:
    """A card's memory."""
    return PoolAccount(name, "vram", int(gib * GIB), used_bytes=0, **more)


@dataclass
class Memory:
    """What is really used, by whom; the scheduler only learns of it by readings."""

    foreign: dict[str, int] = field(default_factory=dict)
    ours: dict[str, dict[str, int]] = field(default_factory=dict)
    """Instance -> pool -> bytes, from its launch until its memory is free."""

    def take(self, instance: str, chosen: Candidate, factor: float) -> None:
        """It is launched, and takes its need times `factor`."""
        self.ours[instance] = {n.pool: int(n.total_bytes * factor) for n in chosen.needs}

    def free(self, instance: str) -> None:
        """Its memory is back."""
        self.ours.pop(instance, None)

    def used(self, pool: str) -> int:
        """All that is in use of a pool."""
        return self.foreign.get(pool, 0) + sum(of.get(pool, 0) for of in self.ours.values())

    def measured(self, pool: str, alive: Callable[[str], bool]) -> dict[str, MemoryUse]:
        """What the engines that live have of a pool."""
        return {
            name: MemoryUse(resident_bytes=of[pool], own_bytes=of[pool])
            for name, of in self.ours.items()
            if pool in of and alive(name)
        }
