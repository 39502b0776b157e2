"""The README's matrix says what the recipes say, no more and no less."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import compatibility_matrix as matrix

KNOWN = matrix.catalogue()
OF_ARCH = {arch: recipe for recipe in KNOWN.gpus() for arch in recipe.archs}
BACKENDS = [KNOWN.backend(name) for name in matrix.COLUMNS]
README = matrix.README


def row_of(arch: str) -> list[str]:
    """The cells of an arch in the README, by backend."""
    (line,) = [one for one in README.read_text("utf-8").splitlines() if f"`{arch}`" in one]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def test_the_readme_shows_the_matrix_of_the_recipes() -> None:
    assert matrix.main(["--check"]) == 0, "run python tools/compatibility_matrix.py"


def test_a_stale_readme_is_told_and_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "README.md"
    shutil.copy(README, copy)
    whole = copy.read_text("utf-8")
    copy.write_text(whole.replace("`gfx1100`", "`gfx9999`", 1), "utf-8")
    assert matrix.main(["--check", "--readme", str(copy)]) == 1
    assert "stale" in capsys.readouterr().err
    assert matrix.main(["--readme", str(copy)]) == 0
    assert copy.read_text("utf-8") == whole


def test_a_file_without_the_marks_is_left_alone(tmp_path: Path) -> None:
    plain = tmp_path / "README.md"
    plain.write_text("# Nothing\n", "utf-8")
    with pytest.raises(ValueError, match="matrix:begin"):
        matrix.main(["--readme", str(plain)])


@pytest.mark.parametrize("arch", OF_ARCH)
def test_every_arch_stands_in_one_row_with_a_word_for_each_backend(arch: str) -> None:
    cells = row_of(arch)
    assert len(cells) == len(BACKENDS)
    assert all(cells)


@pytest.mark.parametrize(("arch", "recipe"), OF_ARCH.items(), ids=OF_ARCH)
def test_a_cell_never_claims_more_than_its_support(arch: str, recipe: matrix.GpuRecipe) -> None:
    for backend in BACKENDS:
        cell, stated = matrix.cell_of(recipe, arch, backend), recipe.support_of(backend.name)
        allowed = stated.evidence if stated else "untested"
        assert matrix.ORDER.index(cell.evidence) <= matrix.ORDER.index(allowed)
        assert (cell.word == "?") == (stated is None or stated.level == "unknown")
        if cell.word not in ("?", "no", matrix.NO_IMAGE) and "embedded" not in cell.word:
            assert any(arch in image.archs for image, _ in matrix.public(backend, arch))


def test_an_image_that_nobody_ran_is_shown_so() -> None:
    for arch, recipe in OF_ARCH.items():
        for backend in BACKENDS:
            cell = matrix.cell_of(recipe, arch, backend)
            own = [
                block for image, block in matrix.first_choices(backend, arch) if image.built_from
            ]
            if "own build" in cell.word and any(one.evidence == "untested" for one in own):
                assert cell.evidence == "untested"
                assert matrix.show(cell, {}).startswith("*")
                assert not matrix.show(cell, {}).startswith("**")


def test_no_cell_names_an_image_that_strangers_cannot_pull() -> None:
    for backend in BACKENDS:
        shown = [image for image, _ in matrix.first_choices(backend, "gfx906")]
        assert shown
        assert not [image for image in shown if image.private]


SEED = {
    "gfx1100": ["full"] * 6,
    "gfx906": ["full"] * 4 + ["experimental"] * 2,
    "sm_52": ["full", "no", "with a library", "full", "no", "no"],
}


@pytest.mark.parametrize("arch", SEED)
def test_the_reference_cards_are_shown_as_the_reference_has_them(arch: str) -> None:
    words = [re.sub(r"[^a-z ,]", "", cell).split(",")[0].strip() for cell in row_of(arch)]
    assert words == SEED[arch]


def test_every_mark_in_the_table_has_a_note_below_it() -> None:
    table, _, notes = matrix.render(KNOWN).partition("\n\n")
    used = set(re.findall("[⁰¹²³⁴⁵⁶⁷⁸⁹]+", table))
    told = {line.split()[0] for line in notes.splitlines() if re.match("[⁰¹²³⁴⁵⁶⁷⁸⁹]", line)}
    assert used == told
