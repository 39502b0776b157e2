"""What a certificate may say: that one feature works with one image on one arch, within bounds.

A certificate is evidence, so it is complete or it is none: the artifact by its digest, since when,
what was run, and the exact values (the envelope) that were run.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from flexlab.core.fields import Form
from flexlab.core.validate import WrongAt
from flexlab.recipes.fields import (
    Arch,
    Date,
    Evidenced,
    InsidePath,
    Name,
    Sentence,
    Sha256,
    Strict,
)

PinnedImage = Annotated[
    str,
    Form(
        r"[a-z0-9][\w./:-]*@sha256:[0-9a-f]{64}",
        "an image by its digest (NAME@sha256: and 64 hexadecimal digits)",
    ),
]
SettingName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$")]


class Bound(Strict):
    """What a setting may be; exactly one of the three."""

    exactly: bool | int | float | str | None = None
    """This value. JSON texts are compared by what they mean."""

    at_most: int | None = None
    below: InsidePath | None = None
    """A path below this folder, without a step up."""

    @model_validator(mode="after")
    def _is_one_bound(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise ValueError("one of exactly, at_most, below")
        return self


class Certificate(Evidenced):
    """One feature of one engine, certified."""

    name: Name
    """The file's stem."""

    backend: Name
    capability: Name
    """What it certifies: slot-snapshots, ngram-speculation, native-mtp."""

    archs: tuple[Arch, ...] = Field(min_length=1)
    image: PinnedImage
    since: Date
    proof: Sentence
    """What was run, with its numbers: shown with every refusal and every admission."""

    asks: tuple[SettingName, ...] = Field(min_length=1)
    """Settings whose use needs this certificate; also on the CPU their bounds hold."""

    envelope: dict[SettingName, Bound] = Field(min_length=1)
    """Every setting that was part of the proof."""

    limits: tuple[Sentence, ...] = ()
    """What is true of the feature even where it is admitted."""

    contract: Sha256 | None = None
    """Where the artifact is a pair: the digest of its other half (a graft contract)."""

    @model_validator(mode="after")
    def _bounds_what_it_gates(self) -> Self:
        for at, setting in enumerate(self.asks):
            if setting not in self.envelope:
                raise WrongAt(("asks", at), f"{setting} has no bound in the envelope")
        return self
