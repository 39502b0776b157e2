"""What other tools were reported for, as far as the scheduler must do better.

The same reports in other layers: engines that outlive the daemon (C35) in
tests/daemon/test_adoption.py; removal by the runtime's own id (C37) in tests/runtimes; what a
reload changes (C39, C40) and state files (C42) with the settings and files of the daemon; live
memory in views (C46) in tests/daemon; fallback to the CPU (C47) and whose choice wins (C48) in
tests/unit/test_planning_asked.py.
"""

from __future__ import annotations

import pytest
from machine_shapes import GIB, card, on
from world import STUCK_AFTER_S, Asked, World, play

from flexlab.spec.plan import Wishes


def test_fifty_requests_alternate_between_two_models_of_one_card() -> None:
    """C26: never both at once, and no request fails."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        for name in ("a", "b"):
            world.add(name, 0, on("gpu0", 16, group="swap"), load_s=3)
        asked: list[Asked] = []
        for number in range(50):
            asked.append(world.ask("ab"[number % 2]))
            asked[-1].done()  # brief answers
            await world.run(0.2)  # the world looks at claims and groups after each event
        await world.run(120)
        assert [each.refused for each in asked] == [None] * 50
        assert all(each.lease for each in asked)

    play(story())


@pytest.mark.parametrize("after_s", [0.0, 0.1, 0.29, 0.31, 1.0])
def test_a_request_that_meets_the_idle_unload_is_served(after_s: float) -> None:
    """C27: whether it comes just before, during or just after the stop."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], idle_timeout_s=20)
        world.add("a", 0, on("gpu0", 16))
        world.ask("a").done()
        await world.run(22.05)  # planned, loaded, and idle for 20 s
        await world.run(after_s)
        asked = world.ask("a")
        await world.run(25)
        assert asked.lease is not None

    play(story())


def test_a_swap_lets_an_answer_finish_unless_priority_is_higher() -> None:
    """C28: an equal waits for it; a higher one may cut it, and then it hears why and when."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], drain_timeout_s=30)
        world.add("a", 0, on("gpu0", 16))
        world.add("equal", 0, on("gpu0", 16))
        world.add("high", 0, on("gpu0", 16), priority=200)
        streaming = world.ask("a")
        await world.run(7)
        equal = world.ask("equal")
        await world.run(60)
        assert streaming.cut is None
        streaming.done()
        await world.run(5)
        assert equal.lease is not None
        world.ask("high")
        await world.run(40)
        assert equal.cut is not None
        assert "high" in equal.cut.message
        assert equal.cut.retry_after_s is not None

    play(story())


def test_the_idle_time_begins_after_the_answer() -> None:
    """C30: limit 5 s, load 8 s, answer 12 s: it is there until 5 s after the answer."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], idle_timeout_s=5)
        world.add("a", 0, on("gpu0", 16), load_s=8)
        asked = world.ask("a")
        await world.run(20)
        asked.done()
        await world.run(4.9)
        assert world.state("a") == "ready"
        await world.run(0.5)
        assert world.running() == set()

    play(story())


def test_a_start_that_failed_is_tried_again_by_the_next_request() -> None:
    """C31: failed is no state for ever; a long load is none either."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("a", 0, on("gpu0", 16), load_s=400)
        world.fails.add("a")
        first = world.ask("a")
        await world.run(5)
        assert first.refused is not None
        world.fails.clear()
        await world.run(10)
        second = world.ask("a")
        await world.run(402)
        assert second.lease is not None

    play(story())


def test_the_next_load_waits_until_the_memory_is_seen_free() -> None:
    """C33: the card shows it 4 s after the engine is gone."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        for name in ("a", "b"):
            world.add(name, 0, on("gpu0", 16))
        world.frees_s["a"] = 4
        world.ask("a").done()
        await world.run(40)
        world.ask("b")
        gone_s = 0.05 + 0.3  # planned, stopped
        await world.run(gone_s + 3.9)
        assert "start b" not in world.deeds
        await world.run(0.3)
        assert "start b" in world.deeds

    play(story())


def test_memory_that_is_never_seen_free_is_waited_for_only_so_long() -> None:
    """C33: whoever else took it meanwhile, the wait is bounded."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], freed_within_s=15)
        for name in ("a", "b"):
            world.add(name, 0, on("gpu0", 16))
        world.frees_s["a"] = 1000
        world.ask("a").done()
        await world.run(40)
        b = world.ask("b")
        await world.run(15 + 5)
        assert b.lease is not None

    play(story())


def test_a_stop_that_hangs_is_said_and_forced_with_a_client_connected() -> None:
    """C34: since when and why; a client that stays does not hold it up."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("a", 0, on("gpu0", 16))
        world.never_stops.add("a")
        world.ask("a")
        await world.run(5)
        world.scheduler.down("a", force=True)
        await world.run(STUCK_AFTER_S + 1)
        (instance,) = world.scheduler.instances_of("a")
        stuck = instance.conditions["stuck"]
        assert world.now - stuck.since == pytest.approx(1)
        assert stuck.why
        world.never_stops.clear()
        world.scheduler.down("a", force=True)
        await world.run(1)
        assert world.running() == set()

    play(story())


def test_five_changes_of_the_settings_in_a_moment_start_one_instance() -> None:
    """C38: with a model that is kept warm, so that each change would start it."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("a", 0, on("gpu0", 4), keep="warm")
        for number in range(5):
            world.scheduler.wish("a", Wishes(settings={"context_size": str(4096 + number)}))
            await world.run(0.06)
            assert len(world.scheduler.instances_of("a")) <= 1
        await world.run(60)
        assert len(world.scheduler.instances_of("a")) == 1
        assert world.prepared_with["a"].settings == {"context_size": "4100"}

    play(story())


def test_what_was_measured_lets_in_what_the_estimate_would_not() -> None:
    """C43: estimated at 14 GiB, measured at 9, and 10 are free."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("a", 0, on("gpu0", 14))
        world.add("b", 0, on("gpu0", 14))
        world.takes["b"] = 9 / 14
        world.ask("b").done()
        await world.run(10)
        world.scheduler.down("b")
        await world.run(20)
        measured = world.used["b-key"]["gpu0"]
        assert measured <= 9 * GIB
        a = world.ask("a")
        await world.run(5)
        world.ways["b"] = (on("gpu0", measured / GIB),)  # as planning does with it
        b = world.ask("b")
        await world.run(5)
        assert a.lease is not None
        assert b.lease is not None
        assert world.running() == {"a", "b"}

    play(story())


def test_a_failed_load_gives_its_claim_back() -> None:
    """C44: the same size loads afterwards."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        for name in ("bad", "good"):
            world.add(name, 0, on("gpu0", 20))
        world.fails.add("bad")
        world.ask("bad")
        await world.run(5)
        assert world.scheduler.held("gpu0") == 0
        good = world.ask("good")
        await world.run(5)
        assert good.lease is not None

    play(story())


def test_a_refusal_for_want_of_memory_says_needed_there_and_held() -> None:
    """C44: three numbers, and by whom."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("holder", 0, on("gpu0", 15), pinned=True)
        world.add("asks", 0, on("gpu0", 12))
        world.ask("holder").done()
        await world.run(5)
        asked = world.ask("asks")
        await world.run(1)
        assert asked.refused is not None
        for word in ("12.0G", "15.0G", "24.0G", "holder"):
            assert word in asked.refused.message

    play(story())


def test_what_is_too_big_for_its_pool_is_refused_with_the_knob_to_turn() -> None:
    """C45: what the reserve leaves counts, not what is printed on the box."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 32, reserve_bytes=2 * GIB)])
        world.add("a", 0, on("gpu0", 30.16))
        asked = world.ask("a")
        await world.run(1)
        assert asked.refused is not None
        assert asked.refused.code == "too_big"
        assert "30.0G" in asked.refused.message
        assert "context_size" in (asked.refused.hint or "")
        assert "start a" not in world.deeds

    play(story())
