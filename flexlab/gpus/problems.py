"""What keeps a GPU of any vendor from being used: the codes and sentences that vendors share."""

from __future__ import annotations

from pathlib import Path

from flexlab.gpus.access import NodeAccess, mend
from flexlab.spec.machine import Problem


def no_driver(vendor: str, hint: str) -> Problem:
    """No driver that gives compute has this card."""
    return Problem(code="no_driver", message=f"no {vendor} driver is loaded for it", hint=hint)


def passed_on() -> Problem:
    """It belongs to a virtual machine."""
    return Problem(
        code="vfio",
        message="it is bound to vfio-pci: reserved for a virtual machine",
        hint="use it inside that machine, or give it back to its driver and boot again",
    )


def denied(root: Path, access: NodeAccess) -> Problem:
    """A device node that this user may not open."""
    path = access.node.path
    code = "kfd_denied" if path.endswith("/kfd") else "render_denied"
    message = f"found, but this user may not open {path}"
    return Problem(code=code, message=message, hint=mend(root, access))


def not_answering(message: str) -> Problem:
    """A driver, or a card of it, that hangs or fails when it is asked."""
    return Problem(
        code="not_answering",
        message=message,
        hint="dmesg | tail shows what the driver says; a reboot is the usual mend",
    )


def asleep() -> Problem:
    """Runtime-suspended: reading its sensors would wake it."""
    return Problem(
        code="asleep",
        message="asleep to save power: its sensors are not read, since that would wake it",
        hint="nothing to do: it wakes when a model starts on it",
    )


def memory_unknown() -> Problem:
    """Neither the driver nor the tables say how much memory it has."""
    return Problem(
        code="memory_unknown",
        message="neither the driver nor our table says how much memory it has",
        hint="nothing is planned on it until that is known: update the driver",
    )


def memory_assumed() -> Problem:
    """Products of this id differ in memory, and one was assumed."""
    return Problem(
        code="memory_assumed",
        message="the driver does not say how much memory it has: the product's usual size is used",
        hint="compare with the card's box; a newer driver says it",
    )


def not_compute(name: str | None, slot: str | None) -> Problem:
    """A display adapter from before the days of compute."""
    return Problem(
        code="not_compute",
        message=f"{name or 'a display adapter'} ({slot or '?'}) shows pictures only: "
        "no compute driver knows it",
        hint="nothing to do: models do not run on it",
    )
