"""Product names in the files that distributions ship: pci.ids and libdrm's amdgpu.ids.

pci.ids has about 40,000 lines: it is searched, not parsed, and only when it is needed.
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from pathlib import Path

from flexlab.core.text import clean_line
from flexlab.gpus.files import read_text

_PCI_IDS = ("usr/share/hwdata/pci.ids", "usr/share/misc/pci.ids")
_AMDGPU_IDS = "usr/share/libdrm/amdgpu.ids"
_HEAD_BYTES = 4096
_VERSION = re.compile(r"^#\s*(?:Version|pci\.ids):?\s*(\d{4})[.-](\d\d)[.-](\d\d)", re.MULTILINE)
_BRACKET = re.compile(r"(.*?)\s*\[(.+)\](?: \(Secondary\))?")
_DIGIT = re.compile(r"\d")


def table_date(text: str) -> tuple[int, ...]:
    """The day of the pci.ids that `text` is, or was made from; () if it does not say."""
    match = _VERSION.search(text, 0, _HEAD_BYTES)
    return tuple(int(part) for part in match.groups()) if match else ()


def pci_ids_date(root: Path) -> tuple[int, ...] | None:
    """The day of the system's newest pci.ids; None without one that says its day."""
    newest = _newest(root)
    return newest[0] if newest else None


def pci_ids_name(root: Path, vendor_id: str, device_id: str) -> str | None:
    """The product of a device in the system's newest pci.ids; ids are four hex digits."""
    newest = _newest(root)
    text = _text(newest[1]) if newest else None
    if text is None:
        return None
    start = text.find(f"\n{vendor_id}  ")
    if start < 0:
        return None
    block = re.compile(r"\n(?=[0-9a-zA-Z])").search(text, start + 1)
    return _device_name(text, device_id, start, block.start() if block else len(text))


def amdgpu_name(root: Path, device_id: str, revision: str) -> str | None:
    """The product of this id and revision in the system's amdgpu.ids."""
    text = _text(os.path.join(root, _AMDGPU_IDS)) or ""
    line = rf"^{device_id},\s*{revision},\s*(\S.*)$"
    match = re.search(line, text, re.IGNORECASE | re.MULTILINE)
    return amd_product(clean_line(match[1])) if match else None


def product_of(line: str) -> str:
    """The product in a name of pci.ids: what is in brackets, or else the name itself.

    A product that only its code name tells apart keeps it: `Granite Ridge [Radeon Graphics]` is
    `Radeon Graphics (Granite Ridge)`.
    """
    match = _BRACKET.fullmatch(line.strip())
    if match is None:
        return line.strip()
    code, product = match[1], amd_product(match[2])
    vague = not _DIGIT.search(product) and product.endswith(("Graphics", "Series"))
    return f"{product} ({code})" if vague and code else product


def amd_product(name: str) -> str:
    """`AMD Radeon 780M Graphics` without the maker, and without the word that says nothing."""
    name = name.removeprefix("AMD ").strip()
    return name.removesuffix(" Graphics") if _DIGIT.search(name) else name


def _device_name(text: str, device_id: str, start: int, end: int) -> str | None:
    at = text.find(f"\n\t{device_id}  ", start, end)
    if at < 0:
        return None
    line_end = text.find("\n", at + 1)
    name = clean_line(text[at + 8 : line_end if line_end > 0 else len(text)])
    return product_of(name) or None


@lru_cache(maxsize=8)
def _newest(root: Path) -> tuple[tuple[int, ...], str] | None:
    dated = []
    for place in _PCI_IDS:
        path = os.path.join(root, place)
        date = table_date(_head(path))
        if date:
            dated.append((date, path))
    return max(dated, default=None)


def _head(path: str) -> str:
    # The date stands at the top, and most systems' files are older than our tables.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return ""
    try:
        return os.read(descriptor, _HEAD_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)


@lru_cache(maxsize=2)
def _text(path: str) -> str | None:
    return read_text(Path(path))
