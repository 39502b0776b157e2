"""What the daemon makes of the helper's ticks: rows, rooms in memory, and whose each process is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from gpu_trees import GIB

from flexlab.daemon.gpu_readings import GpuReadings
from flexlab.gpus import pools, problems
from flexlab.scheduler.policy import Policy
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import Instance, Model, PoolAccount
from flexlab.spec.instance import ContainerRef, LaunchRecord, ProcessRef, RunState
from flexlab.spec.machine import (
    RAM_POOL,
    Aged,
    Cpu,
    Gpu,
    GpuSample,
    Holder,
    Machine,
    MigSlice,
    Pool,
    Sample,
)
from flexlab.spec.plan import Candidate, LaunchPlan, Probe

CARD = "0000:03:00.0"
OTHER = "0000:43:00.0"
CONTAINER = "3f2a" * 16
NOBODY = 2**22 + 1
"""Above the largest pid."""


class Nothing:
    """Effects that nobody has."""

    def __getattr__(self, _name: str) -> Callable[..., None]:
        return lambda *_, **__: None


def card(gpu_id: str = CARD, **values: Any) -> Gpu:
    base: dict[str, Any] = {"index": 0, "id": gpu_id, "pool": gpu_id, "vendor": "amd"}
    base |= {"arch": "gfx1100", "name": "a card", "is_apu": False, "vram_total_bytes": 24 * GIB}
    return Gpu(**(base | values))


def ticked(
    gpu_id: str = CARD, *, stale: bool = False, asleep: bool = False, **values: float
) -> Any:
    aged = {name: Aged(float(value), 0.1) for name, value in values.items()}
    return GpuSample(id=gpu_id, values=aged, stale=stale, asleep=asleep)


class Desk:
    """A scheduler, the readings that feed it, and a clock; a tick is a second."""

    def __init__(self, *gpus: Gpu, ram_used: int | None = 8 * GIB) -> None:
        self.now = 500.0
        self.held: dict[str, LaunchRecord] = {}
        # The launcher's effects are not asked for here.
        self.scheduler = Scheduler(
            Nothing(), Policy(), clock=lambda: self.now, wall=lambda: self.now
        )
        self.readings = GpuReadings(self.scheduler, self.held, clock=lambda: self.now)
        self.begin(*gpus or (card(),), ram_used=ram_used)
        # A daemon's first tick only begins the quiet.
        self.readings.take(self.sample())

    def begin(self, *gpus: Gpu, ram_used: int | None = 8 * GIB) -> None:
        ram = Pool(id=RAM_POOL, kind="ram", total_bytes=64 * GIB, used_bytes=ram_used)
        pooled = pools.assign(gpus, ram)
        for pool in (ram, *pooled.pools):
            if pool.id not in self.scheduler.pools:
                account = PoolAccount(pool.id, pool.kind, pool.total_bytes)
                account.used_bytes = pool.used_bytes
                self.scheduler.add_pool(account)
        self.readings.begin(
            Machine(
                hostname="here",
                platform="linux/amd64",
                cpu=Cpu(name=None, threads_total=8, threads_usable=8),
                gpus=tuple(pooled.gpus),
                pools=(ram, *pooled.pools),
            )
        )

    @staticmethod
    def sample(*parts: GpuSample, holders: Any = (), age_s: float | None = None) -> Sample:
        return Sample(at=0.0, seq=1, gpus=tuple(parts), holders=tuple(holders), holders_age_s=age_s)

    def tick(self, *parts: GpuSample, holders: Any = (), age_s: float | None = None) -> None:
        self.now += 1
        self.readings.take(self.sample(*parts, holders=holders, age_s=age_s))

    def rest(self, *parts: GpuSample, seconds: int = 5) -> None:
        """Ticks without a scan of other processes."""
        for _ in range(seconds):
            self.tick(*parts)

    def run(
        self,
        instance: str,
        gib: float,
        *,
        pool: str = CARD,
        state: Any = "ready",
        ref: Any = None,
    ) -> None:
        """An instance that holds a claim, known by `ref`."""
        model = instance.rpartition("-")[0]
        self.scheduler.add_model(Model(name=model))
        claims = {pool: int(gib * GIB)}
        candidate = Candidate(
            model=model, variant="v", backend="llamacpp", runtime="process", arch="gfx1100",
            support="full", devices=(pool,), needs=(), weights=(),
        )  # fmt: skip
        self.scheduler.adopt(
            Instance(instance, model, candidate, claims, state, self.now, "by the test")
        )
        plan = LaunchPlan(
            model=model, variant="v", backend="llamacpp", runtime="process", arch="gfx1100",
            served_name=model, ready=Probe(path="/health"), claims=claims,
        )  # fmt: skip
        self.held[instance] = LaunchRecord(
            flexlab_version="0", instance=instance, installation="here", model=model,
            created_at=0.0, plan=plan, api_key="", log_path="", ref=ref,
        )  # fmt: skip

    def gpu(self, gpu_id: str = CARD) -> Gpu:
        return next(gpu for gpu in self.readings.gpus() if gpu.id == gpu_id)

    def foreign(self, pool: str = CARD) -> float | None:
        """GiB that others hold."""
        found = self.scheduler.pools[pool].foreign_bytes
        return None if found is None else found / GIB


def docker(vram_gib: float | None, gpu: str = CARD, pid: int = NOBODY) -> Holder:
    """A process of our container."""
    return Holder(
        gpu=gpu,
        pid=pid,
        name="llama-server",
        cgroup=f"/system.slice/docker-{CONTAINER}.scope",
        vram_bytes=None if vram_gib is None else int(vram_gib * GIB),
    )


def foreigner(vram_gib: float, gpu: str = CARD) -> Holder:
    return Holder(gpu=gpu, pid=NOBODY, name="game", vram_bytes=int(vram_gib * GIB))


OURS = ContainerRef(id=CONTAINER)

# -- rows


def test_before_anything_is_known_there_is_nothing() -> None:
    scheduler = Scheduler(Nothing(), Policy(), clock=lambda: 0.0, wall=lambda: 0.0)
    readings = GpuReadings(scheduler, {})
    readings.take(Desk.sample(ticked(vram_used_bytes=GIB), holders=[foreigner(1)]))
    assert (readings.gpus(), readings.has_changed) == ((), False)


def test_the_values_of_the_last_tick_are_laid_over_the_card() -> None:
    desk = Desk(card(vram_used_bytes=GIB, busy_percent=3.0))
    desk.tick(ticked(vram_used_bytes=9 * GIB, busy_percent=77, power_w=120, temp_edge_c=61))
    gpu = desk.gpu()
    assert (gpu.vram_used_bytes, gpu.busy_percent, gpu.power_w) == (9 * GIB, 77, 120)
    assert gpu.temps_c == {"edge": 61}
    assert (gpu.pool_total_bytes, gpu.pool_free_bytes) == (24 * GIB, 15 * GIB)
    (sample,) = desk.readings.samples()
    assert sample.values["power_w"] == Aged(120.0, 0.1)


def test_what_a_card_no_longer_tells_is_unknown() -> None:
    """Not what it was when the daemon started, perhaps days ago."""
    before = card(vram_used_bytes=GIB, busy_percent=3.0, power_w=68.0, temps_c={"edge": 50.0})
    desk = Desk(before)
    desk.tick(ticked(busy_percent=5))
    gpu = desk.gpu()
    assert (gpu.busy_percent, gpu.power_w, gpu.temps_c) == (5, None, {})
    assert (gpu.vram_total_bytes, gpu.vram_used_bytes, gpu.pool_free_bytes) == (
        24 * GIB,
        None,
        None,
    )
    assert desk.foreign() is None


def test_a_card_without_an_answer_keeps_what_it_said() -> None:
    desk = Desk(card(vram_used_bytes=GIB, busy_percent=3.0))
    desk.tick(ticked(stale=True))
    assert (desk.gpu().vram_used_bytes, desk.gpu().busy_percent) == (GIB, 3.0)
    desk.tick()
    assert desk.gpu().vram_used_bytes == GIB


def test_a_card_falls_asleep_and_wakes() -> None:
    desk = Desk(card(busy_percent=3.0, power_w=68.0))
    for _ in range(2):
        desk.tick(ticked(asleep=True))
        gpu = desk.gpu()
        assert (gpu.asleep, gpu.busy_percent, gpu.power_w) == (True, None, None)
        assert [problem.code for problem in gpu.problems] == ["asleep"]
        desk.tick(ticked(busy_percent=50))
        assert (desk.gpu().asleep, desk.gpu().problems) == (False, ())


def test_a_card_that_slept_at_the_start_wakes_too() -> None:
    other = problems.memory_unknown()
    desk = Desk(card(asleep=True, problems=(other, problems.asleep())))
    desk.tick(ticked(stale=True))
    assert desk.gpu().asleep
    desk.tick(ticked(vram_used_bytes=GIB))
    assert (desk.gpu().asleep, desk.gpu().problems) == (False, (other,))


def test_memory_that_is_shared_is_bound_by_the_hosts_last_reading() -> None:
    desk = Desk(card(is_apu=True, unified=True, vram_total_bytes=GIB, gtt_total_bytes=50 * GIB))
    part = ticked(gtt_total_bytes=50 * GIB, gtt_used_bytes=0)
    desk.tick(part)
    assert desk.gpu().pool_free_bytes == 50 * GIB
    desk.scheduler.pools[RAM_POOL].used_bytes = 44 * GIB
    assert (desk.gpu().pool, desk.gpu().pool_free_bytes) == (RAM_POOL, 20 * GIB)
    desk.scheduler.pools[RAM_POOL].used_bytes = None
    assert desk.gpu().pool_free_bytes is None


# -- what others hold


def test_all_that_is_used_of_a_card_without_our_models_is_others() -> None:
    desk = Desk(card(), card(OTHER))
    desk.rest(ticked(vram_used_bytes=9 * GIB), ticked(OTHER, vram_used_bytes=GIB))
    assert (desk.foreign(), desk.foreign(OTHER)) == (9, 1)
    assert desk.scheduler.pools[CARD].used_bytes == 9 * GIB


@pytest.mark.parametrize("how", [{"stale": True}, {"asleep": True}])
def test_old_values_and_a_sleeping_card_say_nothing(how: dict[str, Any]) -> None:
    desk = Desk(card(), card(OTHER))
    desk.rest(ticked(vram_used_bytes=2 * GIB))
    desk.rest(ticked(vram_used_bytes=9 * GIB, **how), ticked(OTHER, vram_used_bytes=3 * GIB))
    assert (desk.foreign(), desk.foreign(OTHER)) == (2, 3)
    assert desk.scheduler.pools[CARD].used_bytes == 2 * GIB


def test_what_our_models_hold_is_not_others() -> None:
    desk = Desk()
    desk.run("a-1", 10, ref=OURS)
    part = ticked(vram_used_bytes=15 * GIB)
    desk.rest(part)
    desk.tick(part, holders=[docker(12), docker(0.5), foreigner(2)], age_s=0.0)
    assert desk.foreign() == 2.5
    assert desk.scheduler.instances["a-1"].measured == {CARD: int(12.5 * GIB)}


@pytest.mark.parametrize("holders", [(), (docker(None),), (foreigner(12),)])
def test_a_model_whose_use_is_not_told_holds_its_claim(holders: tuple[Holder, ...]) -> None:
    """NVIDIA's driver may name no process, and other users' files cannot be read."""
    desk = Desk()
    desk.run("a-1", 10, ref=OURS)
    part = ticked(vram_used_bytes=15 * GIB)
    desk.rest(part)
    desk.tick(part, holders=holders, age_s=0.0)
    assert desk.foreign() == 5
    assert desk.scheduler.instances["a-1"].measured == {}


@pytest.mark.parametrize("age_s", [None, 3.5])
def test_without_a_fresh_scan_nothing_is_said_of_a_card_with_our_models(
    age_s: float | None,
) -> None:
    desk = Desk(card(), card(OTHER))
    desk.run("a-1", 10, ref=OURS)
    parts = ticked(vram_used_bytes=15 * GIB), ticked(OTHER, vram_used_bytes=GIB)
    desk.rest(*parts)
    desk.tick(*parts, holders=[docker(12)], age_s=age_s)
    assert (desk.foreign(), desk.foreign(OTHER)) == (None, 1)


def test_while_a_model_comes_or_goes_nothing_is_learned() -> None:
    desk = Desk()
    desk.rest(ticked(vram_used_bytes=GIB))
    desk.run("a-1", 10, ref=OURS)
    full = ticked(vram_used_bytes=11 * GIB)
    desk.tick(full, holders=[docker(1)], age_s=0.0)
    assert desk.foreign() == 1
    for _ in range(3):
        desk.tick(full, holders=[docker(10)], age_s=0.0)
    assert desk.foreign() == 1
    desk.scheduler.gone("a-1", RunState(alive=False))
    desk.held.clear()
    desk.tick(full)
    assert desk.foreign() == 1
    desk.rest(ticked(vram_used_bytes=2 * GIB))
    assert desk.foreign() == 2


def test_a_model_that_loads_says_nothing_of_others_however_long_it_takes() -> None:
    desk = Desk()
    desk.rest(ticked(vram_used_bytes=GIB))
    desk.run("a-1", 10, state="loading", ref=OURS)
    for _ in range(60):
        desk.tick(ticked(vram_used_bytes=6 * GIB), holders=[docker(2)], age_s=0.0)
    assert desk.foreign() == 1
    assert desk.scheduler.pools[CARD].used_bytes == 6 * GIB


def test_a_scan_from_the_time_of_loading_is_not_held_against_a_full_card() -> None:
    """2 of 20 GiB were there when processes were scanned; the other 18 are no stranger's."""
    desk = Desk()
    desk.rest(ticked(vram_used_bytes=0))
    desk.run("a-1", 20, ref=OURS)
    full = ticked(vram_used_bytes=20 * GIB)
    for age_s in (1.0, 2.0, 3.0):
        desk.tick(full, holders=[docker(2)], age_s=age_s)
    assert desk.foreign() == 0
    assert desk.scheduler.instances["a-1"].measured == {}
    desk.tick(full, holders=[docker(20)], age_s=0.0)
    assert desk.scheduler.instances["a-1"].measured == {CARD: 20 * GIB}
    assert desk.foreign() == 0


def test_slices_are_accounted_each_for_itself() -> None:
    parts = tuple(
        MigSlice(uuid=name, vram_total_bytes=20 * GIB, vram_used_bytes=5 * GIB)
        for name in ("MIG-1", "MIG-2", "MIG-3")
    )
    desk = Desk(card(vendor="nvidia", mig=parts))
    desk.run("a-1", 10, pool="MIG-1", ref=OURS)
    used: dict[str, Any] = {"mig:MIG-1:vram_used_bytes": 14 * GIB, "mig:MIG-2:vram_used_bytes": GIB}
    desk.rest(ticked(**used))
    desk.tick(ticked(**used), holders=[docker(12, "MIG-1"), foreigner(1, "MIG-2")], age_s=0.0)
    assert [desk.foreign(part.uuid) for part in parts] == [2, 1, None]
    assert desk.gpu().mig[2].vram_used_bytes is None


def test_shared_memory_is_the_hosts_account() -> None:
    """What a process maps there is RAM, which is sampled by others."""
    desk = Desk(card(is_apu=True, unified=True, gtt_total_bytes=50 * GIB))
    desk.rest(ticked(vram_used_bytes=GIB, gtt_used_bytes=9 * GIB))
    assert set(desk.scheduler.pools) == {RAM_POOL}
    assert desk.foreign(RAM_POOL) is None
    assert desk.scheduler.pools[RAM_POOL].used_bytes == 8 * GIB


# -- whose a process is


@pytest.fixture
def engine() -> Iterator[tuple[int, int]]:
    """A session's leader and a process that it started: pids of the kernel's own."""
    code = (
        "import subprocess, sys; p = subprocess.Popen(['cat']); print(p.pid, flush=True); p.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as leader:
        assert leader.stdout is not None
        yield leader.pid, int(leader.stdout.readline())
        assert leader.stdin is not None
        leader.stdin.close()  # both end


def test_an_engine_and_its_workers_are_known_by_their_session(engine: tuple[int, int]) -> None:
    leader, worker = engine
    desk = Desk()
    desk.run("a-1", 1, ref=ProcessRef(pid=leader, start_ticks=1, boot_id="b"))
    holders = [
        Holder(gpu=CARD, pid=leader, vram_bytes=GIB, busy_percent=40.0),
        Holder(gpu=CARD, pid=worker, gtt_bytes=2 * GIB, name="worker", cgroup="/user"),
        Holder(gpu=CARD, pid=NOBODY, name="gone"),
        Holder(gpu=CARD, pid=0, vram_bytes=GIB),
        Holder(gpu=CARD, pid=1),
    ]
    desk.tick(holders=holders)
    views = desk.readings.holders()
    assert [(view.instance, view.model) for view in views] == [("a-1", "a")] * 2 + [
        (None, None)
    ] * 3
    assert (views[0].vram_bytes, views[0].busy_percent, views[0].pid) == (GIB, 40.0, leader)
    assert (views[1].gtt_bytes, views[1].name, views[1].cgroup) == (2 * GIB, "worker", "/user")


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/system.slice/docker-{CONTAINER}.scope",
        f"/docker/{CONTAINER}",
        f"/docker/{CONTAINER}/nested",
        f"/user.slice/user-1000.slice/docker-{CONTAINER}.scope",
    ],
)
@pytest.mark.parametrize("pid", [NOBODY, 0])
def test_a_containers_processes_are_known_by_their_control_group(cgroup: str, pid: int) -> None:
    desk = Desk()
    desk.run("a-1", 1, ref=OURS)
    desk.run("b-1", 1, ref=ContainerRef(id="77" * 32))
    desk.tick(holders=[Holder(gpu=CARD, pid=pid, cgroup=cgroup)])
    (view,) = desk.readings.holders()
    assert (view.instance, view.model) == ("a-1", "a")


@pytest.mark.parametrize("cgroup", [None, "/", f"/docker/{'9' * 64}", f"/docker/{CONTAINER[:12]}"])
def test_other_containers_processes_are_not_ours(cgroup: str | None) -> None:
    desk = Desk()
    desk.run("a-1", 1, ref=OURS)
    desk.run("b-1", 1, ref=None)
    desk.tick(holders=[Holder(gpu=CARD, pid=NOBODY, cgroup=cgroup)])
    (view,) = desk.readings.holders()
    assert view.instance is None


# -- cards that come and go


def test_a_card_that_came_is_said_until_it_was_looked_for() -> None:
    desk = Desk()
    desk.tick(ticked())
    assert not desk.readings.has_changed
    desk.tick(ticked(), ticked(OTHER))
    assert desk.readings.has_changed
    desk.begin(card(), card(OTHER))
    assert not desk.readings.has_changed
    desk.tick(ticked(), ticked(OTHER))
    assert not desk.readings.has_changed


def test_the_helper_is_believed_once_about_what_detection_does_not_find() -> None:
    """Or the daemon would search for ever."""
    desk = Desk()
    desk.tick(ticked(OTHER))
    assert desk.readings.has_changed
    desk.begin(card())
    for _ in range(3):
        desk.tick(ticked(OTHER))
        assert not desk.readings.has_changed
    desk.tick(ticked(), ticked(OTHER))
    assert desk.readings.has_changed


def test_a_helper_that_still_searches_says_nothing_of_cards() -> None:
    desk = Desk()
    desk.tick()
    assert not desk.readings.has_changed
    assert desk.gpu().id == CARD
