"""What the screens draw over time: of GPUs, of models, and which instance held what when.

Fed by one tick a second and by the events of instances; of a fixed size whatever happens. What is
given out needs nothing else to be drawn, so that a recording replays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping

from flexlab.daemon.rings import COARSE_SLOTS, COARSE_STEP_S, Rings, Thing
from flexlab.gateway.proxy import Gateway
from flexlab.scheduler.scheduler import Scheduler
from flexlab.spec.lab import Event, History, Run, RunStep, Series
from flexlab.spec.machine import CHIP_TEMPS, GpuSample, Sample

TICK_S = 1.0
REACH_S = COARSE_SLOTS * COARSE_STEP_S
MODELS_MAX = 200
"""Models with series of their own; of more, those that did nothing for longest lose theirs."""
RUNS_MAX = 500
STEPS_MAX = 64
"""Of one run; one that has more loses those after its start."""
FRESH_S = 5.0
"""A reading of a GPU that is older says nothing of now."""
_GPU_VALUES = (
    ("used_bytes", ("vram_used_bytes",)),
    ("busy_percent", ("busy_percent",)),
    ("power_w", ("power_w",)),
    ("temperature_c", tuple(f"temp_{name}_c" for name in CHIP_TEMPS)),
)
"""Name here -> names of the readings, the first that the card has."""


class Recorder:
    """Keeps the history of one lab; used on the loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokens: Callable[[], Mapping[str, int]],
        *,
        makes_text: Callable[[str], bool] = lambda _model: True,
    ) -> None:
        """`tokens`: model -> tokens since the start, those of answers on their way included.

        `makes_text`: whether a model's work is counted in tokens at all.
        """
        self._scheduler = scheduler
        self._tokens = tokens
        self._makes_text = makes_text
        self._rings = Rings()
        self._counted: dict[str, int] = {}
        self._counted_at: float | None = None
        self._active_at: dict[str, float] = {}
        """Model with series -> when it last did anything."""
        self._runs: dict[str, Run] = {}
        self._ended: deque[Run] = deque(maxlen=RUNS_MAX)

    # -- what comes in

    def tick(self, at: float, sample: Sample | None) -> None:
        """One point of every series; `at` in Unix seconds."""
        self._rings.open(at)
        if sample is not None and abs(at - sample.at) <= FRESH_S:
            for part in sample.gpus:
                self._put_gpu(part)
        self._put_models(at)

    def _put_gpu(self, part: GpuSample) -> None:
        if part.stale or part.asleep:
            return
        values = []
        for name, readings in _GPU_VALUES:
            for reading in readings:
                found = part.values.get(reading)
                if found is not None:
                    if found.age_s <= FRESH_S:
                        values.append((name, found.value))
                    break
        self._rings.put(("gpu", part.id), values)

    def _put_models(self, at: float) -> None:
        in_flight: dict[str, int] = {}
        serving = set()
        for instance in self._scheduler.instances.values():
            in_flight[instance.model] = in_flight.get(instance.model, 0) + len(instance.leases)
            if instance.state in ("ready", "draining"):
                serving.add(instance.model)
        busy = {model.name for model in self._scheduler.waiting()} | in_flight.keys()
        self._active_at.update(dict.fromkeys(busy, at))
        self._make_room(at)
        tokens, before, since = self._tokens(), self._counted, self._counted_at
        passed_s = at - since if since is not None else 0.0
        for name in self._active_at:
            model = self._scheduler.models.get(name)
            if model is None:
                continue
            values: list[tuple[str, float]] = [
                ("in_flight", in_flight.get(name, 0)),
                ("waiting", len(model.waiters)),
            ]
            if name in serving and passed_s > 0 and self._makes_text(name):
                # `usage` may correct what was counted on the way; nobody takes tokens back.
                made = max(0, tokens.get(name, 0) - before.get(name, 0))
                values.append(("tokens_per_s", made / passed_s))
            self._rings.put(("model", name), values)
        if passed_s > 0 or since is None:
            self._counted, self._counted_at = dict(tokens), at
        if passed_s < 0:
            self._counted_at = at

    def _make_room(self, at: float) -> None:
        quiet = [name for name, then in self._active_at.items() if at - then > REACH_S]
        if (over := len(self._active_at) - len(quiet) - MODELS_MAX) > 0:
            longest = sorted(self._active_at, key=self._active_at.__getitem__)
            quiet += [name for name in longest if name not in quiet][:over]
        if quiet:
            for name in quiet:
                self._rings.things.pop(("model", name), None)
                del self._active_at[name]

    def note(self, event: Event) -> None:
        """An event of an instance is a step of its run."""
        if event.instance is None or event.model is None or event.state is None:
            return
        step = RunStep(at=event.at, state=event.state, why=event.why or "", by=event.by)
        run = self._runs.get(event.instance)
        if run is None:
            found = self._scheduler.instances.get(event.instance)
            devices = found.candidate.devices if found else ()
            run = Run(
                instance=event.instance, model=event.model, devices=devices, began_at=event.at
            )
        steps = (*run.steps, step)
        if len(steps) > STEPS_MAX:
            steps = (steps[0], *steps[2:])
        # Of one that died by itself nothing else is told: it is gone already.
        ended_at = None if event.instance in self._scheduler.instances else event.at
        run = Run(
            instance=run.instance,
            model=run.model,
            devices=run.devices,
            began_at=run.began_at,
            ended_at=ended_at,
            steps=steps,
        )
        if ended_at is None:
            self._runs[event.instance] = run
        else:
            self._runs.pop(event.instance, None)
            self._ended.append(run)

    # -- what goes out

    def history(self, seconds: float, at: float) -> Callable[[], History]:
        """What was kept of the last `seconds`, copied; the call builds it, in any thread."""
        begin, step_s, columns = self._rings.window(seconds)
        runs = [run for run in self._ended if (run.ended_at or at) >= begin]
        runs += self._runs.values()

        def build() -> History:
            kept: dict[Thing, dict[str, tuple[float | None, ...]]] = {}
            for thing, name, values in columns:
                kept.setdefault(thing, {})[name] = tuple(map(_told, values))
            return History(
                at=at,
                begin=begin,
                step_s=step_s,
                gpus=_series("gpu", kept),
                models=_series("model", kept),
                runs=tuple(sorted(runs, key=lambda run: run.began_at)),
            )

        return build


def _series(
    kind: str, kept: Mapping[Thing, dict[str, tuple[float | None, ...]]]
) -> tuple[Series, ...]:
    """Those of which anything is known in this window."""
    return tuple(
        Series(id=thing, values=values)
        for (of, thing), values in kept.items()
        if of == kind and any(map(_says_something, values.values()))
    )


def _says_something(values: Iterable[float | None]) -> bool:
    return any(value is not None for value in values)


def _told(value: float) -> float | None:
    return None if value != value else round(value, 2)


def tokens_of(gateway: Gateway) -> dict[str, int]:
    """Model -> tokens since the start, of answers that ended and of those on their way."""
    totals = {model: counts.tokens for model, counts in gateway.observer.models.items() if model}
    for exchange in gateway.in_progress():
        record = exchange.record
        if record.model is not None:
            totals[record.model] = totals.get(record.model, 0) + record.tokens
    return totals
