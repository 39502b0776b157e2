"""What nvidia-smi says, as XML (`-q -x`, nvsmi_device v10 to v13) or CSV with a header.

Both come from the program or from a file that was recorded with it. Every value may be `N/A`,
`[Not Supported]`, `[Unknown Error]`, `ERR!`, `[GPU requires reset]` or a sentence about
deprecation: whatever is not what a field should hold is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

from flexlab.core.text import clean_line
from flexlab.core.units import GIB, KIB, MIB
from flexlab.gpus.arch import sm_of_text
from flexlab.gpus.bus import plain_slot
from flexlab.gpus.files import count
from flexlab.gpus.nvidia_card import (
    GPU_IS_LOST,
    REASON_BITS,
    RESET_REQUIRED,
    Answer,
    DriverCard,
    Process,
    made_mig_uuid,
    throttle_words,
)
from flexlab.spec.machine import MigSlice

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

_NUMBER = re.compile(r"(-?[0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([A-Za-z%]*)")
_BYTES = {"": MIB, "mib": MIB, "kib": KIB, "gib": GIB, "b": 1, "bytes": 1}
_UUID = re.compile(r"(?:GPU|MIG)-[0-9A-Za-z/-]{4,80}")
_VERSION = re.compile(r"[0-9]{1,5}(?:\.[0-9]{1,5}){1,3}")
_PCI_ID = re.compile(r"(?:0x)?([0-9A-Fa-f]{4})10DE", re.IGNORECASE)
_FOLDERS_OF = re.compile(r".*[/\\]")
_UNIT_IN_HEADER = re.compile(r"\s*\[([^\]]*)\]\s*$")
_HANDLE_LOST = re.compile(r"device handle for GPU.*?((?:[0-9A-Fa-f]{4,8}:)[0-9A-Fa-f:.]{7})", re.I)
_LISTED_CARD = re.compile(r"GPU [0-9]+: .*\(UUID: (GPU-[^)]+)\)")
_LISTED_SLICE = re.compile(r"\s+MIG (\S+)\s+Device\s+[0-9]+: \(UUID: (MIG-[^)]+)\)")

# Number -> where it stands, the first that holds a number counts. The layout of power changed
# twice: power_readings up to driver 525, then gpu_power_readings, with averages since 545.
_XML_NUMBERS: dict[str, tuple[str, ...]] = {
    "busy_percent": ("utilization/gpu_util",),
    "memory_busy_percent": ("utilization/memory_util",),
    "power_w": (
        "gpu_power_readings/average_power_draw",
        "gpu_power_readings/instant_power_draw",
        "gpu_power_readings/power_draw",
        "power_readings/power_draw",
    ),
    "power_limit_w": (
        "gpu_power_readings/current_power_limit",
        "power_readings/enforced_power_limit",
        "power_readings/power_limit",
    ),
    "clock_core_mhz": ("clocks/sm_clock", "clocks/graphics_clock"),
    "clock_memory_mhz": ("clocks/mem_clock",),
    "fan_percent": ("fan_speed",),
    "temp_gpu_c": ("temperature/gpu_temp",),
    "temp_mem_c": ("temperature/memory_temp",),
}
_CSV_NUMBERS: dict[str, tuple[str, ...]] = {
    "busy_percent": ("utilization.gpu",),
    "memory_busy_percent": ("utilization.memory",),
    "power_w": ("power.draw", "power.draw.average", "power.draw.instant"),
    "power_limit_w": ("enforced.power.limit", "power.limit"),
    "clock_core_mhz": ("clocks.current.sm", "clocks.sm", "clocks.gr"),
    "clock_memory_mhz": ("clocks.current.memory", "clocks.mem"),
    "fan_percent": ("fan.speed",),
    "temp_gpu_c": ("temperature.gpu",),
    "temp_mem_c": ("temperature.memory",),
}
_XML_MEMORY = {
    "vram_total_bytes": "fb_memory_usage/total",
    "vram_used_bytes": "fb_memory_usage/used",
    "vram_reserved_bytes": "fb_memory_usage/reserved",
}
_CSV_MEMORY = {
    "vram_total_bytes": "memory.total",
    "vram_used_bytes": "memory.used",
    "vram_reserved_bytes": "memory.reserved",
}
_SIGNED = frozenset({"temp_gpu_c", "temp_mem_c"})


def parse(text: str | None) -> Answer | None:
    """Either form, by what it looks like; None where no card is in it."""
    if not text:
        return None
    return parse_xml(text) if "<nvidia_smi_log" in text else parse_csv(text)


def parse_xml(text: str) -> Answer | None:
    """All cards that are complete in `text`, which may be cut off; None where there is none."""
    # Imported here: most machines have NVML, or no NVIDIA card.
    from xml.etree.ElementTree import ParseError, XMLPullParser

    parser: XMLPullParser[Element] = XMLPullParser(("end",))
    # What precedes the first tag is a byte order mark, or a warning of the program.
    parser.feed(text[max(0, text.find("<")) :])
    cards: list[DriverCard] = []
    versions: dict[str, str] = {}
    try:
        for _event, element in cast("Iterator[tuple[str, Element]]", parser.read_events()):
            if element.tag == "gpu":
                cards.append(_xml_card(element, len(cards)))
            elif element.tag in ("driver_version", "cuda_version"):
                versions.setdefault(element.tag, _version(element.text) or "")
    except ParseError:
        pass  # cut off, or garbage from here on
    cards += _lost_cards(text)
    if not cards:
        return None
    return Answer(
        tuple(cards), versions.get("driver_version") or None, versions.get("cuda_version") or None
    )


def parse_csv(text: str) -> Answer | None:
    """The rows below the header, by the header's names; units may stand in it, or with values."""
    lines = [line.strip("\ufeff\ufffd \t\r") for line in text.splitlines()]
    titles: list[str] = []
    cards: list[DriverCard] = []
    version = None
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if not titles:
            names = [_UNIT_IN_HEADER.sub("", cell).lower() for cell in cells]
            titles = cells if "name" in names or "uuid" in names else []
        elif len(cells) == len(titles):
            row = _csv_row(titles, cells)
            cards.append(_csv_card(row, len(cards)))
            version = version or _version(row.get("driver_version"))
    cards += _lost_cards(text)
    return Answer(tuple(cards), version) if cards else None


def with_listed_slices(answer: Answer, listing: str) -> Answer:
    """With the UUIDs and profiles of MIG slices that `nvidia-smi -L` lists and XML leaves out.

    Both go by the driver's number of a slice. Where they differ in how many a card has, one was
    made or destroyed in between, and nothing is taken over.
    """
    listed: dict[str, list[tuple[str, str]]] = {}
    card = ""
    for line in listing.splitlines():
        if match := _LISTED_CARD.match(line):
            card = match[1]
        elif match := _LISTED_SLICE.match(line):
            listed.setdefault(card, []).append((match[1], match[2]))
    return answer._replace(
        cards=tuple(_named_slices(card, listed.get(card.uuid or "", [])) for card in answer.cards)
    )


def _named_slices(card: DriverCard, listed: list[tuple[str, str]]) -> DriverCard:
    if len(listed) != len(card.slices):
        return card
    named = [
        MigSlice(
            uuid=uuid,
            gi=part.gi,
            profile=profile,
            vram_total_bytes=part.vram_total_bytes,
            vram_used_bytes=part.vram_used_bytes,
        )
        for part, (profile, uuid) in zip(card.slices, listed, strict=True)
    ]
    return card._replace(slices=tuple(named))


def _xml_card(gpu: Element, number: int) -> DriverCard:
    """One `<gpu>`. Only paths below itself count: MIG slices have fb_memory_usage, too."""
    texts = {name: _texts(gpu, paths) for name, paths in _XML_NUMBERS.items()}
    memory = {name: gpu.findtext(path) for name, path in _XML_MEMORY.items()}
    uuid = _uuid(gpu.findtext("uuid"))
    slot = plain_slot(gpu.findtext("pci/pci_bus_id")) or plain_slot(gpu.get("id"))
    is_mig = _word(gpu.findtext("mig_mode/current_mig")) == "enabled"
    slices = tuple(_xml_slices(gpu, uuid or slot or str(number))) if is_mig else ()
    return DriverCard(
        number=number,
        name=_name(gpu.findtext("product_name")),
        uuid=uuid,
        slot=slot,
        pci_id=_pci_id(gpu.findtext("pci/pci_device_id")),
        minor=count(gpu.findtext("minor_number")),
        is_mig=is_mig,
        slices=slices,
        numbers=_numbers(texts, memory),
        throttle=throttle_words(_xml_reasons(gpu)),
        fault=_xml_fault(gpu),
        processes=tuple(_xml_processes(gpu)),
    )


def _xml_slices(gpu: Element, card: str) -> Iterator[MigSlice]:
    taken: set[str] = set()
    for at, part in enumerate(gpu.iterfind("mig_devices/mig_device")):
        gi = count(part.findtext("gpu_instance_id"))
        ci = count(part.findtext("compute_instance_id"))
        uuid = _uuid(part.findtext("uuid"))
        uuid = uuid or made_mig_uuid(card, at if gi is None else gi, ci or 0)
        if uuid in taken:
            continue
        taken.add(uuid)
        yield MigSlice(
            uuid=uuid,
            gi=gi,
            vram_total_bytes=_bytes(part.findtext("fb_memory_usage/total")) or None,
            vram_used_bytes=_bytes(part.findtext("fb_memory_usage/used")),
        )


def _xml_processes(gpu: Element) -> Iterator[Process]:
    for each in gpu.iterfind("processes/process_info"):
        pid = count(each.findtext("pid"))
        if pid is None:
            continue
        gi = count(each.findtext("gpu_instance_id"))
        path = _name(each.findtext("process_name"))
        yield Process(
            pid=pid,
            name=_FOLDERS_OF.sub("", path) if path else None,
            vram_bytes=_bytes(each.findtext("used_memory")),
            gi=gi,
        )


def _xml_reasons(gpu: Element) -> int:
    bits = 0
    for folder, each in (
        ("clocks_event_reasons", "clocks_event_reason_"),
        ("clocks_throttle_reasons", "clocks_throttle_reason_"),  # up to driver 530
    ):
        for name, bit in REASON_BITS.items():
            if _word(gpu.findtext(f"{folder}/{each}{name}")) == "active":
                bits |= bit
    return bits


def _xml_fault(gpu: Element) -> int | None:
    """A lost card has the sentence in the place of its values."""
    recovery = _word(gpu.findtext("gpu_recovery_action"))
    required = _word(gpu.findtext("gpu_reset_status/reset_required"))
    if required == "yes" or recovery in ("reset", "reboot", "gpu reset", "node reboot"):
        return RESET_REQUIRED
    return _told_fault(element.text for element in gpu.iter())


def _csv_row(titles: list[str], cells: list[str]) -> dict[str, str]:
    """Values by title; a unit that stands in the title goes to a value that has none."""
    row = {}
    for title, cell in zip(titles, cells, strict=True):
        unit = _UNIT_IN_HEADER.search(title)
        match = _NUMBER.fullmatch(cell)
        bare = match is not None and not match[2]
        name = _UNIT_IN_HEADER.sub("", title).strip().lower()
        row[name] = f"{cell} {unit[1]}" if unit and bare else cell
    return row


def _csv_card(row: Mapping[str, str], number: int) -> DriverCard:
    told = count(row.get("index"))
    texts = {
        name: [row[column] for column in columns if column in row]
        for name, columns in _CSV_NUMBERS.items()
    }
    memory = {name: row.get(column) for name, column in _CSV_MEMORY.items()}
    return DriverCard(
        number=number if told is None else told,
        name=_name(row.get("name") or row.get("gpu_name")),
        uuid=_uuid(row.get("uuid") or row.get("gpu_uuid")),
        slot=plain_slot(row.get("pci.bus_id") or row.get("gpu_bus_id")),
        pci_id=_pci_id(row.get("pci.device_id")),
        arch=sm_of_text(row.get("compute_cap") or ""),
        is_mig=_word(row.get("mig.mode.current")) == "enabled",
        numbers=_numbers(texts, memory),
        fault=_told_fault(row.values()),
    )


def _lost_cards(text: str) -> list[DriverCard]:
    """The program names cards that it cannot open in a line of its own and goes on."""
    found = (plain_slot(match[1].rstrip(":.")) for match in _HANDLE_LOST.finditer(text))
    return [DriverCard(number=-1, slot=slot, fault=GPU_IS_LOST) for slot in found if slot]


def _told_fault(values: Iterable[str | None]) -> int | None:
    words = {_word(value) for value in values if value and "GPU" in value}
    if "gpu is lost" in words:
        return GPU_IS_LOST
    return RESET_REQUIRED if "gpu requires reset" in words else None


def _numbers(
    texts: Mapping[str, Iterable[str]], memory: Mapping[str, str | None]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, candidates in texts.items():
        values = (_number(text, signed=name in _SIGNED) for text in candidates)
        value = next((value for value in values if value is not None), None)
        if value is not None:
            found[name] = value
    if found.get("temp_mem_c") == 0:
        del found["temp_mem_c"]  # no sensor
    for name, text in memory.items():
        size = _bytes(text)
        if size is not None:
            found[name] = size
    if found.get("vram_total_bytes") == 0:
        del found["vram_total_bytes"]  # no card has none: the driver does not know
    return found


def _texts(gpu: Element, paths: Iterable[str]) -> list[str]:
    return [text for path in paths if (text := gpu.findtext(path))]


def _number(text: str | None, *, signed: bool = False) -> float | None:
    match = _NUMBER.fullmatch((text or "").strip())
    if match is None or (match[1].startswith("-") and not signed):
        return None
    return float(match[1])


def _bytes(text: str | None) -> int | None:
    """A size; without a unit in MiB, which is what `nounits` leaves out."""
    match = _NUMBER.fullmatch((text or "").strip())
    factor = _BYTES.get(match[2].lower()) if match else None
    if match is None or factor is None or match[1].startswith("-"):
        return None
    return int(float(match[1]) * factor)


def _word(text: str | None) -> str:
    return (text or "").strip(" []\t\r\n").lower()


def _name(text: str | None) -> str | None:
    """A product's or program's name; a value that stands for none is None."""
    name = clean_line(text or "")[:120]
    unknown = not name or name.startswith("[") or name in ("N/A", "ERR!", "Unknown")
    return None if unknown or "GPU is lost" in name else name


def _uuid(text: str | None) -> str | None:
    match = _UUID.fullmatch((text or "").strip())
    return match[0] if match else None


def _version(text: str | None) -> str | None:
    match = _VERSION.fullmatch((text or "").strip())
    return match[0] if match else None


def _pci_id(text: str | None) -> str | None:
    """`1EB810DE` or `0x1EB810DE` as `10de:1eb8`; recordings may hold zeros for it."""
    match = _PCI_ID.fullmatch((text or "").strip())
    return f"10de:{match[1].lower()}" if match and int(match[1], 16) else None
