"""The examples of the documentation are right recipes, and show every key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from flexlab.core.errors import RecipeError
from flexlab.core.validate import judge
from flexlab.core.yaml import dump, load
from flexlab.recipes import schema, variants
from flexlab.recipes.backend_schema import Image, Images
from flexlab.recipes.catalogue import check_file
from flexlab.recipes.certificate_schema import Bound, Certificate
from flexlab.recipes.gpu_schema import (
    GpuDefaults,
    GpuEnvironment,
    GpuRecipe,
    GpuReserve,
    GpuRule,
    GpuSupport,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```yaml\n# (\w+)/([\w.-]+)\.yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {
    f"{kind}/{name}": (page.name, text)
    for page in sorted(DOCS.glob("*.md"))
    for kind, name, text in BLOCK.findall(page.read_text("utf-8"))
}
MODEL_TYPES: list[type[BaseModel]] = [
    schema.ModelRecipe,
    schema.Shape,
    variants.WeightFile,
    variants.Promotion,
    variants.Made,
    variants.Forbidden,
    variants.Smaller,
    variants.LlamaCppVariant,
    variants.OllamaVariant,
    variants.DiffusersVariant,
]
PLANNING_TYPES: list[type[BaseModel]] = [
    GpuRecipe,
    GpuEnvironment,
    GpuSupport,
    GpuDefaults,
    GpuRule,
    GpuReserve,
    Image,
    Images,
    Certificate,
    Bound,
]


def page_of(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


def keys(data: Any) -> Iterator[str]:
    """Every key of a document, wherever it stands."""
    if isinstance(data, dict):
        yield from data
        data = list(data.values())
    for value in data if isinstance(data, list) else ():
        yield from keys(value)


def fields(models: list[type[BaseModel]]) -> list[str]:
    return sorted({f.alias or name for one in models for name, f in one.model_fields.items()})


def test_every_block_of_yaml_is_an_example_that_is_checked() -> None:
    for page in DOCS.glob("*.md"):
        fences = page.read_text("utf-8").count("```yaml")
        assert fences == len([one for one, _ in EXAMPLES.values() if one == page.name]), page.name


@pytest.mark.parametrize("name", [one for one in EXAMPLES if not one.startswith("backends/")])
def test_an_example_is_a_right_recipe(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.yaml"
    file.parent.mkdir()
    file.write_text(EXAMPLES[name][1], "utf-8")
    assert check_file(file).name == file.stem


@pytest.mark.parametrize("name", [one for one in EXAMPLES if one.startswith("backends/")])
def test_an_example_of_images_is_right(name: str) -> None:
    (block,) = load(EXAMPLES[name][1], RecipeError).data["images"]
    _, flaws = judge(Images, load(dump(block), RecipeError))
    assert flaws == []


@pytest.mark.parametrize(
    ("page", "key"),
    [("recipes.md", key) for key in fields(MODEL_TYPES)]
    + [("planning.md", key) for key in fields(PLANNING_TYPES)],
)
def test_every_key_has_a_line_and_an_example(page: str, key: str) -> None:
    text = page_of(page)
    used = {
        used
        for where, example in EXAMPLES.values()
        if where == page
        for used in keys(load(example, RecipeError).data)
    }
    assert key in used
    assert f"`{key}`" in BLOCK.sub("", text)
