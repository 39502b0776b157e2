"""What a model recipe may say. A field's name is its key in the file; its type says the unit.

Every claim carries its evidence: once per block (`evidence`, `reason`, `source`, `date`), and it
holds for all that stands in the block. Recipes are data: they name no host paths, devices,
privileges, network modes, remote code or pickle files. Validation context `origin` is `shipped`
or `user`; without one (recipes built in Python, such as derived ones) the user's rules hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from flexlab.core.fields import Seconds
from flexlab.core.validate import WrongAt
from flexlab.core.yaml import KeyPath
from flexlab.recipes.fields import Evidenced, Name, Sentence, Strict
from flexlab.recipes.variants import Variant
from flexlab.spec.plan import Keep

Capability = Literal["chat", "completions", "embeddings", "images", "video"]


class Shape(Evidenced):
    """What the memory of a context is reckoned from before the weights are here; the file's own
    header counts once they are."""

    layers: int = Field(gt=0)
    kv_layers: int | None = Field(None, gt=0)
    """Of them those that keep keys and values of every token; unset: all."""

    kv_heads: int = Field(ge=0)
    """Heads of keys and values in each of them; 0 for a model that keeps no tokens."""

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

    replicas: int = Field(1, ge=1, le=64)
    """Up to so many run at a time, on other devices each; the further ones only in free memory."""

    max_in_flight: int | None = Field(None, ge=1)
    """Requests that are let in at the same time, the others wait; unset: no limit."""

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
