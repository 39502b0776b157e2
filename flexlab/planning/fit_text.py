"""The memory of engines that answer with text. Pure.

llama.cpp (and Ollama, which runs it), where each term comes from:

weights       size of the files; they are mapped, and every page of them is read
kv_cache      slots x context (rounded up to 256 per slot) x what one token keeps in all layers:
              KV heads x (key length x size of K's type + value length x size of V's type)
compute       per token of a micro batch: 16 activations of the embedding's length in 32 bits, and
              the attention mask (6 bytes per token of context); two rows of logits per slot, per
              token of the batch with embeddings; without flash attention the scores of all heads
prompt_cache  `cache_ram_mib`: may be filled at any time, so it belongs to the claim; in RAM
driver        on a GPU: the driver's context and the engine's kernels (backend recipe)
overhead      of the engine's program (backend recipe)

Measured on x86-64 with SmolLM2-135M Q4_1 (resident memory after use, MB), against the sum without
the prompt cache: context 4096, 1 slot: 270; 512: 171; 8192: 363; 2048 with 4 slots: 366; 4096 with
micro batches of 2048: 310; KV cache in q8_0: 226; flash attention off: 313; embeddings: 400. The
estimate is above each of these and below 1.35 times (tests/unit/test_fit.py).

vLLM and MLC reserve a share of the card at their start and put into the KV cache what the weights
leave of it: the need is the least with which one request of the full context (MLC: all sequences)
can be answered, and a share that somebody chose is itself the claim.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt

import msgspec

from flexlab.backends.base import BackendSettings, of_type
from flexlab.backends.llamacpp import CacheType, LlamaCppSettings
from flexlab.backends.mlc import MlcSettings
from flexlab.backends.ollama import OllamaSettings
from flexlab.backends.vllm import VllmSettings
from flexlab.core.units import MIB
from flexlab.planning.fit import Estimate, Ground, Model, ModelShape
from flexlab.planning.quantization import weight_bytes

# Bytes per block of 32 numbers (ggml's block sizes).
_BLOCK = 32
_BLOCK_BYTES: dict[str, int] = {
    "f32": 128, "f16": 64, "bf16": 64, "q8_0": 34, "q5_1": 24, "q5_0": 22, "q4_1": 20, "q4_0": 18,
    "iq4_nl": 18, "fp8": 32,
}  # fmt: skip
_CONTEXT_STEP = 256
_DEFAULT_UBATCH = 512
_ACTIVATION_BYTES = 16 * 4
_MASK_BYTES = 6
_LOGIT_BYTES = 2 * 4
_SCORE_BYTES = 5
"""Scores in 32 bits, and a quarter for the softmax beside them (measured)."""
_ON_THE_CPU = "weights_on_cpu"
_CACHE_ON_THE_CPU = "kv_cache_on_cpu"
HOST = frozenset({"prompt_cache", "overhead", _ON_THE_CPU, _CACHE_ON_THE_CPU})
"""What llama.cpp keeps in the host's RAM when its layers are on a GPU."""


def _llamacpp(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    chosen = of_type(settings, LlamaCppSettings, "llamacpp")
    guessed: list[str] = []
    terms: dict[str, int] = {}
    if (weights := _weights(model)) is not None:
        terms["weights"] = weights
    types = (chosen.cache_type_k, chosen.cache_type_v)
    per_token = _kv_bytes_per_token(types, model, guessed)
    if per_token is not None:
        slot_tokens = -(-chosen.context_size // _CONTEXT_STEP) * _CONTEXT_STEP
        terms["kv_cache"] = slot_tokens * chosen.parallel * per_token
    compute = _compute_bytes(chosen, model.shape)
    if compute is None:
        compute = (terms.get("weights") or 0) // 8
        guessed.append("compute")
    terms["compute"] = compute
    terms["prompt_cache"] = chosen.cache_ram_mib * MIB
    if ground.on_gpu:
        _split_layers(terms, chosen.n_gpu_layers, model.shape)
        terms["driver"] = ground.driver_bytes
    terms["overhead"] = ground.overhead_bytes
    unknown = tuple(name for name in ("weights", "kv_cache") if name not in terms)
    guessed = [name for name in guessed if name in terms]
    return Estimate(
        terms=terms,
        guessed=tuple(guessed),
        unknown=unknown,
        host=HOST,
        each=frozenset({"compute", "driver"}),
    )


def _split_layers(terms: dict[str, int], on_gpu: int | None, shape: ModelShape | None) -> None:
    """Layers that are computed on the CPU keep their weights and their cache in RAM."""
    layers = shape.layers if shape else None
    if on_gpu is None or not layers or on_gpu >= layers:
        return
    for term, kept in (("weights", _ON_THE_CPU), ("kv_cache", _CACHE_ON_THE_CPU)):
        if term in terms:
            there = terms[term] * on_gpu // layers
            terms[kept] = terms[term] - there
            terms[term] = there


def _ollama(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    chosen = of_type(settings, OllamaSettings, "ollama")
    cache: dict[str, CacheType] = {"f16": "f16", "q8_0": "q8_0", "q4_0": "q4_0"}
    same = LlamaCppSettings(
        context_size=chosen.context_size,
        parallel=chosen.parallel,
        cache_type_k=cache[chosen.cache_type],
        cache_type_v=cache[chosen.cache_type],
        embeddings=chosen.embeddings,
        cache_ram_mib=0,
    )
    found = _llamacpp(same, model, ground)
    # Its overhead is the runner's, on the card.
    return msgspec.structs.replace(
        found, host=found.host - {"overhead"}, each=found.each | {"overhead"}
    )


def _vllm(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    chosen = of_type(settings, VllmSettings, "vllm")
    cache = "fp8" if chosen.kv_cache_dtype.startswith("fp8") else "f16"
    tokens = 0 if chosen.embeddings else chosen.context_size
    share = chosen.gpu_memory_utilization
    fixed = None if share is None or not ground.card_bytes else int(share * ground.card_bytes)
    return _reserving(model, ground, cache, tokens, fixed)


def _mlc(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    chosen = of_type(settings, MlcSettings, "mlc")
    # MLC computes and caches in the type after the f of its quantisation's name.
    cache = "f32" if "f32" in (model.quantization or "") else "f16"
    of_one = chosen.context_size or model.context or 0
    tokens = chosen.max_total_seq_length or of_one * (chosen.max_num_sequence or 1)
    fixed = chosen.gpu_memory_bytes
    if chosen.gpu_memory_utilization is not None and ground.card_bytes:
        fixed = int(chosen.gpu_memory_utilization * ground.card_bytes)
    return _reserving(model, ground, cache, tokens, fixed)


def _reserving(
    model: Model, ground: Ground, cache: str, tokens: int, fixed: int | None
) -> Estimate:
    """An engine that takes a share and fills it with cache."""
    guessed: list[str] = []
    terms: dict[str, int] = {}
    if (weights := _weights(model)) is not None:
        terms["weights"] = weights
    if (per_token := _kv_bytes_per_token((cache, cache), model, guessed)) is not None:
        terms["kv_cache"] = tokens * per_token
    terms["overhead"] = ground.overhead_bytes
    unknown = tuple(name for name in ("weights", "kv_cache") if name not in terms)
    return Estimate(
        terms=terms,
        guessed=tuple(name for name in guessed if name in terms),
        unknown=unknown,
        each=frozenset({"overhead"}),
        fixed_bytes=fixed,
    )


def _weights(model: Model) -> int | None:
    """Of the files; until those are known, so many weights of so many bits."""
    if model.weight_bytes is not None:
        return model.weight_bytes
    shape = model.shape
    ends = 2 * (shape.vocabulary or 0) * (shape.embedding_length or 0) if shape else 0
    return weight_bytes(model.parameters, model.quantization, ends)


def _kv_bytes_per_token(types: tuple[str, str], model: Model, guessed: list[str]) -> int | None:
    known = _known_kv_bytes_per_token(types, model.shape)
    if known is not None:
        return known
    guessed.append("kv_cache")
    return _guessed_kv_bytes_per_token(types, model)


def _known_kv_bytes_per_token(types: tuple[str, str], shape: ModelShape | None) -> int | None:
    if shape is None or shape.kv_heads_total is None:
        return None
    if shape.kv_heads_total == 0:  # a recurrent model keeps no tokens
        return 0
    if not shape.key_length or not shape.value_length:
        return None
    keys = shape.kv_heads_total * shape.key_length * _BLOCK_BYTES[types[0]]
    values = shape.kv_heads_total * shape.value_length * _BLOCK_BYTES[types[1]]
    return -(-(keys + values) // _BLOCK)


def _guessed_kv_bytes_per_token(types: tuple[str, str], model: Model) -> int | None:
    """Models with grouped KV heads keep about sqrt(parameters) numbers per token.

    0.5 to 2.3 times that for SmolLM2-135M, Llama 3 (1B, 8B, 70B) and Qwen3 (0.6B, 8B, 32B). Where
    the parameters are unknown too, a file's size is taken for four and a half bits a parameter.
    """
    parameters = model.parameters
    if parameters is None and model.weight_bytes is not None:
        parameters = model.weight_bytes * 16 // 9
    if parameters is None:
        return None
    both = _BLOCK_BYTES[types[0]] + _BLOCK_BYTES[types[1]]
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


Sum = Callable[[BackendSettings, Model, Ground], Estimate]
SUMS: dict[type[BackendSettings], Sum] = {
    LlamaCppSettings: _llamacpp,
    OllamaSettings: _ollama,
    VllmSettings: _vllm,
    MlcSettings: _mlc,
}
