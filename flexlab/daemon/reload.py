"""Settings and recipes that change while the daemon runs: what changed counts, and nothing else.

Each change is told once, as an event. A file that is wrong changes nothing: what was read before
goes on until it is right again. What runs is never stopped by a reload; a model whose plan would be
another one now is marked stale, and makes room for its new plan when it is idle.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

from flexlab.core import paths
from flexlab.core.settings import Settings, key_of, survey_settings
from flexlab.core.units import show_value
from flexlab.daemon.filewatch import SETTLED_S, FileWatch
from flexlab.daemon.launcher import Launcher
from flexlab.daemon.models import Models
from flexlab.daemon.registry import Registry
from flexlab.recipes.schema import ModelRecipe
from flexlab.scheduler.scheduler import Scheduler
from flexlab.spec.instance import Condition

LOOK_S = 1.0
"""How often the files are looked at."""
FIXED = ("host", "port", "open_to_network", "models_dir")
"""Settings that count from the daemon's next start on."""
PLANNED = frozenset({"runtime", "allow_experimental"})
"""Settings that a plan follows from."""
NAMED_MAX = 5
"""So many models, or flaws of a file, are named in one sentence."""
Apply = Callable[[Settings, frozenset[str]], Awaitable[None]]


class Reload:
    """Looks at the files in the worker thread, tells the daemon's parts on the loop."""

    def __init__(
        self,
        settings: Settings,
        options: Mapping[str, object],
        registry: Registry,
        scheduler: Scheduler,
        models: Models,
        launcher: Launcher,
        apply: Apply,
    ) -> None:
        """`options` were given on the command line: they beat the file at every reading.

        `apply(settings, changed)` tells the parts of the daemon; `changed` are fields' names.
        """
        self.clock: Callable[[], float] = time.monotonic
        self.pause: Callable[[float], Awaitable[None]] = asyncio.sleep
        self.pending: tuple[str, ...] = ()
        """Keys that are set otherwise than they count now, from the next start on."""
        self._settings = settings
        self._options = options
        self._registry = registry
        self._scheduler = scheduler
        self._models = models
        self._apply = apply
        self._call = launcher.threads.call
        self._note = launcher.note
        recipes = paths.user_recipes_dir()
        self._watch = FileWatch(
            {
                "settings": (paths.settings_file(),),
                "models": (recipes / "models",),
                "others": tuple(recipes / kind for kind in ("backends", "gpus", "certificates")),
            }
        )
        self._recipes = self._from_files()
        self._wrong_settings: list[str] = []
        self._wrong_recipes: set[str] = set()
        self._unjudged: set[str] = set()
        """Models with an instance whose plan was not known yet when it was to be judged."""
        self._is_first = True
        self._one_at_a_time = asyncio.Lock()

    async def look(self) -> None:
        """One look; a change is waited for until it has settled, and followed once."""
        async with self._one_at_a_time:
            changed = await self._changed()
            if self._is_first:
                self._is_first = False
                self._wrong_recipes = set(await self._call("worker", self._registry.problems))
                # What was written between reading the file at the start and watching it.
                changed |= {"settings"}
            if "settings" in changed:
                await self._read_settings()
            if changed & {"models", "others"}:
                await self._read_recipes(others="others" in changed)
            if self._unjudged:
                await self._judge_plans(set(self._unjudged))

    async def _changed(self) -> frozenset[str]:
        changed = await self._call("worker", self._watch.look, self.clock())
        while self._watch.is_moving:
            await self.pause(SETTLED_S)
            changed |= await self._call("worker", self._watch.look, self.clock())
        return changed

    # -- settings

    async def _read_settings(self) -> None:
        loaded, problems = await self._call("worker", survey_settings, self._options)
        name = paths.settings_file().name
        if problems:
            if problems != self._wrong_settings:
                self._wrong_settings = problems
                flaws = [line for problem in problems for line in problem.splitlines()]
                text = f"{name} is wrong, what it said before counts on: {_some(flaws, '; ')}"
                self._note("settings", text, why="\n".join(problems))
            return
        was_wrong, self._wrong_settings = bool(self._wrong_settings), []
        before, now = self._settings, loaded.settings
        kept = {field: getattr(before, field) for field in FIXED}
        self._settings = now.model_copy(update=kept)
        changed = _differences(before, self._settings)
        pending = tuple(key_of(field) for field in _differences(self._settings, now))
        news = [_change(field, before, self._settings) for field in changed]
        if pending != self.pending and pending:
            news.append(
                f"{', '.join(pending)} will count once the daemon is started anew: "
                "flexlab down --daemon, then flexlab serve or the next flexlab up"
            )
        self.pending = pending
        await self._apply(self._settings, frozenset(changed))
        self._tell(name, was_wrong=was_wrong, news=news)
        if PLANNED & set(changed):
            await self._judge_plans(None)

    # -- recipes

    async def _read_recipes(self, *, others: bool) -> None:
        """`others`: also recipes of engines and cards, from which any plan may follow."""
        in_use = self._models.in_use()
        await self._call("worker", self._registry.refresh, in_use)
        before, now = self._recipes, self._from_files()
        self._recipes = now
        changed = {name for name in before.keys() | now if before.get(name) != now.get(name)}
        self._models.register_all()
        for name in changed & now.keys():
            self._models.follow(name, before.get(name))
        await self._models.look_again()
        news = list(_changes(before, now))
        if others:
            news.append("recipes of engines or cards changed")
        wrong = set(await self._call("worker", self._registry.problems))
        new, self._wrong_recipes, were = wrong - self._wrong_recipes, wrong, self._wrong_recipes
        if new:
            flaws = [line for problem in sorted(new) for line in problem.splitlines()]
            text = f"a recipe is wrong, what it said before counts on: {_some(flaws, '; ')}"
            self._note("settings", text, why="\n".join(sorted(new)))
        if news or (were - wrong and not new):
            self._tell("recipes", was_wrong=bool(were - wrong) and not new, news=news)
        await self._judge_plans(None if others else changed)

    def _from_files(self) -> dict[str, ModelRecipe]:
        """Recipes of models that are neither external nor derived from a source."""
        others = self._registry.sources.keys() | self._registry.externals.keys()
        return {n: r for n, r in self._registry.recipes().items() if n not in others}

    async def _judge_plans(self, names: Collection[str] | None) -> None:
        """Mark what runs on another plan than it would get now; None: of all models."""
        self._unjudged.clear()
        for name in list(self._scheduler.models):
            if (names is None or name in names) and name not in self._registry.externals:
                await self._judge_model(name)
        self._scheduler.tick()

    async def _judge_model(self, name: str) -> None:
        instances = [i for i in self._scheduler.instances_of(name) if i.live and not i.external]
        is_stale = not instances
        wishes = self._scheduler.models[name].wishes
        for instance in instances:
            if not instance.plan_hash:
                self._unjudged.add(name)
                continue
            why = await self._call(
                "worker", self._registry.why_stale, name, wishes, instance.plan_hash
            )
            if why is None:
                self._scheduler.unmark(instance.id, "stale")
                continue
            is_stale = True
            if "stale" not in instance.conditions:
                condition = Condition(kind="stale", since=time.time(), why=why)
                self._scheduler.mark(instance.id, condition)
                text = f"{name} goes on as it was started until it is idle: {why}"
                self._note("settings", text, model=name, instance=instance.id, why=why)
        if is_stale and name in self._scheduler.models:
            self._scheduler.replan(name)

    def _tell(self, what: str, *, was_wrong: bool, news: list[str]) -> None:
        if not news and not was_wrong:
            return
        good = " are right again" if what == "recipes" else " is right again"
        told = "; ".join(news) or "nothing has changed"
        self._note("settings", f"{what}{good if was_wrong else ''}: {told}")


def _differences(one: Settings, other: Settings) -> list[str]:
    fields = Settings.model_fields
    return [name for name in fields if getattr(one, name) != getattr(other, name)]


def _change(field: str, before: Settings, now: Settings) -> str:
    was, value = (show_value(field, getattr(one, field)) for one in (before, now))
    return f"{key_of(field)} {was} -> {value}"


def _changes(before: Mapping[str, ModelRecipe], now: Mapping[str, ModelRecipe]) -> Iterable[str]:
    """What became of which models, in words."""
    both = before.keys() & now.keys()
    for what, names in (
        ("new", now.keys() - before.keys()),
        ("gone", before.keys() - now.keys()),
        ("changed", {name for name in both if before[name] != now[name]}),
    ):
        if names:
            yield f"{_some(sorted(names), ', ')} {what}"


def _some(items: list[str], between: str) -> str:
    more = len(items) - NAMED_MAX
    return between.join(items[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
