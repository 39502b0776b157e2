"""What the shipped GPU recipes promise, and how a recipe is found for an arch."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.cli.gpu_support import backend_support
from flexlab.core import paths
from flexlab.core.errors import RecipeError
from flexlab.planning.environment import Environment, environment
from flexlab.planning.support import broken_rules
from flexlab.recipes.backend_schema import BackendRecipe, Image
from flexlab.recipes.catalogue import Catalogue, check_file
from flexlab.recipes.gpu_schema import BLOCKS, GpuEnvironment, GpuRecipe
from flexlab.spec.machine import Gpu

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Catalogue.load()
RECIPES = CATALOGUE.gpus()
BACKENDS = ("ollama", "vllm", "mlc", "llamacpp", "diffusers", "comfyui")
PYTORCH = ("vllm", "diffusers", "comfyui")
OTHERS = ("ollama", "mlc", "llamacpp")
AMD = [recipe for recipe in RECIPES if recipe.vendor == "amd"]
CLAIM = "    evidence: untested\n    reason: a guess\n    source: nobody\n    date: 2026-01-31\n"


def known(arch: str) -> GpuRecipe:
    recipe = CATALOGUE.gpu(arch)
    assert recipe is not None
    return recipe


def level(arch: str, backend: str) -> str:
    stated = known(arch).support_of(backend)
    return stated.level if stated else "unknown"


def image(rocm: str | None = "7.2.1", **fields: object) -> Image:
    given = {"image": "x:1", "archs": ["gfx1100"], "platforms": ["linux/amd64"], "port": 8000}
    return Image.model_validate(
        {**given, "entrypoint": "command", "program": ["x"], "rocm": rocm, **fields}
    )


def env(arch: str, backend: str, rocm: str | None = "7.2.1") -> Environment:
    return environment(backend, {}, known(arch), image(rocm))


def named_in_tables() -> set[str]:
    tables = (ROOT / "flexlab" / "gpus" / "data").glob("*.tsv")
    lines = [line for table in tables for line in table.read_text("utf-8").splitlines()]
    return {line.split("\t")[2] for line in lines if line and line[0] != "#"} - {"-"}


@pytest.mark.parametrize("arch", [*sorted(named_in_tables()), "cpu"])
def test_every_arch_that_detection_can_name_has_a_recipe(arch: str) -> None:
    vendors = {"gfx": "amd", "sm_": "nvidia", "xe-": "intel", "xe2": "intel", "cpu": None}
    assert known(arch).vendor == vendors[arch[:3]]


def test_an_arch_belongs_to_one_recipe() -> None:
    for one, other in combinations(RECIPES, 2):
        assert not set(one.archs) & set(other.archs)
    assert CATALOGUE.problems == []


# The compatibility reference, cell by cell: RDNA3 (7900 XTX), Vega20 (Radeon VII), Maxwell.
MATRIX = {
    "ollama": ("full", "full", "full"),
    "vllm": ("full", "full", "unsupported"),
    "mlc": ("full", "full", "precompiled_only"),
    "llamacpp": ("full", "full", "full"),
    "diffusers": ("full", "experimental", "unsupported"),
    "comfyui": ("full", "experimental", "unsupported"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_matrix_of_the_reference(backend: str) -> None:
    rdna3, vega20, maxwell = MATRIX[backend]
    assert level("gfx1100", backend) == rdna3
    assert level("gfx906", backend) == vega20
    for arch in ("sm_50", "sm_52", "sm_53"):
        assert level(arch, backend) == maxwell


def test_notes_of_maxwell_say_what_works() -> None:
    for backend, words in (("vllm", ("Ollama", "llama.cpp")), ("mlc", ("model_lib_path",))):
        stated = known("sm_52").support_of(backend)
        assert stated is not None
        assert stated.note is not None
        assert all(word in stated.note for word in words)


VISIBLE = {"HIP_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "0"}
OVERRIDE, AOTRITON = "HSA_OVERRIDE_GFX_VERSION", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"


@pytest.mark.parametrize("rocm", ["6.4.1", "7.2.1", None])
@pytest.mark.parametrize("backend", PYTORCH)
def test_pytorch_on_gfx1100_gets_the_five_variables_with_any_image(
    backend: str, rocm: str | None
) -> None:
    five = {OVERRIDE: "11.0.0", "PYTORCH_ROCM_ARCH": "gfx1100", AOTRITON: "1", **VISIBLE}
    assert env("gfx1100", backend, rocm).variables.items() >= five.items()


@pytest.mark.parametrize("backend", OTHERS)
def test_the_other_engines_on_gfx1100_see_their_card_and_no_override(backend: str) -> None:
    made = env("gfx1100", backend)
    assert made.variables == VISIBLE
    assert made.cleared == (OVERRIDE,)


def test_only_diffusers_on_gfx1100_is_kept_from_hipblaslt() -> None:
    name = "TORCH_BLAS_PREFER_HIPBLASLT"
    assert env("gfx1100", "vllm").variables[name] == "1"
    assert env("gfx1100", "diffusers").variables[name] == "0"
    for backend in ("diffusers", "comfyui"):
        assert env("gfx1100", backend).variables["MIOPEN_FIND_MODE"] == "2"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_engine_on_gfx906_gets_three_variables_and_never_two(backend: str) -> None:
    made = env("gfx906", backend)
    three = {"HSA_ENABLE_SDMA": "0", "HSA_USE_SVM": "0", "PYTORCH_ROCM_ARCH": "gfx906"}
    assert made.variables.items() >= three.items()
    assert made.cleared == (OVERRIDE, AOTRITON)
    assert made.command == ("env", "-u", OVERRIDE, "-u", AOTRITON, "x")


@pytest.mark.parametrize("arch", ["gfx1101", "gfx1102", "gfx1103"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_spreads_from_gfx1100(arch: str, backend: str) -> None:
    made = env(arch, backend)
    assert made.variables == {}
    assert made.cleared == ()
    assert known(arch).defaults == ()
    assert known(arch).memory_reserve is None


@pytest.mark.parametrize("arch", ["gfx1031", "gfx1032"])
def test_the_override_of_rdna2_ends_with_rocm_7(arch: str) -> None:
    assert env(arch, "comfyui", "6.4.4").variables == {OVERRIDE: "10.3.0"}
    for rocm in ("7.2", "5.7", None):
        assert env(arch, "comfyui", rocm).variables == {}
    assert env(arch, "llamacpp", "6.4.4").variables == {}


def test_an_override_is_set_on_no_other_arch() -> None:
    overridden = {
        arch
        for recipe in RECIPES
        for block in recipe.environment
        if OVERRIDE in block.variables
        for arch in recipe.archs
    }
    assert overridden == {"gfx1031", "gfx1032", "gfx1100"}


def applies(block: GpuEnvironment, backend: str) -> bool:
    return not block.backends or backend in block.backends


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_what_is_never_set_is_not_set(recipe: GpuRecipe) -> None:
    assert {name for block in recipe.environment for name in block.backends} <= set(BACKENDS)
    for backend in BACKENDS:
        mine = [block for block in recipe.environment if applies(block, backend)]
        never = {name for block in mine for name in block.never}
        assert not never & {name for block in mine for name in block.variables}


@pytest.mark.parametrize("recipe", AMD, ids=lambda recipe: recipe.name)
def test_gptq_on_amd_needs_an_image_that_was_tested_for_it(recipe: GpuRecipe) -> None:
    marked = image(image="x@sha256:" + "a" * 64, marks=["gptq_shuffle_guarded"])

    def refused(kind: str, where: Image, tested: bool) -> bool:
        return bool(broken_rules("vllm", "some-model", [kind], recipe, where, tested=tested))

    assert refused("gptq", image(), True)
    assert refused("GPTQ-Int4", marked, False)
    assert refused("gptq", image(marks=["gptq_shuffle_guarded"]), True), "a tag can move"
    assert not refused("gptq", marked, True)
    assert not refused("awq", image(), True)


@pytest.mark.parametrize("recipe", AMD, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("backend", "model", "kind", "forbidden"),
    [
        ("mlc", "qwen3-8b", "q4f16_1", True),
        ("mlc", "qwen3-8b", "q4f32_1", False),
        ("mlc", "mistral-7b-instruct", "q4f16_1", False),
        ("llamacpp", "qwen3-8b", "q4f16_1", False),
    ],
)
def test_half_precision_qwen3_on_amd(
    recipe: GpuRecipe, backend: str, model: str, kind: str, forbidden: bool
) -> None:
    found = broken_rules(backend, model, [kind], recipe, image(), tested=True)
    assert bool(found) == forbidden


@pytest.mark.parametrize(("kind", "forbidden"), [("q4f16_1", True), ("q4f32_1", False)])
def test_half_precision_libraries_on_maxwell(kind: str, forbidden: bool) -> None:
    found = broken_rules("mlc", "any", [kind], known("sm_52"), None, tested=False)
    assert bool(found) == forbidden


def test_mlc_on_maxwell_compiles_nothing_and_takes_five_gigabytes() -> None:
    (block,) = known("sm_52").defaults
    assert block.backend == "mlc"
    assert block.settings == {"jit_policy": "OFF", "gpu_memory_bytes": 5_000_000_000}


@pytest.mark.parametrize("backend", CATALOGUE.backends(), ids=lambda recipe: recipe.name)
def test_what_runs_has_an_image_and_the_other_way_round(backend: BackendRecipe) -> None:
    """The arm64 Tegra boards are left out: images hold their code, but not for their systems."""
    held = {a for one, _ in backend.image_choices if not one.private for a in one.archs}
    tegra = {"sm_53", "sm_62", "sm_72", "sm_87"}
    runs = ("full", "experimental", "precompiled_only")
    archs = {arch for one in RECIPES for arch in one.archs} - tegra
    assert {arch for arch in archs if level(arch, backend.name) in runs} == (held & archs)


def test_the_support_of_a_card_is_told_with_its_evidence() -> None:
    card = Gpu(id="x", index=0, vendor="nvidia", arch="sm_52", name="980 Ti", pool="x")
    told = {each.backend: each for each in backend_support(CATALOGUE, card)}
    assert told["vllm"].support == "unsupported"
    assert told["vllm"].because == "Ollama and llama.cpp run there (documented)"
    foreign = Gpu(id="x", index=0, vendor="amd", arch=None, name="A card", pool="x")
    for each in backend_support(CATALOGUE, foreign):
        assert each.support == "unknown"
        assert "unknown arch" in each.because


# How a recipe is found.


@pytest.fixture
def user(home: Path) -> Path:
    folder = paths.user_recipes_dir() / "gpus"
    folder.mkdir(parents=True)
    return folder


def put(folder: Path, name: str, archs: str, extends: str = "", more: str = "") -> Path:
    file = folder / f"{name}.yaml"
    parent = f"extends: {extends}\n" if extends else ""
    file.write_text(f"name: {name}\narchs: [{archs}]\n{parent}description: Mine.\n{more}", "utf-8")
    return file


def test_a_users_recipe_stands_before_the_shipped_one_whatever_its_name(user: Path) -> None:
    block = "environment:\n  - variables: {HIP_FORCE_DEV_KERNARG: '0'}\n" + CLAIM
    put(user, "zz-mine", "gfx1100", "gfx1100", block)
    catalogue = Catalogue.load()
    recipe = catalogue.gpu("gfx1100")
    assert recipe is not None
    assert recipe.name == "zz-mine"
    assert recipe.vendor == "amd"
    made = environment("vllm", {}, recipe, image()).variables
    assert made["HIP_FORCE_DEV_KERNARG"] == "0", "the child has the last word"
    assert made[OVERRIDE] == "11.0.0"
    assert catalogue.gpu("gfx1101") == known("gfx1101")
    assert catalogue.problems == []


def test_where_tells_the_file_that_a_block_stands_in(user: Path) -> None:
    put(user, "mine", "gfx1100", "gfx1100", "environment:\n  - never: [HSA_XNACK]\n" + CLAIM)
    catalogue = Catalogue.load()
    recipe = catalogue.gpu("gfx1100")
    assert recipe is not None
    last = len(recipe.environment) - 1
    assert catalogue.where(recipe, "environment", last) == f"{user / 'mine.yaml'}:6"
    assert catalogue.where(recipe, "environment", 0).startswith("recipes/gpus/gfx1100.yaml:")
    assert catalogue.where(recipe, "rules", 0).startswith("recipes/gpus/rocm.yaml:")
    assert catalogue.where(recipe, "memory_reserve").startswith("recipes/gpus/gfx1100.yaml:")
    assert catalogue.where(recipe) == f"{user / 'mine.yaml'}:1"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_every_block_of_a_whole_recipe_has_its_place(recipe: GpuRecipe) -> None:
    places = [
        CATALOGUE.where(recipe, key, at)
        for key in BLOCKS
        for at in range(len(getattr(recipe, key)))
    ]
    assert len(set(places)) == len(places)
    assert all(place.rpartition(":")[2].isdigit() for place in places)


def test_an_unknown_parent_is_an_error_for_its_arch_alone(user: Path) -> None:
    file = put(user, "mine", "gfx1101", "rocmm")
    catalogue = Catalogue.load()
    with pytest.raises(RecipeError, match="rocm") as failure:
        catalogue.gpu("gfx1101")
    assert f"{file}:3" in failure.value.message
    assert catalogue.gpu("gfx1100") == known("gfx1100")
    assert [str(problem) for problem in catalogue.problems] == [failure.value.message]
    with pytest.raises(RecipeError, match="no GPU recipe 'rocmm'"):
        check_file(file)


@pytest.mark.parametrize("length", [2, 3, 7])
def test_a_circle_of_parents_is_an_error_with_its_place(tmp_path: Path, length: int) -> None:
    folder = tmp_path / "gpus"
    folder.mkdir()
    for at in range(length):
        put(folder, f"r{at}", f"gfx110{at}", f"r{(at + 1) % length}")
    catalogue = Catalogue.load(tmp_path, tmp_path / "none")
    for at in range(length):
        with pytest.raises(RecipeError, match=r"r\d\.yaml:3: r\d extends itself"):
            catalogue.gpu(f"gfx110{at}")
    assert catalogue.gpus() == []
    assert len(catalogue.problems) == length


LEVELS = st.sampled_from(["full", "experimental", "unsupported", "unknown"])
SAID = st.lists(st.tuples(st.sampled_from(BACKENDS), LEVELS), max_size=4)


def stating(name: str, said: list[tuple[str, str]]) -> GpuRecipe:
    claim = {"evidence": "untested", "reason": "a", "source": "b", "date": "2026-01-31"}
    blocks = [{"backends": [backend], "level": word, **claim} for backend, word in said]
    return GpuRecipe.model_validate({"name": name, "description": "x", "support": blocks})


@given(SAID, SAID, SAID)
def test_the_nearest_recipe_has_the_last_word_on_a_backend(
    far: list[tuple[str, str]], middle: list[tuple[str, str]], near: list[tuple[str, str]]
) -> None:
    whole = stating("near", near).extending(stating("mid", middle).extending(stating("far", far)))
    last = dict([*far, *middle, *near])
    for backend in BACKENDS:
        stated = whole.support_of(backend)
        assert (stated.level if stated else None) == last.get(backend)


def test_a_broken_recipe_is_an_error_for_who_asks_for_its_arch(user: Path) -> None:
    put(user, "gfx1100", "gfx1100", "rocm", "nonsense: 1\n")
    catalogue = Catalogue.load()
    with pytest.raises(RecipeError, match="nonsense"):
        catalogue.gpu("gfx1100")
    assert catalogue.gpu("gfx906") == known("gfx906")
    assert catalogue.gpu("gfx9999") is None
    assert catalogue.gpu(None) is None


def test_an_arch_in_two_recipes_of_the_user_is_a_problem(user: Path) -> None:
    put(user, "first", "gfx1101, gfx1102")
    put(user, "second", "gfx1103, gfx1102")
    catalogue = Catalogue.load()
    (problem,) = catalogue.problems
    assert str(problem) == f"{user / 'second.yaml'}:2: gfx1102 is also an arch of " + str(
        user / "first.yaml:2"
    )
    for arch, name in (("gfx1101", "first"), ("gfx1102", "first"), ("gfx1103", "second")):
        recipe = catalogue.gpu(arch)
        assert recipe is not None
        assert recipe.name == name


def test_a_block_without_evidence_and_a_value_that_is_no_text_are_refused(user: Path) -> None:
    without = "environment:\n  - variables: {HSA_XNACK: '1'}\n"
    with pytest.raises(RecipeError, match="evidence"):
        check_file(put(user, "one", "gfx1101", more=without))
    number = "environment:\n  - variables: {HSA_OVERRIDE_GFX_VERSION: 11.0}\n" + CLAIM
    with pytest.raises(RecipeError, match="quotes"):
        check_file(put(user, "two", "gfx1101", more=number))
