"""How much memory a model needs, with the terms that the need is the sum of. Pure.

llama.cpp, where each term comes from:

weights       size of the files; they are mapped, and every page of them is read
kv_cache      slots x context (rounded up to 256 per slot) x what one token keeps in all layers:
              KV heads x (key length x size of K's type + value length x size of V's type)
compute       per token of a micro batch: 16 activations of the embedding's length in 32 bits, and
              the attention mask (6 bytes per token of context); two rows of logits per slot, per
              token of the batch with embeddings; without flash attention the scores of all heads
prompt_cache  `cache_ram_mib`: may be filled at any time, so it belongs to the claim
overhead      of the engine's program (backend recipe)

Measured on x86-64 with SmolLM2-135M Q4_1 (resident memory after use, MB), against the sum without
the prompt cache: context 4096, 1 slot: 270; 512: 171; 8192: 363; 2048 with 4 slots: 366; 4096 with
micro batches of 2048: 310; KV cache in q8_0: 226; flash attention off: 313; embeddings: 400. The
estimate is above each of these and below 1.35 times (tests/unit/test_fit.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt
from typing import Protocol

import msgspec

from flexlab.backends.base import BackendSettings
from flexlab.backends.llamacpp import LlamaCppSettings
from flexlab.core.units import MIB
from flexlab.spec.machine import RAM_POOL
from flexlab.spec.plan import Need

# Bytes per block of 32 numbers (ggml's block sizes).
_BLOCK = 32
_BLOCK_BYTES = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18,
    "iq4_nl": 18,
}  # fmt: skip
_CONTEXT_STEP = 256
_DEFAULT_UBATCH = 512
_ACTIVATION_BYTES = 16 * 4
_MASK_BYTES = 6
_LOGIT_BYTES = 2 * 4
_SCORE_BYTES = 5
"""Scores in 32 bits, and a quarter for the softmax beside them (measured)."""


HOST_TERMS = frozenset({"prompt_cache", "overhead"})
"""What llama.cpp keeps in the host's RAM when its layers are on a GPU."""


class ModelShape(Protocol):
    """What a model's file says of its size (`weights.gguf.GgufHeader`); None where it is silent."""

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


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes by term; `guessed` terms rest on a rule of thumb, `unknown` ones are left out."""

    terms: dict[str, int]
    guessed: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

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

    def needs(self, pool: str) -> tuple[Need, ...]:
        """As a candidate states them. Of an engine on a GPU, some terms stay in the host's RAM."""
        if pool == RAM_POOL:
            return (_need(pool, self.terms),)
        there = {term: size for term, size in self.terms.items() if term not in HOST_TERMS}
        here = {term: size for term, size in self.terms.items() if term in HOST_TERMS}
        return (_need(pool, there), *((_need(RAM_POOL, here),) if any(here.values()) else ()))


def _need(pool: str, terms: dict[str, int]) -> Need:
    return Need(pool=pool, total_bytes=sum(terms.values()), terms=terms)


def estimate(settings: BackendSettings, model: Model, overhead_bytes: int) -> Estimate:
    """The need of `model` under these settings. Raises TypeError for settings of
    an engine that this version cannot estimate."""
    if isinstance(settings, LlamaCppSettings):
        return _llamacpp(settings, model, overhead_bytes)
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


def _llamacpp(settings: LlamaCppSettings, model: Model, overhead_bytes: int) -> Estimate:
    guessed: list[str] = []
    terms: dict[str, int] = {}
    if model.weight_bytes is not None:
        terms["weights"] = model.weight_bytes
    per_token = _kv_bytes_per_token(settings, model.shape)
    if per_token is None:
        per_token = _guessed_kv_bytes_per_token(settings, model)
        guessed.append("kv_cache")
    if per_token is not None:
        slot_tokens = -(-settings.context_size // _CONTEXT_STEP) * _CONTEXT_STEP
        terms["kv_cache"] = slot_tokens * settings.parallel * per_token
    compute = _compute_bytes(settings, model.shape)
    if compute is None:
        compute = (model.weight_bytes or 0) // 8
        guessed.append("compute")
    terms["compute"] = compute
    terms["prompt_cache"] = settings.cache_ram_mib * MIB
    terms["overhead"] = overhead_bytes
    unknown = tuple(name for name in ("weights", "kv_cache") if name not in terms)
    guessed = [name for name in guessed if name in terms]
    return Estimate(terms=terms, guessed=tuple(guessed), unknown=unknown)


def _kv_bytes_per_token(settings: LlamaCppSettings, shape: ModelShape | None) -> int | None:
    if shape is None or shape.kv_heads_total is None:
        return None
    if shape.kv_heads_total == 0:  # a recurrent model keeps no tokens
        return 0
    if not shape.key_length or not shape.value_length:
        return None
    keys = shape.kv_heads_total * shape.key_length * _BLOCK_BYTES[settings.cache_type_k]
    values = shape.kv_heads_total * shape.value_length * _BLOCK_BYTES[settings.cache_type_v]
    return -(-(keys + values) // _BLOCK)


def _guessed_kv_bytes_per_token(settings: LlamaCppSettings, model: Model) -> int | None:
    """Models with grouped KV heads keep about sqrt(parameters) numbers per token.

    0.5 to 2.3 times that for SmolLM2-135M, Llama 3 (1B, 8B, 70B) and Qwen3 (0.6B, 8B, 32B). Where
    the parameters are unknown too, a file's size is taken for four and a half bits a parameter.
    """
    parameters = model.parameters
    if parameters is None and model.weight_bytes is not None:
        parameters = model.weight_bytes * 16 // 9
    if parameters is None:
        return None
    both = _BLOCK_BYTES[settings.cache_type_k] + _BLOCK_BYTES[settings.cache_type_v]
    return isqrt(parameters) * both // (2 * _BLOCK)


def _compute_bytes(settings: LlamaCppSettings, shape: ModelShape | None) -> int | None:
    if shape is None or not shape.embedding_length:
        return None
    batch = min(settings.ubatch_size or _DEFAULT_UBATCH, settings.context_size)
    per_token = shape.embedding_length * _ACTIVATION_BYTES + settings.context_size * _MASK_BYTES
    if settings.flash_attention == "off":
        per_token += (shape.heads or 0) * settings.context_size * _SCORE_BYTES
    logit_rows = batch if settings.embeddings else settings.parallel
    return batch * per_token + logit_rows * (shape.vocabulary or 0) * _LOGIT_BYTES
