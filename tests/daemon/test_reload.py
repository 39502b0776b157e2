"""Settings and recipes that change under a daemon that works."""

from __future__ import annotations

import asyncio
import http.client
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_lab import Lab, Start, gguf, write_recipe

from flexlab import client, daemons
from flexlab.core import paths
from flexlab.core.units import GIB
from flexlab.daemon.filewatch import FileWatch
from flexlab.demo.machine import demo_machine
from flexlab.spec.lab import Event
from flexlab.spec.machine import Machine
from flexlab.spec.plan import Wishes


class Watched:
    """A daemon whose pauses pass at once: a look sees everything that was written before it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.now = 0.0
        self.in_pauses: Iterator[Callable[[], object]] = iter(())
        """What happens while a change settles, one in each pause."""
        reload = lab.service.reload
        reload.clock = lambda: self.now
        reload.pause = self._pause

    async def _pause(self, seconds: float) -> None:
        for happens in self.in_pauses:
            self.now += seconds / 5
            happens()
            return
        self.now += seconds

    async def look(self) -> list[Event]:
        """One look; what it told."""
        before = self.lab.service.events.last_id
        await self.lab.service.reload.look()
        return [e for e in self.lab.service.events.after(before) if e.kind == "settings"]

    def conditions(self, model: str) -> set[str]:
        instances = self.lab.service.scheduler.instances_of(model)
        return {kind for instance in instances for kind in instance.conditions}


Begin = Callable[..., Awaitable[Watched]]


@pytest.fixture
def begin(start: Start) -> Begin:
    async def begin_one(**settings: Any) -> Watched:
        watched = Watched(await start(**settings))
        await watched.look()
        return watched

    return begin_one


def write_settings(text: str) -> Path:
    file = paths.settings_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


# -- how a file changes


def in_place(file: Path, text: str) -> None:
    file.write_text(text)


def by_rename(file: Path, text: str) -> None:
    fresh = file.with_name(file.name + "~")
    fresh.write_text(text)
    fresh.replace(file)


def by_another_link(file: Path, text: str) -> None:
    """`ln -sfn`."""
    target = file.parent / f".versions-{len(text)}" / file.name
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)
    link = file.with_name(file.name + ".new")
    link.symlink_to(target)
    link.replace(file)


def by_data_folder(file: Path, text: str) -> None:
    """As Kubernetes mounts a ConfigMap: the file is a link into a folder that is one too."""
    version = file.parent / f"..v{len(text)}"
    version.mkdir()
    (version / file.name).write_text(text)
    link = file.parent / "..data_tmp"
    link.symlink_to(version.name)
    link.replace(file.parent / "..data")
    if not file.is_symlink():
        file.unlink()
        file.symlink_to(f"..data/{file.name}")


def under_the_mount(file: Path, text: str) -> None:
    """A mount of the file alone: written from outside, with the times of before."""
    before = file.stat()
    with file.open("r+") as same:
        same.truncate()
        same.write(text)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


WAYS = [in_place, by_rename, by_another_link, by_data_folder, under_the_mount]
Way = Callable[[Path, str], None]


@pytest.mark.parametrize("way", WAYS)
async def test_settings_count_however_their_file_was_changed(
    home: Path, begin: Begin, way: Way
) -> None:
    file = write_settings("idle_timeout: 100s\n")
    way(file, "idle_timeout: 200s\n# first\n")
    lab = await begin()
    policy = lambda: lab.lab.service.scheduler.policy.idle_timeout_s  # noqa: E731
    assert policy() == 200
    way(file, "idle_timeout: 300s\n# other\n# again\n")
    (event,) = await lab.look()
    assert policy() == 300
    assert "idle_timeout 3m 20s -> 5m" in event.text


@pytest.mark.parametrize("way", WAYS)
async def test_a_recipe_counts_however_its_file_was_changed(
    home: Path, begin: Begin, way: Way
) -> None:
    file = write_recipe(home, "small")
    text = file.read_text()
    way(file, text + "priority: 101\n# a\n")
    lab = await begin()
    way(file, text + "priority: 102\n# a\n# b\n")
    (event,) = await lab.look()
    assert "small" in event.text
    assert lab.lab.service.scheduler.models["small"].priority == 102


async def test_a_whole_folder_of_recipes_may_be_another_one(home: Path, begin: Begin) -> None:
    folder = write_recipe(home, "old").parent
    folder.rename(home / "v1")
    (home / "v2").mkdir()
    folder.symlink_to(home / "v1")
    lab = await begin()
    text = (home / "v1" / "old.yaml").read_text()
    (home / "v2" / "new.yaml").write_text(text.replace("old", "new"))
    link = home / "link"
    link.symlink_to(home / "v2")
    link.replace(folder)
    (event,) = await lab.look()
    assert "new new" in event.text
    assert "old gone" in event.text
    assert set(lab.lab.service.registry.recipes()) >= {"new"}


def test_a_file_that_was_only_touched_has_not_changed(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("a: 1\n")
    watch = FileWatch({"settings": (file,)})
    os.utime(file, (1, 1))
    assert watch.look(0.0) == frozenset()
    assert not watch.is_moving


def test_a_second_write_within_the_clock_of_the_disk_is_seen(tmp_path: Path) -> None:
    """Two versions of one length with the same time stamps: only the content differs."""
    file = tmp_path / "settings.yaml"
    file.write_text("a: 1\n")
    watch = FileWatch({"settings": (file,)})
    stamp = file.stat()
    in_place(file, "a: 2\n")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    watch.look(0.0)
    assert watch.look(1.0) == {"settings"}


def test_what_comes_back_before_it_has_settled_is_no_change(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("a: 1\n")
    watch = FileWatch({"settings": (file,), "models": (tmp_path / "models",)})
    file.unlink()
    assert watch.look(0.0) == frozenset()
    assert watch.is_moving
    file.write_text("a: 1\n")
    assert watch.look(0.1) == frozenset()
    assert watch.look(9.0) == frozenset()


def test_a_file_that_goes_on_changing_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    watch = FileWatch({"settings": (file,)})
    for tenth in range(20):
        file.write_text(f"a: {tenth}\n")
        assert watch.look(tenth / 10) == frozenset()
    assert watch.look(1.9 + 0.29) == frozenset()
    assert watch.look(1.9 + 0.31) == {"settings"}
    assert watch.look(9.0) == frozenset(), "told once"


# -- what follows


async def test_five_writes_in_300_ms_are_one_reload(home: Path, begin: Begin) -> None:
    recipe = write_recipe(home, "warm")
    recipe.write_text(recipe.read_text() + "keep: warm\n")
    lab = await begin()
    await lab.lab.until(lambda: lab.lab.running() == ["warm"])
    file = write_settings("queue_limit: 1\n")

    def write(count: int) -> None:
        file.write_text(f"queue_limit: {count}\n")

    lab.in_pauses = iter([lambda count=count: write(count) for count in (2, 3, 4, 5)])
    (event,) = await lab.look()
    assert "queue_limit 256 -> 5" in event.text
    assert lab.lab.service.scheduler.policy.queue_limit == 5
    assert lab.lab.running() == ["warm"], "exactly one process of it"
    assert lab.lab.service.scheduler.models["warm"].starts == 1


async def test_two_looks_at_a_time_follow_a_change_once(home: Path, begin: Begin) -> None:
    lab = await begin()
    write_settings("queue_limit: 7\n")
    first, second = await asyncio.gather(lab.look(), lab.look())
    told = {event.id for event in [*first, *second]}
    assert len(told) == 1


async def test_a_bad_file_keeps_the_last_good_one_and_is_told_once(
    home: Path, begin: Begin
) -> None:
    file = write_settings("idle_timeout: 100s\n")
    lab = await begin()
    file.write_text("idle_timeout: 200s\nqueue_limt: 3\n")
    (wrong,) = await lab.look()
    assert f"{file}:2:1" in wrong.text
    assert "'queue_limt'; did you mean 'queue_limit'?" in wrong.text
    assert lab.lab.service.scheduler.policy.idle_timeout_s == 100
    assert await lab.look() == []
    file.write_text("idle_timeout: 300s\n")
    (good,) = await lab.look()
    assert "right again" in good.text
    assert "idle_timeout 1m 40s -> 5m" in good.text
    assert lab.lab.service.scheduler.policy.idle_timeout_s == 300


async def test_a_file_without_any_sense_changes_nothing(home: Path, begin: Begin) -> None:
    file = write_settings("queue_limit: 3\n")
    lab = await begin()
    for nonsense in (b"\x00\xff\xfe", b"{", b"queue_limit: 3\nqueue_limit: 4\n", b"- 1\n"):
        file.write_bytes(nonsense)
        assert len(await lab.look()) == 1
        assert lab.lab.service.scheduler.policy.queue_limit == 3
    file.unlink()
    file.symlink_to("nowhere.yaml")
    assert len(await lab.look()) == 1
    assert lab.lab.service.scheduler.policy.queue_limit == 3


async def test_without_its_file_the_defaults_count_again(home: Path, begin: Begin) -> None:
    file = write_settings("queue_limit: 3\n")
    lab = await begin()
    file.unlink()
    (event,) = await lab.look()
    assert "queue_limit 3 -> 256" in event.text
    assert lab.lab.service.scheduler.policy.queue_limit == 256


async def test_options_of_the_command_line_beat_the_file_at_every_reading(
    home: Path, begin: Begin
) -> None:
    lab = await begin(linger_s=7.0)
    write_settings("port: 9000\nlinger: 1s\nqueue_limit: 9\n")
    (event,) = await lab.look()
    assert "linger" not in event.text
    assert lab.lab.service.scheduler.policy.linger_s == 7.0
    assert lab.lab.service.scheduler.policy.queue_limit == 9
    assert lab.lab.service.reload.pending == ()


async def test_what_cannot_change_while_it_runs_is_said_with_the_command(
    home: Path, begin: Begin
) -> None:
    lab = await begin()
    file = write_settings("host: 127.0.0.9\nmodels_dir: /elsewhere\nqueue_limit: 9\n")
    (event,) = await lab.look()
    assert "host, models_dir" in event.text
    assert "flexlab down --daemon" in event.text
    assert lab.lab.service.settings.host == "127.0.0.1"
    status = await asyncio.to_thread(client_of_daemon().status)
    assert status.pending == ("host", "models_dir")
    file.write_text("queue_limit: 10\n")
    (event,) = await lab.look()
    assert "host" not in event.text
    assert lab.lab.service.reload.pending == ()


def client_of_daemon() -> client.Client:
    return daemons.connect(start=False)


async def asked_from(lab: Watched, origin: str) -> int:
    """Status of a request by a web page of this origin."""

    def ask() -> int:
        address = lab.lab.service.gateway.address
        connection = http.client.HTTPConnection(address.host, address.port, timeout=20)
        try:
            connection.request("GET", "/v1/models", headers={"Origin": origin})
            return connection.getresponse().status
        finally:
            connection.close()

    return await asyncio.to_thread(ask)


async def test_limits_of_the_gateway_and_of_logs_count_at_once(home: Path, begin: Begin) -> None:
    write_recipe(home, "small")
    lab = await begin()
    assert await asked_from(lab, "https://chat.example.org") == 403
    write_settings("max_body: 1K\nlog_max: 2M\nallow_origins: [https://chat.example.org]\n")
    (event,) = await lab.look()
    assert "max_body 1.0G -> 1K" in event.text
    status, _ = await lab.lab.post("/v1/chat/completions", {"model": "small", "x": "y" * 2000})
    assert status == 413
    assert await asked_from(lab, "https://chat.example.org") == 200
    assert await asked_from(lab, "https://elsewhere.example.org") == 403
    assert lab.lab.service.readings.log_max_bytes == 2 << 20


async def test_the_budget_for_all_models_changes_while_one_runs(
    home: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_recipe(home, "small")
    lab = await begin()
    assert (await lab.lab.chat("small"))[0] == 200
    registry = lab.lab.service.registry

    def detect() -> Machine:
        """As the machine is detected with these settings."""
        machine = demo_machine()
        told = registry.settings
        pools = [
            pool
            if pool.id != "ram"
            else type(pool)(
                id="ram",
                kind="ram",
                total_bytes=pool.total_bytes,
                reserve_bytes=told.ram_reserve_bytes or 0,
                budget_bytes=told.ram_limit_bytes,
            )
            for pool in machine.pools
        ]
        return type(machine)(
            hostname=machine.hostname,
            platform=machine.platform,
            cpu=machine.cpu,
            gpus=machine.gpus,
            pools=tuple(pools),
        )

    monkeypatch.setattr(registry, "_detect", detect)
    file = write_settings("ram_limit: 5G\nram_reserve: 1G\n")
    await lab.look()
    account = lab.lab.service.scheduler.pools["ram"]
    assert (account.limit_bytes, account.reserve_bytes) == (5 * GIB, GIB)
    assert account.usable_bytes == 5 * GIB
    assert lab.lab.running() == ["small"]
    file.write_text("ram_reserve: 1G\n")
    await lab.look()
    assert account.limit_bytes is None


# -- models that run


async def two_running(home: Path, begin: Begin, **settings: Any) -> tuple[Watched, list[str]]:
    write_recipe(home, "one")
    write_recipe(home, "two")
    lab = await begin(**settings)
    for model in ("one", "two"):
        assert (await lab.lab.chat(model))[0] == 200
    return lab, instances(lab)


def instances(lab: Watched) -> list[str]:
    return sorted(one.launch.instance for one in lab.lab.world.alive())


async def test_names_times_and_limits_leave_what_runs_untouched(home: Path, begin: Begin) -> None:
    lab, before = await two_running(home, begin)
    write_settings("idle_timeout: 1h\nallow_origins: [https://chat.example.org]\n")
    recipe = paths.user_recipes_dir() / "models" / "two.yaml"
    text = recipe.read_text().replace("[two-alias]", "[two-alias, deux]")
    more = "idle_timeout: 2h\npriority: 50\nmax_in_flight: 4\nreplicas: 2\n"
    recipe.write_text(text + more)
    await lab.look()
    assert instances(lab) == before
    assert lab.conditions("one") == lab.conditions("two") == set()
    assert (await lab.lab.chat("deux"))[0] == 200
    assert instances(lab) == before
    model = lab.lab.service.scheduler.models["two"]
    assert (model.idle_timeout_s, model.priority) == (7200, 50)
    assert (model.max_in_flight, model.replicas) == (4, 2)


async def test_only_the_model_whose_plan_changed_is_stale_and_it_goes_on(
    home: Path, begin: Begin
) -> None:
    lab, before = await two_running(home, begin, linger_s=3600.0)
    write_recipe(home, "two", context=2048)
    changed, told = await lab.look()
    assert told.model == "two"
    assert "two changed" in changed.text
    assert lab.conditions("one") == set()
    assert lab.conditions("two") == {"stale"}
    assert (await lab.lab.chat("two"))[0] == 200
    assert instances(lab) == before, "whoever comes is served by what runs"


async def test_a_plan_that_is_the_same_again_takes_the_mark_away(home: Path, begin: Begin) -> None:
    lab, before = await two_running(home, begin, linger_s=3600.0)
    write_recipe(home, "two", context=2048)
    await lab.look()
    write_recipe(home, "two", context=1024)
    await lab.look()
    assert lab.conditions("two") == set()
    assert instances(lab) == before


async def test_a_stale_model_that_is_idle_gives_way_to_its_new_plan(
    home: Path, begin: Begin
) -> None:
    lab, before = await two_running(home, begin, linger_s=0.05)
    write_recipe(home, "two", context=2048)
    await lab.look()
    await lab.lab.until(lambda: lab.lab.running() == ["one"])
    assert (await lab.lab.chat("two"))[0] == 200
    assert len(set(instances(lab)) & set(before)) == 1, "one is as it was, two is a new one"
    assert lab.conditions("two") == set()


async def test_an_up_that_read_the_recipes_first_takes_nothing_from_the_reload(
    home: Path, begin: Begin
) -> None:
    """`up` reads recipes too; what runs of a changed one is stale all the same."""
    lab, _ = await two_running(home, begin, linger_s=3600.0)
    write_recipe(home, "two", context=2048)
    await asyncio.to_thread(lab.lab.service.registry.refresh, {"one", "two"})
    await lab.look()
    assert lab.conditions("two") == {"stale"}


async def test_a_setting_that_plans_follow_from_is_judged_for_all(home: Path, begin: Begin) -> None:
    lab, before = await two_running(home, begin, linger_s=3600.0)
    file = write_settings("runtime: docker\n")
    await lab.look()
    assert lab.conditions("one") == lab.conditions("two") == {"stale"}
    file.write_text("")
    await lab.look()
    assert lab.conditions("one") == lab.conditions("two") == set()
    assert instances(lab) == before


async def test_a_recipe_that_becomes_wrong_leaves_its_model_as_it_was(
    home: Path, begin: Begin
) -> None:
    lab, before = await two_running(home, begin)
    recipe = paths.user_recipes_dir() / "models" / "two.yaml"
    good = recipe.read_text()
    recipe.write_text(good.replace("license:", "licence:"))
    (wrong,) = await lab.look()
    assert "two.yaml:3:1" in wrong.text
    assert "license" in wrong.text
    assert (await lab.lab.chat("two"))[0] == 200
    assert lab.conditions("two") == set()
    recipe.write_text(good)
    (right,) = await lab.look()
    assert "right again" in right.text
    assert instances(lab) == before


async def test_a_recipe_whose_file_goes_keeps_its_model_while_it_runs(
    home: Path, begin: Begin
) -> None:
    lab, before = await two_running(home, begin)
    (paths.user_recipes_dir() / "models" / "two.yaml").unlink()
    await lab.look()
    assert (await lab.lab.chat("two"))[0] == 200
    assert instances(lab) == before


async def test_what_a_user_decided_beats_what_the_recipe_says_later(
    home: Path, begin: Begin
) -> None:
    for name in ("follows", "decided"):
        write_recipe(home, name)
    lab = await begin()
    models = lab.lab.service.scheduler.models
    await asyncio.to_thread(client_of_daemon().hold, ("decided",), keep="warm")
    for name in ("follows", "decided"):
        recipe = write_recipe(home, name)
        recipe.write_text(recipe.read_text() + "keep: warm\n")
    await lab.look()
    assert (models["follows"].keep, models["decided"].keep) == ("warm", "warm")
    await asyncio.to_thread(client_of_daemon().hold, ("decided",), keep="cold")
    for name in ("follows", "decided"):
        recipe = write_recipe(home, name)
        recipe.write_text(recipe.read_text() + "keep: warm\npriority: 120\n")
    await lab.look()
    assert (models["follows"].keep, models["decided"].keep) == ("warm", "cold")
    for name in ("follows", "decided"):
        write_recipe(home, name)
    await lab.look()
    assert (models["follows"].keep, models["decided"].keep) == ("cold", "cold")


async def test_what_was_decided_against_a_recipe_outlives_the_daemon(
    home: Path, start: Start
) -> None:
    """And what was not decided follows the recipe, also one that changed between two daemons."""
    names = ("decided", "follows")
    for name in names:
        recipe = write_recipe(home, name)
        recipe.write_text(recipe.read_text() + "keep: warm\n")
    lab = await start()
    await asyncio.to_thread(client_of_daemon().hold, ("decided",), keep="cold")
    await start.end(lab)  # type: ignore[attr-defined]
    lab = await start()
    models = lab.service.scheduler.models
    assert [models[name].keep for name in names] == ["cold", "warm"]
    await start.end(lab)  # type: ignore[attr-defined]
    for name in names:
        write_recipe(home, name)
    lab = await start()
    assert [lab.service.scheduler.models[name].keep for name in names] == ["cold", "cold"]


async def test_a_recipe_that_changes_while_its_model_starts_is_judged_once_its_plan_is_known(
    home: Path, begin: Begin
) -> None:
    lab, _ = await two_running(home, begin, linger_s=3600.0)
    (instance,) = lab.lab.service.scheduler.instances_of("two")
    known, instance.plan_hash = instance.plan_hash, ""
    write_recipe(home, "two", context=2048)
    await lab.look()
    assert lab.conditions("two") == set()
    instance.plan_hash = known
    await lab.look()
    assert lab.conditions("two") == {"stale"}


async def test_a_model_of_a_mere_file_is_no_news_of_the_recipes(home: Path, begin: Begin) -> None:
    weights = home / "mine.gguf"
    weights.write_bytes(gguf())
    lab = await begin()
    steps = client_of_daemon().up(weights.as_uri(), Wishes())
    await asyncio.to_thread(list, steps)
    write_recipe(home, "late")
    (event,) = await lab.look()
    assert "mine" not in event.text
    assert lab.conditions("mine") == set()
    assert lab.lab.running() == ["mine"]


async def test_a_recipe_that_is_written_while_the_daemon_runs_is_a_model_at_once(
    home: Path, begin: Begin
) -> None:
    lab = await begin()
    write_recipe(home, "late")
    (event,) = await lab.look()
    assert "late new" in event.text
    assert (await lab.lab.chat("late"))[0] == 200
