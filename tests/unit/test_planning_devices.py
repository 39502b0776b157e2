"""Which device a model gets, by which image, with which variables."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.core.units import GIB
from flexlab.planning import devices, environment, images, support
from flexlab.planning.devices import Device
from flexlab.recipes.backend_schema import BackendRecipe, Image
from flexlab.recipes.catalogue import Catalogue
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.spec.machine import Cpu, Gpu, Machine, MigSlice, Pool, Problem
from flexlab.spec.plan import Support

PROOF = {"evidence": "documented", "reason": "It is so.", "source": "a test", "date": "2026-01-31"}
NO_DRIVER = Problem(code="no_driver", message="no driver", hint="install it")


def gpu(index: int = 0, **changes: Any) -> Gpu:
    slot = f"0000:0{index + 3}:00.0"
    facts: dict[str, Any] = {
        "index": index, "id": slot, "pool": slot, "pci_slot": slot, "vendor": "amd",
        "arch": "gfx1100", "name": "Radeon RX 7900 XTX", "pool_total_bytes": 24 * GIB,
        "best": index == 0, "uuid": f"GPU-{index}",
    }  # fmt: skip
    return Gpu(**(facts | changes))


def machine(*gpus: Gpu) -> Machine:
    cpu = Cpu(name="Test", threads_total=8, threads_usable=8)
    ram = Pool(id="ram", kind="ram", total_bytes=64 * GIB)
    return Machine(hostname="lab", platform="linux/amd64", cpu=cpu, gpus=gpus, pools=(ram,))


def never(arch: str | None) -> Support | None:
    return None


def always(arch: str | None) -> Support | None:
    return "unsupported"


def choose(*gpus: Gpu, wish: str | None = None, **more: Any) -> list[str]:
    facts: dict[str, Any] = {"on_cpu": True, "stated": always, **more}
    return [device.id for device in devices.choose(machine(*gpus), wish, **facts).devices]


# -- devices


def test_the_best_gpu_comes_first() -> None:
    assert choose(gpu(0, best=False), gpu(1, best=True)) == ["0000:04:00.0", "0000:03:00.0"]


def test_the_cpu_is_no_way_round_a_gpu_that_is_refused() -> None:
    assert choose(gpu()) == ["0000:03:00.0"]


def test_the_cpu_is_a_candidate_where_nothing_is_known_of_the_gpus() -> None:
    assert choose(gpu(), stated=never) == ["0000:03:00.0", "cpu"]
    assert choose() == ["cpu"]


def test_a_gpu_that_cannot_be_used_does_not_keep_a_model_from_the_cpu() -> None:
    broken = gpu(usable=False, problems=(NO_DRIVER,))
    choice = devices.choose(machine(broken), None, on_cpu=True, stated=always)
    assert [device.id for device in choice.devices] == ["cpu"]
    assert [problem.code for _, problem in choice.out] == ["no_driver"]


@pytest.mark.parametrize("wish", ["1", "0000:04:00.0", "GPU-1", "gpu-1"])
def test_a_gpu_may_be_named_in_every_way_that_flexlab_shows(wish: str) -> None:
    assert choose(gpu(0), gpu(1), wish=wish) == ["0000:04:00.0"]
    assert devices.unknown_device(machine(gpu(0), gpu(1)), wish) is None


def test_asking_for_the_cpu_gives_the_cpu() -> None:
    assert choose(gpu(), wish="CPU") == ["cpu"]


def test_a_gpu_that_is_not_there_is_named_with_those_that_are() -> None:
    problem = devices.unknown_device(machine(gpu(0)), "7")
    assert problem is not None
    assert "0000:03:00.0" in problem.message


def test_a_card_in_mig_mode_is_its_slices() -> None:
    parts = (
        MigSlice(uuid="MIG-a", gi=1, profile="1g.10gb", vram_total_bytes=10 * GIB),
        MigSlice(uuid="MIG-b", gi=2, profile="1g.10gb", vram_total_bytes=10 * GIB),
    )
    found = devices.gpu_devices(machine(gpu(mig=parts, vendor="nvidia", arch="sm_80")))
    assert [(one.id, one.pool, one.total_bytes) for one in found] == [
        ("MIG-a", "MIG-a", 10 * GIB),
        ("MIG-b", "MIG-b", 10 * GIB),
    ]


# -- images


def backend(*choices: dict[str, Any]) -> BackendRecipe:
    shipped = Catalogue.load().backend("llamacpp").model_dump(exclude_unset=True)
    blocks = [{"choices": [image(**choice)], **PROOF} for choice in choices]
    return BackendRecipe.model_validate(shipped | {"images": blocks})


def image(**changes: Any) -> dict[str, Any]:
    return {
        "image": "lab/engine:1", "archs": ["sm_86"], "platforms": ["linux/amd64"],
        "entrypoint": "image", "port": 8080, **changes,
    }  # fmt: skip


def device(arch: str | None = "sm_86", **facts: Any) -> Device:
    one = gpu(arch=arch, vendor="nvidia", **facts)
    return Device(one.id, one.pool, arch, one.pool_total_bytes, one)


NEW = {"image": "lab/engine:cuda13", "driver_min": "580"}
OLD = {"image": "lab/engine:cuda12", "driver_min": "525"}


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("580.65.06", "lab/engine:cuda13"),
        ("579.99", "lab/engine:cuda12"),
        ("525.147.05", "lab/engine:cuda12"),
        ("470.1", None),
        (None, "lab/engine:cuda13"),  # unknown is no reason to refuse
        ("strange", "lab/engine:cuda13"),
    ],
)
def test_an_image_suits_the_driver(driver: str | None, name: str | None) -> None:
    chosen = images.choose(
        backend(NEW, OLD), [device(driver_version=driver)], platform="linux/amd64"
    )
    assert chosen.name == name
    if name is None:
        assert {problem.code for problem in chosen.problems} == {"driver_too_old"}


def test_an_image_for_another_arch_is_none() -> None:
    chosen = images.choose(backend(OLD), [device("sm_52")], platform="linux/amd64")
    assert chosen.name is None
    assert "sm_52" in chosen.problems[0].message


def test_an_image_for_another_platform_is_refused_by_its_name() -> None:
    chosen = images.choose(backend(OLD), [device()], platform="linux/arm64")
    assert chosen.name is None
    assert "linux/arm64" in chosen.problems[0].message


def test_a_private_image_is_never_chosen_by_itself() -> None:
    private = {"image": "registry.lab/engine:1", "private": True}
    assert images.choose(backend(private), [device()], platform=None).name is None
    asked = images.choose(backend(private), [device()], platform=None, wish="registry.lab/engine:1")
    assert asked.name == "registry.lab/engine:1"
    assert [problem.code for problem in asked.problems] == ["image_private"]


def test_the_users_image_beats_every_other() -> None:
    chosen = images.choose(backend(OLD), [device("sm_52")], platform=None, wish="mine:1")
    assert (chosen.name, chosen.facts) == ("mine:1", None)
    assert chosen.reasons[0].source == "option --image"


def test_an_image_of_our_own_says_what_building_it_costs() -> None:
    own = {
        "image": "flexlab/engine:1", "built_from": "engine", "built_bytes": 3_000_000_000,
        "build_time": 600,
    }  # fmt: skip
    chosen = images.choose(backend(own), [device()], platform=None)
    (problem,) = chosen.problems
    assert problem.code == "image_build_needed"
    assert "3 GB" in problem.message
    assert "10 minutes" in problem.message


MODERN = frozenset({"avx2", "fma"})
FAST = {"image": "lab/engine:fast", "archs": ["cpu"], "cpu_flags": {"x86_64": ["avx2", "fma"]}}
ANY = {"image": "lab/engine:any", "archs": ["cpu"], "platforms": ["linux/amd64", "linux/arm64"]}


def cpu(flags: frozenset[str]) -> Cpu:
    return Cpu(name="Old", threads_total=8, threads_usable=8, flags=flags)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (MODERN, "lab/engine:fast"),
        (frozenset({"sse2", "avx2"}), "lab/engine:any"),
        (frozenset(), "lab/engine:fast"),  # unreadable is no reason to pass it over
    ],
)
def test_an_image_suits_the_cpu(flags: frozenset[str], name: str) -> None:
    here = devices.cpu_of(machine())
    chosen = images.choose(backend(FAST, ANY), [here], platform="linux/amd64", cpu=cpu(flags))
    assert chosen.name == name
    told = " ".join(f"{reason.choice} {reason.because}" for reason in chosen.reasons)
    assert ("fma" in told) is (name == "lab/engine:any")


def test_flags_of_another_architecture_are_not_asked_for() -> None:
    both = FAST | {"platforms": ["linux/amd64", "linux/arm64"]}
    here, arm = devices.cpu_of(machine()), cpu(frozenset({"asimd"}))
    chosen = images.choose(backend(both, ANY), [here], platform="linux/arm64", cpu=arm)
    assert chosen.name == "lab/engine:fast"


def test_an_image_that_is_asked_for_and_would_crash_this_cpu_is_refused() -> None:
    here, wish = devices.cpu_of(machine()), "lab/engine:fast"
    chosen = images.choose(
        backend(FAST, ANY), [here], platform="linux/amd64", cpu=cpu(frozenset({"sse2"})), wish=wish
    )
    (problem,) = chosen.refused
    assert "avx2, fma" in problem.message


# -- variables


def gpu_recipe(*blocks: dict[str, Any], **fields: Any) -> GpuRecipe:
    facts = {"name": "gfx906", "archs": ["gfx906"], "vendor": "amd", "description": "A card."}
    environment_blocks = [{**block, **PROOF} for block in blocks]
    return GpuRecipe.model_validate({**facts, "environment": environment_blocks, **fields})


NEVER = {"never": ["HSA_OVERRIDE_GFX_VERSION"]}


def made(recipe: GpuRecipe | None, **changes: Any) -> environment.Environment:
    facts = Image.model_validate(image(archs=["gfx906"], **changes))
    return environment.environment("vllm", {"A": "1"}, recipe, facts)


def uncleared(recipe: GpuRecipe | None, **changes: Any) -> list[str]:
    facts = Image.model_validate(image(archs=["gfx906"], **changes))
    return [problem.code for problem in environment.uncleared("vllm", recipe, facts)]


def test_a_variable_that_must_not_be_set_is_taken_from_its_image() -> None:
    found = made(
        gpu_recipe(NEVER),
        program=["/bin/engine", "serve"],
        env_baked={"HSA_OVERRIDE_GFX_VERSION": "11.0.0"},
    )
    assert found.cleared == ("HSA_OVERRIDE_GFX_VERSION",)
    assert found.command == ("env", "-u", "HSA_OVERRIDE_GFX_VERSION", "/bin/engine", "serve")
    assert found.variables == {"A": "1"}


def test_an_image_that_is_known_not_to_set_it_starts_as_it_is() -> None:
    found = made(gpu_recipe(NEVER), env_baked={})
    assert found.command is None
    assert uncleared(gpu_recipe(NEVER), env_baked={}) == []
    assert found.cleared == ("HSA_OVERRIDE_GFX_VERSION",)


def test_an_image_of_which_nothing_is_known_is_refused() -> None:
    assert uncleared(gpu_recipe(NEVER)) == ["env_uncleared"]


def test_variables_of_another_backend_or_rocm_do_not_spread() -> None:
    blocks = (
        {"backends": ["diffusers"], "variables": {"B": "1"}},
        {"variables": {"C": "1"}, "rocm_min": "6", "rocm_below": "7"},
        {"variables": {"D": "1"}},
    )
    assert made(gpu_recipe(*blocks), rocm="7.2").variables == {"A": "1", "D": "1"}
    assert made(gpu_recipe(*blocks), rocm="6.4.1").variables == {"A": "1", "C": "1", "D": "1"}
    assert made(gpu_recipe(*blocks)).variables == {"A": "1", "D": "1"}


names = st.sampled_from(["A", "B", "C", "D"])
blocks = st.lists(
    st.fixed_dictionaries(
        {"variables": st.dictionaries(names, st.just("x")), "never": st.lists(names)}
    ),
    max_size=4,
)


@given(blocks)
def test_a_variable_is_never_both_set_and_cleared(drawn: list[dict[str, Any]]) -> None:
    found = made(gpu_recipe(*drawn), program=["engine"])
    assert not set(found.variables) & set(found.cleared)


# -- support


def judged(level: Support | None, **more: Any) -> support.Judgement:
    stated = [] if level is None else [{"backends": ["vllm"], "level": level, **PROOF}]
    facts: dict[str, Any] = {"settings": {}, "allow_experimental": False, **more}
    return support.judge("vllm", device(), gpu_recipe(support=stated), **facts)


@pytest.mark.parametrize(
    ("level", "more", "refused"),
    [
        ("full", {}, False),
        ("experimental", {}, True),
        ("experimental", {"allow_experimental": True}, False),
        (None, {}, True),
        (None, {"allow_experimental": True}, False),
        ("precompiled_only", {"allow_experimental": True}, True),
        ("precompiled_only", {"settings": {"model_lib_path": "/models/a.so"}}, False),
        ("unsupported", {"allow_experimental": True}, True),
    ],
)
def test_support_decides(level: Support | None, more: dict[str, Any], refused: bool) -> None:
    answer = judged(level, **more)
    assert answer.level == (level or "unknown")
    assert bool(answer.problems) == refused
    assert all(problem.hint for problem in answer.problems)


DIGEST = "lab/engine@sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("changes", "tested", "allowed"),
    [
        ({"image": DIGEST, "marks": ["gptq_shuffle_guarded"]}, True, True),
        ({"image": DIGEST, "marks": ["gptq_shuffle_guarded"]}, False, False),
        ({"image": "lab/engine:1", "marks": ["gptq_shuffle_guarded"]}, True, False),
        ({"image": DIGEST}, True, False),
    ],
)
def test_a_mark_lifts_a_rule_by_a_test_of_its_digest_only(
    changes: dict[str, Any], tested: bool, allowed: bool
) -> None:
    rule = {
        "backend": "vllm", "quantization": "gptq", "mark": "gptq_shuffle_guarded",
        "message": "GPTQ gives token salad here", "hint": "another quantisation", **PROOF,
    }  # fmt: skip
    facts = Image.model_validate(image(**changes))
    recipe = gpu_recipe(rules=[rule])
    found = support.broken_rules("vllm", "qwen3-8b", ["GPTQ"], recipe, facts, tested=tested)
    assert (found == ()) == allowed
    assert support.broken_rules("vllm", "qwen3-8b", ["AWQ"], recipe, facts, tested=tested) == ()
