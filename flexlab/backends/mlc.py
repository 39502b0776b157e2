"""MLC-LLM: settings, the words of `mlc_llm serve`, and what its answers mean.

Its server knows no key, and answers to any model name while it serves one model: its port is
reached by FlexLab alone, and no page of a browser may ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from flexlab.backends.base import (
    BackendSettings,
    EngineDefaults,
    Readiness,
    Site,
    of_type,
)
from flexlab.backends.memory_share import chosen_share, granted_share
from flexlab.backends.model_paths import ModelPath
from flexlab.spec.plan import HOST, PORT


class MlcSettings(BackendSettings):
    """Settings of MLC-LLM; None lets the engine decide."""

    other_names: ClassVar[Mapping[str, str]] = {
        "context_window_size": "context_size", "ctx_size": "context_size", "n_ctx": "context_size",
        "num_ctx": "context_size", "ctx": "context_size", "context_length": "context_size",
        "max_model_len": "context_size", "model_lib": "model_lib_path", "lib": "model_lib_path",
        "parallel": "max_num_sequence", "max_num_seqs": "max_num_sequence",
        "slots": "max_num_sequence", "np": "max_num_sequence",
        "max_total_sequence_length": "max_total_seq_length", "jit": "jit_policy",
        "mlc_jit_policy": "jit_policy", "mlc_gpu_size_bytes": "gpu_memory_bytes",
        "gpu_size_bytes": "gpu_memory_bytes", "max_num_batched_tokens": "prefill_chunk_size",
    }  # fmt: skip

    mode: Literal["local", "interactive", "server"] = "server"
    """For how many it is tuned: few requests, one, or many with the largest KV cache."""

    model_lib_path: ModelPath | None = None
    """The library that the model was compiled to for this arch, below /models; unset: compile."""

    context_size: int | None = Field(None, ge=1, le=16_777_216)
    """Tokens of one request, prompt and answer together; unset: what it was compiled for."""

    max_num_sequence: int | None = Field(None, ge=1, le=65_536)
    """Requests that are worked on at the same time."""

    max_total_seq_length: int | None = Field(None, ge=1, le=1_073_741_824)
    """Tokens of all requests in the KV cache together; unset: by mode and memory."""

    prefill_chunk_size: int | None = Field(None, ge=1, le=16_777_216)
    """Tokens of a prompt that are computed at once; temporary buffers grow with it."""

    sliding_window_size: int | None = Field(None, ge=1, le=16_777_216)
    """Tokens that attention looks back, where the model was compiled with a window."""

    attention_sink_size: int | None = Field(None, ge=0, le=16_777_216)
    """First tokens that always stay within the window."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    """Share of each GPU's memory that it may take; unset: what it was granted."""

    gpu_memory_bytes: int | None = Field(None, ge=1, le=2**53)
    """Bytes of each GPU's memory that it may take, where a share was not chosen."""

    jit_policy: Literal["ON", "OFF", "REDO", "READONLY"] | None = None
    """Whether it may compile; unset: OFF with a library, else the engine's ON."""

    dedicated: bool = True
    """Whether this engine serves this model alone; features that need evidence ask for it."""


class Mlc(EngineDefaults):
    """The backend `mlc`."""

    name = "mlc"
    settings_type: type[BackendSettings] = MlcSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """The subcommand, the model, and options with every value a word of its own."""
        chosen = of_type(settings, MlcSettings, "mlc")
        words = ["serve", site.model_path, "--mode", chosen.mode]
        if chosen.model_lib_path is not None:
            words += ["--model-lib", chosen.model_lib_path]
        if overrides := _overrides(chosen, site):
            words += ["--overrides", overrides]
        words += ["--host", HOST, "--port", PORT, "--allow-origins", "[]"]
        return tuple(words)

    def env(self, settings: BackendSettings, site: Site) -> dict[str, str]:
        """A library that was compiled beforehand is never silently compiled anew."""
        chosen = of_type(settings, MlcSettings, "mlc")
        policy = chosen.jit_policy or ("OFF" if chosen.model_lib_path is not None else None)
        found: dict[str, str] = {"MLC_JIT_POLICY": policy} if policy is not None else {}
        if chosen.gpu_memory_bytes is not None:
            found["MLC_GPU_SIZE_BYTES"] = str(chosen.gpu_memory_bytes)
        return found

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """Nothing listens before the engine is up."""
        return "ready" if status == 200 else "failed"


def _overrides(chosen: MlcSettings, site: Site) -> str:
    """The engine's own config, `name=value` joined by semicolons, in upstream's names."""
    values: dict[str, object] = {
        "max_num_sequence": chosen.max_num_sequence,
        "max_total_seq_length": chosen.max_total_seq_length,
        "prefill_chunk_size": chosen.prefill_chunk_size,
        "gpu_memory_utilization": _memory_share(chosen, site),
        "context_window_size": chosen.context_size,
        "sliding_window_size": chosen.sliding_window_size,
        "attention_sink_size": chosen.attention_sink_size,
        "tensor_parallel_shards": site.gpus if site.gpus > 1 else None,
    }
    return ";".join(f"{name}={value}" for name, value in values.items() if value is not None)


def _memory_share(chosen: MlcSettings, site: Site) -> str | None:
    """The chosen one, else what the chosen bytes are of the card (builds of today read only a
    share, not MLC_GPU_SIZE_BYTES), else what was granted."""
    if chosen.gpu_memory_utilization is not None:
        return chosen_share(chosen.gpu_memory_utilization)
    if chosen.gpu_memory_bytes is not None:
        return granted_share(chosen.gpu_memory_bytes, site.total_bytes)
    return granted_share(site.claim_bytes, site.total_bytes)
