"""llama.cpp: settings, llama-server's own words, and what its answers mean.

The embedded engine (`flexlab.engines.llamacpp`), the official images and a pod all take these
words. Context is stated per request here; llama-server divides `--ctx-size` among its slots, so
the words carry the product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from flexlab.backends.base import (
    PLACEHOLDERS,
    BackendSettings,
    ErrorPattern,
    Readiness,
    Site,
    explain_by_patterns,
)
from flexlab.spec.machine import Problem
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT

CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]

_UNQUANTISED = ("f32", "f16", "bf16")


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
        "pooling_type": "pooling",
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

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.flash_attention == "off" and self.cache_type_v not in _UNQUANTISED:
            raise ValueError(
                f"cache_type_v {self.cache_type_v} needs flash_attention on or auto, not off"
            )
        if self.pooling is not None and not self.embeddings:
            raise ValueError("pooling needs embeddings: true")
        if self.chat_template in PLACEHOLDERS:
            raise ValueError(f"chat_template {self.chat_template} is not a template")
        return self


class LlamaCpp:
    """The backend `llamacpp`."""

    name = "llamacpp"
    settings_type: type[BackendSettings] = LlamaCppSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """Long option names of llama-server, every value a word of its own."""
        chosen = _typed(settings)
        words = [
            "--host", HOST, "--port", PORT, "--api-key-file", API_KEY_FILE,
            "--model", site.model_path, "--alias", site.served_name,
            "--ctx-size", str(chosen.context_size * chosen.parallel),
            "--parallel", str(chosen.parallel),
            "--n-gpu-layers", str(chosen.n_gpu_layers or 0),
            "--flash-attn", chosen.flash_attention,
            "--cache-type-k", chosen.cache_type_k, "--cache-type-v", chosen.cache_type_v,
            "--cache-ram", str(chosen.cache_ram_mib),
        ]  # fmt: skip
        optional = {
            "--threads": site.threads if chosen.threads is None else chosen.threads,
            "--threads-batch": chosen.threads_batch,
            "--batch-size": chosen.batch_size,
            "--ubatch-size": chosen.ubatch_size,
            "--chat-template": chosen.chat_template,
        }
        for option, value in optional.items():
            if value is not None:
                words += [option, str(value)]
        words.append("--jinja" if chosen.jinja else "--no-jinja")
        if chosen.embeddings:
            # Without a pooling type the OpenAI route answers 400.
            words += ["--embeddings", "--pooling", chosen.pooling or "mean"]
        if chosen.metrics:
            words.append("--metrics")
        return tuple(words)

    def env(self, settings: BackendSettings, site: Site) -> dict[str, str]:
        """None of its own: OMP_WAIT_POLICY and the like stand in the backend's recipe."""
        return {}

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """/health is up before the model is: 503 while it loads, then 200."""
        if status == 200:
            return "ready"
        return "loading" if status == 503 else "failed"

    def explain(self, log_tail: str, patterns: Iterable[ErrorPattern]) -> Problem | None:
        """The engine raises one error for every cause; only its log tells them apart."""
        return explain_by_patterns(log_tail, patterns)


def _typed(settings: BackendSettings) -> LlamaCppSettings:
    if not isinstance(settings, LlamaCppSettings):
        raise TypeError(f"llamacpp needs LlamaCppSettings, not {type(settings).__name__}")
    return settings
