"""What a PCI id says about a card, from small tables that ship with the program.

They are asked where the kernel or the driver does not say it itself. Each vendor has one file,
`data/VENDOR.tsv`, written by `tools/gpu_tables.py`; its header names the public sources. A line is
`id revision arch MiB kind name`, sorted by id, with tabs between and `-` for what is unknown; `?`
after the memory says that it is assumed. The line without a revision carries the name of pci.ids;
lines with one are exact products.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from flexlab.core.units import MIB
from flexlab.gpus.files import read_text
from flexlab.gpus.hwdata import amdgpu_name, pci_ids_date, pci_ids_name, table_date
from flexlab.spec.machine import Vendor


class Card(NamedTuple):
    """What is certain about a card of this id and revision; None where nothing is."""

    name: str | None
    arch: str | None
    vram_bytes: int | None
    """Of the whole card, as it is sold: a little more than a driver reports."""
    is_apu: bool | None
    compute: bool
    """False: a display adapter that no compute runtime drives (TeraScale, Fermi and older)."""
    vram_assumed: bool = False
    """Products of this id differ in memory, and without a revision the first one is assumed."""


UNKNOWN = Card(name=None, arch=None, vram_bytes=None, is_apu=None, compute=True)

_DATA = Path(__file__).parent / "data"
VENDOR_NAMES: dict[Vendor, str] = {"amd": "AMD", "nvidia": "NVIDIA", "intel": "Intel"}
_IDS: dict[Vendor, str] = {"amd": "1002", "nvidia": "10de", "intel": "8086"}
_KINDS = {"dgpu": False, "apu": True}
_DISPLAY = "display"
_COLUMNS = 6
_DEVICE = re.compile(r"[0-9a-f]{4}")
_REVISION = re.compile(r"[0-9a-f]{2}")

# Words that a driver adds to a product name, or leaves out: they tell no chip or size apart.
_NOISE = re.compile(
    r"nvidia|corporation|tesla|hgx|dgxs?|gpu|generation|with|design|lite|hash|rate|refresh"
    r"|pcie|sxm[0-9]?|hbm[0-9]e?|fhhl|nvl"
)
_SIZE = re.compile(r"\b([0-9]+) ?gb\b")


def card_for(root: Path, vendor: Vendor, pci_id: str | None, revision: str | None) -> Card:
    """The card `1002:744c` of revision `c8`; always with a name, if only `AMD GPU 1002:744c`."""
    nameless = f"{VENDOR_NAMES[vendor]} GPU"
    device = _device_of(vendor, pci_id)
    if device is None:
        return UNKNOWN._replace(name=nameless)
    revision = (revision or "").strip().lower()
    return _card(root, vendor, device, revision if _REVISION.fullmatch(revision) else "-")


def nvidia_card_by_name(name: str) -> Card:
    """A card by the product name that the driver gives; all unknown where no product matches.

    Every word that tells products apart has to match. `vram_bytes` only if all products of that
    name have the same memory (`GeForce RTX 3080` has not).
    """
    key = name_key(name)
    row = _find(_table("nvidia-names"), key) if key else None
    return UNKNOWN if row is None else _as_card(row[2:])._replace(name=name.strip())


def is_integrated_nvidia(name: str, pci_id: str | None) -> bool:
    """Whether this NVIDIA GPU has no memory of its own (GB10, Jetson).

    By known products only: a card whose memory cannot be read is not integrated for that
    (wookayin/gpustat#179).
    """
    device = _device_of("nvidia", pci_id)
    row = _row("nvidia", device, "-") if device else None
    card = _as_card(row[2:]) if row else nvidia_card_by_name(name)
    return card.is_apu is True


def name_key(name: str) -> str:
    """The words that tell NVIDIA products apart, in an order that does not depend on the name's.

    `NVIDIA A100-SXM4-80GB`, `A100 PCIe 80GB` and `NVIDIA A100 80GB PCIe` have the same key.
    """
    text = _SIZE.sub(r" \1gb ", name.lower().replace("laptop gpu", "mobile"))
    text = re.sub(r"\brev\b\.? ?[0-9a-z]\b|[()®™]", " ", text)
    words = set(re.findall(r"[0-9a-z]+", text))
    return " ".join(sorted(word for word in words if not _NOISE.fullmatch(word)))


@lru_cache(maxsize=512)
def _card(root: Path, vendor: Vendor, device: str, revision: str) -> Card:
    exact = _row(vendor, device, revision) if revision != "-" else None
    general = _row(vendor, device, "-")
    row = exact or general
    known = UNKNOWN if row is None else _as_card(row[2:])
    name = _system_name(root, vendor, device, revision, exact, general) or known.name
    return known._replace(name=name or f"{VENDOR_NAMES[vendor]} GPU {_IDS[vendor]}:{device}")


def _system_name(
    root: Path,
    vendor: Vendor,
    device: str,
    revision: str,
    exact: list[str] | None,
    general: list[str] | None,
) -> str | None:
    """A name from the system's own files where they know more than our tables do."""
    if vendor == "amd" and exact is None and revision != "-":
        found = amdgpu_name(root, device, revision)
        if found is not None:
            return found
    date = pci_ids_date(root)
    if date is None or (general and date <= table_date(_table(vendor))):
        return None
    found = pci_ids_name(root, _IDS[vendor], device)
    if found is None or exact is None:
        return found
    # pci.ids lists all products of a device id (`RX 7900 XT/7900 XTX`): ours stays when its line
    # is the one that our tables were made from, or still lists this product.
    ours, unchanged = exact[-1], general is not None and general[-1] == found
    return None if unchanged or _models(ours) <= _models(found) else found


def _models(name: str) -> set[str]:
    return set(re.findall(r"[a-z]*[0-9]\w*", name.lower()))


def _device_of(vendor: Vendor, pci_id: str | None) -> str | None:
    maker, _, device = (pci_id or "").strip().lower().partition(":")
    return device if maker == _IDS[vendor] and _DEVICE.fullmatch(device) else None


def _as_card(columns: list[str]) -> Card:
    """`arch MiB kind name` as a card."""
    arch, mib, kind, name = columns
    return Card(
        name=name,
        arch=None if arch == "-" else arch,
        vram_bytes=None if mib == "-" else int(mib.rstrip("?")) * MIB,
        is_apu=_KINDS.get(kind),
        compute=kind != _DISPLAY,
        vram_assumed=mib.endswith("?"),
    )


def _row(vendor: Vendor, device: str, revision: str) -> list[str] | None:
    return _find(_table(vendor), f"{device}\t{revision}")


def _find(table: str, start: str) -> list[str] | None:
    """The columns of the one line that starts with these; nothing else of the file is parsed."""
    at = table.find(f"\n{start}\t") + 1
    columns = table[at : table.find("\n", at)].split("\t") if at else []
    return columns if len(columns) == _COLUMNS else None


@lru_cache(maxsize=len(VENDOR_NAMES) + 1)
def _table(name: str) -> str:
    return read_text(_DATA / f"{name}.tsv") or ""
