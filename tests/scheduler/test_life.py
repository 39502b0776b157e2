"""Load on demand, idle unload, withdrawal, failure and the user's stop."""

from __future__ import annotations

import pytest
from world import World, play

from flexlab.spec.plan import Wishes


def test_first_request_loads_and_gets_its_lease_when_ready() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1, load_s=2)
        asked = world.ask("a")
        await world.run(1.5)
        assert asked.waits
        await world.run(1)
        assert asked.lease is not None
        assert asked.lease.model == "a"

    play(story())


def test_a_ready_model_gives_a_lease_at_once() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.ask("a")
        await world.run(5)
        assert not world.ask("a").waits

    play(story())


def test_a_hundred_waiters_share_one_load() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        asked = [world.ask("a") for _ in range(100)]
        await world.run(5)
        assert all(each.lease for each in asked)
        assert world.deeds.count("start a") == 1

    play(story())


def test_idle_time_counts_from_the_end_of_the_last_answer() -> None:
    async def story() -> None:
        world = World(idle_timeout_s=5)
        world.add("a", 1, load_s=8)
        asked = world.ask("a")
        await world.run(20)  # loading 8 s, answering 12 s: longer than the limit, never idle
        assert world.running() == {"a"}
        asked.done()
        await world.run(4.5)
        assert world.running() == {"a"}
        await world.run(1.5)
        assert world.running() == set()

    play(story())


@pytest.mark.parametrize("wish", [{"keep": "warm"}, {"pinned": True}])
def test_warm_and_pinned_models_do_not_idle_out(wish: dict[str, object]) -> None:
    async def story() -> None:
        world = World(idle_timeout_s=5)
        world.add("a", 1, **wish)
        world.ask("a").done()
        await world.run(3)
        await world.run(1000)
        assert world.running() == {"a"}

    play(story())


def test_a_request_never_downloads() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.not_installed.add("a")
        asked = world.ask("a")
        await world.run(1)
        assert asked.refused is not None
        assert (asked.refused.code, asked.refused.status) == ("model_not_installed", 404)
        assert "prepare a with download" not in world.deeds

    play(story())


def test_a_request_during_the_download_of_an_up_shares_it_within_its_own_time() -> None:
    async def story() -> None:
        world = World(queue_timeout_s=60)  # the download takes 100 s
        world.add("a", 1)
        world.not_installed.add("a")
        up = world.ask("a", wants_download=True)
        await world.run(1)
        impatient = world.ask("a")
        await world.run(50)
        late = world.ask("a")
        await world.run(150)
        assert up.lease is not None
        assert late.lease is not None
        assert impatient.refused is not None
        assert "fetched" in impatient.refused.message

    play(story())


def test_an_up_that_is_withdrawn_ends_its_download_and_loads_nothing() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.not_installed.add("a")
        up = world.ask("a", wants_download=True)
        await world.run(5)
        up.hang_up()
        await world.run(500)
        assert "cancel a" in world.deeds
        assert "start a" not in world.deeds

    play(story())


def test_a_second_up_keeps_the_download_when_the_first_leaves() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.not_installed.add("a")
        first = world.ask("a", wants_download=True)
        second = world.ask("a", wants_download=True)
        await world.run(5)
        first.hang_up()
        await world.run(200)
        assert second.lease is not None
        assert "cancel a" not in world.deeds

    play(story())


def test_a_load_ends_when_nobody_waits_for_it_any_more() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1, load_s=60)
        asked = world.ask("a")
        await world.run(5)
        asked.hang_up()
        await world.run(2)
        assert world.running() == set()

    play(story())


def test_a_failed_start_tells_its_waiters_and_backs_off() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.fails.add("a")
        asked = world.ask("a")
        await world.run(3)
        assert asked.refused is not None
        assert asked.refused.message == "a is broken"
        again = world.ask("a")
        assert again.refused is not None
        assert again.refused.code == "backing_off"
        assert again.refused.retry_after_s is not None
        assert 5 < again.refused.retry_after_s <= 10
        await world.run(again.refused.retry_after_s + 0.1)
        assert world.ask("a").waits

    play(story())


def test_an_up_ends_the_back_off() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.fails.add("a")
        world.ask("a")
        await world.run(3)
        world.fails.clear()
        up = world.ask("a", wants_download=True)
        await world.run(5)
        assert up.lease is not None

    play(story())


def test_a_first_crash_is_answered_by_a_new_start_at_once() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        streaming = world.ask("a")
        await world.run(5)
        world.crash("a")
        assert streaming.cut is not None
        assert "died" in streaming.cut.message
        again = world.ask("a")
        await world.run(5)
        assert again.lease is not None

    play(story())


def test_an_engine_that_crashes_again_and_again_is_given_time() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        for _ in range(2):
            world.ask("a")
            await world.run(5)
            world.crash("a")
        again = world.ask("a")
        assert again.refused is not None
        assert again.refused.code == "backing_off"

    play(story())


def test_other_settings_replace_what_runs() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.ask("a").done()
        await world.run(5)
        (before,) = world.scheduler.instances_of("a")
        world.scheduler.wish("a", Wishes(settings={"context_size": "8192"}))
        up = world.ask("a", wants_download=True)
        await world.run(10)
        (after,) = world.scheduler.instances_of("a")
        assert up.lease is not None
        assert after.id != before.id

    play(story())


def test_the_end_of_the_daemon_answers_everyone_who_waits() -> None:
    async def story() -> None:
        from flexlab.spec.plan import Refusal

        world = World()
        world.add("a", 1)
        asked = world.ask("a")
        world.scheduler.refuse_all(Refusal(code="daemon_ending", message="ending"))
        await world.run(5)
        assert asked.refused is not None
        late = world.ask("a")
        assert late.refused is not None
        assert late.refused.code == "daemon_ending"

    play(story())


def test_every_wait_ends_by_its_deadline_with_a_cause() -> None:
    async def story() -> None:
        world = World(ram_gib=8, queue_timeout_s=20, min_residency_s=100)
        world.add("a", 6)
        world.add("b", 6)
        world.ask("a")  # never ends its answer
        await world.run(5)
        late = world.ask("b")
        await world.run(21)
        assert late.refused is not None
        assert late.refused.status == 504
        assert "a" in late.refused.message

    play(story())


def test_health_for_a_minute_ends_a_series_of_failures() -> None:
    async def story() -> None:
        world = World(ram_gib=8)
        world.add("a", 6)
        world.add("low", 6, priority=10)
        world.fails.add("a")
        world.ask("a")
        await world.run(20)
        world.fails.clear()
        healthy = world.ask("a")
        await world.run(200)
        healthy.done()
        world.scheduler.down("a")
        await world.run(5)
        world.ask("low")
        await world.run(5)
        again = world.ask("a")
        await world.run(60)
        assert again.lease is not None

    play(story())


def test_wishes_given_while_preparing_are_the_ones_that_start() -> None:
    async def story() -> None:
        world = World()
        world.add("a", 1)
        world.not_installed.add("a")
        world.ask("a", wants_download=True)
        await world.run(5)
        world.scheduler.wish("a", Wishes(settings={"context_size": "8192"}))
        up = world.ask("a", wants_download=True)
        await world.run(300)
        assert up.lease is not None
        assert world.prepared_with["a"].settings == {"context_size": "8192"}

    play(story())


def test_a_timer_that_fires_a_little_early_is_set_again() -> None:
    async def story() -> None:
        world = World(idle_timeout_s=5)
        world.add("a", 1)
        world.early_s = 0.0004  # as loops do that count in milliseconds
        world.ask("a").done()
        await world.run(20)
        assert world.running() == set()

    play(story())


def test_a_fetch_longer_than_the_queue_time_survives_a_change_of_wishes() -> None:
    async def story() -> None:
        world = World(queue_timeout_s=50)
        world.add("a", 1)
        world.not_installed.add("a")
        first = world.ask("a", wants_download=True)
        await world.run(10)
        world.scheduler.wish("a", Wishes(settings={"context_size": "8192"}))
        second = world.ask("a", wants_download=True)
        await world.run(300)
        assert first.lease is not None
        assert second.lease is not None

    play(story())
