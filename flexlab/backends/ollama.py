"""Ollama: settings, its variables, and the steps that bring it a model.

Its server takes no options but variables, and answers before it has any model. Clients ask for
FlexLab's name of a model, so the one that was pulled is copied under it: a name beside the other,
no second file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

import msgspec
from pydantic import Field, StringConstraints, model_validator

from flexlab.backends.base import (
    BackendSettings,
    EngineDefaults,
    Readiness,
    Site,
    of_type,
)
from flexlab.core.errors import UsageError
from flexlab.spec.plan import Step

LibraryName = Annotated[
    str,
    StringConstraints(
        max_length=256,
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*){0,3}"
        r"(:[A-Za-z0-9][A-Za-z0-9._-]*)?$",
    ),
]

_ANY_ADDRESS = "0.0.0.0"
"""Inside its own network; outside it is published on the loopback only."""
_FLASH_ATTENTION = {"on": "1", "off": "0"}


class OllamaSettings(BackendSettings):
    """Settings of Ollama; None lets the engine decide."""

    other_names: ClassVar[Mapping[str, str]] = {
        "ctx_size": "context_size", "n_ctx": "context_size", "num_ctx": "context_size",
        "ctx": "context_size", "max_model_len": "context_size", "context_length": "context_size",
        "ollama_context_length": "context_size", "np": "parallel", "slots": "parallel",
        "num_parallel": "parallel", "max_num_seqs": "parallel", "ollama_num_parallel": "parallel",
        "cache_type_k": "cache_type", "cache_type_v": "cache_type", "kv_cache_type": "cache_type",
        "kv_cache_dtype": "cache_type", "ollama_kv_cache_type": "cache_type",
        "fa": "flash_attention", "flash_attn": "flash_attention", "embedding": "embeddings",
        "ollama_flash_attention": "flash_attention", "tag": "model", "ollama_model": "model",
        "dedicated_deployment": "dedicated",
    }  # fmt: skip

    model: LibraryName | None = None
    """Its name in Ollama's library, such as qwen3:8b; unset: what the recipe's weights name."""

    context_size: int = Field(4096, ge=1, le=16_777_216)
    """Tokens of one request, prompt and answer together; memory grows by this times `parallel`."""

    parallel: int = Field(1, ge=1, le=256)
    """Requests that are worked on at the same time."""

    cache_type: Literal["f16", "q8_0", "q4_0"] = "f16"
    """Type of the KV cache; a smaller one holds more context and needs flash attention."""

    flash_attention: Literal["auto", "on", "off"] = "auto"
    """Attention that needs less memory; `auto` is right wherever the device supports it."""

    embeddings: bool = False
    """A model that makes embeddings and cannot chat."""

    dedicated: bool = True
    """Whether this engine serves this model alone; features that need evidence ask for it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.flash_attention == "off" and self.cache_type != "f16":
            raise ValueError(
                f"cache_type {self.cache_type} needs flash_attention on or auto, not off"
            )
        return self


class Ollama(EngineDefaults):
    """The backend `ollama`."""

    name = "ollama"
    settings_type: type[BackendSettings] = OllamaSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """The subcommand alone: everything else is a variable."""
        of_type(settings, OllamaSettings, "ollama")
        return ("serve",)

    def env(self, settings: BackendSettings, site: Site) -> dict[str, str]:
        """What a request that says nothing gets. Its port is the engine's usual one."""
        chosen = of_type(settings, OllamaSettings, "ollama")
        found = {
            "OLLAMA_HOST": _ANY_ADDRESS,
            "OLLAMA_CONTEXT_LENGTH": str(chosen.context_size),
            "OLLAMA_NUM_PARALLEL": str(chosen.parallel),
            "OLLAMA_KV_CACHE_TYPE": chosen.cache_type,
        }
        wanted = chosen.flash_attention
        if wanted == "auto" and chosen.cache_type != "f16":
            # The engine would take f16 without a word where it does not choose it by itself.
            wanted = "on"
        if wanted != "auto":
            found["OLLAMA_FLASH_ATTENTION"] = _FLASH_ATTENTION[wanted]
        if site.gpus > 1:
            # Else it takes as few of them as the model needs.
            found["OLLAMA_SCHED_SPREAD"] = "1"
        return found

    def after_start(self, settings: BackendSettings, site: Site) -> tuple[Step, ...]:
        """What to ask once it answers: pull the model, give it FlexLab's name, load it.

        Raises UsageError where no name in Ollama's library is known.
        """
        chosen = of_type(settings, OllamaSettings, "ollama")
        source = chosen.model or _library_name(site.model_path)
        name = site.served_name
        copy = Step(kind="copy", path="/api/copy", body={"source": source, "destination": name})
        return (
            Step(
                kind="pull", path="/api/pull", body={"model": source, "stream": True}, streams=True
            ),
            *(() if source in (name, f"{name}:latest") else (copy,)),
            _warm(name, embeddings=chosen.embeddings),
        )

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """/api/ps lists what is loaded, /api/tags what is there: no model at all is not ready."""
        if status == 503:
            return "loading"
        if status != 200:
            return "failed"
        try:
            models = msgspec.json.decode(body, type=_Listed).models
        except msgspec.DecodeError:
            return "failed"
        return "ready" if models else "loading"


class _Listed(msgspec.Struct, frozen=True):
    """The answer of /api/ps and /api/tags."""

    models: list[dict[str, object]] | None = None


def _warm(name: str, *, embeddings: bool) -> Step:
    """A request without a prompt loads the model and ends; -1 keeps it until it is stopped."""
    body: dict[str, object] = {"model": name, "keep_alive": -1}
    if embeddings:
        return Step(kind="warm", path="/api/embed", body={**body, "input": ""})
    return Step(kind="warm", path="/api/generate", body={**body, "stream": False})


def _library_name(path: str) -> str:
    if not path or path.startswith(("/", ".")) or "://" in path:
        raise UsageError(
            "Ollama needs the model's name in its library",
            "--set model=NAME:TAG, such as model=qwen3:8b",
            code="wrong_setting",
        )
    return path
