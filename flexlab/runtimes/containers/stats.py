"""Memory of a container out of the engine's statistics. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flexlab.spec.instance import MemoryUse


def memory_of(told: Mapping[str, Any]) -> MemoryUse | None:
    """None where the engine tells none, as of a container that does not run.

    Control groups of version 2 say `anon` and `file_mapped`, those of version 1 `total_rss` and
    `total_mapped_file`; podman tells a sum only.
    """
    memory = told.get("memory_stats") or {}
    parts = memory.get("stats") or {}
    own = parts.get("anon", parts.get("total_rss"))
    mapped = parts.get("file_mapped", parts.get("total_mapped_file"))
    usage = memory.get("usage")
    if own is None:
        return None if not usage else MemoryUse(resident_bytes=int(usage), own_bytes=int(usage))
    if not own and not usage:
        return None
    return MemoryUse(resident_bytes=int(own) + int(mapped or 0), own_bytes=int(own))
