"""What to give up where a model does not fit: what costs its user least, first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from flexlab.backends.base import BackendSettings
from flexlab.core.units import say_bytes
from flexlab.planning import fit

CONTEXT_MIN = 512
"""A smaller context is of no use to anybody."""

# The prompt cache saves time when prompts repeat, slots let requests run side by side; neither
# changes an answer, as a smaller context does.
_CHEAP: tuple[dict[str, object], ...] = (
    {},
    {"cache_ram_mib": 0},
    {"parallel": 1},
    {"parallel": 1, "cache_ram_mib": 0},
)


def advice(
    settings: BackendSettings,
    model: fit.Model,
    ground: fit.Ground,
    backend: str,
    usable_bytes: int,
) -> str:
    """The first smaller settings that fit, as options and with their need; else the least need."""
    least = fit.estimate(settings, model, ground)
    options = ""
    for smaller in _smaller(settings):
        least = fit.estimate(smaller, model, ground)
        options = _options(settings, smaller)
        if _on_device(least, ground) <= usable_bytes:
            return f"it would fit ({_shown(least)}) with {options}"
    with_options = f" ({options})" if options else ""
    at_any = " at any context" if hasattr(settings, "context_size") else ""
    return (
        f"too small for this model{at_any}; the least is {_shown(least)}{with_options}; "
        "flexlab recipes lists what fits"
    )


def _on_device(need: fit.Estimate, ground: fit.Ground) -> int:
    """Of a GPU without what stays in the host's RAM."""
    if not ground.on_gpu:
        return need.total_bytes
    on_card = sum(size for term, size in need.terms.items() if term not in need.host)
    return max(on_card, need.fixed_bytes or 0)


def _smaller(settings: BackendSettings) -> Iterator[BackendSettings]:
    """All that is worth trying: the largest context first, and with it the fewest other changes."""
    if total := getattr(settings, "max_total_seq_length", None):  # it, and no context, is reserved
        yield from (
            settings.model_copy(update={"max_total_seq_length": total >> halved})
            for halved in range(1, total.bit_length())
            if total >> halved >= CONTEXT_MIN
        )
        return
    wanted = int(getattr(settings, "context_size", None) or CONTEXT_MIN)
    powers = (1 << bits for bits in reversed(range(wanted.bit_length())))
    before = settings.model_dump()
    for context in (wanted, *(size for size in powers if CONTEXT_MIN <= size < wanted)):
        for update in _CHEAP:
            is_new = all(before.get(name, value) != value for name, value in update.items())
            if is_new and (update or context != wanted):
                changes = {**update, **({"context_size": context} if context != wanted else {})}
                if changes.keys() <= before.keys():
                    yield settings.model_copy(update=changes)


def _options(before: BackendSettings, after: BackendSettings) -> str:
    old, new = before.model_dump(), after.model_dump()
    names = ("parallel", "cache_ram_mib", "context_size", "max_total_seq_length")
    return " ".join(f"--set {name}={new[name]}" for name in names if new.get(name) != old.get(name))


def _shown(need: fit.Estimate) -> str:
    return f"{'about ' if need.guessed else ''}{say_bytes(need.total_bytes)}"
