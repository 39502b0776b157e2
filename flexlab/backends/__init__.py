"""One file per engine. `get` finds an engine by its name or by one of its usual spellings."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flexlab.core.errors import UsageError

if TYPE_CHECKING:
    from flexlab.backends.base import Backend

_BACKENDS = {"llamacpp": ("flexlab.backends.llamacpp", "LlamaCpp")}
_SPELLINGS = {
    "llama.cpp": "llamacpp", "llama-cpp": "llamacpp", "llama_cpp": "llamacpp",
    "llama-server": "llamacpp",
}  # fmt: skip


def names() -> tuple[str, ...]:
    """The backends that this version knows."""
    return tuple(_BACKENDS)


def canonical(name: str) -> str:
    """`llama.cpp` -> `llamacpp`; a name that nobody knows comes back as it is."""
    return _SPELLINGS.get(name.lower(), name.lower())


def get(name: str) -> Backend:
    """The backend of this name. Raises UsageError with what exists."""
    known = canonical(name)
    if known not in _BACKENDS:
        raise UsageError(
            f"no backend named {name!r}",
            f"backends of this version: {', '.join(_BACKENDS)}",
            code="unknown_backend",
        )
    module, attribute = _BACKENDS[known]
    # Imported by name and late: settings types bring pydantic, and engines are many.
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
