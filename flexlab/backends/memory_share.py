"""The share of a GPU's memory that an engine may take, as engines want it written."""

from __future__ import annotations

_LEAST_DIGITS = 2


def granted_share(granted_bytes: int | None, total_bytes: int | None) -> str | None:
    """What was granted of the whole, never rounded up: two digits, more only where those say
    nothing at all. None where one of the two is unknown."""
    if not granted_bytes or not total_bytes or granted_bytes < 0 or total_bytes < 0:
        return None
    if granted_bytes >= total_bytes:
        return "1.00"
    digits = _LEAST_DIGITS
    while not (parts := granted_bytes * 10**digits // total_bytes):
        digits += 1
    return f"0.{parts:0{digits}d}"


def chosen_share(share: float) -> str:
    """What a recipe or a user chose, exactly."""
    two_digits = f"{share:.{_LEAST_DIGITS}f}"
    return two_digits if float(two_digits) == share else repr(share)
