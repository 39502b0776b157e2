"""What the launcher reports: each event changes the state and ends in one pass."""

from __future__ import annotations

from flexlab.scheduler.passes import Passes
from flexlab.scheduler.policy import back_off_s
from flexlab.scheduler.state import Instance, Preparing
from flexlab.spec.engine import OUT_OF_MEMORY
from flexlab.spec.instance import Condition, ConditionKind, Endpoint, RunState
from flexlab.spec.lab import Progress
from flexlab.spec.plan import Candidates, Refusal


class Reports(Passes):
    """Base of the scheduler: events from outside."""

    def progress(self, name: str, progress: Progress) -> None:
        """How far preparing is."""
        preparing = self.models[name].preparing
        if preparing is not None:
            preparing.progress = progress

    def prepared(self, name: str, candidates: Candidates) -> None:
        """Planned and installed."""
        model = self.models[name]
        now = self._clock()
        was, model.preparing = model.preparing, None
        if was is not None and was.download:
            for waiter in model.waiters:  # fetching is not time that an `up` spends in the queue
                if waiter.wants_download:
                    waiter.deadline += now - max(was.since, waiter.since)
        # Made for wishes that have changed meanwhile, it is prepared again.
        if was is None or was.wishes == model.wishes:
            model.candidates = candidates
        self._pass()

    def prepare_failed(self, name: str, refusal: Refusal) -> None:
        """Not plannable, not installed, not fetched, or given up (code `cancelled`)."""
        model = self.models[name]
        was = model.preparing or Preparing(self._clock(), False, model.wishes)
        model.preparing = None
        if refusal.code != "cancelled" and was.wishes == model.wishes:
            model.restore_blocked = True
            # A request's quick look ends here; an `up` that came meanwhile asks again, with fetch.
            meant = [w for w in model.waiters if was.download or not w.wants_download]
            self._refuse_some(model, meant, refusal)
            model.problem = refusal
        self._pass()

    def launched(self, instance: str, endpoint: Endpoint, **known: str | None) -> None:
        """It runs and loads. `known`: ref, image, plan_hash, log_path, for the views."""
        found = self.instances.get(instance)
        if found is None or found.state not in ("starting", "loading"):
            return
        found.endpoint = endpoint
        for name, value in known.items():
            setattr(found, name, value)
        self._to(found, "loading", "the engine loads the model")

    def ready(self, instance: str, load_s: float) -> None:
        """It answers."""
        found = self.instances.get(instance)
        if found is None or found.state not in ("starting", "loading"):
            return
        model = self.models[found.model]
        found.load_s = model.last_load_s = load_s
        self._admit(found, f"loaded in {load_s:.1f} s", seconds=load_s)
        self._pass()

    def start_failed(self, instance: str, refusal: Refusal) -> None:
        """It never became ready; what is left of it is stopped."""
        found = self.instances.get(instance)
        if found is None or found.state == "stopping":
            return
        model = self.models[found.model]
        model.failures += 1
        model.back_off_until = self._clock() + back_off_s(
            model.failures, self.policy, was_ready=False
        )
        model.restore_blocked = model.failures >= self.policy.restore_tries
        self._refuse_waiters(model, refusal)
        model.problem = refusal
        self._learn_shortage(found, refusal.code)
        self._to(found, "failed", refusal.message)
        self._stop(found, refusal.message)
        self._pass()

    def _learn_shortage(self, found: Instance, code: str | None) -> None:
        """Rule 2: it died for lack of memory, so the next one claims more."""
        if code == OUT_OF_MEMORY and found.candidate.memory_key:
            self._effects.remember_shortage(found.candidate.memory_key, dict(found.claims))
            self.models[found.model].candidates = None

    def gone(self, instance: str, state: RunState) -> None:
        """Confirmed gone, asked for or not. The claim ends here."""
        found = self.instances.get(instance)
        if found is None:
            return
        self._remove(found)
        if found.served and found.peak and found.candidate.memory_key:
            self._effects.remember_use(found.candidate.memory_key, dict(found.peak))
        for future in self._gone_waiters.pop(instance, ()):
            if not future.done():
                future.set_result(True)
        if found.state == "stopping":
            seconds = self._clock() - found.since
            self._note(found, "gone", f"{found.model} is gone ({found.why})", seconds=seconds)
        else:
            self._died(found, state)
        self._pass()

    def _died(self, found: Instance, state: RunState) -> None:
        model = self.models[found.model]
        now = self._clock()
        model.crashes += 1
        if found.ready_at is not None and now - found.ready_at >= self.policy.settled_s:
            model.failures = 0
        model.failures += 1
        model.restore_blocked = model.failures >= self.policy.restore_tries
        was_ready = found.ready_at is not None
        model.back_off_until = now + back_off_s(model.failures, self.policy, was_ready=was_ready)
        why = state.why or "it ended"
        model.problem = Refusal(
            code="engine_died",
            message=f"the engine of {found.model} died: {why}",
            hint=f"flexlab logs {found.model}",
            status=502,
        )
        self._learn_shortage(found, state.code)
        self._cut_leases(found, model.problem)
        if not was_ready:
            self._refuse_waiters(model, model.problem)
        self._note(found, "failed", model.problem.message)

    def stop_unconfirmed(self, instance: str) -> None:
        """Rule 10: stuck; the claim stays, and `down --force` tries again."""
        found = self.instances.get(instance)
        if found is None:
            return
        why = "the stop was not confirmed"
        found.conditions["stuck"] = Condition(kind="stuck", since=self._wall(), why=why)
        for future in self._gone_waiters.pop(instance, ()):
            if not future.done():
                future.set_result(False)
        self._note(found, "stuck", f"{found.model} does not go away; flexlab down --force")
        self._refuse_waiters(self.models[found.model], stuck(found.model))
        self._pass()

    def adopt(self, instance: Instance) -> None:
        """One that runs already: found by an earlier daemon's record, or external."""
        self._add(instance)
        if not instance.external:
            self._note(instance, "ready", f"{instance.model} was adopted: it went on running")

    def mark(self, instance: str, condition: Condition) -> None:
        """Put a condition beside the state."""
        if found := self.instances.get(instance):
            found.conditions[condition.kind] = condition

    def unmark(self, instance: str, kind: ConditionKind) -> None:
        """Take a condition away."""
        if found := self.instances.get(instance):
            found.conditions.pop(kind, None)

    def runtime_lost(self, runtime: str, why: str) -> None:
        """Rule 19: it cannot be reached. Claims stay, what answers goes on, nothing starts."""
        if runtime in self.unknown:
            return
        self.unknown[runtime] = why
        self._effects.note("daemon", f"{runtime} cannot be reached: {why}", why=why)
        for instance in self.instances.values():
            if instance.candidate.runtime == runtime:
                self.mark(instance.id, Condition(kind="unknown", since=self._wall(), why=why))
        self._pass()

    def runtime_back(self, runtime: str) -> None:
        """It answers again; what became of its instances is told by whoever asked it."""
        if self.unknown.pop(runtime, None) is None:
            return
        self._effects.note("daemon", f"{runtime} answers again")
        for instance in self.instances.values():
            if instance.candidate.runtime == runtime:
                instance.conditions.pop("unknown", None)
        self._pass()


def stuck(model: str) -> Refusal:
    """What everybody hears who asks for a model that does not go away."""
    return Refusal(
        code="stuck",
        message=f"{model} was told to stop, and that is not confirmed; it still holds its memory",
        hint=f"flexlab down {model} --force",
    )
