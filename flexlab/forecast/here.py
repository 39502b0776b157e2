"""What a forecast rests on: recipes, settings, the machine, its software, and who is running."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import msgspec

from flexlab import daemons
from flexlab.core.errors import FlexLabError
from flexlab.core.settings import Settings, load_settings
from flexlab.gpus import isolated
from flexlab.planning.reserves import with_reserves
from flexlab.recipes.catalogue import Catalogue
from flexlab.runtimes.docker import DockerRuntime
from flexlab.runtimes.preflight import process_facts
from flexlab.scheduler.occupancy import seen
from flexlab.scheduler.room import Occupancy, Room
from flexlab.scheduler.state import PoolAccount
from flexlab.spec.lab import Snapshot
from flexlab.spec.machine import Machine, Pool, Problem
from flexlab.spec.plan import Facts, RuntimeFacts, RuntimeName, Weight, Wishes
from flexlab.spec.source import parse_source
from flexlab.weights.here import Here as WeightsFound
from flexlab.weights.here import WeightsHere
from flexlab.weights.store import Store

THIS_MACHINE = Path("/")


class Here:
    """One machine (this one, or one recorded below a folder) at one moment."""

    def __init__(
        self,
        root: Path,
        *,
        catalogue: Catalogue,
        settings: Settings,
        machine: Machine,
        occupancy: Occupancy,
        snapshot: Snapshot | None = None,
    ) -> None:
        self.root = root
        self.catalogue = catalogue
        self.settings = settings
        self.machine = machine
        self.occupancy = occupancy
        self.snapshot = snapshot
        self._store = Store(settings.models_dir)
        self._weights = WeightsHere(self._store)
        self._containers = DockerRuntime(settings.docker_host)
        self._runtimes = self._find_runtimes()

    @classmethod
    def look(cls, root: Path, catalogue: Catalogue | None = None) -> Here:
        """Raises FlexLabError where settings or the machine cannot be read."""
        recipes = catalogue or Catalogue.load()
        settings = load_settings().settings
        is_this = root == THIS_MACHINE
        found = isolated.detect(
            root,
            ram_reserve_bytes=settings.ram_reserve_bytes if is_this else None,
            ram_budget_bytes=settings.ram_limit_bytes if is_this else None,
        )
        machine = with_reserves(found, recipes.gpu)
        snapshot = _ask_daemon() if is_this else None
        return cls(
            root,
            catalogue=recipes,
            settings=settings,
            machine=machine,
            occupancy=seen(snapshot) if snapshot else _unoccupied(machine),
            snapshot=snapshot,
        )

    @property
    def is_this_machine(self) -> bool:
        """Rather than one that was recorded."""
        return self.root == THIS_MACHINE

    def weights(self, weights: Iterable[Weight]) -> WeightsFound:
        """What is installed of these; of another machine nothing is known."""
        if not self.is_this_machine:
            return WeightsFound(paths={}, sizes={}, headers={}, broken={})
        return self._weights.look(weights)

    def facts(self, weights: Iterable[Weight], found: WeightsFound) -> Facts:
        """Weights that are not here get the place where they would be, so that a plan is whole."""
        wanted = {weight.source: weight for weight in weights}
        places = {source: str(self._place(weight)) for source, weight in wanted.items()}
        return Facts(
            runtimes=self._runtimes,
            models_dir=str(self._store.models_dir),
            weights={**places, **found.paths},
            weight_bytes=found.sizes,
            images=self._containers.images() if self.is_this_machine else {},
        )

    def with_runtime(self, wishes: Wishes) -> tuple[Wishes, list[Problem]]:
        """Of another machine nobody can say what runs on it: docker is assumed, aloud."""
        if self.settings.allow_experimental:
            wishes = msgspec.structs.replace(wishes, allow_experimental=True)
        if self.is_this_machine or wishes.runtime or self.settings.runtime is not None:
            return wishes, []
        problem = Problem(
            code="runtime_assumed",
            message="that machine's runtimes cannot be asked: docker is assumed",
            hint="--runtime process plans for the embedded engine",
        )
        return msgspec.structs.replace(wishes, runtime="docker"), [problem]

    def _place(self, weight: Weight) -> Path:
        name = PurePosixPath(parse_source(weight.source).uri).name
        return self._store.models_dir / name

    def _find_runtimes(self) -> dict[str, RuntimeFacts]:
        if not self.is_this_machine:
            both: tuple[RuntimeName, ...] = ("process", "docker")
            return {name: RuntimeFacts(name=name, available=True) for name in both}
        return {"process": process_facts(), "docker": self._containers.facts()}


def room(pool: Pool) -> Room:
    """As the scheduler accounts it, with all that is used taken for others'."""
    account = PoolAccount.of(pool)
    account.foreign_bytes = pool.used_bytes
    free = None if pool.used_bytes is None else account.free_bytes(0)
    return Room(usable_bytes=account.usable_bytes, free_bytes=free)


def _unoccupied(machine: Machine) -> Occupancy:
    return Occupancy(rooms={pool.id: room(pool) for pool in machine.pools})


def _ask_daemon() -> Snapshot | None:
    """None without a daemon, or with one that does not answer: then its models count as others'."""
    try:
        daemon = daemons.connect(start=False)
        return daemon.snapshot()
    except FlexLabError:
        return None
