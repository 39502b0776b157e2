"""The warm set, and why a model is in the state that it is in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from machine_shapes import card, on, ram
from world import World, play

from flexlab.scheduler.warm import Warm, warm_set
from flexlab.scheduler.why import why
from flexlab.spec.plan import Wishes

SIZES = st.integers(1, 12)
WARM = st.lists(
    st.builds(
        lambda name, priority, size, other: Warm(
            name=name, priority=priority, ways=({"gpu0": size},) + (({"ram": other},) * (other > 6))
        ),
        name=st.sampled_from("abcdefgh"),
        priority=st.sampled_from([50, 100, 200]),
        size=SIZES,
        other=SIZES,
    ),
    max_size=6,
    unique_by=lambda one: one.name,
)
USABLE = st.fixed_dictionaries({"gpu0": st.integers(0, 24), "ram": st.integers(0, 24)})


@given(WARM, USABLE)
def test_members_of_the_warm_set_fit_together(models: list[Warm], usable: dict[str, int]) -> None:
    members = [one for one in models if one.name in warm_set(models, usable)]
    ways = [way for one in members for way in one.ways[:1]]
    if all(len(one.ways) == 1 for one in members):
        assert sum(way["gpu0"] for way in ways) <= usable["gpu0"]
    assert sum(min(sum(way.values()) for way in one.ways) for one in members) <= sum(
        usable.values()
    )


@given(WARM, USABLE)
def test_only_what_comes_before_keeps_a_model_out(
    models: list[Warm], usable: dict[str, int]
) -> None:
    """Whoever comes after it, by priority then name, changes nothing for it."""
    order = sorted(models, key=lambda one: (-one.priority, one.name))
    members = warm_set(models, usable)
    for count in range(len(order)):
        head = warm_set(order[: count + 1], usable)
        assert head == members & {one.name for one in order[: count + 1]}


@given(WARM, USABLE)
def test_the_order_in_which_they_are_named_does_not_matter(
    models: list[Warm], usable: dict[str, int]
) -> None:
    assert warm_set(models, usable) == warm_set(reversed(models), usable)


@given(WARM, st.integers(0, 24), st.integers(0, 24))
def test_more_memory_helps_the_first_whom_it_concerns(
    models: list[Warm], less: int, more: int
) -> None:
    """It may put a smaller one of lower priority out, yet never for nothing."""
    one_way = [Warm(name=m.name, priority=m.priority, ways=m.ways[:1]) for m in models]
    small, large = sorted((less, more))
    before = warm_set(one_way, {"gpu0": small})
    after = warm_set(one_way, {"gpu0": large})
    changed = sorted(
        (one for one in one_way if one.name in before ^ after), key=lambda m: (-m.priority, m.name)
    )
    if changed:
        assert changed[0].name in after


def test_who_is_not_planned_yet_is_a_member_until_its_needs_are_known() -> None:
    known = Warm(name="a", priority=100, ways=({"gpu0": 20},))
    new = Warm(name="b", priority=100, ways=())
    assert warm_set([known, new], {"gpu0": 20}) == {"a", "b"}
    planned = Warm(name="b", priority=100, ways=({"gpu0": 1},))
    assert warm_set([known, planned], {"gpu0": 20}) == {"a"}


def told(world: World, name: str) -> str:
    """All sentences of it."""
    sentences = why(world.scheduler, name, world.now)
    assert sentences
    assert all(sentence.strip() for sentence in sentences)
    return "\n".join(sentences)


def test_who_waits_is_told_who_holds_the_memory_and_until_when() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], queue_timeout_s=600, drain_timeout_s=30)
        world.add("holder", 0, on("gpu0", 20), priority=50)
        world.add("asks", 0, on("gpu0", 20), priority=200)
        world.ask("holder")
        await world.run(5)
        world.ask("asks")
        await world.run(1)
        asks, holder = told(world, "asks"), told(world, "holder")
        assert "1 request waits, for another" in asks
        assert "holder holds 20.0 GiB of gpu0 and is draining, for another" in asks
        assert "it makes room for asks" in holder
        assert "it works on 1 request" in holder

    play(story())


def test_every_state_of_a_model_is_explained() -> None:
    async def story() -> None:
        world = World(pools=[ram(8), card("gpu0", 24)])
        world.add("a", 0, on("gpu0", 20), load_s=10)
        world.add("b", 0, on("gpu0", 20), priority=200)
        world.not_installed.add("b")
        assert "nobody asked for it" in told(world, "a")
        asked = world.ask("a")
        await world.run(5)
        assert "is loading" in told(world, "a")
        await world.run(10)
        asked.done()
        assert "it is idle and unloads in" in told(world, "a")
        up = world.ask("b", wants_download=True)
        await world.run(1)
        assert "weights are being fetched" in told(world, "b")
        await world.run(120)
        assert up.lease is not None
        assert "it made room for b; its next request brings it back" in told(world, "a")
        world.scheduler.down("b", force=True)
        await world.run(5)
        assert "its user stopped it" in told(world, "b")
        world.scheduler.enable("b", enabled=False)
        assert "it is disabled" in told(world, "b")
        world.fails.add("a")
        world.ask("a")
        await world.run(30)
        world.scheduler.wish("a", Wishes())
        assert "a is broken" in told(world, "a")
        world.scheduler.keep("a", pinned=True)
        assert "pinned: never made to yield" in told(world, "a")

    play(story())


def test_who_waits_for_a_runtime_or_does_not_go_away_is_explained() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("a", 0, on("gpu0", 20, runtime="docker"))
        world.ask("a").done()
        await world.run(5)
        world.lose("docker")
        assert "it is unknown: no answer" in told(world, "a")
        world.scheduler.down("a")
        await world.run(30)
        assert "it is stuck" in told(world, "a")

    play(story())
