"""Who makes room for whom, who is left alone, and what counts as room."""

from __future__ import annotations

from machine_shapes import GIB, card, on, over, ram
from world import World, play

from flexlab.spec.instance import RunState


def test_one_request_drains_one_card_only() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 8), card("gpu1", 8)])
        world.add("x", 6, on("gpu0", 6), priority=50)
        world.add("y", 6, on("gpu1", 6), priority=50)
        world.add("high", 6, on("gpu0", 6), on("gpu1", 6), priority=200)
        world.ask("x"), world.ask("y")
        await world.run(60)
        world.ask("high")
        await world.run(2)
        world.scheduler.tick()
        await world.run(2)
        assert [world.state("x"), world.state("y")].count("draining") == 1
        assert [world.state("x"), world.state("y")].count("ready") == 1

    play(story())


def test_higher_priority_hastens_a_drain_for_an_equal() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("x", 6)
        world.add("equal", 6)
        world.add("high", 6, priority=200)
        streaming = world.ask("x")
        await world.run(40)
        world.ask("equal")
        await world.run(10)
        assert world.state("x") == "draining"
        high = world.ask("high")
        await world.run(70)
        assert high.lease is not None
        assert streaming.cut is not None

    play(story())


def test_memory_that_two_cards_give_back_is_waited_for() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 8), card("gpu1", 8)])
        world.add("big", 6, over(["gpu0", "gpu1"], 6))
        world.add("other", 6, over(["gpu0", "gpu1"], 6))
        world.frees_s["big"] = 4
        world.ask("big").done()
        await world.run(5)
        world.read()
        await world.run(40)
        asked = world.ask("other")
        await world.run(10)
        assert asked.refused is None
        assert asked.lease is not None

    play(story())


def test_two_that_leave_together_are_each_seen_free() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        for name in ("a", "b"):
            world.add(name, 1, on("gpu0", 6))
        world.frees_s |= {"a": 1, "b": 10}
        for name in ("a", "b"):
            world.ask(name).done()
        await world.run(5)
        world.read()
        world.scheduler.down("a"), world.scheduler.down("b")
        await world.run(3)
        assert world.scheduler.held("gpu0") == 6 * GIB, "b's memory is still used"
        await world.run(9)
        assert world.scheduler.held("gpu0") == 0

    play(story())


def test_nobody_yields_in_vain_to_one_that_strangers_leave_no_room_for() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.is_strict = False
        world.add("x", 6)
        world.add("a", 5)
        world.ask("x").done()
        await world.run(40)
        world.memory.foreign["ram"] = 5 * GIB
        world.read()
        asked = world.ask("a")
        await world.run(10)
        assert asked.refused is not None
        assert world.running() == {"x"}

    play(story())


def test_a_replica_that_is_left_alone_is_the_model() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 8), card("gpu1", 8)])
        world.add("p", 6, on("gpu0", 6, slots=1), on("gpu1", 6, slots=1), pinned=True, replicas=2)
        world.add("other", 6, on("gpu0", 6), on("gpu1", 6), priority=200)
        world.ask("p")
        await world.run(5)
        world.ask("p")
        await world.run(5)
        assert len(world.scheduler.instances_of("p")) == 2
        one = world.scheduler.instances_of("p")[0]
        world.scheduler.gone(one.id, RunState(alive=False))
        await world.run(1)
        a = world.ask("other")
        await world.run(60)
        assert a.lease is not None
        assert "p" in world.running()
        (left,) = world.scheduler.instances_of("p")
        assert not left.is_replica

    play(story())


def test_linger_is_no_longer_than_it_says() -> None:
    async def story() -> None:
        for at in range(50):
            world = World(ram_gib=8, linger_s=4.7, min_residency_s=300)
            world.now += at * 0.1
            world.add("x", 6)
            world.add("a", 6)
            world.ask("x").done()
            await world.run(2.1)
            a = world.ask("a")
            await world.run(12)
            assert a.lease is not None, at

    play(story())


def test_an_idle_model_of_an_unreachable_runtime_is_left_alone() -> None:
    async def story() -> None:
        world = World(ram_gib=8, idle_timeout_s=20)
        world.add("x", 6)
        world.ask("x").done()
        await world.run(5)
        world.lose("process")
        await world.run(100)
        assert world.state("x") == "ready"
        world.find("process")
        await world.run(30)
        assert world.running() == set()

    play(story())


def test_a_warm_model_that_takes_more_than_there_is_does_not_come_and_go() -> None:
    async def story() -> None:
        world = World(pools=[ram(8, reserve_bytes=GIB)])
        world.is_strict = False
        world.add("warm", 4, keep="warm")
        world.takes["warm"] = 1.25
        world.memory.foreign["ram"] = 3 * GIB
        world.read()
        world.scheduler.tick()
        for _ in range(300):
            await world.run(1)
            world.read()
        assert world.deeds.count("start warm") == 1
        world.memory.foreign["ram"] = 0
        for _ in range(30):
            await world.run(1)
            world.read()
        assert world.running() == {"warm"}

    play(story())


def test_pinning_ends_a_drain_for_another() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("x", 6, priority=50)
        world.add("high", 6, priority=200)
        streaming = world.ask("x")
        await world.run(5)
        high = world.ask("high")
        await world.run(5)
        assert world.state("x") == "draining"
        world.scheduler.keep("x", pinned=True)
        await world.run(60)
        assert streaming.cut is None
        assert high.refused is not None
        assert high.refused.code == "pinned_in_the_way"

    play(story())


def test_who_was_cut_for_an_equal_comes_back_after_it() -> None:
    async def story() -> None:
        world = World(ram_gib=8, drain_limit_s=60)
        world.add("x", 6)
        world.add("equal", 6)
        streaming = world.ask("x", comes_back=True)
        await world.run(10)
        equal = world.ask("equal")
        await world.run(100)
        assert equal.lease is not None
        assert streaming.waits

    play(story())


def test_a_limit_per_key_is_said_with_its_number() -> None:
    async def story() -> None:
        world = World(ram_gib=8, max_in_flight_per_key=1, queue_timeout_s=10)
        world.add("x", 6)
        world.ask("x", key="k")
        await world.run(5)
        second = world.ask("x", key="k")
        await world.run(11)
        assert second.refused is not None
        assert "None" not in second.refused.message
        assert "1 request" in second.refused.message

    play(story())


def test_a_runtime_that_is_away_refuses_nobody_who_could_wait_for_it() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("x", 6, on("ram", 6, runtime="docker"))
        world.add("a", 6)
        world.ask("x").done()
        await world.run(40)
        world.lose("docker")
        a = world.ask("a")
        await world.run(5)
        assert a.waits
        world.find("docker")
        await world.run(10)
        assert a.lease is not None

    play(story())


def test_who_waits_for_a_runtime_keeps_no_memory_from_others() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("x", 6, on("ram", 6, runtime="docker"))
        world.add("a", 6)
        world.lose("docker")
        world.ask("x")
        await world.run(1)
        a = world.ask("a")
        await world.run(10)
        assert a.lease is not None

    play(story())


def test_down_by_force_gives_no_lease_on_what_is_being_stopped() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("x", 6)
        asked = world.ask("x")
        await world.run(5)
        seen = []
        assert asked.lease is not None
        asked.lease.on_cut(lambda why: seen.append(world.ask("x")))
        world.scheduler.down("x", force=True)
        await world.run(0.1)
        assert seen[0].lease is None

    play(story())


def test_who_drains_goes_on_when_it_is_pinned() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24), card("gpu1", 24)])
        world.add("x", 0, on("gpu0", 22), priority=50)
        world.add("other", 0, on("gpu1", 22), priority=50, load_s=4)
        world.add("high", 0, on("gpu0", 22), on("gpu1", 22), priority=200)
        streaming = world.ask("x")
        world.ask("other")
        await world.run(5)
        high = world.ask("high")
        await world.run(5)
        assert world.state("x") == "draining"
        world.scheduler.keep("x", pinned=True)
        await world.run(100)
        assert streaming.cut is None
        assert high.lease is not None

    play(story())


def test_three_equals_that_never_end_are_served_in_turn() -> None:
    async def story() -> None:
        world = World(ram_gib=8, drain_limit_s=60, queue_timeout_s=5000)
        asked = []
        for name in ("a", "b", "c"):
            world.add(name, 6)
            asked.append(world.ask(name, comes_back=True))
            await world.run(1)
        await world.run(250)
        served = [deed for deed in world.deeds if deed.startswith("start")]
        assert served[:3] == ["start a", "start b", "start c"]

    play(story())
