#!/usr/bin/env python3
"""Write the README's compatibility matrix from recipes/gpus and recipes/backends.

    python tools/compatibility_matrix.py            write it into README.md
    python tools/compatibility_matrix.py --check    exit 1 when README.md differs

It stands between `<!-- matrix:begin -->` and `<!-- matrix:end -->`. Only shipped recipes count.
A cell is what a plan says: the support, whose image it is, and the weakest evidence of both.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flexlab.planning.images import is_older  # noqa: E402
from flexlab.recipes.backend_schema import BackendRecipe, Image, Images  # noqa: E402
from flexlab.recipes.catalogue import Catalogue  # noqa: E402
from flexlab.recipes.gpu_schema import GpuRecipe  # noqa: E402
from flexlab.spec.plan import Evidence  # noqa: E402

README = ROOT / "README.md"
BEGIN, END = "<!-- matrix:begin -->", "<!-- matrix:end -->"
COLUMNS = {
    "ollama": "Ollama",
    "vllm": "vLLM",
    "mlc": "MLC-LLM",
    "llamacpp": "llama.cpp",
    "diffusers": "Diffusers",
    "comfyui": "ComfyUI",
}
VENDORS = {"amd": "AMD", "nvidia": "NVIDIA", "intel": "Intel", None: "No GPU"}
WORDS = {
    "full": "full",
    "experimental": "experimental",
    "precompiled_only": "with a library",
    "unsupported": "no",
    "unknown": "?",
}
NO_IMAGE = "no image"
OFFICIAL = {"ollama": "ollama/", "vllm": "vllm/", "llamacpp": "ghcr.io/ggml-org/"}
"""Where an engine's own makers publish; images from elsewhere are somebody else's work."""
MARKS = {"tested": "**{}**", "documented": "{}", "untested": "*{}*"}
ORDER: tuple[Evidence, ...] = ("untested", "documented", "tested")
DIGITS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
LEGEND = (
    "**bold**: tested, somebody ran it. Plain: documented, a public source says so. *Italic*: "
    "nobody of ours ran it. What counts is the weaker of two: what is known of the engine on the "
    "card, and of the image.\n\n"
    "`full` runs. `experimental` is refused without `--allow-experimental`; so is `?` (nobody "
    "knows), and for most of these there is no image either. `with a library` needs "
    "`--set model_lib_path=`. `no` is always refused, and so is `no image` without an image of "
    "yours (`--image`).\n\n"
    "`official`, `community` and `own build` say whose image it is. Nobody publishes an own build: "
    "it is built once, and the plan says how. `embedded` is inside FlexLab and needs no container."
)


class Cell(NamedTuple):
    """One backend on one card: what is shown, and its notes."""

    word: str
    evidence: Evidence
    notes: tuple[str, ...]


class Row(NamedTuple):
    """Cards on which all backends do the same."""

    archs: tuple[str, ...]
    cards: tuple[str, ...]
    cells: tuple[Cell, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, or compare."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when stale")
    parser.add_argument("--readme", type=Path, default=README)
    options = parser.parse_args(arguments)
    text = options.readme.read_text(encoding="utf-8")
    wanted = put_in(text, render(catalogue()))
    if text == wanted:
        return 0
    if options.check:
        print(f"{options.readme} is stale: python tools/compatibility_matrix.py", file=sys.stderr)
        return 1
    options.readme.write_text(wanted, encoding="utf-8")
    print(f"wrote {options.readme}")
    return 0


def catalogue() -> Catalogue:
    """The shipped recipes alone: nobody's own change what the README says."""
    with tempfile.TemporaryDirectory() as empty:
        return Catalogue.load(user=Path(empty))


def put_in(text: str, matrix: str) -> str:
    """The text with the matrix between its marks. Raises ValueError when it has none."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{matrix}\n\n{END}{after}"


def render(known: Catalogue) -> str:
    """The table, its notes and its legend, as Markdown."""
    backends = [known.backend(name) for name in COLUMNS]
    notes: dict[str, int] = {}
    lines = [
        "| | cards | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 2) + "|",
    ]
    for vendor, name in VENDORS.items():
        for row in rows([one for one in known.gpus() if one.vendor == vendor], backends):
            archs = " ".join(f"`{arch}`" for arch in row.archs)
            cells = " | ".join(show(cell, notes) for cell in row.cells)
            lines.append(f"| {name}<br>{archs} | {' '.join(row.cards)} | {cells} |")
    told = [f"{str(at).translate(DIGITS)} {note}" for note, at in notes.items()]
    return "\n".join([*lines, "", *("<br>\n".join(told).splitlines()), "", LEGEND])


def rows(recipes: Sequence[GpuRecipe], backends: Sequence[BackendRecipe]) -> list[Row]:
    """The newest arch first; archs whose cells are all equal share a row."""
    of_arch = {arch: recipe for recipe in recipes for arch in recipe.archs}
    found: dict[tuple[Cell, ...], list[str]] = {}
    for arch in sorted(of_arch, key=age, reverse=True):
        cells = tuple(cell_of(of_arch[arch], arch, backend) for backend in backends)
        found.setdefault(cells, []).append(arch)
    return [
        Row(
            archs=tuple(same),
            cards=tuple(dict.fromkeys(of_arch[arch].description for arch in same)),
            cells=cells,
        )
        for cells, same in found.items()
    ]


def age(arch: str) -> tuple[int, str]:
    """Sorts archs of one vendor; the numbers of AMD's are hexadecimal."""
    found = re.fullmatch(r"(gfx|sm_)([0-9a-f]+)", arch)
    if found is None:
        return 0, arch
    return int(found[2], 16 if found[1] == "gfx" else 10), arch


def cell_of(recipe: GpuRecipe, arch: str, backend: BackendRecipe) -> Cell:
    """What a plan would find on an arch, whose recipe is given."""
    stated = recipe.support_of(backend.name)
    if stated is None:
        return Cell(WORDS["unknown"], "untested", ())
    note = (stated.note.removesuffix("."),) if stated.note else ()
    if stated.level in ("unsupported", "unknown"):
        return Cell(WORDS[stated.level], stated.evidence, note)
    choices = list(first_choices(backend, arch))
    kinds = list(dict.fromkeys(kind_of(backend.name, image) for image, _ in choices))
    embedded = backend.embedded
    if embedded is not None and arch in embedded.archs:
        kinds.insert(0, "embedded")
        runs = embedded.evidence
    elif choices:
        runs = min((block.evidence for _, block in choices), key=ORDER.index)
    else:
        return Cell(NO_IMAGE, "untested", note)
    return Cell(
        f"{WORDS[stated.level]}, {' or '.join(kinds)}",
        min(stated.evidence, runs, key=ORDER.index),
        (*note, *floors(backend, [image for image, _ in choices])),
    )


def first_choices(backend: BackendRecipe, arch: str) -> Iterator[tuple[Image, Images]]:
    """Public images that hold code for an arch: the best one for each kind of machine.

    A worse one with the same CUDA floor is never chosen; one for an older driver may be.
    """
    lowest: str | None = None
    for at, (image, block) in enumerate(public(backend, arch)):
        if at == 0 or (image.driver_min and is_older(image.driver_min, lowest)):
            lowest = image.driver_min
            yield image, block


def public(backend: BackendRecipe, arch: str) -> Iterator[tuple[Image, Images]]:
    """Those that strangers can get."""
    for image, block in backend.image_choices:
        if arch in image.archs and not image.private:
            yield image, block


def kind_of(backend: str, image: Image) -> str:
    """Whose image it is."""
    if image.built_from is not None:
        return "own build"
    return "official" if image.image.startswith(OFFICIAL.get(backend, " ")) else "community"


def floors(backend: BackendRecipe, images: Sequence[Image]) -> Iterator[str]:
    """What these images ask of the driver beyond others, and whether they stand still."""
    everywhere = [image for image, _ in backend.image_choices if not image.private]
    floor = lowest(images)
    if floor and is_older(lowest(everywhere), floor):
        yield f"needs NVIDIA driver {floor} or newer"
    held = next((image.build for image in images if image.build), None)
    moves = any(image.build is None or is_older(held, image.build) for image in everywhere)
    own = any(image.built_from for image in images)
    if held and moves and not own and all(image.build for image in images):
        yield f"the image stays at version {held}, which does not load models that came later"


def lowest(images: Sequence[Image]) -> str | None:
    """The oldest driver that one of them runs with."""
    known = [image.driver_min for image in images if image.driver_min]
    return min(known, key=lambda text: [int(part) for part in text.split(".")], default=None)


def show(cell: Cell, notes: dict[str, int]) -> str:
    """A cell with the numbers of its notes; new notes get the next number."""
    numbers = [notes.setdefault(note, len(notes) + 1) for note in cell.notes]
    marks = " ".join(str(number).translate(DIGITS) for number in sorted(numbers))
    return MARKS[cell.evidence].format(cell.word) + (f" {marks}" if marks else "")


if __name__ == "__main__":
    sys.exit(main())
