"""Memory accounts: what is held, what others hold, what is on its way out (rules 1, 10, 16)."""

from __future__ import annotations

from flexlab.core.units import say_bytes
from flexlab.scheduler.moves import Moves
from flexlab.scheduler.policy import ROUNDING_S
from flexlab.scheduler.state import Instance, PoolAccount
from flexlab.spec.instance import MemoryUse


class Accounts(Moves):
    """Base of the scheduler: its readings."""

    def held(self, pool: str) -> int:
        """Bytes accounted to our instances in this pool, until they are gone and seen free."""
        held = sum(i.held(pool) for i in self.instances.values() if pool in i.claims)
        account = self.pools.get(pool)
        return held + sum(one.size_bytes for one in account.leaving) if account else held

    def sample(
        self, pool_id: str, used_bytes: int | None, measured: dict[str, MemoryUse], epoch: int
    ) -> None:
        """A reading of one pool: what is used in all, and by each of our instances.

        `epoch` is what `self.epoch` was before the reading began: one during which something of
        ours came or went says nothing of others' use.
        """
        pool = self.pools.get(pool_id)
        if pool is None or epoch != self.epoch:
            return
        pool.used_bytes, pool.sampled_at = used_bytes, self._wall()
        self._see_free(pool)
        ours = [i for i in self.instances.values() if pool_id in i.claims]
        for instance in ours:
            if use := measured.get(instance.id):
                instance.measured[pool_id] = use.resident_bytes
                highest = max(instance.peak.get(pool_id, 0), use.resident_bytes)
                instance.peak[pool_id] = highest
        if used_bytes is None or pool.leaving or any(not _is_settled(i) for i in ours):
            return
        own = sum(use.own_bytes if (use := measured.get(i.id)) else i.claims[pool_id] for i in ours)
        pool.foreign_bytes = max(0, used_bytes - own)
        self._judge_growth(pool)
        self._pass()

    def _see_free(self, pool: PoolAccount) -> None:
        """What is gone counts no longer once a reading shows it."""
        now, used = self._clock(), pool.used_bytes
        before = len(pool.leaving)
        pool.leaving = [
            one
            for one in pool.leaving
            if now < one.until
            and (used is None or one.below_bytes is None or used >= one.below_bytes)
        ]
        if len(pool.leaving) != before:
            self.epoch += 1
            self._pass()

    def _expire_leaving(self, now: float) -> None:
        for pool in self.pools.values():
            if pool.leaving and any(one.until <= now for one in pool.leaving):
                self.epoch += 1
                pool.leaving = [one for one in pool.leaving if one.until > now]

    def _judge_growth(self, pool: PoolAccount) -> None:
        """Rule 16: it stops placements (there is less free) and is an event; it evicts nobody."""
        usable, foreign = pool.usable_bytes, pool.foreign_bytes or 0
        if usable is None:
            return
        held = self.held(pool.id)
        total = pool.total_bytes or usable
        short = held + foreign > total - pool.reserve_bytes and held > 0
        if short != pool.is_short:
            pool.is_short = short
            if short:
                text = (
                    f"other programs hold {say_bytes(foreign)} of {pool.id}: with our "
                    f"{say_bytes(held)} that is more than the {say_bytes(usable)} there is"
                )
            else:
                text = f"other programs have let go of {pool.id} again"
            self._effects.note("memory", text, size=foreign)
        if pool.kind == "ram":
            self._judge_pressure(pool)

    def _judge_pressure(self, pool: PoolAccount) -> None:
        """Of the host's RAM: whether less than the reserve is free, and since when."""
        if pool.total_bytes is None or pool.used_bytes is None:
            return
        pressed = pool.total_bytes - pool.used_bytes < pool.reserve_bytes
        if not pressed:
            pool.pressed_since = None
        elif pool.pressed_since is None:
            pool.pressed_since = self._clock()

    def _relieve(self, now: float) -> None:
        """Rule 16, its exception: idle models leave the host's RAM, the least recently used first.

        One at a time: whether another one must go shows the reading after it.
        """
        for pool in self.pools.values():
            since = pool.pressed_since
            if since is None or now - since < self.policy.pressed_s - ROUNDING_S:
                continue
            on_it = [i for i in self.instances.values() if pool.id in i.claims]
            if any(i.state == "stopping" for i in on_it):
                continue
            idle = [
                i
                for i in on_it
                if i.state == "ready" and not i.leases and not i.external
                if not self.models[i.model].pinned and i.idle_since is not None
                if "unknown" not in i.conditions
            ]
            if idle:
                first = min(idle, key=lambda one: one.idle_since or 0.0)
                self.models[first.model].took = {name: first.held(name) for name in first.claims}
                self._stop(first, "the host has less free memory than its reserve")
                pool.pressed_since = None  # until the next reading says so again


def _is_settled(instance: Instance) -> bool:
    """Its memory is what it will be: it neither loads nor stops."""
    return instance.state in ("ready", "draining")
