"""Types of fields that recipes share, and what every claim carries."""

from __future__ import annotations

import datetime
import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints

from flexlab.core.fields import Form
from flexlab.spec.plan import Evidence


def _date(value: str) -> str:
    try:
        return datetime.date.fromisoformat(value).isoformat()
    except ValueError:
        raise ValueError(f"{value!r} is not a date such as 2026-01-31") from None


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as failure:
        raise ValueError(f"not a regular expression: {failure}") from None
    return value


Name = Annotated[
    str,
    Form(r"[a-z0-9](?:[a-z0-9._-]{0,94}[a-z0-9])?", "a name (lower-case letters, digits, . _ -)"),
]
Sentence = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]
Sha256 = Annotated[str, Form(r"[0-9a-f]{64}", "a sha256 (64 lower-case hexadecimal digits)")]
HttpPath = Annotated[str, Form(r"/[!-~]*", "a path of a URL, such as /health")]
Code = Annotated[str, Form(r"[a-z][a-z0-9_]*", "a code (lower-case letters, digits, _)")]
ImageName = Annotated[
    str,
    Form(r"[a-z0-9][\w./:-]*(?::[\w.-]+|@sha256:[0-9a-f]{64})", "an image with a tag or a digest"),
]
DeviceClass = Literal["cpu", "gpu"]
"""What a variant can run on; which GPUs, say their recipes and the backend's images."""

Arch = Annotated[
    str,
    Form(
        r"cpu|gfx[0-9a-f]{3,5}|sm_[0-9]{2,3}|xe-lp|xe-hpg|xe2",
        "an arch (cpu, gfx1100, sm_86, xe-hpg)",
    ),
]
"""The exact instruction-set target, as `flexlab gpus` says it."""

Version = Annotated[str, Form(r"[0-9]+(?:\.[0-9]+){0,3}", "a version such as 12.8")]
EngineBuild = Annotated[
    str, Form(r"[bv]?[0-9]+(?:\.[0-9]+){0,3}", "a build of an engine, such as b8173 or 0.12.3")
]
InsidePath = Annotated[
    str, Form(r"/(?!.*(?:^|/)\.\.(?:/|$))[\w./-]*", "an absolute path inside the container")
]

# Variables that make a program load other code, hand out secrets, or are FlexLab's own.
_FORBIDDEN_ENV = re.compile(
    r"LD_.*|GCONV_PATH|PATH|HOME|SHELL|ENV|IFS|BASH_.*|PYTHON.*|.*_TOKEN|.*_(?:API_)?KEY|FLEXLAB_.*"
)


def _env_name(value: str) -> str:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
        raise ValueError(f"{value!r} is no name of a variable")
    if _FORBIDDEN_ENV.fullmatch(value):
        raise ValueError(f"a recipe cannot set {value}")
    return value


EnvName = Annotated[str, AfterValidator(_env_name)]
Date = Annotated[str, AfterValidator(_date)]
RegularExpression = Annotated[str, AfterValidator(_pattern)]


class Strict(BaseModel):
    """No unknown keys, no changes afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Evidenced(Strict):
    """A block of claims and what they rest on."""

    evidence: Evidence
    """tested: somebody ran it; documented: the source says so; untested: nobody knows yet."""

    reason: Sentence
    """Why it is so, in a sentence that a plan can show."""

    source: Sentence
    """Who says so: a measurement (what, on what), a document with its version, an issue."""

    date: Date
    """When that was last looked at."""
