"""Diffusers: settings as users type them, words as FlexLab's own server takes them."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import backend_recipe

from flexlab import backends
from flexlab.backends.base import PLACEHOLDERS, Site, parse_settings
from flexlab.backends.diffusers import Diffusers, DiffusersSettings
from flexlab.core.errors import UsageError
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT


def parse(**wishes: str) -> DiffusersSettings:
    return parse_settings("diffusers", DiffusersSettings(), wishes)


def argv(settings: DiffusersSettings, gpus: int = 1) -> tuple[str, ...]:
    site = Site(model_path="/models/wan", served_name="video-gen", gpus=gpus)
    return Diffusers().argv(settings, site)


def option(words: tuple[str, ...], name: str) -> str:
    return words[words.index(name) + 1]


def test_the_video_lane_of_the_compatibility_reference() -> None:
    words = argv(
        parse(
            pipeline_mode="text2video", size="832x480", frames="33", fps="16", steps="20",
            guidance="5", memory_plan="model_offload", compile="full",
        )
    )  # fmt: skip
    said = {name: option(words, f"--{name}") for name in ("size", "frames", "fps", "steps")}
    assert said == {"size": "832x480", "frames": "33", "fps": "16", "steps": "20"}
    assert float(option(words, "--guidance")) == 5
    assert option(words, "--memory-plan") == "model_offload"
    assert option(words, "--compile") == "full"
    assert (option(words, "--model"), option(words, "--alias")) == ("/models/wan", "video-gen")


def test_nothing_is_taken_for_a_value_that_nobody_gave() -> None:
    words = argv(DiffusersSettings())
    assert not {"--steps", "--guidance", "--size", "--scheduler", "--quantization"} & set(words)
    assert float(option(argv(parse(guidance="0")), "--guidance")) == 0
    assert option(argv(parse(negative_prompt="")), "--negative-prompt") == ""


def test_the_cpu_is_said_and_offloads_to_nowhere() -> None:
    words = argv(parse(memory_plan="group_offload"), gpus=0)
    assert (option(words, "--device"), option(words, "--memory-plan")) == ("cpu", "resident")
    assert option(argv(DiffusersSettings()), "--device") == "gpu"


CHANGED: dict[str, Any] = {
    "steps": 4, "guidance": 0.0, "size": "512x768", "scheduler": "unipc", "negative_prompt": "blur",
    "strength": 0.0, "dtype": "float16", "quantization": "nf4", "memory_plan": "model_offload",
    "vae_tiling": False, "compile": "regional", "warmup_sizes": "512x512,1024x1024",
    "lora": "/models/a.safetensors", "vae": "/models/vae", "pipeline_mode": "text2video",
}  # fmt: skip
WITH_ANOTHER: dict[str, dict[str, Any]] = {
    "frames": {"pipeline_mode": "text2video", "frames": 81},
    "fps": {"pipeline_mode": "text2video", "fps": 16},
    "lora_scale": {"lora": "/models/a", "lora_scale": 0.5},
    "controlnet": {"pipeline_mode": "controlnet", "controlnet": "/models/canny"},
}


def test_every_setting_reaches_the_engine() -> None:
    fields = set(DiffusersSettings.model_fields) - {"dedicated"}
    assert set(CHANGED) | set(WITH_ANOTHER) == fields
    plain = argv(DiffusersSettings())
    for name, value in CHANGED.items():
        assert argv(DiffusersSettings(**{name: value})) != plain, name
    for name, values in WITH_ANOTHER.items():
        words = argv(DiffusersSettings(**values))
        assert option(words, f"--{name.replace('_', '-')}") == str(values[name])


@given(st.integers(-10, 200))
def test_frames_are_one_more_than_a_multiple_of_four_up_to_81(frames: int) -> None:
    if 1 <= frames <= 81 and frames % 4 == 1:
        assert parse(pipeline_mode="text2video", frames=str(frames)).frames == frames
    else:
        with pytest.raises(UsageError, match="frames"):
            parse(pipeline_mode="text2video", frames=str(frames))


def test_a_wrong_number_of_frames_names_a_right_one() -> None:
    with pytest.raises(UsageError, match="33 is"):
        parse(pipeline_mode="text2video", frames="35")


@given(st.integers(1, 4200), st.integers(1, 4200))
def test_both_sides_of_an_image_are_multiples_of_eight(width: int, height: int) -> None:
    text = f"{width}x{height}"
    if width % 8 == 0 and height % 8 == 0 and min(width, height) >= 10:
        assert parse(size=text).size == text
    elif width % 8 or height % 8:
        with pytest.raises(UsageError, match="size"):
            parse(size=text)


@pytest.mark.parametrize(
    "wishes",
    [
        {"frames": "33"}, {"fps": "16"}, {"lora_scale": "1"}, {"pipeline_mode": "controlnet"},
        {"controlnet": "/models/canny"}, {"pipeline_mode": "text2video", "size": "840x480"},
        {"negative_prompt": "--host"}, {"negative_prompt": HOST},
    ],
)  # fmt: skip
def test_settings_that_need_each_other_are_judged_together(wishes: dict[str, str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(**wishes)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("steps", "0"), ("steps", "101"), ("guidance", "21"), ("guidance", "nan"),
        ("size", "1024"), ("size", "1024x"), ("size", "1024X1024"), ("size", "٨x٨"),
        ("dtype", "half"), ("compile", "true"), ("memory_plan", "cpu"), ("scheduler", "fast"),
        ("vae", "/models/../etc"), ("lora", "org/repo"), ("warmup_sizes", "512x512,"),
        ("quantization", "gptq"), ("vae_tiling", "1"),
    ],
)  # fmt: skip
def test_values_of_the_wrong_type_or_size_are_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        parse(**{name: text})
    assert caught.value.hint


STEPS = st.sampled_from(["models", "..", ".", "", "etc", "vae", "\0"])


@given(st.lists(STEPS, max_size=6).map("/".join))
def test_no_path_leads_out_of_models(path: str) -> None:
    steps = path.split("/")
    inside = steps[:2] == ["", "models"] and len(steps) > 2
    if inside and not {"", ".", "..", "\0"} & set(steps[2:]):
        assert parse(vae=path, lora=path).vae == path
    else:
        with pytest.raises(UsageError, match="vae"):
            parse(vae=path)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("numInferenceSteps", "steps"), ("guidanceScale", "guidance"),
        ("cpuOffload", "memory_plan"),
        ("compileMode", "compile"), ("num_frames", "frames"), ("vae_tilling", "vae_tiling"),
        ("warmupResolutions", "warmup_sizes"), ("negativePrompt", "negative_prompt"),
    ],
)  # fmt: skip
def test_a_wrong_name_suggests_the_right_one(typed: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean {meant}"):
        parse(**{typed: "1"})


@given(
    st.dictionaries(
        st.sampled_from(sorted(DiffusersSettings.model_fields)),
        st.sampled_from(sorted(PLACEHOLDERS)) | st.text(max_size=8), max_size=3,
    )
)  # fmt: skip
def test_no_text_is_a_traceback_or_stands_for_a_host_a_port_or_a_key(
    wishes: dict[str, str],
) -> None:
    with contextlib.suppress(UsageError):
        words = argv(parse_settings("diffusers", DiffusersSettings(), wishes))
        assert [word for word in words if word in PLACEHOLDERS] == [HOST, PORT, API_KEY_FILE]


@pytest.mark.parametrize(
    ("status", "meaning"), [(200, "ready"), (503, "loading"), (500, "failed"), (404, "failed")]
)
def test_ready_is_only_what_is_loaded_and_warm(status: int, meaning: str) -> None:
    assert backend_recipe("diffusers").ready.path == "/health"
    assert Diffusers().judge_ready(status, b"{}") == meaning


def test_the_shipped_patterns_are_of_use() -> None:
    log = "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB\n"
    found = Diffusers().explain(log, backend_recipe("diffusers").patterns)
    assert found is not None
    assert found.code == "out_of_memory"
    name, _, value = found.hint.split("--set ")[1].partition("=")
    assert getattr(parse(**{name: value}), name) == value


def test_it_is_found_by_its_name() -> None:
    assert backends.get("diffusers").settings_type is DiffusersSettings
