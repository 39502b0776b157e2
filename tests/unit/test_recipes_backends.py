"""What the shipped backend recipes promise, whoever edits them."""

from __future__ import annotations

import re

import pytest

from flexlab.recipes.backend_schema import BackendRecipe, Image, Images
from flexlab.recipes.catalogue import Catalogue

BACKENDS = Catalogue.load().backends()
IMAGES = [
    pytest.param(backend, image, block, id=f"{backend.name}-{image.image}-{image.archs[0]}")
    for backend in BACKENDS
    for image, block in backend.image_choices
]


def archs_of(backend: str, *, private: bool = False) -> set[str]:
    recipe = next(one for one in BACKENDS if one.name == backend)
    return {a for image, _ in recipe.image_choices if image.private == private for a in image.archs}


def test_all_six_engines_have_a_recipe() -> None:
    names = {recipe.name for recipe in BACKENDS}
    assert names == {"llamacpp", "ollama", "vllm", "mlc", "diffusers", "comfyui"}


@pytest.mark.parametrize(("backend", "image", "block"), IMAGES)
def test_an_image_can_be_started(backend: BackendRecipe, image: Image, block: Images) -> None:
    if image.entrypoint == "command":
        assert image.program, "nothing says what starts it"
    assert backend.container is not None
    amd = any(arch.startswith("gfx") for arch in image.archs)
    if amd and image.rocm is not None:
        assert image.platforms == ("linux/amd64",), "ROCm exists for amd64 only"
    if image.cuda is not None:
        assert image.driver_min is not None, "an old driver falls back to the CPU without a word"
    if image.built_from is not None:
        assert image.image.startswith("flexlab/")
        assert image.built_bytes
        assert image.build_time
    if image.image.startswith("registry."):
        assert image.private
        assert "@sha256:" in image.image


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda recipe: recipe.name)
def test_no_image_stands_twice_for_an_arch(backend: BackendRecipe) -> None:
    pairs = [
        (image.image, arch, platform)
        for image, _ in backend.image_choices
        for arch in image.archs
        for platform in image.platforms
    ]
    assert len(pairs) == len(set(pairs))


# What the compatibility reference promises, beside what it refuses.
PROMISED = {
    "ollama": {"gfx1100", "gfx906", "sm_50", "sm_52"},
    "vllm": {"gfx1100", "gfx906"},
    "mlc": {"gfx1100", "gfx906", "sm_50", "sm_52"},
    "llamacpp": {"gfx1100", "gfx906", "sm_50", "sm_52", "cpu"},
    "diffusers": {"gfx1100", "gfx906"},
    "comfyui": {"gfx1100", "gfx906"},
}


@pytest.mark.parametrize("backend", sorted(PROMISED))
def test_every_promise_has_an_image_that_strangers_can_have(backend: str) -> None:
    assert archs_of(backend) >= PROMISED[backend]


def test_what_is_refused_has_no_image() -> None:
    for backend in ("vllm", "diffusers", "comfyui"):
        assert not archs_of(backend) & {"sm_50", "sm_52", "sm_53"}


def test_official_rocm_images_are_never_for_gfx906() -> None:
    official = re.compile(
        r"(ghcr\.io/ggml-org/llama\.cpp:server-rocm|ollama/ollama:(rocm|latest)"
        r"|vllm/vllm-openai(-rocm)?:.*|rocm/.*)"
    )
    for parameters in IMAGES:
        _, image, _ = parameters.values
        assert isinstance(image, Image)
        if official.fullmatch(image.image):
            assert "gfx906" not in image.archs


def test_cuda_13_is_never_for_what_it_has_dropped() -> None:
    for parameters in IMAGES:
        _, image, _ = parameters.values
        assert isinstance(image, Image)
        if image.cuda and image.cuda.startswith("13"):
            old = [a for a in image.archs if a.startswith("sm_") and int(a[3:]) < 75]
            assert not old
