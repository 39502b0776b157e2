"""Who yields to whom when not all fit."""

from __future__ import annotations

from world import World, play


def test_an_idle_model_makes_room_and_is_confirmed_gone_first() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6)
        world.add("b", 6)
        world.ask("a").done()
        await world.run(40)
        world.stop_s["a"] = 4
        asked = world.ask("b")
        await world.run(3)
        assert world.running() == {"a"}, "b may not start before a is gone"
        await world.run(5)
        assert asked.lease is not None
        assert world.scheduler.models["a"].preempted == 1

    play(story())


def test_two_that_fit_run_side_by_side() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 4)
        world.add("b", 4)
        world.ask("a"), world.ask("b")
        await world.run(5)
        assert world.running() == {"a", "b"}

    play(story())


def test_a_pinned_model_is_never_a_victim() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6, pinned=True)
        world.add("b", 6)
        world.ask("a").done()
        await world.run(100)
        asked = world.ask("b")
        await world.run(1)
        assert asked.refused is not None
        assert asked.refused.code == "pinned_in_the_way"
        assert "a" in asked.refused.message
        assert world.running() == {"a"}

    play(story())


def test_what_is_larger_than_the_pool_is_refused_at_once_and_evicts_nobody() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6)
        world.add("big", 31)
        world.ask("a").done()
        await world.run(40)
        asked = world.ask("big")
        await world.run(1)
        assert asked.refused is not None
        assert "31.0G" in asked.refused.message
        assert world.running() == {"a"}

    play(story())


def test_an_equal_that_is_busy_keeps_its_turn_and_then_drains() -> None:
    async def story() -> None:
        world = World(ram_gib=8, min_residency_s=30, drain_limit_s=600)
        world.add("a", 6)
        world.add("b", 6)
        streaming = world.ask("a")
        await world.run(5)
        asked = world.ask("b")
        await world.run(20)
        assert world.scheduler.instances_of("a")[0].state == "ready"
        await world.run(20)
        assert world.scheduler.instances_of("a")[0].state == "draining"
        assert streaming.cut is None
        streaming.done()
        await world.run(5)
        assert asked.lease is not None

    play(story())


def test_higher_priority_drains_a_busy_one_and_cuts_it_after_the_limit() -> None:
    async def story() -> None:
        world = World(ram_gib=8, drain_timeout_s=30)
        world.add("low", 6, priority=50)
        world.add("high", 6, priority=200)
        streaming = world.ask("low")
        await world.run(5)
        asked = world.ask("high")
        await world.run(29)
        assert streaming.cut is None
        await world.run(6)
        assert streaming.cut is not None
        assert "high" in streaming.cut.message
        assert asked.lease is not None

    play(story())


def test_a_drain_is_taken_back_when_the_waiter_hangs_up() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("low", 6, priority=50)
        world.add("high", 6, priority=200)
        streaming = world.ask("low")
        await world.run(5)
        asked = world.ask("high")
        await world.run(5)
        assert world.scheduler.instances_of("low")[0].state == "draining"
        asked.hang_up()
        await world.run(1)
        assert world.scheduler.instances_of("low")[0].state == "ready"
        await world.run(100)
        assert streaming.cut is None
        assert not world.ask("low").waits

    play(story())


def test_an_endless_stream_of_equal_priority_cannot_starve_the_other() -> None:
    async def story() -> None:
        world = World(ram_gib=8, min_residency_s=30)
        world.add("a", 6)
        world.add("b", 6)
        world.ask("a").done()
        await world.run(5)
        other = world.ask("b")
        for _ in range(200):
            busy = [world.ask("a"), world.ask("a")]
            await world.run(1)
            for each in busy:
                each.hang_up()
            if other.lease:
                break
        assert other.lease is not None

    play(story())


def test_lower_priority_never_stops_what_is_busy() -> None:
    async def story() -> None:
        world = World(ram_gib=8, queue_timeout_s=100)
        world.add("low", 6, priority=50)
        world.add("high", 6, priority=200)
        streaming = world.ask("high")
        await world.run(5)
        asked = world.ask("low")
        await world.run(101)
        assert streaming.cut is None
        assert asked.refused is not None
        assert asked.refused.status == 504

    play(story())


def test_memory_that_only_strangers_hold_is_said_with_numbers() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6)
        world.read_memory(5)
        asked = world.ask("a")
        await world.run(1)
        assert asked.refused is not None
        assert "6.0G" in asked.refused.message
        assert "3.0G is free" in asked.refused.message

    play(story())


def test_foreign_memory_is_not_read_while_something_of_ours_loads() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 2, load_s=10)
        world.ask("a")
        await world.run(5)
        world.read_memory(6)
        assert not world.scheduler.pools["ram"].foreign_bytes
        await world.run(10)
        world.read_memory(6, a=2)
        assert world.scheduler.pools["ram"].foreign_bytes == 4 * 1024**3

    play(story())


def test_more_measured_than_claimed_counts() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 2)
        world.add("b", 6)
        world.ask("a").done()
        await world.run(100)
        world.read_memory(3, a=3)
        assert world.scheduler.held("ram") == 3 * 1024**3

    play(story())


def test_who_fits_into_what_is_reserved_for_another_waits_for_its_turn() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("busy", 5)
        world.add("first", 6)
        world.add("second", 3)
        world.ask("busy")
        await world.run(4)
        world.ask("first")
        await world.run(1)
        second = world.ask("second")
        await world.run(1)
        assert second.refused is None
        assert second.waits

    play(story())


def test_a_model_in_nobodys_way_goes_on_admitting() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("big", 6, load_s=100)
        world.add("next", 6)
        world.add("small", 1)
        world.ask("big"), world.ask("small")
        await world.run(101)
        world.ask("next")
        await world.run(1)
        assert not world.ask("small").waits

    play(story())


def test_a_drain_ends_when_the_wanted_model_has_started_elsewhere() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("low", 5, priority=50)
        world.add("idle", 2, priority=150)
        world.add("high", 4, priority=200)
        streaming = world.ask("low")
        resting = world.ask("idle")
        await world.run(4)
        world.ask("high")
        await world.run(1)
        assert world.scheduler.instances_of("low")[0].state in ("ready", "draining")
        resting.done()
        world.scheduler.down("idle")
        await world.run(60)
        assert "high" in world.running()
        if "low" in world.running():
            assert streaming.cut is None

    play(story())


def test_a_model_whose_last_start_failed_displaces_nobody_that_is_busy() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("bad", 7)
        world.add("idle", 3)
        world.add("busy", 3)
        world.fails.add("bad")
        world.ask("bad")
        await world.run(20)
        world.ask("idle").done()
        world.ask("busy")
        await world.run(60)
        world.ask("bad")
        await world.run(5)
        assert world.running() == {"idle", "busy"}

    play(story())


def test_a_reading_that_spans_an_end_says_nothing_of_strangers() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 5)
        world.add("b", 5)
        world.ask("a").done()
        await world.run(10)
        before = world.scheduler.epoch
        world.scheduler.down("a")
        await world.run(2)
        world.scheduler.sample("ram", 6 * 1024**3, {}, before)
        b = world.ask("b")
        await world.run(10)
        assert b.lease is not None

    play(story())


def test_the_waiters_of_a_victim_get_in_when_it_need_not_yield_any_more() -> None:
    async def story() -> None:
        world = World(ram_gib=8, queue_timeout_s=500)
        world.add("yielding", 1, load_s=0.2)
        world.add("other", 1, load_s=0.2)
        world.add("wanted", 7, load_s=60)
        world.ask("yielding"), world.ask("other")
        await world.run(31)
        world.ask("wanted")
        await world.run(1)
        late = world.ask("yielding")
        await world.run(1)
        assert late.waits
        world.crash("other")
        await world.run(50)
        assert not late.waits

    play(story())
