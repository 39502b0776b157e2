"""How much memory an Intel card has, by the one question that its driver answers to everybody.

sysfs does not say it, and products of one PCI id differ (the Arc A770 has 8 or 16 GiB). What is in
use is told to privileged callers only (to others xe says 0 and i915 "all free"), so it is not read
here. Layouts: Linux include/uapi/drm/xe_drm.h and i915_drm.h, which the kernel never changes.
"""

from __future__ import annotations

import fcntl
import os
import struct
from array import array
from collections.abc import Callable

_XE_DEVICE_QUERY = 0xC028_6440
"""DRM_IOWR(0x40, 40 bytes)."""
_XE_QUERY = struct.Struct("=QIIQ16x")
"""Extensions, what is asked, size of the answer, where it goes."""
_XE_MEM_REGIONS = 1
_I915_QUERY_IOCTL = 0xC010_6479
"""DRM_IOWR(0x40 + 0x39, 16 bytes)."""
_I915_QUERY = struct.Struct("=IIQ")
"""How many questions, flags, where they are."""
_I915_ITEM = struct.Struct("=QiIQ")
"""What is asked, size of the answer (negative: an error number), flags, where it goes."""
_I915_MEMORY_REGIONS = 4
_HEADERS = {"xe": 8, "i915": 16}
"""Bytes before the first region; the count of regions comes first."""
_REGION = struct.Struct("=HHIQ72x")
"""Both drivers: class, instance, something else, size in bytes, more."""
_ON_THE_CARD = 1
_LONGEST_ANSWER = 64 * 1024

Ask = Callable[[int, int, bytearray], object]


def read_total(path: str, driver: str, ask: Ask = fcntl.ioctl) -> int | None:
    """Bytes of memory on the card behind the render node `path`; None where it does not say.

    Opens the node: not for a card that sleeps, since that wakes it.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        question = _ask_xe if driver == "xe" else _ask_i915
        return total_of(question(descriptor, ask), driver)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def total_of(answer: bytes, driver: str) -> int | None:
    """The sum of all regions (one a tile) that are on the card."""
    header = _HEADERS[driver]
    if len(answer) < header:
        return None
    count = int.from_bytes(answer[:4], "little")
    fitting = (len(answer) - header) // _REGION.size
    if count > fitting:
        return None
    places = (header + number * _REGION.size for number in range(count))
    regions = [_REGION.unpack_from(answer, place) for place in places]
    return sum(size for kind, _, _, size in regions if kind == _ON_THE_CARD) or None


def _ask_xe(descriptor: int, ask: Ask) -> bytes:
    question = bytearray(_XE_QUERY.pack(0, _XE_MEM_REGIONS, 0, 0))
    ask(descriptor, _XE_DEVICE_QUERY, question)
    size = _XE_QUERY.unpack(question)[2]
    if not 0 < size <= _LONGEST_ANSWER:
        return b""
    answer = array("B", bytes(size))
    place, _ = answer.buffer_info()
    ask(descriptor, _XE_DEVICE_QUERY, bytearray(_XE_QUERY.pack(0, _XE_MEM_REGIONS, size, place)))
    return answer.tobytes()


def _ask_i915(descriptor: int, ask: Ask) -> bytes:
    item = array("B", _I915_ITEM.pack(_I915_MEMORY_REGIONS, 0, 0, 0))
    question = _I915_QUERY.pack(1, 0, item.buffer_info()[0])
    ask(descriptor, _I915_QUERY_IOCTL, bytearray(question))
    size = _I915_ITEM.unpack(item)[1]
    if not 0 < size <= _LONGEST_ANSWER:
        return b""
    answer = array("B", bytes(size))
    _I915_ITEM.pack_into(item, 0, _I915_MEMORY_REGIONS, size, 0, answer.buffer_info()[0])
    ask(descriptor, _I915_QUERY_IOCTL, bytearray(question))
    # A refusal of the second question stands in its length, not in the call's outcome.
    return answer.tobytes() if _I915_ITEM.unpack(item)[1] == size else b""
