#!/usr/bin/env python3
"""Write flexlab/gpus/data/*.tsv from pci.ids, amdgpu.ids and tools/gpu_tables.toml.

    python tools/gpu_tables.py --pci-ids pci.ids [--pci-ids OLDER] --amdgpu-ids amdgpu.ids

pci.ids is https://github.com/pciutils/pciids (or package `pci.ids`, `hwdata`), amdgpu.ids is
https://gitlab.freedesktop.org/mesa/drm data/amdgpu.ids. Of several pci.ids the first that has a
device names it. A device whose code name no rule of the TOML file knows is left out.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from flexlab.gpus.arch import sm_of_text  # noqa: E402
from flexlab.gpus.hwdata import amd_product, product_of, table_date  # noqa: E402
from flexlab.gpus.tables import name_key  # noqa: E402

DATA = HERE.parent / "flexlab/gpus/data"
VENDORS = {"amd": "1002", "nvidia": "10de", "intel": "8086"}
SIZE = re.compile(r"\b([0-9]+) ?GB\b")
NOT_A_GPU = re.compile(
    r"Audio|USB|UCSI|Port\b|Bridge|Switch|Coprocessor|Serial|Host|Memory Controller"
    r"|Virtual Function|Theater|Crossfire|XGMI|dummy|PCI Express|IOMMU",
    re.IGNORECASE,
)
FAMILY = re.compile(r"00[MX]*( Series| /)|^[^0-9]*(Series|Graphics|Vega)$|Adapter$|TDC")
APU_PAIR = re.compile(r"Radeon [0-9]+M / [0-9]+M")
VARIANT = re.compile(r" (Rev\. \w|Lite Hash Rate|GDDR6X)$")

Rules = dict[str, Any]


class Row(NamedTuple):
    """One line of a table; see flexlab/gpus/tables.py."""

    device: str
    revision: str
    arch: str | None
    mib: int | None
    kind: str
    name: str
    assumed: bool = False
    """The memory is that of the product that amdgpu.ids lists first for the device."""

    def line(self) -> str:
        mib = "-" if self.mib is None else f"{self.mib}{'?' * self.assumed}"
        return "\t".join((self.device, self.revision, self.arch or "-", mib, self.kind, self.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pci-ids", type=Path, action="append", required=True)
    parser.add_argument("--amdgpu-ids", type=Path, required=True)
    options = parser.parse_args()
    rules = tomllib.loads((HERE / "gpu_tables.toml").read_text())
    files = [path.read_text(errors="replace") for path in options.pci_ids]
    amdgpu_ids = options.amdgpu_ids.read_text()
    dates = [".".join(f"{part:02}" for part in table_date(text)) for text in files]

    amd = list(amd_rows(devices(files, "amd", rules["amd"]["devices"]), amdgpu_ids, rules["amd"]))
    nvidia = list(nvidia_rows(devices(files, "nvidia"), rules["nvidia"]))
    intel = list(intel_rows(devices(files, "intel"), rules["intel"]))
    amdgpu_version = re.search(r"^([0-9.]+)$", amdgpu_ids, re.MULTILINE)
    extra = f"amdgpu.ids: {amdgpu_version[1] if amdgpu_version else '?'}, libdrm (MIT)"
    write("amd", amd, dates, [extra, *rules["amd"]["source"].splitlines()])
    write("nvidia", nvidia, dates, rules["nvidia"]["source"].splitlines())
    write("intel", intel, dates, rules["intel"]["source"].splitlines())
    names = name_rows(nvidia, rules["nvidia"])
    write("nvidia-names", names, dates, ["words of a driver's name -> what its products share"])


def devices(files: list[str], vendor: str, extra: dict[str, str] | None = None) -> dict[str, str]:
    """Device id -> name of this vendor's block; `extra` wins, then earlier files."""
    found: dict[str, str] = {}
    for text in files:
        block = re.search(rf"^{VENDORS[vendor]}  .*\n((?:[\t#].*\n|\n)*)", text, re.MULTILINE)
        for device, name in re.findall(r"^\t([0-9a-f]{4})  (.+)$", block[1] if block else "", re.M):
            found.setdefault(device, name)
    return {**found, **(extra or {})}


def amd_rows(known: dict[str, str], amdgpu_ids: str, rules: Rules) -> Iterator[Row]:
    """A row per device, and one per revision that says more.

    Not of an APU that comes as one of two (`880M / 890M`): they differ in compute units only, which
    the kernel counts, and the pair is right for revisions too that no list has yet.
    """
    products: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for device, revision, name in re.findall(
        r"^([0-9A-F]{4}),\s*([0-9A-F]{2}),\s*(\S.*)$", amdgpu_ids, re.MULTILINE
    ):
        names = products[device.lower()][revision.lower()]
        if (product := amd_product(name.strip())) not in names:
            names.append(product)
    for device, line in sorted(known.items()):
        found = amd_chip(line, rules)
        if found is None:
            continue
        arch, kind = found
        general = product_of(line)
        for match in rules["product_arch"]:
            arch = rules["product_arch"][match] if match in general else arch
        exact = {revision: amd_name(names, general) for revision, names in products[device].items()}
        exact.update(
            (place[5:], name) for place, name in rules["names"].items() if place[:4] == device
        )
        memory = memory_of(general, rules)
        sizes = [memory_of(name, rules) for name in exact.values()]
        first = memory or next(iter(sizes), None)
        assumed = memory is None and len(set(sizes)) > 1
        yield Row(device, "-", arch, first, kind, general, assumed)
        for revision, name in sorted(exact.items()):
            sure = f"{device}:{revision}" not in rules["unsure"]
            if not sure or (name != general and not APU_PAIR.fullmatch(general)):
                mib = memory_of(name, rules)
                yield Row(device, revision, arch if sure else None, mib, kind, name)


def amd_chip(line: str, rules: Rules) -> tuple[str | None, str] | None:
    """Architecture and kind by the code name that a pci.ids name starts with."""
    code = line.split("[")[0].strip()
    if NOT_A_GPU.search(line) or not code:
        return None
    if re.match(r"(R|RV|RS|RC)[0-9]{3}|(3D )?Rage|M[0-9]+\b", code) or "Mach64" in line:
        return None, "display"
    chips = rules["chips"]
    named = "|".join([*rules["arch"], chips["gcn"], chips["apu"], chips["display"]])
    # Longest first: `Strix Halo` is no `Strix`. What follows names a cut (`XT`) or a second chip.
    longest = "|".join(map(re.escape, sorted(named.split("|"), key=len, reverse=True)))
    match = re.match(rf"({longest})(?=$|[ /-])", code)
    if match is None:
        return None
    chip = match[1]
    if chip in chips["display"].split("|"):
        return None, "display"
    return rules["arch"].get(chip), "apu" if chip in chips["apu"].split("|") else "dgpu"


def amd_name(names: list[str], general: str) -> str:
    """The names of one revision; that of the device where they only name a family."""
    exact = [name.removesuffix(" Series") for name in names if not FAMILY.search(name)]
    if exact or not re.search(r"[0-9]", general):
        return " / ".join(exact or names)
    return general


def nvidia_rows(known: dict[str, str], rules: Rules) -> Iterator[Row]:
    for device, line in sorted(known.items()):
        arch, kind = nvidia_chip(line, rules)
        if kind is None or NOT_A_GPU.search(line.split("[")[0]) or "Switch" in line:
            continue
        name = product_of(line)
        size = rules["memory_by_id"].get(device)
        mib = memory_of(name, rules) if size is None else size * 1024
        yield Row(device, "-", arch, None if kind != "dgpu" else mib, kind, name)


def nvidia_chip(line: str, rules: Rules) -> tuple[str | None, str | None]:
    """Architecture and kind by the chip that a pci.ids name starts with; kind None: no GPU."""
    word = line.split()[0].split("/")[0]
    chip = re.match(r"(G[KMPVAHBR][0-9]{2}[0-9A-F]|TU[0-9]{3}|AD[0-9]{3})", word)
    if chip and "[" in line:
        capability = rules["arch"].get(chip[1])
        apu = re.fullmatch(rules["chips"]["apu"], chip[1])
        return sm_of_text(capability) if capability else None, "apu" if apu else "dgpu"
    old = re.match(rf"({rules['chips']['display']})", word)
    return None, "display" if old and line.endswith("]") else None


def name_rows(nvidia: Iterable[Row], rules: Rules) -> list[Row]:
    """Every name that a driver may give, with what all products of that name have in common."""
    found: dict[str, list[Row]] = defaultdict(list)
    for chip, names in invert(rules["driver_names"]).items():
        arch = sm_of_text(rules["arch"][chip])
        kind = "apu" if re.fullmatch(rules["chips"]["apu"], chip) else "dgpu"
        for name in names:
            found[name_key(name)].append(Row("", "", arch, None, kind, name))
    for row in nvidia:
        for name in alternatives(row.name):
            sized, plain = name_key(name), name_key(SIZE.sub("", name))
            for key in {sized, plain} - {""}:
                found[key].append(row._replace(name=name))
    return [shared(key, rows) for key, rows in sorted(found.items())]


def shared(key: str, rows: list[Row]) -> Row:
    archs, sizes, kinds = ({getattr(row, part) for row in rows} for part in ("arch", "mib", "kind"))
    return Row(
        key,
        "-",
        archs.pop() if len(archs) == 1 else None,
        sizes.pop() if len(sizes) == 1 else None,
        kinds.pop() if len(kinds) == 1 else "dgpu",
        rows[0].name,
    )


def alternatives(name: str) -> list[str]:
    """`RTX 4080 Max-Q / Mobile`, `Quadro RTX 6000/8000` as the names that they stand for."""
    first, *others = name.split(" / ")
    if re.search(r"\w/\w", first):
        start, _, rest = first.rpartition(" ")
        return [f"{start} {part}" for part in rest.split("/")]
    base = first.rsplit(" ", 1)[0]
    return [first, *(other if len(other.split()) > 2 else f"{base} {other}" for other in others)]


def intel_rows(known: dict[str, str], rules: Rules) -> Iterator[Row]:
    ids = rules["ids"]
    for device, line in sorted(known.items()):
        if not re.search(r"Graphics|Arc |Iris|Ponte|\bGPU\b|82810|82740", line) or NOT_A_GPU.search(
            line
        ):
            continue
        arch = next((a for a in ("xe-lp", "xe-hpg", "xe2") if re.fullmatch(ids[a], device)), None)
        kind = "dgpu" if re.fullmatch(ids["discrete"], device) else "apu"
        if re.fullmatch(ids["display"], device):
            kind = "display"
        name = product_of(line)
        yield Row(device, "-", arch, memory_of(name, rules) if kind == "dgpu" else None, kind, name)


def memory_of(name: str, rules: Rules) -> int | None:
    """MiB of a product: by the rules, or by the one size that its own name has."""
    product = VARIANT.sub("", name).lower()
    for size, names in rules["memory_gib"].items():
        if product in (known.lower() for known in names):
            return int(size) * 1024
    sizes = SIZE.findall(name)
    # The sizes in `GH200 480GB` are those of the CPU's memory.
    sure = len(sizes) == 1 and "/" not in name and "GH200" not in name
    return int(sizes[0]) * 1024 if sure else None


def invert(names: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, chip in names.items():
        found[chip].append(name)
    return found


def write(name: str, rows: Iterable[Row], dates: list[str], sources: list[str]) -> None:
    newest, *older = dates
    head = [
        f"pci.ids: {newest}" + "".join(f", gaps from {date}" for date in older)
        + ", The PCI ID Repository (GPL-2.0-or-later or BSD-3-Clause)",
        *sources,
        "written by tools/gpu_tables.py; columns: id, revision, architecture, MiB, kind, name",
    ]  # fmt: skip
    lines = [*(f"# {line}" for line in head), *(row.line() for row in rows)]
    DATA.mkdir(exist_ok=True)
    (DATA / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    print(f"{name}.tsv: {len(lines) - len(head)} rows", file=sys.stderr)


if __name__ == "__main__":
    main()
