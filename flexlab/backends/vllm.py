"""vLLM: settings, the words of its OpenAI server, and what its answers mean.

Words are those of 0.11 and newer; what changed since is keyed on the build. The engine takes its
key by an option or a variable only (or as a line of its own `--config` file), which others can
read, so none is given: its port is reached by FlexLab alone, and no page of a browser may ask it.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal, NoReturn, Self

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints, model_validator

from flexlab.backends.base import (
    PLACEHOLDERS,
    BackendSettings,
    EngineDefaults,
    Readiness,
    Site,
    of_type,
    option_words,
)
from flexlab.backends.memory_share import chosen_share, granted_share
from flexlab.spec.plan import HOST, PORT

JSON_MAX_CHARS = 16 * 1024
MODELS_DIR = "/models/"

_ATTENTION_OPTION_SINCE = (0, 13)
"""Before it (vllm-project/vllm#26315, December 2025) a variable chooses the attention backend."""

_USUAL_TOOL_PARSER = "hermes"
_REMOTE_CODE_KEYS = frozenset({"trust_remote_code", "auto_map"})
_LORA_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_LORA_PATH = re.compile(r"[\w./+@-]+")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def _small_word(text: str) -> str:
    if not _WORD.fullmatch(text) or text != text.lower():
        raise ValueError("write one word in small letters")
    return text


def _capital_word(text: str) -> str:
    if not _WORD.fullmatch(text) or text != text.upper():
        raise ValueError("write one word in capital letters, such as TRITON_ATTN")
    return text


def _as_text(value: object) -> object:
    """A mapping of a recipe, and what a command line was read as, are JSON as well."""
    if isinstance(value, dict | list):
        try:
            return json.dumps(value)
        except (TypeError, ValueError, RecursionError):
            raise ValueError("write a JSON object") from None
    return value


def _json_object(text: str) -> str:
    """An object as JSON, written without spaces: what is compared is what the engine gets."""
    try:
        value = json.loads(text, parse_constant=_no_number)
        if not isinstance(value, dict):
            raise ValueError("not an object")
        forbidden = _REMOTE_CODE_KEYS.intersection(_keys(value))
    except (ValueError, RecursionError):
        raise ValueError('write a JSON object, such as {"image":1}') from None
    if forbidden:
        raise ValueError(f"{', '.join(sorted(forbidden))} would run code of strangers")
    return json.dumps(value, separators=(",", ":"))


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _keys(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)


def _lora_modules(text: str) -> str:
    text = _json_object(text)
    for name, path in json.loads(text).items():
        if not _LORA_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for an adapter")
        if not isinstance(path, str) or not _LORA_PATH.fullmatch(path):
            raise ValueError(f"the adapter {name} needs a path such as /models/adapters/NAME")
        if posixpath.normpath(path) != path or not path.startswith(MODELS_DIR):
            raise ValueError(f"the adapter {name} must lie below {MODELS_DIR}")
    return text


Text = Annotated[str, StringConstraints(min_length=2, max_length=JSON_MAX_CHARS)]
JsonObject = Annotated[Text, AfterValidator(_json_object), BeforeValidator(_as_text)]
LoraModules = Annotated[Text, AfterValidator(_lora_modules), BeforeValidator(_as_text)]
SmallWord = Annotated[str, AfterValidator(_small_word)]
CapitalWord = Annotated[str, AfterValidator(_capital_word)]


class VllmSettings(BackendSettings):
    """Settings of vLLM; None lets the engine decide."""

    other_names: ClassVar[Mapping[str, str]] = {
        "max_model_len": "context_size", "ctx_size": "context_size", "n_ctx": "context_size",
        "num_ctx": "context_size", "ctx": "context_size", "context_length": "context_size",
        "context_window_size": "context_size", "parallel": "max_num_seqs",
        "max_num_sequence": "max_num_seqs", "slots": "max_num_seqs", "np": "max_num_seqs",
        "batch_size": "max_num_batched_tokens", "gpu_util": "gpu_memory_utilization",
        "cache_type_k": "kv_cache_dtype", "cache_type_v": "kv_cache_dtype",
        "eager": "enforce_eager", "quant": "quantization", "mtp": "speculative_config",
        "hf_override": "hf_overrides", "enable_auto_tool_choice": "enable_tool_calling",
        "enable_lora": "max_loras", "embedding": "embeddings", "pooling_type": "pooling",
        "pooler_config": "pooling",
    }  # fmt: skip

    context_size: int = Field(4096, ge=1, le=16_777_216)
    """Tokens of one request, prompt and answer together."""

    max_num_seqs: int | None = Field(None, ge=1, le=65_536)
    """Requests that are worked on at the same time; they share one KV cache."""

    max_num_batched_tokens: int | None = Field(None, ge=1, le=16_777_216)
    """Tokens computed in one step; activations grow with it."""

    gpu_memory_utilization: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    """Share of each GPU's memory that it may take; unset: what it was granted."""

    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"] = "auto"
    """Type of weights and activations; `auto` is that of the weights' own config."""

    quantization: SmallWord | None = None
    """How the weights are quantised (awq, gptq, fp8); unset: what their config says."""

    kv_cache_dtype: Literal["auto", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV cache; an fp8 one holds twice the context in the same memory."""

    attention_backend: CapitalWord | None = None
    """Kernels for attention, such as TRITON_ATTN or FLASH_ATTN."""

    enforce_eager: bool = False
    """Do not record graphs: less memory and a faster start, slower answers."""

    enable_prefix_caching: bool | None = None
    """Keep the KV cache of prompts that begin alike."""

    block_size: Literal[1, 8, 16, 32, 64, 128] | None = None
    """Tokens in one block of the KV cache."""

    num_gpu_blocks_override: int | None = Field(None, ge=1, le=16_777_216)
    """Blocks of the KV cache, instead of as many as fit."""

    cpu_offload_gb: float | None = Field(None, ge=0, le=65_536, allow_inf_nan=False)
    """GiB of weights for each GPU that stay in RAM."""

    disable_hybrid_kv_cache_manager: bool | None = None
    """Give every layer the same KV cache, where a model mixes kinds of attention."""

    hf_overrides: JsonObject | None = None
    """Changes to the model's config.json, a JSON object."""

    speculative_config: JsonObject | None = None
    """How tokens are drafted before the model confirms them, a JSON object."""

    limit_mm_per_prompt: JsonObject | None = None
    """Images, videos and sounds that one prompt may hold, such as {"image":1}."""

    mm_processor_kwargs: JsonObject | None = None
    """Options of the model's own processor of images, a JSON object."""

    enable_tool_calling: bool = False
    """Turn what the model writes into tool calls."""

    tool_call_parser: SmallWord | None = None
    """How this model writes tool calls; unset: hermes, which Qwen models follow."""

    reasoning_parser: SmallWord | None = None
    """How this model marks its reasoning, such as qwen3."""

    chat_template: str | None = Field(None, min_length=1, max_length=JSON_MAX_CHARS)
    """A template to use instead of the model's own: the template itself or a file below /models."""

    max_loras: int | None = Field(None, ge=1, le=1024)
    """Adapters that one batch may mix; set: adapters are served."""

    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] | None = None
    """The highest rank among the adapters."""

    lora_modules: LoraModules | None = None
    """Adapters by the name they answer to: {"NAME":"/models/adapters/NAME"}."""

    embeddings: bool = False
    """Serve /v1/embeddings instead of chat."""

    pooling: Literal["cls", "last", "mean"] | None = None
    """How token vectors become one embedding; unset: what the model's own files say."""

    dedicated: bool = True
    """Whether this engine serves this model alone; features that need evidence ask for it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.tool_call_parser is not None and not self.enable_tool_calling:
            raise ValueError("tool_call_parser needs enable_tool_calling: true")
        if self.pooling is not None and not self.embeddings:
            raise ValueError("pooling needs embeddings: true")
        for name in ("max_lora_rank", "lora_modules"):
            if getattr(self, name) is not None and self.max_loras is None:
                raise ValueError(f"{name} needs max_loras")
        template = self.chat_template
        if template is not None and (template in PLACEHOLDERS or template.startswith("-")):
            raise ValueError(f"chat_template {template} is not a template")
        return self


class Vllm(EngineDefaults):
    """The backend `vllm`."""

    name = "vllm"
    settings_type: type[BackendSettings] = VllmSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """Long option names of the OpenAI server, every value a word of its own."""
        chosen = of_type(settings, VllmSettings, "vllm")
        words = [
            # After the program `vllm serve` the model is no option (one of that name goes away).
            site.model_path, "--host", HOST, "--port", PORT, "--allowed-origins", "[]",
            "--served-model-name", site.served_name,
            "--max-model-len", str(chosen.context_size),
            "--dtype", chosen.dtype, "--kv-cache-dtype", chosen.kv_cache_dtype,
        ]  # fmt: skip
        words += option_words(_options(chosen, site))
        words += _switches(chosen)
        if chosen.lora_modules is not None:
            adapters: dict[str, str] = json.loads(chosen.lora_modules)
            words += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
        return tuple(words)

    def env(self, settings: BackendSettings, site: Site) -> dict[str, str]:
        """The attention backend, for builds that have no option for it."""
        wanted = of_type(settings, VllmSettings, "vllm").attention_backend
        if wanted is None or not _is_before(site.build, _ATTENTION_OPTION_SINCE):
            return {}
        return {"VLLM_ATTENTION_BACKEND": wanted}

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """Nothing listens before the engine is up; 503 says that it has died since."""
        return "ready" if status == 200 else "failed"


def _options(chosen: VllmSettings, site: Site) -> dict[str, object]:
    """Options with a value; None: the engine decides."""
    by_variable = _is_before(site.build, _ATTENTION_OPTION_SINCE)
    return {
        "--gpu-memory-utilization": _memory_share(chosen, site),
        "--tensor-parallel-size": site.gpus if site.gpus > 1 else None,
        "--max-num-seqs": chosen.max_num_seqs,
        "--max-num-batched-tokens": chosen.max_num_batched_tokens,
        "--quantization": chosen.quantization,
        "--attention-backend": None if by_variable else chosen.attention_backend,
        "--block-size": chosen.block_size,
        "--num-gpu-blocks-override": chosen.num_gpu_blocks_override,
        "--cpu-offload-gb": chosen.cpu_offload_gb,
        "--hf-overrides": chosen.hf_overrides,
        "--speculative-config": chosen.speculative_config,
        "--limit-mm-per-prompt": chosen.limit_mm_per_prompt,
        "--mm-processor-kwargs": chosen.mm_processor_kwargs,
        "--tool-call-parser": (chosen.tool_call_parser or _USUAL_TOOL_PARSER)
        if chosen.enable_tool_calling
        else None,
        "--reasoning-parser": chosen.reasoning_parser,
        "--chat-template": chosen.chat_template,
        "--max-loras": chosen.max_loras,
        "--max-lora-rank": chosen.max_lora_rank,
        "--runner": "pooling" if chosen.embeddings else None,
        "--pooler-config": f'{{"pooling_type":"{chosen.pooling.upper()}"}}'
        if chosen.pooling
        else None,
    }


def _switches(chosen: VllmSettings) -> Iterator[str]:
    if chosen.enforce_eager:
        yield "--enforce-eager"
    if chosen.enable_tool_calling:
        yield "--enable-auto-tool-choice"
    if chosen.max_loras is not None:
        yield "--enable-lora"
    for name in ("enable_prefix_caching", "disable_hybrid_kv_cache_manager"):
        wanted: bool | None = getattr(chosen, name)
        if wanted is not None:
            yield f"--{'' if wanted else 'no-'}{name.replace('_', '-')}"


def _memory_share(chosen: VllmSettings, site: Site) -> str | None:
    """Of each GPU; the engine's own default would take nine tenths, whatever was granted."""
    if chosen.gpu_memory_utilization is not None:
        return chosen_share(chosen.gpu_memory_utilization)
    return granted_share(site.claim_bytes, site.total_bytes) if site.gpus else None


def _is_before(build: str | None, version: tuple[int, int]) -> bool:
    """Whether a build is older; one that is not known is taken for a new one."""
    found = re.match(r"v?([0-9]{1,6})\.([0-9]{1,6})", build or "", re.ASCII)
    return found is not None and (int(found[1]), int(found[2])) < version
