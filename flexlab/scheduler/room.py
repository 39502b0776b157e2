"""What memory there is and who holds it, as placement asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

import msgspec

from flexlab.scheduler.policy import Occupant
from flexlab.spec.plan import Candidate


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """One pool's account. None: unknown, and then never a reason to refuse."""

    usable_bytes: int | None
    """Total less reserve: what could ever be given out."""
    free_bytes: int | None
    """Usable less foreign use and all claims; below 0 where those are more than there is."""


class Seen(Protocol):
    """Who holds what at this moment, as placement asks for it."""

    @property
    def rooms(self) -> Mapping[str, Room]: ...

    @property
    def reserved(self) -> Mapping[str, int]:
        """Bytes per pool that a model ahead in the queue waits for (rule 7)."""

    @property
    def unknown(self) -> Mapping[str, str]:
        """Runtimes that cannot be reached: nothing new starts there (rule 19)."""

    def near(self, candidate: Candidate) -> list[Occupant]:
        """Instances of other models that share a pool or a device with it."""


class Occupancy(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """All of it at once."""

    rooms: dict[str, Room]
    occupants: tuple[Occupant, ...] = ()
    reserved: dict[str, int] = {}
    unknown: dict[str, str] = {}

    @cached_property
    def _by_place(self) -> dict[str, list[Occupant]]:
        """Pool or device -> who is there."""
        found: dict[str, list[Occupant]] = {}
        for one in self.occupants:
            for place in dict.fromkeys((*one.claims, *one.devices)):
                found.setdefault(place, []).append(one)
        return found

    def near(self, candidate: Candidate) -> list[Occupant]:
        by_place = self._by_place
        return others_at([by_place.get(place, ()) for place in places_of(candidate)], candidate)


def places_of(candidate: Candidate) -> tuple[str, ...]:
    """The pools and devices that it would be on."""
    return (*(need.pool for need in candidate.needs), *candidate.devices)


def others_at(lists: Sequence[Sequence[Occupant]], candidate: Candidate) -> list[Occupant]:
    """Those of all the lists, once each, that are not of the same model."""
    found = {one.instance: one for some in lists for one in some}
    return [one for one in found.values() if one.model != candidate.model]


def missing_for(candidate: Candidate, occupancy: Seen, *, reserved: bool = True) -> dict[str, int]:
    """Bytes short per pool (negative: to spare); a pool of unknown size lacks nothing.

    `reserved`: what models ahead in the queue wait for is not to be had (rule 7).
    """
    short: dict[str, int] = {}
    for need in candidate.needs:
        room = occupancy.rooms.get(need.pool)
        if room is None or room.free_bytes is None:
            short[need.pool] = 0
        else:
            ahead = occupancy.reserved.get(need.pool, 0) if reserved else 0
            short[need.pool] = need.total_bytes + ahead - room.free_bytes
    return short


def any_short(missing: Mapping[str, int]) -> bool:
    return any(count > 0 for count in missing.values())
