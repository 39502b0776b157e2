"""Diffusers: settings, the words of FlexLab's own server for images and video, and its answers.

The server (`python -m flexlab.engines.diffusers`) takes these words; what a request leaves out is
taken from them. One pipeline works on one request at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

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
from flexlab.backends.model_paths import ModelPath
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT

_SIZE = re.compile(r"([1-9][0-9]{1,4})x([1-9][0-9]{1,4})", re.ASCII)
_IMAGE_STEP = 8
"""Pixels: what one number of a latent image stands for, in both directions."""
_VIDEO_STEP = 16
_VIDEO_PIXELS_MAX = 832 * 480
"""Of the only video lane that was validated (compatibility reference, live gate of 2026-07-14)."""
_FRAMES_STEP = 4
"""Frames that become one latent frame; the first one stands alone."""


def _size(text: str) -> str:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("write WIDTHxHEIGHT, such as 1024x1024")
    if any(int(side) % _IMAGE_STEP for side in found.groups()):
        raise ValueError(f"both sides of {text} must be multiples of {_IMAGE_STEP}")
    return text


def _sizes(text: str) -> str:
    for size in text.split(","):
        _size(size)
    return text


def _frames(number: int) -> int:
    if number % _FRAMES_STEP != 1:
        nearest = number // _FRAMES_STEP * _FRAMES_STEP + 1
        raise ValueError(f"frames must be 4k+1, and {number} is not; {nearest} is")
    return number


Size = Annotated[str, StringConstraints(max_length=11), AfterValidator(_size)]
Sizes = Annotated[str, StringConstraints(max_length=256), AfterValidator(_sizes)]
Frames = Annotated[int, Field(ge=1, le=81), AfterValidator(_frames)]
Scheduler = Literal[
    "dpm++2m", "dpm++2m-karras", "dpm++2m-sde-karras", "dpm++sde", "dpm++sde-karras", "euler",
    "euler-a", "unipc", "ddim",
]  # fmt: skip
Mode = Literal["text2image", "img2img", "inpainting", "instruct", "controlnet", "text2video"]


class DiffusersSettings(BackendSettings):
    """Settings of FlexLab's Diffusers server; None: what the model's family is used to."""

    other_names: ClassVar[Mapping[str, str]] = {
        "num_inference_steps": "steps", "default_num_inference_steps": "steps",
        "guidance_scale": "guidance", "default_guidance_scale": "guidance", "cfg": "guidance",
        "cfg_scale": "guidance", "sampler": "scheduler", "default_scheduler": "scheduler",
        "video_size": "size", "num_frames": "frames", "video_frames": "frames",
        "video_fps": "fps", "compute_dtype": "dtype", "torch_dtype": "dtype", "use_fp16": "dtype",
        "compile_mode": "compile", "torch_compile": "compile", "quant": "quantization",
        "cpu_offload": "memory_plan", "use_cpu_offload": "memory_plan", "memory": "memory_plan",
        "offload": "memory_plan", "mode": "pipeline_mode", "warmup_resolutions": "warmup_sizes",
        "lora_path": "lora", "vae_path": "vae", "dedicated_deployment": "dedicated",
    }  # fmt: skip

    pipeline_mode: Mode = "text2image"
    """What a request brings and what it gets."""

    steps: int | None = Field(None, ge=1, le=100)
    """Steps of a request that names none."""

    guidance: float | None = Field(None, ge=0, le=20, allow_inf_nan=False)
    """How closely a prompt is followed; 0 for turbo models."""

    size: Size | None = None
    """Size of a request that names none, WIDTHxHEIGHT."""

    frames: Frames | None = None
    """Frames of a video, one more than a multiple of 4."""

    fps: int | None = Field(None, ge=1, le=60)
    """Frames of a video in one second."""

    scheduler: Scheduler | None = None
    """How noise is taken away step by step."""

    negative_prompt: str | None = Field(None, max_length=4096)
    """What should not be seen, for a request that says nothing of it."""

    strength: float | None = Field(None, ge=0, le=1, allow_inf_nan=False)
    """How much of a given image may change."""

    dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Type of weights and activations; `auto` is what the device computes well."""

    quantization: Literal["nf4", "int8", "fp8"] | None = None
    """Hold the weights in fewer bits while they are loaded."""

    memory_plan: Literal["resident", "model_offload", "group_offload", "sequential_offload"] = (
        "resident"
    )
    """What stays on the GPU: all of it, one part of the pipeline at a time, or less; each needs
    less of its memory than the one before and is slower."""

    vae_tiling: bool = True
    """Make the pixels of an image piece by piece, where the model's VAE can."""

    compile: Literal["off", "regional", "full"] = "off"
    """Compile the repeated blocks or the whole model: a slow first request, faster ones after."""

    warmup_sizes: Sizes | None = None
    """Sizes to make an image of before it is ready, joined by commas; unset: none."""

    lora: ModelPath | None = None
    """An adapter that is applied to the model."""

    lora_scale: float | None = Field(None, ge=0, le=4, allow_inf_nan=False)
    """How strongly the adapter counts."""

    vae: ModelPath | None = None
    """A VAE to use instead of the model's own."""

    controlnet: ModelPath | None = None
    """What reads the given image in the mode controlnet."""

    dedicated: bool = True
    """Whether this engine serves this model alone; features that need evidence ask for it."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        video = self.pipeline_mode == "text2video"
        for name in ("frames", "fps"):
            if getattr(self, name) is not None and not video:
                raise ValueError(f"{name} needs pipeline_mode: text2video")
        sides = self.size.split("x") if self.size is not None else ()
        if video and any(int(side) % _VIDEO_STEP for side in sides):
            raise ValueError(f"both sides of a video's size must be multiples of {_VIDEO_STEP}")
        if video and sides and int(sides[0]) * int(sides[1]) > _VIDEO_PIXELS_MAX:
            raise ValueError(f"a video of {self.size} has more pixels than 832x480")
        if self.lora_scale is not None and self.lora is None:
            raise ValueError("lora_scale needs lora")
        if (self.pipeline_mode == "controlnet") != (self.controlnet is not None):
            raise ValueError("pipeline_mode controlnet and the setting controlnet need each other")
        text = self.negative_prompt
        if text is not None and (text in PLACEHOLDERS or text.startswith("-")):
            raise ValueError("negative_prompt must be words, and not begin with a dash")
        return self


class Diffusers(EngineDefaults):
    """The backend `diffusers`."""

    name = "diffusers"
    settings_type: type[BackendSettings] = DiffusersSettings

    def argv(self, settings: BackendSettings, site: Site) -> tuple[str, ...]:
        """Long option names of our own server, every value a word of its own."""
        chosen = of_type(settings, DiffusersSettings, "diffusers")
        words = [
            "--host", HOST, "--port", PORT, "--api-key-file", API_KEY_FILE,
            "--model", site.model_path, "--alias", site.served_name,
            "--device", "gpu" if site.gpus else "cpu",
            "--pipeline-mode", chosen.pipeline_mode, "--dtype", chosen.dtype,
            # Of one device: on the CPU there is nothing to take weights off from.
            "--memory-plan", chosen.memory_plan if site.gpus else "resident",
            "--compile", chosen.compile,
            "--vae-tiling" if chosen.vae_tiling else "--no-vae-tiling",
        ]  # fmt: skip
        optional = {
            "--threads": site.threads,
            "--steps": chosen.steps,
            "--guidance": chosen.guidance,
            "--size": chosen.size,
            "--frames": chosen.frames,
            "--fps": chosen.fps,
            "--scheduler": chosen.scheduler,
            "--negative-prompt": chosen.negative_prompt,
            "--strength": chosen.strength,
            "--quantization": chosen.quantization,
            "--warmup-sizes": chosen.warmup_sizes,
            "--lora": chosen.lora,
            "--lora-scale": chosen.lora_scale,
            "--vae": chosen.vae,
            "--controlnet": chosen.controlnet,
        }
        words += option_words(optional)
        return tuple(words)

    def judge_ready(self, status: int, body: bytes) -> Readiness:
        """/health is up before the pipeline is: 503 while it loads and warms up, then 200."""
        return loads_behind_health(status)
