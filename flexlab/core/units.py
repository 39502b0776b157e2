"""Bytes and seconds, read from people and written for people. GiB = 1024**3, written `G`."""

from __future__ import annotations

import re

KIB, MIB, GIB = 1024, 1024**2, 1024**3
_SIZES = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 1024**4, "tib": 1024**4, "tb": 1000**4,
}  # fmt: skip
_TIMES = {"": 1.0, "ms": 0.001, "s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0,
          "d": 86400.0}  # fmt: skip
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """`512M`, `1.5 GiB`, `2gb` or a plain number of bytes. Raises ValueError."""
    return int(_parse(text, _SIZES, "a size such as 512M or 1.5G"))


def parse_seconds(text: str) -> float:
    """`90`, `90s`, `15min`, `1h 30m`. Raises ValueError."""
    parts = re.findall(r"\d+(?:\.\d+)?\s*[a-zA-Z]*", text)
    if not parts or re.sub(r"\d+(?:\.\d+)?\s*[a-zA-Z]*|\s", "", text):
        raise ValueError(f"{text!r} is not a time such as 90s, 15min or 1h")
    return sum(_parse(part, _TIMES, "a time such as 90s, 15min or 1h") for part in parts)


def _parse(text: str, units: dict[str, float] | dict[str, int], wanted: str) -> float:
    match = _NUMBER.fullmatch(text)
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ValueError(f"{text!r} is not {wanted}")
    return float(match[1]) * factor


def show_bytes(count: int | float | None) -> str:
    """Always one decimal from MiB up: `93.8M`, `1.2G`; `?` when unknown."""
    if count is None:
        return "?"
    for unit, size in (("T", 1024**4), ("G", GIB), ("M", MIB)):
        if abs(count) >= size:
            return f"{count / size:.1f}{unit}"
    return f"{count / KIB:.0f}K" if abs(count) >= KIB else f"{count:.0f}B"


def say_bytes(count: int | float | None) -> str:
    """For sentences, with the unit in full: `93.8 MiB`, `1.2 GiB`; `?` when unknown."""
    short = show_bytes(count)
    if count is None or short.endswith("B"):
        return short.removesuffix("B") + (" bytes" if count is not None else "")
    return f"{short[:-1]} {short[-1]}iB"


def show_value(field: str, value: object) -> str:
    """A setting's value; the unit is in its field's name (`log_max_bytes`, `linger_s`)."""
    if value is None:
        return "automatic"
    if field.endswith("_bytes") and isinstance(value, int):
        return show_bytes(value)
    if field.endswith("_s") and isinstance(value, int | float):
        return show_seconds(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value) or "none"
    return str(value)


def show_seconds(seconds: float | None) -> str:
    """`0.4 s`, `5 s`, `3m 20s`, `15m`, `4d 3h`, without zero parts; `?` when unknown."""
    if seconds is None:
        return "?"
    tenths = round(seconds, 1)
    if tenths < 10:
        return f"{tenths:.0f} s" if tenths == int(tenths) else f"{tenths:.1f} s"
    whole = round(seconds)
    for big, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= big:
            rest = whole % big // small
            return f"{whole // big}{names[0]}" + (f" {rest}{names[1]}" if rest else "")
    return f"{whole} s"
