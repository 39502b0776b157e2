"""What FlexLab ships: every file is valid, every claim has its evidence, the schemas keep step."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexlab.core.errors import RecipeError
from flexlab.core.validate import judge
from flexlab.core.yaml import dump, load
from flexlab.recipes import jsonschema
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.catalogue import Catalogue, check_file
from flexlab.recipes.certificate_schema import Certificate
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.recipes.schema import ModelRecipe

SHIPPED = Path(__file__).resolve().parents[2] / "recipes"
FILES = sorted(SHIPPED.glob("*/*.yaml"))
KINDS: dict[str, type[Any]] = {
    "models": ModelRecipe,
    "backends": BackendRecipe,
    "certificates": Certificate,
    "gpus": GpuRecipe,
}
CLAIM = ("evidence", "reason", "source", "date")
Path_ = tuple[str | int, ...]


def data_of(file: Path) -> Any:
    return load(file, RecipeError).data


def blocks(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every mapping that carries evidence."""
    if isinstance(data, dict):
        if "evidence" in data:
            yield path
        for key, value in data.items():
            yield from blocks(value, (*path, key))
    elif isinstance(data, list):
        for at, value in enumerate(data):
            yield from blocks(value, (*path, at))


def at(data: Any, path: Path_) -> Any:
    for part in path:
        data = data[part]
    return data


CLAIMS = [(file, path) for file in FILES for path in blocks(data_of(file))]


def test_there_is_something_to_check() -> None:
    assert {file.parent.name for file in FILES} >= set(KINDS)
    assert len(CLAIMS) >= 9


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_recipe_is_valid(file: Path) -> None:
    assert check_file(file).name == file.stem


def test_no_shipped_name_or_alias_stands_twice(tmp_path: Path) -> None:
    catalogue = Catalogue.load(SHIPPED, tmp_path)
    catalogue.models()
    assert catalogue.problems == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shipped_files_mean_the_same_to_every_reader_of_yaml(file: Path) -> None:
    """A reader of YAML 1.1 makes dates of dates; nothing else may differ."""
    assert yaml.load(file.read_text(), yaml.BaseLoader).keys() == data_of(file).keys()
    assert str(
        yaml.safe_load(re.sub(r"\b(date|since): (\S+)", r"\1: '\2'", file.read_text()))
    ) == str(data_of(file))


@settings(deadline=None)
@given(st.sampled_from(CLAIMS), st.sampled_from(CLAIM), st.sampled_from(["drop", "", "maybe", 5]))
def test_a_claim_without_its_evidence_is_refused(
    claim: tuple[Path, Path_], key: str, change: str | int
) -> None:
    file, path = claim
    data = copy.deepcopy(data_of(file))
    block = at(data, path)
    if change == "drop":
        del block[key]
    elif change == "maybe" and key in ("reason", "source"):
        return
    else:
        block[key] = change
    _, flaws = judge(KINDS[file.parent.name], load(dump(data), RecipeError))
    assert any(key in flaw.text for flaw in flaws)


@settings(deadline=None)
@given(st.sampled_from(FILES), st.data())
def test_a_recipe_with_any_value_replaced_is_valid_or_explained(
    file: Path, draw: st.DataObject
) -> None:
    data = copy.deepcopy(data_of(file))
    places = [path for path in all_paths(data) if path]
    path = draw.draw(st.sampled_from(places))
    at(data, path[:-1])[path[-1]] = draw.draw(
        st.sampled_from([None, 0, -1, 1.5, True, "", "x", "a: b", [], ["x"], {}, {"x": 1}])
    )
    text = dump(data)
    _, flaws = judge(KINDS[file.parent.name], load(text, RecipeError))
    assert not [one for one in flaws if "pydantic" in one.text or "Input" in one.text]
    assert all(1 <= one.line <= len(text.splitlines()) for one in flaws)


def all_paths(data: Any, path: Path_ = ()) -> Iterator[Path_]:
    yield path
    if isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from all_paths(value, (*path, key))


MODEL = data_of(SHIPPED / "models" / "smollm2-135m.yaml")
BACKEND = data_of(SHIPPED / "backends" / "llamacpp.yaml")


def refused(data: Any, kind: Any, origin: str = "user") -> str:
    _, flaws = judge(kind, load(dump(data), RecipeError), {"origin": origin})
    assert flaws
    return " ".join(flaw.text for flaw in flaws)


def with_source(source: str, **more: str) -> Any:
    data = copy.deepcopy(MODEL)
    data["variants"][0]["weights"] = [{"source": source, **more}]
    return data


def test_only_the_users_own_recipes_name_paths() -> None:
    data = with_source("file:///srv/model.gguf")
    assert "cannot name a path" in refused(data, ModelRecipe, "shipped")
    recipe, flaws = judge(ModelRecipe, load(dump(data), RecipeError), {"origin": "user"})
    assert recipe is not None
    assert flaws == []


def test_what_we_ship_can_be_verified() -> None:
    assert "sha256 or a revision" in refused(with_source("hf://o/r/m.gguf"), ModelRecipe, "shipped")
    assert "needs its sha256" in refused(with_source("pypi://a==1/m.gguf"), ModelRecipe)


@pytest.mark.parametrize("suffix", ["bin", "pt", "ckpt", "pth", "pkl", "PT"])
def test_pickle_files_are_refused_whoever_asks(suffix: str) -> None:
    for source in (f"hf://o/r@abc/m.{suffix}", f"file:///m.{suffix}"):
        assert "pickle" in refused(with_source(source), ModelRecipe)


def test_only_a_file_of_this_machine_may_say_what_it_is() -> None:
    said = with_source("file:///srv/model.bin", format="gguf")
    recipe, flaws = judge(ModelRecipe, load(dump(said), RecipeError), {"origin": "user"})
    assert recipe is not None
    assert flaws == []
    elsewhere = with_source("hf://o/r@abc/model.bin", format="gguf")
    assert "format: only for a file:// source" in refused(elsewhere, ModelRecipe)


def test_llamacpp_takes_gguf_only() -> None:
    assert "runs GGUF files" in refused(with_source("hf://o/r@abc/m.safetensors"), ModelRecipe)


@pytest.mark.parametrize(
    "key", ["privileged", "network", "volumes", "devices_path", "trust_remote_code", "command"]
)
def test_a_recipe_has_no_words_for_privileges(key: str) -> None:
    data = copy.deepcopy(MODEL)
    data["variants"][0][key] = "x"
    assert "unknown key" in refused(data, ModelRecipe)


@pytest.mark.parametrize(
    "name", ["LD_PRELOAD", "PATH", "PYTHONPATH", "HF_TOKEN", "FLEXLAB_PORT", "OPENAI_API_KEY"]
)
def test_variables_that_load_code_or_hold_secrets_are_refused(name: str) -> None:
    data = copy.deepcopy(BACKEND)
    data["environment"][0]["variables"] = {name: "x"}
    assert f"cannot set {name}" in refused(data, BackendRecipe)


def test_a_context_beyond_the_models_own_is_refused_at_its_line() -> None:
    data = copy.deepcopy(MODEL)
    data["variants"][0]["settings"]["context_size"] = 16384
    assert "settings.context_size: 16384 tokens; the model was trained for 8192" in refused(
        data, ModelRecipe
    )


def test_two_variants_of_one_name_are_refused() -> None:
    data = copy.deepcopy(MODEL)
    last = len(data["variants"])
    data["variants"].append(copy.deepcopy(data["variants"][0]))
    assert f"variants[{last}].name: q4-1 stands twice" in refused(data, ModelRecipe)


def test_a_bad_pattern_for_logs_is_refused() -> None:
    data = copy.deepcopy(BACKEND)
    data["errors"][0]["patterns"][0]["match"] = "(["
    assert "not a regular expression" in refused(data, BackendRecipe)


LOG_LINES = {
    "out_of_memory": "E llama_init_from_model: failed to initialize the context: failed to "
    "allocate buffer for kv cache",
    "unknown_architecture": "E llama_model_load: error loading model: unknown model "
    "architecture: 'xlama'",
    "gguf_truncated": "E llama_model_load: error loading model: tensor 'token_embd.weight' "
    "data is not within the file bounds, model is corrupted or incomplete",
    "weights_damaged": "E gguf_init_from_reader: failed to read key-value pairs",
    "not_gguf": "E gguf_init_from_reader: invalid magic characters: 'hell', expected 'GGUF'",
    "weights_unreadable": "E gguf_init_from_file: failed to open GGUF file 'x.gguf' (No such "
    "file or directory)",
    "port_taken": "E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 1",
    "libgomp_missing": "ImportError: libgomp.so.1: cannot open shared object file: No such file "
    "or directory",
    "extra_missing": "ModuleNotFoundError: No module named 'xllamacpp'",
}


@pytest.mark.parametrize("code", LOG_LINES)
def test_the_engines_own_words_lead_to_a_cause(code: str) -> None:
    backend = Catalogue.load(SHIPPED).backend("llamacpp")
    found = [one.code for one in backend.patterns if re.search(one.match, LOG_LINES[code])]
    assert found == [code]


def test_no_sentence_leaves_a_blank_for_its_reader_to_fill_in() -> None:
    for pattern in Catalogue.load(SHIPPED).backend("llamacpp").patterns:
        assert not re.search(r"\b[A-Z]{4,}\b", pattern.hint.replace("GGUF", ""))
        assert not re.search(r"\{(?!line\})", pattern.message + pattern.hint)


def test_the_backend_recipe_holds_what_a_launch_needs() -> None:
    backend = Catalogue.load(SHIPPED).backend("llamacpp")
    assert backend.env == {"OMP_WAIT_POLICY": "passive"}
    assert backend.ready.probe().path == "/health"
    assert backend.clients.abort == "stream_only"
    assert "/v1/chat/completions" in backend.routes.allow
    assert backend.embedded is not None
    assert backend.embedded.cpu_flags["x86_64"] == ("avx2", "fma", "f16c", "bmi2")


@pytest.mark.parametrize("name", jsonschema.FILES)
def test_the_committed_json_schema_is_that_of_the_models(name: str) -> None:
    committed = (SHIPPED / "schema" / name).read_text(encoding="utf-8")
    assert committed == jsonschema.render(jsonschema.FILES[name]), (
        "run python -m flexlab.recipes.jsonschema"
    )


def test_every_key_of_a_schema_that_needs_words_has_some() -> None:
    text = jsonschema.render(jsonschema.FILES["settings.json"])
    assert text.count('"description"') == len(jsonschema.FILES["settings.json"].model_fields) + 1


def test_schemas_are_written_where_asked(tmp_path: Path) -> None:
    assert {file.name for file in jsonschema.write(tmp_path)} == set(jsonschema.FILES)
    assert jsonschema.write(tmp_path) == []
