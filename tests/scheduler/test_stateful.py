"""What holds whatever happens in whatever order, on two cards and the host's memory.

By itself it tells the same few stories each time; `FLEXLAB_STORMS=50` tells fifty times as many,
and others each time. A failure prints its story, the last events and how to play it again: paste
the printed `@reproduce_failure(...)` above the test, or give `--hypothesis-seed=N`.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from storms import (
    RELOAD,
    REQUESTS,
    STRANGERS,
    TROUBLE,
    UNHURRIED_S,
    USER,
    Shape,
    Storm,
    shapes,
    steps,
)
from world import STUCK_AFTER_S, play

from flexlab.scheduler.policy import turn_s

TIMES = int(os.environ.get("FLEXLAB_STORMS", "1"))
Story = list[tuple[str, int, float]]


def told(count: int) -> settings:
    """So many stories, or more by the environment."""
    return settings(
        max_examples=count * TIMES,
        deadline=None,
        derandomize=TIMES == 1,  # always the same few stories, unless many are asked for
        print_blob=True,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def labs(
    *, priorities: tuple[int, ...] = (50, 100, 200), most_taken: float = 1.0
) -> st.SearchStrategy[list[Shape]]:
    """Five models."""
    one = shapes(priorities=priorities, most_taken=most_taken)
    return st.lists(one, min_size=5, max_size=5)


@told(150)
@given(labs(), steps(*REQUESTS, *REQUESTS, *TROUBLE, *USER, *RELOAD, most=60))
def test_claims_groups_deadlines_and_rest(models: list[Shape], story: Story) -> None:
    async def told() -> None:
        storm = Storm(models, is_strict=True)
        async with storm.told():
            await storm.play(story)
            await storm.run(125)
            await storm.end()

    play(told())


@told(60)
@given(labs(), steps(*REQUESTS, *REQUESTS, *REQUESTS, *USER, *RELOAD, most=60))
def test_the_highest_waits_no_longer_than_a_drain_and_a_stop(
    models: list[Shape], story: Story
) -> None:
    async def told() -> None:
        urgent = replace(models[0], priority=900, more={})
        storm = Storm([urgent, *models[1:]], is_strict=True, queue_timeout_s=5000)
        # What is left of an earlier instance of its own may have to stop first.
        own_s = STUCK_AFTER_S + urgent.load_s + 0.1
        storm.bound_s = lambda asked: UNHURRIED_S + own_s if asked.model == "m0" else 5000
        async with storm.told():
            await storm.play(
                [
                    (deed, number or (0 if deed in REQUESTS else 1), pause)
                    for deed, number, pause in story
                ]
            )
            await storm.end()

    play(told())


@told(60)
@given(labs(priorities=(100,)), steps("ask", "ask", "ask", "hang up", most=60))
def test_equals_that_never_end_take_turns(models: list[Shape], story: Story) -> None:
    async def told() -> None:
        equal = [replace(shape, more={}) for shape in models]
        storm = Storm(equal, is_strict=True, queue_timeout_s=5000, drain_limit_s=60)
        policy = storm.scheduler.policy
        turns_s = [
            turn_s(one.load_s, policy) + 60 + policy.stop_timeout_s + 25 + one.load_s
            for one in equal
        ]
        storm.bound_s = lambda asked: sum(turns_s)
        async with storm.told():
            await storm.play(story)
            await storm.run(sum(turns_s))
            await storm.end()

    play(told())


@told(100)
@given(
    labs(most_taken=1.3),
    steps(*REQUESTS, *REQUESTS, *STRANGERS, *STRANGERS, *TROUBLE, *USER, *RELOAD, most=60),
)
def test_strangers_and_wrong_estimates(models: list[Shape], story: Story) -> None:
    async def told() -> None:
        storm = Storm(models, is_strict=False)
        async with storm.told():
            await storm.play(story)
            storm.do("game over", storm.names[0])
            await storm.end()

    play(told())
