"""Which of the models that are kept warm belong together on this machine (rule 12). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class Warm(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be kept warm."""

    name: str
    priority: int
    ways: tuple[dict[str, int], ...]
    """Pool -> bytes for each way to run it, the preferred first; none: nobody knows yet."""


def warm_set(models: Iterable[Warm], usable: Mapping[str, int | None]) -> frozenset[str]:
    """Those that fit together, by priority then name; the others count as cold.

    `usable`: pool -> bytes that could ever be given out; None: unknown, and then no obstacle.
    A model whose needs nobody knows yet is a member until they are known.
    """
    left = dict(usable)
    members = set()
    for model in sorted(models, key=lambda one: (-one.priority, one.name)):
        way = next((way for way in model.ways if _fits(way, left)), None)
        if way is None and model.ways:
            continue
        members.add(model.name)
        for pool, size in (way or {}).items():
            rest = left.get(pool)
            left[pool] = None if rest is None else rest - size
    return frozenset(members)


def _fits(way: Mapping[str, int], left: Mapping[str, int | None]) -> bool:
    return all((rest := left.get(pool)) is None or size <= rest for pool, size in way.items())
