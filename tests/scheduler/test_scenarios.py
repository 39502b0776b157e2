"""Situations that every lab comes into, each as one story."""

from __future__ import annotations

from machine_shapes import GIB, card, on, over
from world import World, play

CARDS = ("gpu0", "gpu1")


def test_two_warm_models_that_do_not_fit_together_then_nothing_happens() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("one", 0, on("gpu0", 14), keep="warm")
        world.add("two", 0, on("gpu0", 14), keep="warm")
        world.ask("two").done()
        await world.run(100_000)
        assert world.running() == {"one"}, "the first by name is this machine's warm set"
        assert world.deeds.count("start one") == world.deeds.count("start two") == 1
        assert world.pending == 0

    play(story())


def test_an_idle_model_of_high_priority_yields_to_a_low_request() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], linger_s=5)
        world.add("high", 0, on("gpu0", 20), priority=900)
        world.add("low", 0, on("gpu0", 20), priority=1)
        world.ask("high").done()
        await world.run(100)
        low = world.ask("low")
        await world.run(5)
        assert low.lease is not None

    play(story())


def test_a_long_pull_disturbs_nobody_who_serves() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("serving", 0, on("gpu0", 20))
        world.add("pulled", 0, on("gpu0", 20))
        world.not_installed.add("pulled")
        streaming = world.ask("serving")
        await world.run(40)
        up = world.ask("pulled", wants_download=True)
        await world.run(99)  # the pull takes 100 s
        assert world.state("serving") == "ready"
        late = world.ask("serving")
        assert late.lease is not None
        late.done()
        assert world.scheduler.held("gpu0") == 20 * GIB, "what is only fetched claims nothing"
        assert streaming.cut is None
        streaming.done()
        await world.run(10)
        assert up.lease is not None

    play(story())


def test_a_higher_priority_that_arrives_during_a_load_aborts_it() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("low", 0, on("gpu0", 20), load_s=40, priority=50)
        world.add("high", 0, on("gpu0", 20), load_s=2, priority=200)
        low = world.ask("low")
        await world.run(10)
        high = world.ask("high")
        await world.run(20)
        assert high.lease is not None, "long before the load of 40 s would have ended"
        assert low.waits, "its request is queued again, not refused"
        high.done()
        await world.run(90)
        assert low.lease is not None

    play(story())


def test_an_equal_that_arrives_during_a_load_waits_for_it_and_its_turn() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("first", 0, on("gpu0", 20), load_s=40)
        world.add("second", 0, on("gpu0", 20))
        first = world.ask("first")
        await world.run(10)
        world.ask("second")
        await world.run(31)
        assert first.lease is not None
        assert "stop first" not in world.deeds

    play(story())


def test_a_two_card_model_among_small_ones_gets_both_cards() -> None:
    async def story() -> None:
        world = World(pools=[card(name, 24) for name in CARDS])
        world.add("wide", 0, over(CARDS, 20))
        smalls = [f"small{number}" for number in range(6)]
        for name in smalls:
            world.add(name, 0, *(on(pool, 8) for pool in CARDS))
            world.ask(name).done()
        await world.run(5)
        wide = world.ask("wide")
        for _ in range(100):  # every small one is asked for again and again
            for name in smalls:
                world.ask(name).done()
            await world.run(1)
            if wide.lease:
                break
        assert wide.lease is not None
        assert world.running() == {"wide"}

    play(story())


def test_a_two_card_model_is_placed_whole_or_disturbs_nobody() -> None:
    async def story() -> None:
        world = World(pools=[card(name, 24) for name in CARDS])
        world.add("wide", 0, over(CARDS, 20))
        world.add("idle", 0, on("gpu0", 20))
        world.add("pinned", 0, on("gpu1", 20), pinned=True)
        for name in ("idle", "pinned"):
            world.ask(name).done()
        await world.run(60)
        wide = world.ask("wide")
        await world.run(5)
        assert wide.refused is not None
        assert "pinned" in wide.refused.message
        assert world.running() == {"idle", "pinned"}

    play(story())


def test_victims_drained_in_vain_serve_on() -> None:
    async def story() -> None:
        world = World(pools=[card(name, 24) for name in CARDS])
        for name in CARDS:
            world.add(f"on {name}", 0, on(name, 20), priority=50)
        world.add("wide", 0, over(CARDS, 20), priority=200)
        streaming = [world.ask(f"on {name}") for name in CARDS]
        await world.run(10)
        wide = world.ask("wide")
        await world.run(10)
        assert [world.state(f"on {name}") for name in CARDS] == ["draining", "draining"]
        wide.hang_up()
        await world.run(100)
        assert [each.cut for each in streaming] == [None, None]
        assert not any(world.ask(f"on {name}").waits for name in CARDS)
        assert "start wide" not in world.deeds

    play(story())


def test_an_endless_stream_of_equal_priority_ends_with_its_turn() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], min_residency_s=30)
        world.add("stream", 0, on("gpu0", 20), load_s=2)
        world.add("other", 0, on("gpu0", 20), load_s=2)
        ongoing = [world.ask("stream")]
        await world.run(4)
        other = world.ask("other")
        for _ in range(60):
            ongoing.append(world.ask("stream"))
            await world.run(1)
            ongoing.pop(0).hang_up()  # there is always one at work
            if other.lease:
                break
        assert other.lease is not None
        assert other.ended_at is not None
        assert other.ended_at - other.asked_at <= 30 + 5

    play(story())


def test_two_agents_in_turn_on_one_card_with_long_loads() -> None:
    """Each asks anew as soon as it has its answer of a second: loads must not eat the time."""

    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        answered = {"one": 0, "two": 0}
        asked = {}
        for name in answered:
            world.add(name, 0, on("gpu0", 20), load_s=40)
            asked[name] = world.ask(name)
        for _ in range(1200):
            await world.run(1)
            for name, each in asked.items():
                assert each.refused is None
                if each.lease is not None:
                    each.done()
                    answered[name] += 1
                    asked[name] = world.ask(name)
        loads = sum(deed.startswith("start") for deed in world.deeds)
        assert min(answered.values()) > 200, "both get on"
        assert loads <= 12, "a turn lasts at least twice as long as its load"

    play(story())


def test_a_pinned_model_in_the_way_is_said_at_once_and_stays() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("pinned", 0, on("gpu0", 20), pinned=True, priority=1)
        world.add("urgent", 0, on("gpu0", 20), priority=1000)
        world.ask("pinned").done()
        await world.run(100)
        urgent = world.ask("urgent")
        await world.run(1)
        assert urgent.refused is not None
        assert urgent.refused.hint == "flexlab down pinned"
        world.scheduler.keep("pinned", pinned=False)
        again = world.ask("urgent")
        await world.run(10)
        assert again.lease is not None

    play(story())


def test_a_start_that_fails_after_it_cut_a_victim_cuts_no_second_one() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)], drain_timeout_s=30)
        world.add("victim", 0, on("gpu0", 20), priority=50)
        world.add("broken", 0, on("gpu0", 20), priority=200)
        world.fails.add("broken")
        streaming = world.ask("victim", comes_back=True)
        await world.run(10)
        broken = world.ask("broken")
        await world.run(40)
        assert broken.refused is not None
        assert streaming.cut is not None
        await world.run(10)
        assert streaming.lease is not None, "cut before its first byte, it was queued again"
        await world.run(20)
        world.ask("broken")
        await world.run(100)
        assert world.state("victim") == "ready"
        assert world.deeds.count("stop victim") == 1

    play(story())


def test_an_estimate_that_is_too_low_is_corrected_by_the_reading() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("hungry", 0, on("gpu0", 10))
        world.add("other", 0, on("gpu0", 12))
        world.takes["hungry"] = 1.5
        busy = world.ask("hungry")
        await world.run(10)
        world.read()
        other = world.ask("other")
        await world.run(20)
        assert other.waits, "12 of 24 GiB are not free while 15 are used"
        busy.done()
        await world.run(60)
        assert other.lease is not None
        assert world.used["hungry-key"] == {"gpu0": 15 * GIB}

    play(story())


def test_a_death_for_lack_of_memory_is_remembered_and_planned_anew() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.add("hungry", 0, on("gpu0", 10))
        world.starves.add("hungry")
        asked = world.ask("hungry")
        await world.run(5)
        assert asked.refused is not None
        assert world.short["hungry-key"] == {"gpu0": 10 * GIB}
        assert "hungry-key" not in world.used
        world.starves.clear()
        world.ways["hungry"] = (on("gpu0", 11.5),)
        up = world.ask("hungry", wants_download=True)
        await world.run(5)
        assert up.lease is not None
        assert world.scheduler.held("gpu0") == int(11.5 * GIB)

    play(story())


def test_a_game_that_takes_the_memory_evicts_nobody_and_is_said() -> None:
    async def story() -> None:
        world = World(pools=[card("gpu0", 24)])
        world.is_strict = False
        world.add("serving", 0, on("gpu0", 16))
        world.add("next", 0, on("gpu0", 6), priority=50)
        streaming = world.ask("serving")
        await world.run(10)
        world.read()
        world.memory.foreign["gpu0"] = 12 * GIB
        world.read()
        asked = world.ask("next")
        await world.run(60)
        world.read()
        assert streaming.cut is None
        assert world.state("serving") == "ready"
        assert asked.lease is None, "nothing new starts in what the game holds"
        assert any("other programs hold 12" in text for text in world.events)
        world.memory.foreign["gpu0"] = 0
        world.read()
        again = world.ask("next")
        await world.run(10)
        assert again.lease is not None

    play(story())


def test_a_game_that_takes_the_hosts_memory_unloads_idle_models_there() -> None:
    async def story() -> None:
        world = World(ram_gib=16, pressed_s=10)
        world.is_strict = False
        for name in ("older", "newer", "busy"):
            world.add(name, 3)
        world.ask("older").done()
        await world.run(5)
        world.ask("newer").done()
        streaming = world.ask("busy")
        await world.run(5)
        world.memory.foreign["ram"] = 9 * GIB  # 2 GiB more than there are
        for _ in range(20):
            world.read()
            await world.run(1)
        assert world.running() == {"newer", "busy"}, "the least recently used, and no more"
        assert streaming.cut is None

    play(story())
