"""llama.cpp: settings, llama-server's own words, and what its answers mean.

The embedded engine (`flexlab.engines.llamacpp`), the official images and a pod all take these
words. Context is stated per request here; llama-server divides `--ctx-size` among its slots, so
the words carry the product. Options that were renamed are keyed on the build.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from flexlab.backends.base import (
    PLACEHOLDERS,
    BackendSettings,
    EngineDefaults,
    Readiness,
    Site,
    loads_behind_health,
    of_type,
    option_words,
)
from flexlab.backends.model_paths import ModelPath, ModelPaths
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]

DeviceNames = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]*(,[A-Za-z][A-Za-z0-9]*)*$")
]
Proportions = Annotated[
    str, StringConstraints(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6})?(,[0-9]{1,6}(\.[0-9]{1,6})?)*$")
]


def _no_speculation(value: object) -> object:
    """`none` is how the engine calls it."""
    return None if value in ("none", "") else value


SpecType = Annotated[
    Literal[
        "ngram-simple", "ngram-cache", "ngram-mod", "ngram-map-k", "ngram-map-k4v", "draft",
        "draft-simple", "draft-mtp", "eagle3",
    ]
    | None,
    BeforeValidator(_no_speculation),
]  # fmt: skip
"""As llama.cpp names them."""

_UNQUANTISED = ("f32", "f16", "bf16")
_ALL_LAYERS = 999
_NEW_DRAFT_OPTIONS_SINCE = 8962
"""ggml-org/llama.cpp#22397, end of April 2026: the old options are gone, and the engine ends on
them (b8953 still has them, b8962 has not)."""


class LlamaCppSettings(BackendSettings):
    """Settings of llama.cpp; None lets the engine (or, for threads, this machine) decide."""

    other_names: ClassVar[Mapping[str, str]] = {
        "ctx_size": "context_size", "n_ctx": "context_size", "num_ctx": "context_size",
        "ctx": "context_size", "max_model_len": "context_size", "context_length": "context_size",
        "np": "parallel", "n_parallel": "parallel", "slots": "parallel", "max_num_seqs": "parallel",
        "ngl": "n_gpu_layers", "gpu_layers": "n_gpu_layers", "num_gpu": "n_gpu_layers",
        "n_threads": "threads", "num_thread": "threads", "num_threads": "threads",
        "n_batch": "batch_size", "num_batch": "batch_size", "n_ubatch": "ubatch_size",
        "fa": "flash_attention", "flash_attn": "flash_attention",
        "ctk": "cache_type_k", "ctv": "cache_type_v", "kv_cache_dtype": "cache_type_k",
        "cram": "cache_ram_mib", "cache_ram": "cache_ram_mib", "embedding": "embeddings",
        "pooling_type": "pooling", "rerank": "reranking", "slot_path": "slot_save_path",
        "slots_path": "slot_save_path", "speculative": "spec_type", "draft": "draft_max",
        "draft_n": "draft_max", "spec_draft_n_max": "draft_max", "draft_n_min": "draft_min",
        "spec_draft_n_min": "draft_min", "dedicated_deployment": "dedicated",
        "projector": "mmproj", "reasoning": "reasoning_format", "cpu_moe": "n_cpu_moe",
        "ncmoe": "n_cpu_moe", "dev": "device", "sm": "split_mode", "ts": "tensor_split",
        "adapters": "lora", "n_predict": "max_tokens", "num_predict": "max_tokens",
    }  # fmt: skip

    context_size: int = Field(4096, ge=1, le=16_777_216)
    """Tokens of one request, prompt and answer together; memory grows by this times `parallel`."""

    parallel: int = Field(1, ge=1, le=256)
    """Requests that are worked on at the same time (slots)."""

    n_gpu_layers: int | None = Field(None, ge=0, le=9999)
    """Layers on the GPU; 0 on the CPU, all of them where a GPU is granted and this is unset."""

    threads: int | None = Field(None, ge=1, le=1024)
    """Threads for generation; unset: what this process may use of the CPU."""

    threads_batch: int | None = Field(None, ge=1, le=1024)
    """Threads for prompts; unset: as `threads`."""

    batch_size: int | None = Field(None, ge=1, le=1_048_576)
    """Tokens of a prompt that are taken in one go; unset: the engine's 2048."""

    ubatch_size: int | None = Field(None, ge=1, le=1_048_576)
    """Tokens computed at once; compute buffers grow with it; unset: the engine's 512."""

    flash_attention: Literal["auto", "on", "off"] = "auto"
    """Attention that needs less memory; `auto` is right wherever the device supports it."""

    cache_type_k: CacheType = "f16"
    """Type of the keys in the KV cache; a smaller one holds more context in the same memory."""

    cache_type_v: CacheType = "f16"
    """Type of the values in the KV cache; a quantised one needs flash attention."""

    cache_ram_mib: int = Field(256, ge=0, le=1_048_576)
    """RAM that may keep the state of earlier prompts, MiB; counts as part of the claim."""

    jinja: bool = True
    """Use the model's own chat template (tool calling needs it)."""

    chat_template: str | None = Field(None, min_length=1)
    """A template to use instead of the model's own: a built-in name or the template itself."""

    embeddings: bool = False
    """Serve /v1/embeddings; chat goes on working beside it."""

    pooling: Pooling | None = None
    """How token vectors become one embedding; unset with `embeddings`: mean."""

    metrics: bool = True
    """Serve /metrics, where tokens per second are read."""

    reranking: bool = False
    """Serve /v1/rerank, for models that judge how well a text answers a question."""

    max_tokens: int | None = Field(None, ge=1, le=16_777_216)
    """Tokens of an answer whose request names no limit; unset: until it ends by itself."""

    mmproj: ModelPath | None = None
    """The projector for images and sounds, a second file beside the model."""

    lora: ModelPaths | None = None
    """Adapters that are applied to the model, joined by commas."""

    reasoning_format: Literal["auto", "none", "deepseek", "deepseek-legacy"] | None = None
    """Where a model's reasoning stands in the answer; unset: the engine's auto."""

    reasoning_budget: int | None = Field(None, ge=-1, le=16_777_216)
    """Tokens of reasoning: 0 for none, -1 for no limit."""

    n_cpu_moe: int | None = Field(None, ge=0, le=9999)
    """Layers whose experts stay in RAM, where a mixture of experts is larger than the GPU."""

    device: DeviceNames | None = None
    """Devices by the engine's own names, joined by commas; unset: all that it is given."""

    split_mode: Literal["none", "layer", "row"] | None = None
    """How a model is spread over several GPUs; unset: by layers."""

    tensor_split: Proportions | None = None
    """How much of it each of several GPUs takes, such as 3,1; unset: by their free memory."""

    slot_save_path: ModelPath | None = None
    """Folder for snapshots of slots; needs a certificate on a GPU."""

    spec_type: SpecType = None
    """How tokens are drafted before the model confirms them; only what a certificate has proved is
    let through, also on the CPU."""

    draft_max: int | None = Field(None, ge=0, le=1024)
    """Most tokens that are drafted at once."""

    draft_min: int | None = Field(None, ge=0, le=1024)
    """Fewest tokens that a draft must have."""

    dedicated: bool = True
    """Whether this engine serves this model alone; features that need evidence ask for it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.reranking and self.embeddings:
            raise ValueError("reranking and embeddings exclude each other")
        if self.flash_attention == "off" and self.cache_type_v not in _UNQUANTISED:
            raise ValueError(
                f"cache_type_v {self.cache_type_v} needs flash_attention on or auto, not off"
            )
        if self.pooling is not None and not self.embeddings:
            raise ValueError("pooling needs embeddings: true")
        if self.chat_template in PLACEHOLDERS:
            raise ValueError(f"chat_template {self.chat_template} is not a template")
        return self


class LlamaCpp(EngineDefaults):
    """The backend `llamacpp`."""

    name = "llamacpp"
    settings_type: type[BackendSettings] = LlamaCppSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """Long option names of llama-server, every value a word of its own."""
        chosen = of_type(settings, LlamaCppSettings, "llamacpp")
        words = [
            "--host", HOST, "--port", PORT, "--api-key-file", API_KEY_FILE,
            "--model", site.model_path, "--alias", site.served_name,
            "--ctx-size", str(chosen.context_size * chosen.parallel),
            "--parallel", str(chosen.parallel),
            "--n-gpu-layers", str(_gpu_layers(chosen, site)),
            "--flash-attn", chosen.flash_attention,
            "--cache-type-k", chosen.cache_type_k, "--cache-type-v", chosen.cache_type_v,
            "--cache-ram", str(chosen.cache_ram_mib),
        ]  # fmt: skip
        words += option_words(_options(chosen, site))
        words += _switches(chosen)
        return tuple(words)

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """/health is up before the model is: 503 while it loads, then 200."""
        return loads_behind_health(status)


def _gpu_layers(chosen: LlamaCppSettings, site: Site) -> int:
    """All layers on a GPU unless somebody chose fewer; the CPU has none to give."""
    if not site.gpus:
        return 0
    return _ALL_LAYERS if chosen.n_gpu_layers is None else chosen.n_gpu_layers


def _options(chosen: LlamaCppSettings, site: Site) -> dict[str, object]:
    """Options with a value; None: the engine decides."""
    return {
        "--threads": site.threads if chosen.threads is None else chosen.threads,
        "--threads-batch": chosen.threads_batch,
        "--batch-size": chosen.batch_size,
        "--ubatch-size": chosen.ubatch_size,
        "--chat-template": chosen.chat_template,
        "--n-predict": chosen.max_tokens,
        "--mmproj": chosen.mmproj,
        "--lora": chosen.lora,
        "--reasoning-format": chosen.reasoning_format,
        "--reasoning-budget": chosen.reasoning_budget,
        "--slot-save-path": chosen.slot_save_path,
        **_gpu_options(chosen, site),
        **_draft_options(chosen, site.build),
    }


def _gpu_options(chosen: LlamaCppSettings, site: Site) -> dict[str, object]:
    if not site.gpus:
        return {}
    found: dict[str, object] = {"--device": chosen.device, "--n-cpu-moe": chosen.n_cpu_moe}
    if site.gpus > 1:
        found |= {
            "--split-mode": chosen.split_mode or "layer",
            "--tensor-split": chosen.tensor_split,
        }
    return found


def _draft_options(chosen: LlamaCppSettings, build: str | None) -> dict[str, object]:
    """A build that is not known moves with its tag, so it is taken for a new one."""
    number = re.match(r"b?([0-9]{1,9})(?![0-9.])", build or "", re.ASCII)
    old = number is not None and int(number[1]) < _NEW_DRAFT_OPTIONS_SINCE
    most, fewest = (
        ("--draft-max", "--draft-min") if old else ("--spec-draft-n-max", "--spec-draft-n-min")
    )
    return {"--spec-type": chosen.spec_type, most: chosen.draft_max, fewest: chosen.draft_min}


def _switches(chosen: LlamaCppSettings) -> Iterator[str]:
    yield "--jinja" if chosen.jinja else "--no-jinja"
    if chosen.embeddings:
        # Without a pooling type the OpenAI route answers 400.
        yield from ("--embeddings", "--pooling", chosen.pooling or "mean")
    if chosen.reranking:
        yield "--reranking"
    if chosen.metrics:
        yield "--metrics"
