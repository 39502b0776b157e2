"""A lab's models and a day of its requests, made from a seed: what benchmarks/scheduler.py plays.

Popularity is Zipf's; requests come in sessions (a person or an agent who asks one model, or two in
turn, several times with pauses); the rate has the rhythm of a day, squeezed into `hours`.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

GIB = 1024**3
CARD_GIB = 24
TWO_CARDS = 0.05
"""Share of models that are split over two cards."""
PINNED, WARM = 4, 12


class Spec(NamedTuple):
    """One model: what it takes, and what its user decided."""

    name: str
    gib: float
    """On each of its cards."""
    cards: int
    load_s: float
    tokens_per_s: float
    priority: int
    warm: bool
    pinned: bool
    weight: float
    """Its share of the sessions."""


class Request(NamedTuple):
    """One request: when it comes, and for how long an engine works on it."""

    at: float
    model: str
    work_s: float


def models(count: int, seed: int) -> list[Spec]:
    """The first is the most popular. Sizes and popularity have nothing to do with each other."""
    dice = random.Random(f"models {seed}")
    found = []
    for rank in range(count):
        cards = 2 if dice.random() < TWO_CARDS else 1
        if cards == 2:
            gib = dice.uniform(14.0, CARD_GIB)
        else:
            gib = min(CARD_GIB, max(2.0, dice.lognormvariate(math.log(6.5), 0.65)))
        whole = gib * cards
        found.append(
            Spec(
                name=f"m{rank:04d}",
                gib=gib,
                cards=cards,
                load_s=min(60.0, max(3.0, 1.0 + 1.3 * whole * dice.uniform(0.7, 1.3))),
                tokens_per_s=min(150.0, max(15.0, 600.0 / whole)),
                priority=dice.choices((50, 100, 200), (0.2, 0.7, 0.1))[0],
                warm=PINNED <= rank < PINNED + WARM,
                pinned=rank < PINNED and cards == 1,
                weight=1.0 / (rank + 1) ** 0.9,
            )
        )
    return found


def requests(specs: list[Spec], count: int, hours: float, seed: int) -> list[Request]:
    """`count` requests in the order in which they come."""
    dice = random.Random(f"requests {seed}")
    by_name = {spec.name: spec for spec in specs}
    names, weights = [s.name for s in specs], [s.weight for s in specs]
    length_s = hours * 3600.0
    found: list[Request] = []
    while len(found) < count:
        at = _time_of_day(dice) * length_s
        turns = 1 + min(40, int(dice.expovariate(1 / 7)))
        chosen = dice.choices(names, weights, k=2 if dice.random() < 0.15 else 1)
        for turn in range(turns):
            spec = by_name[chosen[turn % len(chosen)]]
            work_s = _work_s(dice, spec)
            if at < length_s:
                found.append(Request(at, spec.name, work_s))
            at += work_s + min(300.0, dice.expovariate(1 / 25))
    dice.shuffle(found)
    return sorted(found[:count])


def _time_of_day(dice: random.Random) -> float:
    """0..1 with five times as many sessions at noon as at midnight."""
    while True:
        at = dice.random()
        if dice.random() < 0.6 - 0.4 * math.cos(2 * math.pi * at):
            return at


def _work_s(dice: random.Random, spec: Spec) -> float:
    """Reading the prompt is twenty times as fast as writing the answer, token by token."""
    prompt = min(16_000.0, dice.lognormvariate(math.log(700), 1.0))
    answer = min(4_000.0, dice.lognormvariate(math.log(220), 0.9))
    return (prompt / 20 + answer) / spec.tokens_per_s
