"""How much memory a model needs, with the terms that the need is the sum of. Pure.

Each engine has its own sum (`fit_text`, `fit_images`); here is what they share: what is known of a
model, what an estimate says, and how it becomes the needs of a candidate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from flexlab.backends.base import BackendSettings
from flexlab.spec.machine import RAM_POOL
from flexlab.spec.plan import Need


class ModelShape(Protocol):
    """What a model's file says of its size (`weights.gguf.GgufHeader`); None where it is silent."""

    @property
    def layers(self) -> int | None: ...
    @property
    def heads(self) -> int | None: ...
    @property
    def kv_heads_total(self) -> int | None:
        """KV heads summed over all layers."""

    @property
    def key_length(self) -> int | None: ...
    @property
    def value_length(self) -> int | None: ...
    @property
    def embedding_length(self) -> int | None: ...
    @property
    def vocabulary(self) -> int | None: ...
    @property
    def context_length(self) -> int | None: ...


class KnownShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model's shape as a recipe states it, until its header is here."""

    layers: int | None = None
    heads: int | None = None
    kv_heads_total: int | None = None
    key_length: int | None = None
    value_length: int | None = None
    embedding_length: int | None = None
    vocabulary: int | None = None
    context_length: int | None = None


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model before it runs."""

    weight_bytes: int | None
    """All its files together; None while unknown."""
    parameters: int | None = None
    shape: ModelShape | None = None
    quantization: str | None = None
    """As its makers call it (Q4_K_M, awq): says the bits of a weight where no file does."""
    context: int | None = None
    """The longest that it was trained for, in tokens."""
    parts: dict[str, int] | None = None
    """Bytes of each part of a pipeline as it is loaded."""
    activations: int | None = None
    """Bytes that one job of a pipeline takes beside its parts."""


class Ground(NamedTuple):
    """What an engine is going to stand on."""

    overhead_bytes: int
    """Of the engine's program (backend recipe)."""

    on_gpu: bool = False
    card_bytes: int | None = None
    """Memory of each card; None: unknown, or the CPU."""

    driver_bytes: int = 0
    """That the driver takes of each card for one program."""


class Share(NamedTuple):
    """One pool that takes a part of the whole: `of_all` of everything that can be divided."""

    pool: str
    of_all: float = 1.0


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by term; `guessed` terms rest on a rule of thumb, `unknown` ones are left out."""

    terms: dict[str, int]
    guessed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    host: frozenset[str] = frozenset()
    """Terms that stay in the host's RAM when the engine is on a GPU."""
    each: frozenset[str] = frozenset()
    """Terms that every card of several has whole."""
    fixed_bytes: int | None = None
    """What the engine takes of each card whatever it needs: a share that somebody chose."""

    @property
    def total_bytes(self) -> int:
        """The sum of the terms."""
        return sum(self.terms.values())

    @property
    def certain_terms(self) -> dict[str, int]:
        """Without what is only guessed: never more than what it will really take."""
        return {term: size for term, size in self.terms.items() if term not in self.guessed}

    @property
    def certain_bytes(self) -> int:
        """The sum of the certain terms."""
        return sum(self.certain_terms.values())

    def least_terms(self, cards: int) -> dict[str, int]:
        """The certain terms on each of `cards` that do all of it together."""
        return {
            term: size if term in self.each else -(-size // cards)
            for term, size in self.certain_terms.items()
        }

    def has_share_too_small(self, cards: int) -> bool:
        """Whether the share that somebody chose is less than that."""
        return self.fixed_bytes is not None and self.fixed_bytes < sum(
            self.least_terms(cards).values()
        )

    def needs(self, *shares: Share) -> tuple[Need, ...]:
        """As a candidate states them: one for each pool, and the host's where terms stay there."""
        if [share.pool for share in shares] == [RAM_POOL]:
            return (_need(RAM_POOL, self.terms),)
        here = {term: size for term, size in self.terms.items() if term in self.host}
        there = [self._of_card(share) for share in shares]
        return (*there, *((_need(RAM_POOL, here),) if any(here.values()) else ()))

    def _of_card(self, share: Share) -> Need:
        terms = {
            term: size if term in self.each else round(size * share.of_all)
            for term, size in self.terms.items()
            if term not in self.host
        }
        if self.fixed_bytes is not None:
            terms["kv_cache"] = terms.get("kv_cache", 0) + max(
                0, self.fixed_bytes - sum(terms.values())
            )
        return _need(share.pool, terms)


def _need(pool: str, terms: dict[str, int]) -> Need:
    return Need(pool=pool, total_bytes=sum(terms.values()), terms=terms)


def estimate(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    """The need of `model` under these settings. Raises TypeError for settings of
    an engine that this version cannot estimate."""
    # Each engine's sum stands in its own file, which needs the types of this one.
    from flexlab.planning import fit_images, fit_text

    for sums in (fit_text.SUMS, fit_images.SUMS):
        for settings_type, reckon in sums.items():
            if isinstance(settings, settings_type):
                return reckon(settings, model, ground)
    raise TypeError(f"no estimate for {type(settings).__name__}")


def claim_bytes(need: Need, measured_bytes: int | None) -> int:
    """What an instance claims: the measurement of earlier runs beats the estimate.

    Never below the weights: mapped pages that nobody has touched lately are missing from a
    measurement, yet all of them are needed.
    """
    if measured_bytes is None:
        return need.total_bytes
    return max(measured_bytes, need.terms.get("weights", 0))


def highest(runs: Iterable[int], keep: int = 3) -> int | None:
    """The highest use of the last `keep` runs (oldest first); None without any."""
    return max(list(runs)[-keep:], default=None)


def even(pools: Sequence[str]) -> tuple[Share, ...]:
    """The same part for each pool."""
    return tuple(Share(pool, 1 / len(pools)) for pool in pools)


def by_size(pools: Sequence[tuple[str, int]]) -> tuple[Share, ...]:
    """Parts as large as each pool is of all of them: (pool, bytes)."""
    total = sum(size for _, size in pools)
    return tuple(Share(pool, size / total) for pool, size in pools)
