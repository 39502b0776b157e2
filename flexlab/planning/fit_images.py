"""The memory of engines that make images and video. Pure.

weights       the parts of the pipeline as they are loaded (recipe), else the size of the files;
              of them what the memory plan keeps on the card: everything (resident), the largest
              part (model_offload), a quarter of it (group_offload), nothing (sequential_offload)
weights_on_cpu  the rest of them, in RAM
activations   of one job at the recipe's own size (recipe)
overhead      of the engine's program and its driver (backend recipe)

Held in fewer bits (`quantization`) a part takes that much less; how much of it can be is a guess.
"""

from __future__ import annotations

from flexlab.backends.base import BackendSettings, of_type
from flexlab.backends.comfyui import ComfyUiSettings
from flexlab.backends.diffusers import DiffusersSettings
from flexlab.planning.fit import Estimate, Ground, Model
from flexlab.planning.fit_text import Sum
from flexlab.planning.quantization import bits_per_weight

_LOADED_BITS = 16
_GROUPS = 4
_ON_THE_CPU = "weights_on_cpu"
_COMFYUI_PLANS = {
    "auto": "resident", "gpu_only": "resident", "highvram": "resident",
    "normalvram": "model_offload", "lowvram": "group_offload", "novram": "sequential_offload",
}  # fmt: skip


def _diffusers(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    chosen = of_type(settings, DiffusersSettings, "diffusers")
    plan = chosen.memory_plan if ground.on_gpu else "resident"
    return _pipeline(model, ground, plan, chosen.quantization)


def _comfyui(settings: BackendSettings, model: Model, ground: Ground) -> Estimate:
    chosen = of_type(settings, ComfyUiSettings, "comfyui")
    plan = _COMFYUI_PLANS[chosen.memory] if ground.on_gpu else "resident"
    return _pipeline(model, ground, plan, None)


def _pipeline(model: Model, ground: Ground, plan: str, quantization: str | None) -> Estimate:
    parts = model.parts or ({} if model.weight_bytes is None else {"model": model.weight_bytes})
    guessed: list[str] = []
    if quantization is not None:
        bits = bits_per_weight(quantization) or _LOADED_BITS
        parts = {name: round(size * bits / _LOADED_BITS) for name, size in parts.items()}
        guessed.append("weights")
    terms: dict[str, int] = {}
    if parts:
        terms["weights"] = _on_the_card(parts, plan)
        if rest := sum(parts.values()) - terms["weights"]:
            terms[_ON_THE_CPU] = rest
        if model.parts is None and plan != "resident":
            guessed.append("weights")  # how the files are made up of parts is not known
    if model.activations is not None:
        terms["activations"] = model.activations
    terms["overhead"] = ground.overhead_bytes
    return Estimate(
        terms=terms,
        guessed=tuple(dict.fromkeys(guessed)),
        unknown=() if parts else ("weights",),
        host=frozenset({_ON_THE_CPU}),
    )


def _on_the_card(parts: dict[str, int], plan: str) -> int:
    largest = max(parts.values())
    if plan == "resident":
        return sum(parts.values())
    if plan == "model_offload":
        return largest
    return largest // _GROUPS if plan == "group_offload" else 0


SUMS: dict[type[BackendSettings], Sum] = {
    DiffusersSettings: _diffusers,
    ComfyUiSettings: _comfyui,
}
