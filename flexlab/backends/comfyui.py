"""ComfyUI: settings, the words of its `main.py`, and what its answers mean.

It serves its own page, routes and websocket and no OpenAI route. It takes no key: its port is
reached by FlexLab alone, and no page of a browser may ask it unless a setting names the page.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, StringConstraints

from flexlab.backends.base import (
    BackendSettings,
    EngineDefaults,
    Readiness,
    Site,
    of_type,
    option_words,
)
from flexlab.backends.model_paths import PATH_MAX_CHARS, ModelPath
from flexlab.spec.plan import HOST, PORT

OUTPUT_DIR = "/output"
_MEMORY_WORDS = {
    "gpu_only": "--gpu-only", "highvram": "--highvram", "normalvram": "--normalvram",
    "lowvram": "--lowvram", "novram": "--novram",
}  # fmt: skip
_ATTENTION_WORDS = {
    "pytorch": "--use-pytorch-cross-attention", "split": "--use-split-cross-attention",
    "quad": "--use-quad-cross-attention", "flash": "--use-flash-attention",
}  # fmt: skip
_VAE_WORDS = {
    "fp16": "--fp16-vae", "bf16": "--bf16-vae", "fp32": "--fp32-vae", "cpu": "--cpu-vae",
}  # fmt: skip


def _in_the_output(path: str) -> str:
    inside = path == OUTPUT_DIR or path.startswith(OUTPUT_DIR + "/")
    if not path.isprintable() or not inside or posixpath.normpath(path) != path:
        raise ValueError(f"images are written to {OUTPUT_DIR} or a folder in it, without steps up")
    return path


OutputPath = Annotated[
    str, StringConstraints(max_length=PATH_MAX_CHARS), AfterValidator(_in_the_output)
]
Origin = Annotated[
    str,
    StringConstraints(max_length=256, pattern=r"^(\*|https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?)$"),
]


class ComfyUiSettings(BackendSettings):
    """Settings of ComfyUI; None lets the engine decide."""

    other_names: ClassVar[Mapping[str, str]] = {
        "vram": "memory", "vram_mode": "memory", "memory_mode": "memory", "memory_plan": "memory",
        "lowvram": "memory", "normalvram": "memory", "highvram": "memory", "novram": "memory",
        "gpu_only": "memory", "reserve_vram": "reserve_vram_gb", "cors": "cors_origin",
        "enable_cors": "cors_origin", "enable_cors_header": "cors_origin",
        "output": "output_directory", "output_dir": "output_directory",
        "models_path": "extra_model_paths", "extra_model_paths_config": "extra_model_paths",
        "vae": "vae_precision", "preview": "previews", "preview_method": "previews",
        "custom_nodes_path": "custom_nodes", "dedicated_deployment": "dedicated",
    }  # fmt: skip

    memory: Literal["auto", "gpu_only", "highvram", "normalvram", "lowvram", "novram"] = "auto"
    """What stays in the GPU's memory: everything (gpu_only) to nothing (novram)."""

    reserve_vram_gb: float | None = Field(None, ge=0, le=65_536, allow_inf_nan=False)
    """GiB of the GPU's memory that it leaves alone."""

    attention: Literal["auto", "pytorch", "split", "quad", "flash"] = "auto"
    """Kernels for attention; `split` and `quad` need less memory and are slower."""

    vae_precision: Literal["auto", "fp16", "bf16", "fp32", "cpu"] = "auto"
    """How the last step to an image is computed; fp32 where images come out black."""

    previews: Literal["none", "auto", "latent2rgb", "taesd"] = "none"
    """Pictures of unfinished work on its page."""

    output_directory: OutputPath = OUTPUT_DIR
    """Where images are written."""

    extra_model_paths: ModelPath | None = None
    """A file below /models that says where more models lie."""

    custom_nodes: bool = True
    """Load the nodes that the image brings beside ComfyUI's own."""

    api_nodes: bool = False
    """Offer the nodes that ask paid services elsewhere."""

    cors_origin: Origin | None = None
    """The page of a browser that may ask it, such as https://lab.example; unset: none."""

    dedicated: bool = True
    """Whether this engine has its device alone; features that need evidence ask for it."""


class ComfyUi(EngineDefaults):
    """The backend `comfyui`."""

    name = "comfyui"
    settings_type: type[BackendSettings] = ComfyUiSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """Words after the program, every value a word of its own."""
        chosen = of_type(settings, ComfyUiSettings, "comfyui")
        words = [
            "--listen", HOST, "--port", PORT,
            "--output-directory", chosen.output_directory, "--preview-method", chosen.previews,
        ]  # fmt: skip
        optional = {
            "--reserve-vram": chosen.reserve_vram_gb if site.gpus else None,
            "--extra-model-paths-config": chosen.extra_model_paths,
            "--enable-cors-header": chosen.cors_origin,
        }
        words += option_words(optional)
        words += _switches(chosen, site)
        return tuple(words)

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """Nothing listens before its nodes are loaded; models load with the first job."""
        return "ready" if status == 200 else "failed"


def _switches(chosen: ComfyUiSettings, site: Site) -> Iterator[str]:
    if not site.gpus:
        # One of a group with the memory modes: only one of them may be said.
        yield "--cpu"
    elif chosen.memory != "auto":
        yield _MEMORY_WORDS[chosen.memory]
    if chosen.attention != "auto":
        yield _ATTENTION_WORDS[chosen.attention]
    if chosen.vae_precision != "auto":
        yield _VAE_WORDS[chosen.vae_precision]
    if not chosen.custom_nodes:
        yield "--disable-all-custom-nodes"
    if not chosen.api_nodes:
        yield "--disable-api-nodes"
