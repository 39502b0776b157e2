"""What holds whatever happens in whatever order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from world import Asked, World, play

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "up", "done", "hang up", "crash", "down", "wait"]),
        st.sampled_from(["a", "b", "c", "d"]),
        st.floats(0.01, 40.0),
    ),
    max_size=60,
)


def lab(shape: list[tuple[float, float, int]]) -> World:
    world = World(ram_gib=8, queue_timeout_s=120, idle_timeout_s=50)
    for name, (gib, load_s, priority) in zip("abcd", shape, strict=True):
        world.add(name, gib, load_s=load_s, priority=priority)
    return world


MODELS = st.lists(
    st.tuples(st.floats(1, 9), st.floats(0.2, 30), st.sampled_from([50, 100, 200])),
    min_size=4,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(MODELS, STEPS)
def test_every_request_ends_and_nothing_is_left(shape: Any, steps: Any) -> None:
    async def story() -> None:
        world = lab(shape)
        asked: list[Asked] = []
        for deed, name, pause in steps:
            mine = [each for each in asked if each.model == name]
            if deed == "ask":
                asked.append(world.ask(name))
            elif deed == "up":
                asked.append(world.ask(name, wants_download=True))
            elif deed == "done" and mine:
                mine[-1].done()
            elif deed == "hang up" and mine:
                mine[-1].hang_up()
            elif deed == "crash":
                world.crash(name)
            elif deed == "down":
                world.scheduler.down(name)
            world.check()
            await world.run(pause)
        # every wait ends by its deadline, though nobody who has a lease lets go of it
        await world.run(125)
        assert not [each.model for each in asked if each.waits]
        for each in asked:
            each.hang_up()
        await world.run(2000)
        assert all(not i.leases for i in world.scheduler.instances.values())
        assert world.running() == set(), "cold models unload by themselves"
        assert world.scheduler.held("ram") == 0
        assert world.pending == 0, "quiescence: nothing is due any more"

    play(story())


@settings(max_examples=80, deadline=None)
@given(MODELS, st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_who_hangs_up_before_anything_started_causes_no_start(shape: Any, names: Any) -> None:
    async def story() -> None:
        world = lab(shape)
        asked = [world.ask(name) for name in names]
        for each in asked:
            each.hang_up()
        await world.run(300)
        assert not [deed for deed in world.deeds if deed.startswith("start")]

    play(story())
