"""What holds whatever happens in whatever order, on two cards and the host's memory.

A failure prints its story and its seed. The same again: `pytest ... --hypothesis-seed=N`, or paste
the printed `@reproduce_failure(...)` above the test. `FLEXLAB_STORMS=50` tells fifty times as many
stories.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storms import (
    RELOAD,
    REQUESTS,
    STRANGERS,
    TROUBLE,
    USER,
    Shape,
    Storm,
    shapes,
    steps,
)
from world import play

TIMES = int(os.environ.get("FLEXLAB_STORMS", "1"))
Story = list[tuple[str, int, float]]


def told(count: int) -> settings:
    """So many stories, or more by the environment."""
    return settings(
        max_examples=count * TIMES,
        deadline=None,
        print_blob=True,
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
