"""ComfyUI: settings as users type them, words as its main.py takes them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import backend_recipe

from flexlab import backends
from flexlab.backends.base import PLACEHOLDERS, Site, parse_settings
from flexlab.backends.comfyui import OUTPUT_DIR, ComfyUi, ComfyUiSettings
from flexlab.core.errors import UsageError
from flexlab.spec.plan import HOST, PORT


def parse(**wishes: str) -> ComfyUiSettings:
    return parse_settings("comfyui", ComfyUiSettings(), wishes)


def argv(settings: ComfyUiSettings, gpus: int = 1) -> tuple[str, ...]:
    site = Site(model_path="/models/sdxl.safetensors", served_name="sdxl-base", gpus=gpus)
    return ComfyUi().argv(settings, site)


def option(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def test_it_listens_where_the_runtime_says_and_no_page_may_ask_it() -> None:
    words = argv(ComfyUiSettings())
    assert (option(words, "--listen"), option(words, "--port")) == (HOST, PORT)
    assert "--enable-cors-header" not in words
    assert option(words, "--output-directory") == OUTPUT_DIR
    chosen = parse(cors_origin="https://lab.example:8443")
    assert option(argv(chosen), "--enable-cors-header") == "https://lab.example:8443"


def test_the_output_is_a_folder_that_the_recipe_lets_it_write() -> None:
    container = backend_recipe("comfyui").container
    assert container is not None
    assert OUTPUT_DIR in container.writable


def test_exactly_one_memory_mode_is_said() -> None:
    modes = {"--cpu", "--gpu-only", "--highvram", "--normalvram", "--lowvram", "--novram"}
    assert modes & set(argv(parse(memory="lowvram"))) == {"--lowvram"}
    assert modes & set(argv(parse(memory="normalvram"))) == {"--normalvram"}
    assert not modes & set(argv(ComfyUiSettings()))
    assert modes & set(argv(parse(memory="lowvram"), gpus=0)) == {"--cpu"}


def test_paid_services_elsewhere_are_off_unless_asked_for() -> None:
    assert "--disable-api-nodes" in argv(ComfyUiSettings())
    assert "--disable-api-nodes" not in argv(parse(api_nodes="true"))
    assert "--disable-all-custom-nodes" in argv(parse(custom_nodes="false"))


CHANGED: dict[str, Any] = {
    "memory": "novram", "reserve_vram_gb": 1.5, "attention": "quad", "vae_precision": "fp32",
    "previews": "auto", "output_directory": "/output/mine", "custom_nodes": False,
    "extra_model_paths": "/models/extra.yaml", "api_nodes": True, "cors_origin": "*",
}  # fmt: skip


def test_every_setting_reaches_the_engine() -> None:
    assert set(CHANGED) == set(ComfyUiSettings.model_fields) - {"dedicated"}
    plain = argv(ComfyUiSettings())
    for name, value in CHANGED.items():
        assert argv(ComfyUiSettings(**{name: value})) != plain, name


STEPS = st.sampled_from(["output", "..", ".", "", "etc", "mine", "\0", "outputs"])


@given(st.lists(STEPS, max_size=6).map("/".join))
def test_images_are_written_nowhere_else(path: str) -> None:
    steps = path.split("/")
    if steps[:2] == ["", "output"] and not {"", ".", "..", "\0"} & set(steps[2:]):
        assert parse(output_directory=path).output_directory == path
    else:
        with pytest.raises(UsageError, match="output_directory"):
            parse(output_directory=path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("memory", "low"), ("cors_origin", "lab.example"), ("cors_origin", "https://a\n"),
        ("cors_origin", "--cpu"), ("extra_model_paths", "/models/../etc/x.yaml"),
        ("reserve_vram_gb", "-1"), ("reserve_vram_gb", "2GB"), ("api_nodes", "yes"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_or_size_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        parse(**{name: text})
    assert caught.value.hint


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("lowvram", "memory"), ("enableCORS", "cors_origin"),
        ("outputDirectory", "output_directory"),
        ("--reserve-vram", "reserve_vram_gb"), ("vram", "memory"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        parse(**{typed: "1"})


@given(
    st.dictionaries(
        st.sampled_from(sorted(ComfyUiSettings.model_fields)),
        st.sampled_from(sorted(PLACEHOLDERS)) | st.text(max_size=8), max_size=3,
    )
)  # fmt: skip
def test_no_text_is_a_traceback_or_stands_for_a_host_or_a_port(wishes: dict[str, str]) -> None:
    with contextlib.suppress(UsageError):
        words = argv(parse_settings("comfyui", ComfyUiSettings(), wishes))
        assert [word for word in words if word in PLACEHOLDERS] == [HOST, PORT]


def test_ready_is_answering_what_the_recipe_asks() -> None:
    assert backend_recipe("comfyui").ready.path in ("/", "/system_stats")
    assert ComfyUi().judge_ready(200, b"{}") == "ready"
    assert ComfyUi().judge_ready(500, b"") == "failed"


def test_the_shipped_patterns_are_of_use() -> None:
    log = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB\n"
    found = ComfyUi().explain(log, backend_recipe("comfyui").patterns)
    assert found is not None
    assert found.code == "out_of_memory"
    name, _, value = found.hint.split("--set ")[1].partition("=")
    assert getattr(parse(**{name: value}), name) == value


def test_it_is_found_by_its_name() -> None:
    assert backends.get("comfyui").settings_type is ComfyUiSettings
