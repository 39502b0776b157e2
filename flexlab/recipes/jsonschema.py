"""`python -m flexlab.recipes.jsonschema`: write the JSON Schemas that editors check files with.

They are made of the same models that the loader uses and are committed beside the recipes; a test
holds them to the models.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from flexlab.core import paths
from flexlab.core.settings import Settings
from flexlab.recipes import backend_schema, certificate_schema, gpu_schema, schema, variants
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.schema import ModelRecipe

FILES: dict[str, type[BaseModel]] = {
    "model.json": ModelRecipe,
    "backend.json": BackendRecipe,
    "gpu.json": GpuRecipe,
    "certificate.json": Certificate,
    "settings.json": Settings,
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class _WithoutTitles(GenerateJsonSchema):
    """A title that repeats the key helps nobody."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False


def render(model: type[BaseModel]) -> str:
    """The schema of one kind of file, every key with its documentation."""
    made = model.model_json_schema(by_alias=True, schema_generator=_WithoutTitles)
    known = {one.__name__: one for one in _models_of(model)}
    _document(made, model)
    for name, part in made.get("$defs", {}).items():
        if name in known:
            _document(part, known[name])
    _drop_machine_defaults(made)
    return json.dumps({"$schema": _DIALECT, **made}, indent=2, ensure_ascii=False) + "\n"


def write(folder: Path) -> list[Path]:
    """Write all schemas; returns the files that changed."""
    changed = []
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in FILES.items():
        file, text = folder / name, render(model)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            changed.append(file)
    return changed


def _models_of(model: type[BaseModel]) -> list[type[BaseModel]]:
    modules = (schema, variants, backend_schema, gpu_schema, certificate_schema)
    here = [one for module in modules for one in vars(module).values() if inspect.isclass(one)]
    return [model, *(one for one in here if issubclass(one, BaseModel))]


def _document(part: dict[str, Any], model: type[BaseModel]) -> None:
    """Put the texts that stand under the fields into the schema."""
    texts: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            texts |= _field_texts(base)
    for name, field in model.model_fields.items():
        if name in texts:
            part["properties"][field.alias or name]["description"] = texts[name]


def _field_texts(model: type[BaseModel]) -> dict[str, str]:
    """Field -> the string right under it."""
    body = ast.parse(textwrap.dedent(inspect.getsource(model))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for field, under in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
            found[field.target.id] = " ".join(str(under.value.value).split())
    return found


def _drop_machine_defaults(made: dict[str, Any]) -> None:
    """A settings type's defaults inside a recipe would repeat what its own schema says."""
    for part in made.get("$defs", {}).values():
        for entry in part.get("properties", {}).values():
            if isinstance(entry.get("default"), dict):
                del entry["default"]


def main(arguments: list[str]) -> int:
    """Write into the folder named, or into this checkout's recipes/schema."""
    folder = Path(arguments[0]) if arguments else paths.shipped_dir("recipes") / "schema"
    for file in write(folder):
        print(f"wrote {file}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
