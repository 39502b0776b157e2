"""Placement alone: from candidates and who holds what to an answer, without any clock."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from machine_shapes import GIB, candidate, candidates, on, over

from flexlab.scheduler.place import Asker, place
from flexlab.scheduler.policy import Occupant, Policy
from flexlab.scheduler.room import Occupancy, Room
from flexlab.spec.plan import Placement, Refusal, Wait

POLICY = Policy()
ASKER = Asker(priority=100)


def rooms(**gib: tuple[float, float]) -> dict[str, Room]:
    """Pool -> (usable, free) in GiB."""
    return {
        name: Room(usable_bytes=int(usable * GIB), free_bytes=int(free * GIB))
        for name, (usable, free) in gib.items()
    }


def occupant(model: str, gib: dict[str, float], **more: Any) -> Occupant:
    """One that has been idle for long, unless it is said otherwise."""
    facts: dict[str, Any] = {"phase": "ready", "priority": 100, "idle_s": 1000.0}
    claims = {pool: int(size * GIB) for pool, size in gib.items()}
    devices = tuple(pool for pool in gib if pool != "ram") or ("cpu",)
    return Occupant(
        instance=f"{model}-1", model=model, claims=claims, devices=devices, **(facts | more)
    )


def test_neighbours_share_a_pool_or_a_device_once_and_are_of_other_models() -> None:
    wide = occupant("wide", {"gpu0": 1, "gpu1": 1})
    elsewhere = occupant("elsewhere", {"gpu2": 1})
    offloads = occupant("offloads", {"gpu2": 1, "ram": 4})
    same = occupant("asks", {"gpu0": 1})
    occupancy = Occupancy(rooms={}, occupants=(wide, elsewhere, offloads, same))
    asks = candidate("asks", way=over(["gpu0", "gpu1"], 2))
    assert occupancy.near(asks) == [wide]
    on_the_host = candidate("asks", way=on("ram", 2))
    assert occupancy.near(on_the_host) == [offloads]


def test_a_runtime_that_is_away_is_waited_for_and_said() -> None:
    occupancy = Occupancy(rooms=rooms(gpu0=(24, 24)), unknown={"docker": "no answer"})
    answer = place(candidates("a", [on("gpu0", 4, runtime="docker")]), occupancy, POLICY, ASKER)
    assert isinstance(answer, Wait)
    assert "docker" in answer.why
    assert "no answer" in answer.why


def test_another_runtime_of_the_same_class_is_taken_instead() -> None:
    occupancy = Occupancy(rooms=rooms(gpu0=(24, 24)), unknown={"docker": "no answer"})
    ways = [on("gpu0", 4, runtime="docker"), on("gpu0", 4)]
    answer = place(candidates("a", ways), occupancy, POLICY, ASKER)
    assert isinstance(answer, Placement)
    assert answer.candidate.runtime == "process"


def test_memory_on_its_way_out_is_waited_for_on_every_card() -> None:
    leaving = [
        occupant("old", {pool: 20}, phase="stopping") for pool in ("gpu0", "gpu1")
    ]  # one entry for each card
    named = [
        Occupant(**{f: getattr(o, f) for f in o.__struct_fields__} | {"instance": f"old {n}"})
        for n, o in enumerate(leaving)
    ]
    occupancy = Occupancy(rooms=rooms(gpu0=(24, 4), gpu1=(24, 4)), occupants=tuple(named))
    answer = place(candidates("a", [over(["gpu0", "gpu1"], 20)]), occupancy, POLICY, ASKER)
    assert isinstance(answer, Wait)
    assert answer.under_way
    assert set(answer.blocked_by) == {"old 0", "old 1"}


def test_only_those_that_leave_and_are_needed_are_waited_for() -> None:
    soon = occupant("soon", {"gpu0": 10}, phase="stopping")
    busy = occupant("busy", {"gpu0": 10}, phase="draining", settling=True, in_flight=1)
    occupancy = Occupancy(rooms=rooms(gpu0=(24, 4)), occupants=(busy, soon))
    answer = place(candidates("a", [on("gpu0", 12)]), occupancy, POLICY, ASKER)
    assert isinstance(answer, Wait)
    assert answer.blocked_by == ("soon-1",)


def test_a_worse_class_is_not_taken_to_spare_an_idle_victim() -> None:
    idle = occupant("idle", {"gpu0": 20})
    occupancy = Occupancy(rooms=rooms(gpu0=(24, 4), ram=(64, 64)), occupants=(idle,))
    ways = [on("gpu0", 20), on("ram", 20, preference=1)]
    answer = place(candidates("a", ways), occupancy, POLICY, ASKER)
    assert isinstance(answer, Placement)
    assert answer.victims == ("idle-1",)


def test_a_worse_class_is_taken_where_the_better_one_can_never_be() -> None:
    occupancy = Occupancy(rooms=rooms(gpu0=(8, 8), ram=(64, 64)))
    ways = [on("gpu0", 20), on("ram", 20, preference=1)]
    answer = place(candidates("a", ways), occupancy, POLICY, ASKER)
    assert isinstance(answer, Placement)
    assert answer.candidate.devices == ("cpu",)


def test_more_held_than_there_is_counts_as_less_than_nothing_free() -> None:
    """Evicting 6 GiB gives 3 where 3 too many are in use: not enough for 5."""
    idle = occupant("idle", {"gpu0": 6})
    occupancy = Occupancy(rooms=rooms(gpu0=(8, -3)), occupants=(idle,))
    answer = place(candidates("a", [on("gpu0", 5)]), occupancy, POLICY, ASKER)
    assert isinstance(answer, Refusal)
    assert "0.0G is free" in answer.message


def test_a_pool_of_unknown_size_refuses_nobody() -> None:
    occupancy = Occupancy(rooms={"gpu0": Room(usable_bytes=None, free_bytes=None)})
    answer = place(candidates("a", [on("gpu0", 500)]), occupancy, POLICY, ASKER)
    assert isinstance(answer, Placement)


OCCUPANTS = st.lists(
    st.builds(
        lambda name, gib, pool, more: occupant(name, {pool: gib}, **more),
        name=st.sampled_from("bcdefg"),
        gib=st.integers(1, 12),
        pool=st.sampled_from(["gpu0", "gpu1"]),
        more=st.sampled_from(
            [
                {},
                {"pinned": True},
                {"in_flight": 1, "idle_s": None},
                {"in_flight": 1, "idle_s": None, "priority": 200},
                {"in_flight": 1, "idle_s": None, "turn_over": False},
                {"phase": "loading", "waiting": 1, "idle_s": None},
                {"phase": "stopping"},
                {"is_unreachable": True},
            ]
        ),
    ),
    max_size=6,
    unique_by=lambda one: one.instance,
)


@given(OCCUPANTS, st.integers(1, 24), st.booleans())
def test_victims_may_yield_suffice_and_none_is_needless(
    occupants: list[Occupant], need: int, is_wide: bool
) -> None:
    free = {
        pool: 24 * GIB - sum(o.claims.get(pool, 0) for o in occupants) for pool in ("gpu0", "gpu1")
    }
    found = {name: Room(usable_bytes=24 * GIB, free_bytes=size) for name, size in free.items()}
    occupancy = Occupancy(rooms=found, occupants=tuple(occupants))
    ways = [over(free, need)] if is_wide else [on(pool, need) for pool in free]
    answer = place(candidates("a", ways), occupancy, POLICY, ASKER)
    if not isinstance(answer, Placement):
        return
    victims = [o for o in occupants if o.instance in answer.victims]
    leaving = [o for o in occupants if o.phase == "stopping" and victims]
    assert not any(o.pinned or o.is_unreachable or o.priority > 100 for o in victims)
    for one in [None, *victims]:
        gone = [o for o in [*leaving, *victims] if o is not one]
        room = {
            pool: size + sum(o.claims.get(pool, 0) for o in gone) for pool, size in free.items()
        }
        fits = all(room[n.pool] >= n.total_bytes for n in answer.candidate.needs)
        assert fits == (one is None), "room for all of it, and only with every victim"
