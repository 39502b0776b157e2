"""Types of fields that settings and recipes share: people write `15min` and `1.5G`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from flexlab.core.units import parse_bytes, parse_seconds


def _seconds(value: object) -> object:
    return parse_seconds(value) if isinstance(value, str) else value


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


_NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Count = Annotated[int, Field(ge=0)]

Seconds = Annotated[
    _NotNegative, BeforeValidator(_seconds, json_schema_input_type=_NotNegative | str)
]
"""A number of seconds, or text such as `90s`, `15min`, `1h 30m`."""

Bytes = Annotated[_Count, BeforeValidator(_bytes, json_schema_input_type=_Count | str)]
"""A number of bytes, or text such as `120MB`, `1.5G` (G = 1024**3, GB = 1000**3)."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form of a text, as an annotation: a pattern for programs, a sentence for people."""

    pattern: str
    wanted: str

    def check(self, value: str) -> str:
        """The value itself. Raises ValueError with what is wanted."""
        if not re.fullmatch(self.pattern, value):
            raise ValueError(f"{value!r} is not {self.wanted}")
        return value

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}
