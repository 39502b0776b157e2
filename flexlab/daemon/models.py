"""The models of the lab: what is known of each, what users decided, what is installed."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from flexlab.core import paths
from flexlab.core.errors import FlexLabError
from flexlab.daemon.files import ModelState, read_models, write_models
from flexlab.daemon.registry import Registry
from flexlab.daemon.tasks import Tasks, Threads
from flexlab.recipes.schema import ModelRecipe
from flexlab.scheduler.scheduler import Scheduler
from flexlab.scheduler.state import Model
from flexlab.scheduler.views import Known, Views
from flexlab.spec.lab import ModelView
from flexlab.spec.lease import Refused
from flexlab.spec.plan import Keep, Refusal

log = logging.getLogger(__name__)
KNOWN_FOR_S = 1.0
"""How long facts about files (what is installed) are believed; each look costs a few stat calls."""
_TEXT = frozenset({"chat", "completions"})


class Models:
    """Joins the registry's models with the scheduler's state of them and users' decisions."""

    def __init__(
        self,
        registry: Registry,
        scheduler: Scheduler,
        views: Views,
        tasks: Tasks,
        threads: Threads,
    ) -> None:
        self.speed_of: Callable[[str], tuple[float | None, float | None]] = lambda _: (None, None)
        """Model -> time to first token and tokens/s of its last streamed answer."""
        self._registry = registry
        self._scheduler = scheduler
        self._views = views
        self._tasks = tasks
        self._threads = threads
        self._known: dict[str, Known] = {}
        self._known_at = 0.0
        self._known_stamp = 0
        self._states_file = paths.state_dir() / "models.json"
        self._states = read_models(self._states_file)

    # -- names

    def derive_again(self) -> None:
        """Models without a recipe that an earlier daemon knew. Blocks."""
        for state in self._states.values():
            if state.source is not None:
                with contextlib.suppress(FlexLabError):  # its file may be gone; then so is it
                    self._registry.derive(state.source)

    def register_all(self) -> None:
        """Tell the scheduler of every model: recipes, derived ones, external servers."""
        for name in self._registry.known():
            self.register(name)

    def find(self, name: str) -> str:
        """The model of a name or alias, known to the scheduler from here on.

        Raises UnknownModel.
        """
        model = self._registry.find(name)
        self.register(model)
        return model

    def register(self, name: str) -> None:
        """Make a model known to the scheduler; one that is known keeps its state."""
        if name in self._scheduler.models:
            return
        state = self._states.get(name, ModelState())
        model = Model(
            name=name,
            keep=state.keep or self._recipes_keep(name),
            pinned=state.pinned,
            enabled=state.enabled,
            held_down=state.held_down,
            wishes=state.wishes,
        )
        if name not in self._registry.externals:
            recipe = self._registry.recipe(name)
            model.priority = recipe.priority
            model.idle_timeout_s = recipe.idle_timeout
            model.replicas = recipe.replicas
            model.max_in_flight = recipe.max_in_flight
        self._scheduler.add_model(model)

    def follow(self, name: str, before: ModelRecipe | None) -> None:
        """Its recipe has changed: what it says counts, but for what a user decided.

        `before` is the recipe until now, None where there was none.
        """
        recipe, model = self._registry.recipe(name), self._scheduler.models[name]
        follows = before is not None and model.keep == before.keep != recipe.keep
        self._scheduler.revise(
            name,
            priority=recipe.priority,
            idle_timeout_s=recipe.idle_timeout,
            replicas=recipe.replicas,
            max_in_flight=recipe.max_in_flight,
            keep=recipe.keep if follows else model.keep,
        )

    def in_use(self) -> set[str]:
        """Models whose recipe is kept although its file is gone."""
        return {
            model.name
            for model in self._scheduler.models.values()
            if self.is_busy(model) or model.keep == "warm"
        }

    def forget(self, name: str) -> None:
        """A derived model that does not run; it is known again by its source."""
        if name in self._registry.sources and not self.is_busy(self._scheduler.models[name]):
            self._registry.forget(name)
            self._scheduler.remove_model(name)
            self._states.pop(name, None)
            self._known = {known: facts for known, facts in self._known.items() if known != name}

    def is_busy(self, model: Model) -> bool:
        """It runs, starts, stops, is prepared or is waited for; external ones never are."""
        ours = any(not i.external for i in self._scheduler.instances_of(model.name))
        return ours or bool(model.waiters) or model.preparing is not None

    # -- what users decided

    async def save_states(self) -> None:
        """Keep what users decided, also of models that cannot be found at present."""
        for model in self._scheduler.models.values():
            self._states[model.name] = ModelState(
                keep=None if model.keep == self._recipes_keep(model.name) else model.keep,
                pinned=model.pinned,
                enabled=model.enabled,
                held_down=model.held_down,
                wishes=model.wishes,
                source=self._registry.sources.get(model.name) if self._proved(model) else None,
            )
        states = dict(self._states)
        try:
            await self._threads.call("worker", write_models, self._states_file, states)
        except OSError as error:
            log.warning("what you decided about models is not kept: %s", error)

    def _recipes_keep(self, name: str) -> Keep:
        """What holds of a model of which nobody decided otherwise."""
        recipe = self._registry.recipes().get(name)
        return "cold" if recipe is None else recipe.keep

    def _proved(self, model: Model) -> bool:
        """A derived model is one of the lab's once it has run, not by being named once."""
        before = self._states.get(model.name)
        return model.last_load_s is not None or (before is not None and before.source is not None)

    # -- what is known

    def require(self, model: str, capability: str) -> None:
        """Refuse what the recipe says that the model cannot do; of others nothing is known."""
        known = self._known.get(model)
        derived = model in self._registry.sources or model in self._registry.externals
        if derived or known is None or capability in known.capabilities:
            return
        can = ", ".join(known.capabilities)
        raise Refused(
            Refusal(
                code="not_supported",
                message=f"{model} has no {capability}; it can: {can}",
                status=400,
            )
        )

    def makes_text(self, model: str) -> bool:
        """Whether its answers are counted in tokens; of what is not known: yes."""
        known = self._known.get(model)
        return known is None or bool(_TEXT.intersection(known.capabilities))

    def views(self) -> tuple[ModelView, ...]:
        """Every model as people and programs see it."""
        return self._views.models(
            {name: self._as_seen(name, known) for name, known in self.known().items()}
        )

    def _as_seen(self, name: str, known: Known) -> Known:
        """With the speed of its last answer; what never ran of a mere source is not installed."""
        ttft_s, rate = self.speed_of(name)
        if rate is not None:
            known = msgspec.structs.replace(known, ttft_s=ttft_s, tokens_per_s=rate)
        model = self._scheduler.models.get(name)
        if model is not None and name in self._registry.sources and not self._proved(model):
            known = msgspec.structs.replace(known, installed=False)
        return known

    def known(self) -> dict[str, Known]:
        """What is installed: read anew when the store says that it changed, else a second old.

        Files that the store does not keep (paths, a hub's cache) are looked at in the worker.
        """
        stamp = self._registry.store.stamp()
        if stamp != self._known_stamp or not self._known:
            self._know(self._registry.known(), stamp)
        elif time.monotonic() - self._known_at > KNOWN_FOR_S:
            self._known_at = time.monotonic()
            self._tasks.spawn("look at weights", self.look_again())
        return self._known

    async def look_again(self) -> None:
        """Look at the files now."""
        stamp = self._registry.store.stamp()
        self._know(await self._threads.call("worker", self._registry.known), stamp)

    def _know(self, known: dict[str, Known], stamp: int) -> None:
        self._known, self._known_stamp, self._known_at = known, stamp, time.monotonic()
