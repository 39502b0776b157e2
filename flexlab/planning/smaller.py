"""What is given up where a model does not fit, where its recipe allows it. Pure.

In this order, since the first costs its user least: a smaller context, a smaller type of the KV
cache, layers on the CPU. Each comes with its number and is said aloud as a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flexlab.planning import fit, sizing
from flexlab.planning.draft import Draft, Given
from flexlab.planning.question import Question
from flexlab.spec.machine import Machine, Pool
from flexlab.spec.plan import Limit, Need

_CACHE_NAMES = ("cache_type_k", "cache_type_v", "cache_type", "kv_cache_dtype")
_CONTEXT_STEP = 1024
_MOVED = "n_gpu_layers"


def fitting(question: Question, draft: Draft) -> Given | None:
    """The first that makes it fit into what its pools ever have; None where nothing does."""
    return _first(question, draft, now=False)


def fitting_now(question: Question, draft: Draft) -> Given | None:
    """The same for what its pools have beside what is used at this moment; None also where the
    whole fits, or where nobody knows what is used."""
    if draft.variant.smaller is None or _have_room(question.machine, draft.candidate.needs):
        return None
    return _first(question, draft, now=True)


def _first(question: Question, draft: Draft, *, now: bool) -> Given | None:
    machine = question.machine
    for stage in _stages(draft, frozenset(question.wishes.settings)):
        # Mostly each stage gives up more and more: where its end does not fit, nothing of it does.
        # Layers are not given up but moved into RAM, which may be too small for all of them.
        if not stage or not (_MOVED in stage[-1] or _fits(machine, draft, stage[-1], now=now)):
            continue
        for update in stage:
            if _fits(machine, draft, update, now=now):
                return _given(draft, update)
    return None


def _stages(draft: Draft, wished: frozenset[str]) -> Iterator[list[dict[str, object]]]:
    """What somebody asked for is never made smaller."""
    allowed = draft.variant.smaller
    if allowed is None:
        return
    contexts: list[dict[str, object]] = []
    if "context_size" not in wished:
        contexts = list(_contexts(draft, allowed.context_min))
    yield contexts
    cache: dict[str, object] = {}
    if allowed.cache_type is not None:
        names = [n for n in _CACHE_NAMES if hasattr(draft.settings, n) and n not in wished]
        cache = dict.fromkeys(names, allowed.cache_type)
        yield [{**context, **cache} for context in ({}, *contexts)] if cache else []
    if allowed.n_gpu_layers_min is not None and _MOVED not in wished:
        smallest = {**(contexts[-1] if contexts else {}), **cache}
        layers = _layers(draft, allowed.n_gpu_layers_min)
        yield [{**smallest, _MOVED: count} for count in layers]


def _contexts(draft: Draft, least: int | None) -> Iterator[dict[str, object]]:
    wanted = getattr(draft.settings, "context_size", None)
    if least is None or wanted is None or wanted <= least or draft.model.shape is None:
        return
    for size in (*range(wanted - _CONTEXT_STEP, least, -_CONTEXT_STEP), least):
        yield {"context_size": size}


def _layers(draft: Draft, least: int) -> Iterator[int]:
    layers = draft.model.shape.layers if draft.model.shape else None
    if layers is not None and draft.ground.on_gpu:
        wanted: int | None = getattr(draft.settings, _MOVED, None)
        most = layers if wanted is None else min(layers, wanted)
        yield from range(most - 1, least - 1, -1)


def _given(draft: Draft, update: dict[str, object]) -> Given:
    limits = [
        Limit(what=name, wanted=_wanted(draft, name), given=f"{value} (so that it fits)")
        for name, value in update.items()
        if getattr(draft.settings, name) != value
    ]
    return Given(update, tuple(limits))


def _wanted(draft: Draft, name: str) -> str:
    value = getattr(draft.settings, name)
    return "all" if value is None else str(value)


def _fits(machine: Machine, draft: Draft, update: dict[str, object], *, now: bool) -> bool:
    # Not validated: hundreds are tried, and whichever fits is validated when it is drafted.
    settings = draft.settings.model_copy(update=update)
    need = fit.estimate(settings, draft.model, draft.ground)
    if need.has_share_too_small(len(draft.cards)):
        return False
    needs = need.needs(*sizing.shares(draft.variant.backend, draft.cards))
    return _have_room(machine, needs, now=now)


def _have_room(machine: Machine, needs: Iterable[Need], *, now: bool = True) -> bool:
    rooms = [(one, _room(machine.pool(one.pool), now=now)) for one in needs]
    return all(room is None or one.total_bytes <= room for one, room in rooms)


def _room(pool: Pool | None, *, now: bool) -> int | None:
    usable = sizing.usable_bytes(pool)
    if pool is None or usable is None or not now or pool.used_bytes is None:
        return usable
    return max(0, usable - pool.used_bytes)
