"""`up`, told step by step: what was found, what was chosen and why, how far it is, how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import msgspec

from flexlab.planning.explain import describe, explain
from flexlab.scheduler.state import HeldLease
from flexlab.spec.lab import Progress, UpStep
from flexlab.spec.lease import Refused
from flexlab.spec.plan import Candidate, Keep

if TYPE_CHECKING:
    from flexlab.daemon.lab import Lab

TICK_S = 0.2


async def up_steps(
    lab: Lab,
    name: str,
    *,
    keep: Keep | None = None,
    pin: bool | None = None,
    after: int | None = None,
) -> AsyncIterator[UpStep]:
    """Steps until `ready` or `refused`. Closing it before that withdraws the wish.

    `after`: the event after which the story begins; now, if not given.

    `keep` and `pin` hold from `ready` on: an `up` that fails or is withdrawn decides nothing.
    """
    scheduler = lab.scheduler
    seen = lab.log.last_id if after is None else after
    try:
        asked = scheduler.acquire(name, wants_download=True)
    except Refused as refused:
        yield _refused(refused)
        return
    if isinstance(asked, HeldLease):
        asked.release()
        yield await _ready(lab, name, keep, pin)
        return
    try:
        if lab.machine is not None:
            for line in describe(lab.machine):
                yield UpStep(kind="event", text=line)
        told: Progress | None = None
        explained = False
        while not asked.done():
            await asyncio.wait({asked}, timeout=TICK_S)
            model = scheduler.models[name]
            if not explained and model.candidates is not None and model.candidates.items:
                explained = True
                for line in _chosen(model.candidates.items[0]):
                    yield UpStep(kind="event", text=line)
            progress = model.preparing.progress if model.preparing else None
            if progress is not None and progress != told:
                told = progress
                yield UpStep(kind="progress", text=progress.text, progress=progress)
            for event in lab.log.after(seen):
                seen = event.id
                if event.model == name and event.kind != "refused":
                    yield UpStep(kind="event", text=event.text)
        try:
            asked.result().release()
        except Refused as refused:
            yield _refused(refused)
            return
        yield await _ready(lab, name, keep, pin)
    finally:
        if not asked.cancel() and not asked.cancelled() and asked.exception() is None:
            asked.result().release()


def _chosen(candidate: Candidate) -> list[str]:
    """What was chosen and why, without what goes without saying (`flexlab plan` tells it all)."""
    told = [r for r in candidate.reasons if r.source not in ("default", "machine")]
    lines = [f"{reason.choice}: {reason.because}" for reason in told]
    return lines + explain(msgspec.structs.replace(candidate, reasons=()))


def _refused(refused: Refused) -> UpStep:
    return UpStep(kind="refused", text=refused.refusal.message, refusal=refused.refusal)


async def _ready(lab: Lab, name: str, keep: Keep | None, pin: bool | None) -> UpStep:
    lab.scheduler.keep(name, warm=None if keep is None else keep == "warm", pinned=pin)
    await lab.save_models()
    snapshot = lab.snapshot()
    model = next(view for view in snapshot.models if view.name == name)
    instance = next((view for view in snapshot.instances if view.model == name), None)
    return UpStep(kind="ready", text=f"{name} is ready", model=model, instance=instance)
