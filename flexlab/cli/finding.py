"""What `flexlab doctor` says of one thing."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding; `mend` is the next command or act where it is not ok."""

    subject: str
    level: Level
    text: str
    mend: str | None = None
