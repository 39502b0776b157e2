"""Models that are kept warm: when they come back, and when not."""

from __future__ import annotations

from world import World, play


def test_a_warm_model_comes_back_after_it_was_preempted() -> None:
    async def story() -> None:
        world = World(ram_gib=8, idle_timeout_s=60)
        world.add("warm", 6, keep="warm")
        world.add("cold", 6)
        world.ask("warm").done()
        await world.run(40)
        asked = world.ask("cold")
        await world.run(10)
        assert world.running() == {"cold"}
        asked.done()
        await world.run(100)
        assert world.running() == {"warm"}

    play(story())


def test_two_warm_models_that_do_not_fit_together_then_silence() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("one", 6, keep="warm")
        world.add("two", 6, keep="warm")
        world.scheduler.tick()
        await world.run(10_000)
        assert len(world.running()) == 1
        assert world.pending == 0, "nothing is due any more"
        assert sum(deed.startswith("start") for deed in world.deeds) == 1

    play(story())


def test_down_of_a_warm_model_is_final_until_it_is_wanted_again() -> None:
    async def story() -> None:
        world = World()
        world.add("warm", 1, keep="warm")
        world.ask("warm").done()
        await world.run(10)
        world.scheduler.down("warm")
        await world.run(1000)
        assert world.running() == set()
        asked = world.ask("warm")
        await world.run(10)
        assert asked.lease is not None

    play(story())


def test_a_warm_model_comes_back_after_a_crash_and_after_a_refusal() -> None:
    async def story() -> None:
        world = World(ram_gib=8, queue_timeout_s=20)
        world.add("warm", 5, keep="warm")
        world.add("big", 6)
        world.scheduler.tick()
        await world.run(100)
        world.crash("warm")
        await world.run(60)
        assert world.running() == {"warm"}
        big = world.ask("big")
        await world.run(60)
        assert big.lease is not None
        refused = world.ask("warm")
        await world.run(25)
        assert refused.refused is not None
        big.done()
        await world.run(2000)
        assert world.running() == {"warm"}

    play(story())


def test_a_warm_model_comes_back_when_a_stranger_lets_go_of_the_memory() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("warm", 5, keep="warm")
        world.read_memory(6)
        world.scheduler.tick()
        await world.run(10)
        assert world.running() == set()
        world.read_memory(1)
        await world.run(10)
        assert world.running() == {"warm"}

    play(story())


def test_a_warm_model_that_cannot_start_is_given_up_until_it_is_wanted() -> None:
    async def story() -> None:
        world = World()
        world.add("warm", 1, keep="warm")
        world.fails.add("warm")
        world.scheduler.tick()
        await world.run(10_000)
        assert world.deeds.count("start warm") == world.scheduler.policy.restore_tries
        assert world.pending == 0
        world.fails.clear()
        up = world.ask("warm", wants_download=True)
        await world.run(10)
        assert up.lease is not None

    play(story())


def test_a_cold_model_yields_sooner_while_a_warm_one_is_out() -> None:
    async def story() -> None:
        world = World(ram_gib=8, idle_timeout_s=900, yield_after_s=30)
        world.add("warm", 6, keep="warm")
        world.add("cold", 6)
        world.ask("warm").done()
        await world.run(40)
        world.ask("cold").done()
        await world.run(45)
        assert world.running() == {"warm"}

    play(story())


def test_a_warm_model_that_can_never_fit_hurries_nobody() -> None:
    async def story() -> None:
        world = World(ram_gib=8, idle_timeout_s=900)
        world.add("big", 6, keep="warm")
        world.add("pinned", 5, pinned=True)
        world.add("cold", 1)
        world.ask("pinned").done()
        await world.run(5)
        world.ask("cold").done()
        await world.run(100)
        assert "cold" in world.running()

    play(story())
