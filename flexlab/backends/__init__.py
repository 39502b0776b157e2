"""One file per engine, found by its name; other spellings stand in the backend's recipe."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from flexlab.core.errors import UsageError

if TYPE_CHECKING:
    from flexlab.backends.base import Backend

_BACKENDS = {
    "llamacpp": ("flexlab.backends.llamacpp", "LlamaCpp"),
    "vllm": ("flexlab.backends.vllm", "Vllm"),
    "mlc": ("flexlab.backends.mlc", "Mlc"),
    "ollama": ("flexlab.backends.ollama", "Ollama"),
    "diffusers": ("flexlab.backends.diffusers", "Diffusers"),
    "comfyui": ("flexlab.backends.comfyui", "ComfyUi"),
}


def names() -> tuple[str, ...]:
    """The backends that this version knows."""
    return tuple(_BACKENDS)


def get(name: str) -> Backend:
    """The backend of this name. Raises UsageError with what exists."""
    if name not in _BACKENDS:
        raise UsageError(
            f"no backend named {name!r}",
            f"backends of this version: {', '.join(_BACKENDS)}",
            code="unknown_backend",
        )
    module, attribute = _BACKENDS[name]
    # Imported by name and late: settings types bring pydantic, and engines are many.
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
