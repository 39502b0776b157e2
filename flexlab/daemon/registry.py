"""Which models there are: recipes, what was derived from a source, and external servers.

Joins the catalogue, the store of weights and the machine into what planning needs. Blocking calls
(`plan`, `refresh`) run in the worker thread; `known` is cheap enough for the loop.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping

import msgspec

from flexlab.core.errors import FlexLabError, SettingsError, UnknownModel, WeightsError
from flexlab.core.near import near
from flexlab.core.settings import Settings
from flexlab.daemon.claims import Claims
from flexlab.gpus import isolated
from flexlab.planning.candidates import candidates
from flexlab.planning.render import render
from flexlab.planning.reserves import with_reserves
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.catalogue import Catalogue
from flexlab.recipes.schema import ModelRecipe
from flexlab.runtimes.base import FetchesImages, Runtime
from flexlab.scheduler.views import Known
from flexlab.spec.machine import Machine
from flexlab.spec.plan import (
    Candidate,
    Candidates,
    Facts,
    Grant,
    LaunchPlan,
    Refusal,
    Weight,
    Wishes,
)
from flexlab.weights.here import Here, WeightsHere
from flexlab.weights.store import Store

log = logging.getLogger(__name__)
DETECTION_IS_FRESH_S = 1.0
"""Looking takes a process of its own where there is a GPU."""


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """What planning says of one model, and what must be fetched before it can start."""

    candidates: Candidates
    missing: tuple[Weight, ...] = ()
    missing_image: str | None = None
    """Of the first candidate, where the engine lacks it."""
    facts: Facts = Facts()


class Registry:
    """The models of this lab."""

    def __init__(
        self,
        settings: Settings,
        runtimes: Mapping[str, Runtime],
        externals: Mapping[str, str],
        *,
        claims: Claims | None = None,
        load: Callable[[], Catalogue] = Catalogue.load,
        detect: Callable[[], Machine] | None = None,
    ) -> None:
        self.settings = settings
        self.externals = dict(externals)
        self.store = Store(settings.models_dir)
        self._weights = WeightsHere(self.store)
        self._runtimes = runtimes
        self._claims = claims
        self._load = load
        self._detect = detect or self._detect_here
        self._seen: tuple[float, Machine] | None = None
        self._catalogue = load()
        known = {name for r in self._catalogue.models() for name in (r.name, *r.aliases)}
        if taken := sorted(known & set(externals)):
            raise SettingsError(
                f"--external {taken[0]}=…: a recipe has this name already",
                f"--external my-{taken[0]}={externals[taken[0]]}",
            )
        self._derived: dict[str, ModelRecipe] = {}
        self._kept: dict[str, ModelRecipe] = {}
        self.sources: dict[str, str] = {}
        """Derived model -> the source it was derived from."""
        self._by_source: dict[str, str] = {}
        self._names = self._all_names()

    def _all_names(self) -> dict[str, str]:
        """Every name and alias -> model."""
        names: dict[str, str] = {}
        for recipe in self._recipes().values():
            for alias in recipe.aliases:
                names.setdefault(alias, recipe.name)
        names.update({name: name for name in [*self._recipes(), *self.externals]})
        return names

    def _recipes(self) -> dict[str, ModelRecipe]:
        found = {recipe.name: recipe for recipe in self._catalogue.models()}
        return self._kept | found | self._derived

    def recipes(self) -> dict[str, ModelRecipe]:
        """Every model's recipe as it was read last."""
        return self._recipes()

    def problems(self) -> list[str]:
        """Recipe files that are left out, and why. Blocks."""
        return [str(problem) for problem in self._catalogue.problems]

    def use(self, settings: Settings) -> None:
        """Plan by these settings from now on."""
        self.settings = settings
        self._seen = None

    def refresh(self, in_use: Collection[str] = ()) -> None:
        """Read the recipes again: a file may have come, gone or changed. Blocks.

        The last good recipe is kept of a model that is `in_use`, and where a file is wrong now.
        """
        before = self._recipes()
        self._catalogue = self._load()
        broken = {problem.file.stem for problem in self._catalogue.problems}
        now = {recipe.name for recipe in self._catalogue.models()}
        gone = {n: r for n, r in before.items() if n not in now and (n in in_use or n in broken)}
        self._kept = {name: recipe for name, recipe in gone.items() if name not in self._derived}
        self._names = self._all_names()
        for problem in self._catalogue.problems:
            log.warning("a recipe is left out: %s", problem)

    def find(self, name: str) -> str:
        """The model of this name or alias. Raises UnknownModel with near names."""
        found = self._names.get(name) or self._by_source.get(name)
        if found is None:
            raise UnknownModel(name, near(name, self._names))
        return found

    def derive(self, name: str, in_use: Collection[str] = ()) -> str:
        """As `find` in the recipes as they are now; for a source without one, one is derived.

        Blocks. Raises FlexLabError.
        """
        if name in self.externals:
            return name
        self.refresh(in_use)
        if self._names.get(name) in self._kept:
            return self._names[name]
        recipe = self._catalogue.resolve(name, self._derived)
        if recipe.name not in self._names:
            self._derived = {**self._derived, recipe.name: recipe}
            self.sources[recipe.name] = name
            self._by_source = {**self._by_source, name: recipe.name}
            self._names = {**self._names, recipe.name: recipe.name}
        return recipe.name

    def forget(self, model: str) -> None:
        """A derived model that nobody wants any more; a recipe's model stays."""
        if (source := self.sources.pop(model, None)) is not None:
            self._derived = {n: r for n, r in self._derived.items() if n != model}
            self._by_source = {s: n for s, n in self._by_source.items() if s != source}
            self._names = {n: m for n, m in self._names.items() if m != model}

    def recipe(self, model: str) -> ModelRecipe:
        """The recipe of a model that is not external. Raises UnknownModel: it may have gone."""
        found = self._recipes().get(model)
        if found is None:
            raise UnknownModel(model)
        return found

    def known(self) -> dict[str, Known]:
        """Facts of every model for the views: a few stat calls each."""
        facts = {name: self._known(recipe) for name, recipe in self._recipes().items()}
        for name in self.externals:
            facts[name] = Known(installed=True, capabilities=("chat", "completions", "embeddings"))
        return facts

    def _known(self, recipe: ModelRecipe) -> Known:
        size: int | None = None
        installed = False
        told = (getattr(variant.settings, "context_size", None) for variant in recipe.variants)
        contexts = [context for context in told if context is not None]
        for variant in recipe.variants:
            weights = variant.plan_weights()
            sizes = [weight.size_bytes for weight in weights]
            if size is None and sizes and None not in sizes:
                size = sum(count for count in sizes if count is not None)
            # Without files of its own: what its engine's store holds is not known here.
            if weights and self._are_installed(weights):
                installed = True
                break
        return Known(
            aliases=recipe.aliases,
            installed=installed,
            weight_bytes=size,
            capabilities=recipe.capabilities,
            context=min(
                [*contexts[:1], *([recipe.context] if recipe.context else [])], default=None
            ),
        )

    def _are_installed(self, weights: tuple[Weight, ...]) -> bool:
        try:
            return all(self.store.installed(weight) for weight in weights)
        except WeightsError as error:  # said where the weights are wanted; a list goes on
            log.debug("%s", error)
            return False

    # -- planning; blocks

    def machine(self) -> Machine:
        """What is here now, or was a moment ago: one command asks several times."""
        now = time.monotonic()
        if self._seen is None or now - self._seen[0] > DETECTION_IS_FRESH_S:
            self._seen = (now, with_reserves(self._detect(), self._catalogue.gpu))
        return self._seen[1]

    def _detect_here(self) -> Machine:
        return isolated.detect(
            ram_reserve_bytes=self.settings.ram_reserve_bytes,
            ram_budget_bytes=self.settings.ram_limit_bytes,
        )

    def facts(self, here: Here) -> Facts:
        """Runtimes, and where the weights are."""
        return Facts(
            runtimes={name: runtime.facts() for name, runtime in self._runtimes.items()},
            models_dir=str(self.store.models_dir),
            weights=here.paths,
            weight_bytes=here.sizes,
            images=self._images(),
            measured_bytes=self._claims.measured() if self._claims else {},
            floor_bytes=self._claims.floors() if self._claims else {},
        )

    def _images(self) -> dict[str, str]:
        """Of the runtimes that start images."""
        found: dict[str, str] = {}
        for runtime in self._runtimes.values():
            if isinstance(runtime, FetchesImages):
                found |= runtime.images()
        return found

    def plan(self, model: str, wishes: Wishes) -> Planned:
        """Candidates of a model as things are now. Raises FlexLabError for a wrong wish."""
        recipe = self.recipe(model)
        if self.settings.allow_experimental and not wishes.allow_experimental:
            wishes = msgspec.structs.replace(wishes, allow_experimental=True)
        here = self._weights.look(w for v in recipe.variants for w in v.plan_weights())
        facts = self.facts(here)
        found = candidates(
            recipe,
            self.machine(),
            facts,
            wishes,
            backend_recipe=self._catalogue.backend,
            default_runtime=self.settings.runtime,
            shapes=here.headers,
            broken=here.broken,
            gpu_recipe=self._catalogue.gpu,
            certificates=self._catalogue.certificates_of,
            locate=self._catalogue.where,
        )
        if (told := self._told("start_timeout_s")) is not None:
            items = tuple(msgspec.structs.replace(c, start_timeout_s=told) for c in found.items)
            found = msgspec.structs.replace(found, items=items)
        missing = tuple(
            weight
            for candidate in found.items[:1]
            for weight in candidate.weights
            if weight.source not in here.paths
        )
        first = found.items[0] if found.items else None
        image = first.image if first and first.image and first.image not in facts.images else None
        return Planned(candidates=found, missing=missing, missing_image=image, facts=facts)

    def render(self, candidate: Candidate, grant: Grant) -> LaunchPlan:
        """How it is launched, with the weights where they are now."""
        return render(
            candidate,
            grant,
            machine=self.machine(),
            facts=self.facts(self._weights.look(candidate.weights)),
            backend_recipe=self._catalogue.backend,
            gpu_recipe=self._catalogue.gpu,
            stop_timeout_s=self._told("stop_timeout_s"),
            locate=self._catalogue.where,
        )

    def would_be(self, model: str, wishes: Wishes, plan_hash: str) -> bool:
        """Whether these wishes lead to the very plan that has this hash. Raises FlexLabError."""
        planned = self.plan(model, wishes)
        if not planned.candidates.items or planned.missing or planned.missing_image:
            return False
        candidate = planned.candidates.items[0]
        claims = {need.pool: need.total_bytes for need in candidate.needs}
        grant = Grant(devices=candidate.devices, claims=claims)
        return self.render(candidate, grant).hash == plan_hash

    def why_stale(self, model: str, wishes: Wishes, plan_hash: str) -> str | None:
        """Why what runs by this plan would not be launched like that now; None when it would.

        As any of the ways to run the model: which of them was taken depended on who ran beside it.
        Blocks.
        """
        try:
            planned = self.plan(model, wishes)
        except FlexLabError as error:
            return f"it could not be planned again: {error.message}"
        if planned.candidates.refusal is not None:
            return f"it could not be planned again: {planned.candidates.refusal.message}"
        for candidate in planned.candidates.items:
            claims = {need.pool: need.total_bytes for need in candidate.needs}
            grant = Grant(devices=candidate.devices, claims=claims)
            with contextlib.suppress(FlexLabError):  # its weights are not here
                if self.render(candidate, grant).hash == plan_hash:
                    return None
        return "its plan has changed"

    def sources_of(self, model: str) -> set[str]:
        """Where the weights of a model come from, all its variants together."""
        recipe = self._recipes().get(model)
        if recipe is None:
            return set()
        variants = recipe.variants
        return {weight.source for variant in variants for weight in variant.plan_weights()}

    def remove_weights(self, model: str) -> tuple[list[str], int]:
        """Delete what is installed of a model: (paths, bytes freed). Raises FlexLabError."""
        removed: list[str] = []
        freed = 0
        for variant in self.recipe(model).variants:
            for weight in variant.plan_weights():
                path = self.store.installed(weight)
                if bytes_freed := self.store.remove(weight):
                    freed += bytes_freed
                    removed.append(str(path or weight.source))
        return removed, freed

    def _told(self, setting: str) -> float | None:
        """A setting's value if the user gave one: a default does not beat the recipe."""
        given = setting in self.settings.model_fields_set
        return getattr(self.settings, setting) if given else None

    def backend(self, name: str) -> BackendRecipe:
        """The backend recipe of this name. Raises RecipeError."""
        return self._catalogue.backend(name)


def installed_only(planned: Planned, store: Store) -> Candidates | Refusal:
    """The candidates whose weights and image are here, or a 404: requests never download (rule
    3)."""
    images = planned.facts.images
    items = tuple(c for c in planned.candidates.items if c.image is None or c.image in images)
    # One without files keeps its model in the engine's own store, and fetches it there by itself.
    here = tuple(c for c in items if all(store.installed(w) for w in c.weights))
    model = planned.candidates.model
    if here:
        return Candidates(model=model, items=here)
    return Refusal(
        code="model_not_installed",
        message=f"{model} is not installed; requests never download",
        hint=f"flexlab up {model}",
        status=404,
    )
