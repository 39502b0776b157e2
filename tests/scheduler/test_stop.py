"""The user's stop, and stops that nobody confirms."""

from __future__ import annotations

from world import World, play


def test_down_drains_what_streams_and_refuses_who_waits() -> None:
    async def story() -> None:
        world = World(drain_timeout_s=30)
        world.add("a", 1)
        streaming = world.ask("a")
        await world.run(5)
        world.scheduler.down("a")
        await world.run(10)
        assert world.running() == {"a"}
        streaming.done()
        await world.run(1)
        assert world.running() == set()
        assert streaming.cut is None

    play(story())


def test_down_by_force_cuts() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        streaming = world.ask("a")
        await world.run(5)
        world.scheduler.down("a", force=True)
        await world.run(1)
        assert streaming.cut is not None
        assert world.running() == set()

    play(story())


def test_a_stop_that_is_not_confirmed_keeps_its_claim_until_forced() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6)
        world.add("b", 6)
        world.never_stops.add("a")
        world.ask("a").done()
        await world.run(5)
        world.scheduler.down("a")
        await world.run(30)
        (instance,) = world.scheduler.instances_of("a")
        assert "stuck" in instance.conditions
        assert world.scheduler.held("ram") == instance.claims["ram"]
        world.never_stops.clear()
        world.scheduler.down("a", force=True)
        await world.run(1)
        assert world.scheduler.held("ram") == 0

    play(story())


def test_a_stuck_stop_is_tried_again_by_every_down() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.never_stops.add("a")
        world.ask("a").done()
        await world.run(4)
        world.scheduler.down("a")
        await world.run(60)
        (instance,) = world.scheduler.down("a")
        confirmed = world.scheduler.when_gone(instance)
        await world.run(60)
        assert confirmed.done()
        assert confirmed.result() is False

    play(story())


def test_who_asks_for_a_stuck_model_hears_so_at_once() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6)
        world.add("b", 6)
        world.never_stops.add("a")
        world.ask("a").done()
        await world.run(5)
        world.scheduler.down("a")
        await world.run(30)
        again, other = world.ask("a"), world.ask("b")
        await world.run(5)
        assert again.refused is not None
        assert again.refused.code == "stuck"
        assert other.refused is not None
        assert "a" in other.refused.message

    play(story())
