"""Every shipped model on every machine that was recorded or built: a plan, or a refusal that helps.

Recorded machines lie beside the repository; without them those tests skip, by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from forecast_lab import here_of
from gpu_trees import APU, GIB, Tree, nvidia_row, nvidia_xml_card
from planning_lab import shipped

from flexlab import backends
from flexlab.core.errors import UsageError
from flexlab.forecast.here import Here
from flexlab.forecast.planned import Planned, plan
from flexlab.gpus.inventory import detect
from flexlab.recipes.schema import ModelRecipe
from flexlab.spec.plan import RuntimeName, Wishes

FIXTURES = Path(__file__).parents[3] / "shared/fixtures/gpu"
RECORDED = [path.parent.name for path in sorted(FIXTURES.glob("*/expected.json"))]
needs_recordings = pytest.mark.skipif(
    not RECORDED, reason="no recorded machines beside the repository"
)

WISHES: tuple[dict[str, Any], ...] = (
    {},
    *({"backend": name} for name in backends.names()),
    {"allow_experimental": True},
    {"gpu": "cpu"},
)
RUNTIMES: tuple[RuntimeName, ...] = ("docker", "process")
NEXT_COMMAND = re.compile(r"\bflexlab \w|--\w|\bdocker \w|\bapt-get |\bpip ")


def bare(tree: Tree) -> None:
    tree.cpu().ram()


def arm(tree: Tree) -> None:
    tree.cpu(arm=True).ram(8 * GIB, 7 * GIB)


def two_xtx(tree: Tree) -> None:
    bare(tree)
    tree.kfd_cpu().amd(vram_used=23 * GIB)
    tree.amd("0000:43:00.0", card=1, minor=129, node=2)


def xtx_and_apu(tree: Tree) -> None:
    bare(tree)
    tree.kfd_cpu().amd().amd("0000:0d:00.0", card=1, minor=129, node=2, **APU)


def old_and_new(tree: Tree) -> None:
    """A Radeon VII and an RX 7900 XTX: one needs variables that the other must never get."""
    bare(tree)
    tree.kfd_cpu().amd()
    tree.amd(
        "0000:23:00.0", 0x66AF, card=1, minor=129, node=2, gfx=90006, simds=240, vram=16 * GIB,
        revision=0xC1,
    )  # fmt: skip


def three_vendors(tree: Tree) -> None:
    bare(tree)
    tree.kfd_cpu().amd()
    tree.intel(card=1, minor=129)
    tree.nvidia_csv(nvidia_row())


def old_driver(tree: Tree) -> None:
    bare(tree)
    old = {"driver_version": "470.199.02"}
    tree.nvidia_csv(nvidia_row(**old), nvidia_row("00000000:02:00.0", index="1", **old))


def sliced(tree: Tree) -> None:
    bare(tree)
    slices = [("20096 MiB", "0 MiB"), ("20096 MiB", "20000 MiB")]
    tree.nvidia_smi_xml(nvidia_xml_card(mig=slices))


def eight_parts(tree: Tree) -> None:
    bare(tree)
    tree.kfd_cpu().amd_partitioned(
        "0000:05:00.0", parts=8, first_node=1, first_minor=128, unique_id=7
    )


def jetson(tree: Tree) -> None:
    tree.cpu(arm=True).ram(32 * GIB, 30 * GIB).tegra()


BUILT: dict[str, Callable[[Tree], None]] = {
    build.__name__: build
    for build in (
        bare, arm, two_xtx, xtx_and_apu, old_and_new, three_vendors, old_driver, sliced,
        eight_parts, jetson,
    )
}  # fmt: skip


@cache
def models() -> list[ModelRecipe]:
    return shipped().models()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Here]:
    @cache
    def build(name: str) -> Here:
        root = tmp_path_factory.mktemp(name)
        BUILT[name](Tree(root))
        return here_of(detect(root), root=root)

    return build


def plans(here: Here, every: int = 1, first: int = 0) -> Iterator[tuple[str, Planned]]:
    """All that can be asked, or each `every`-th of it. Only a backend that a model has no variant
    for is a mistake."""
    asked = list(product(models(), WISHES, RUNTIMES))
    for recipe, wish, runtime in asked[first % every :: every]:
        wishes = Wishes(runtime=runtime, **wish)
        offered = {variant.backend for variant in recipe.variants}
        if wishes.backend is None or wishes.backend in offered:
            yield f"{recipe.name} {wish} in {runtime}", plan(here, recipe, wishes)
            continue
        with pytest.raises(UsageError):
            plan(here, recipe, wishes)


def check(what: str, answer: Planned) -> None:
    """What holds of every plan, whatever was asked."""
    assert not set(answer.env) & set(answer.env_cleared), what
    nodes = {node.path for gpu in answer.gpus for node in gpu.nodes}
    ids = {gpu.uuid for gpu in answer.gpus} | {part.uuid for gpu in answer.gpus for part in gpu.mig}
    assert set(answer.devices) <= nodes | ids, what
    vendors = {gpu.vendor for gpu in answer.gpus}
    assert len(vendors) <= 1, what
    assert all(each.code and each.message and each.hint for each in answer.problems), what
    assert all(each.choice and each.because and each.source for each in answer.reasons), what
    assert answer.memory.need_bytes in (None, sum(answer.memory.terms.values())), what
    if answer.verdict == "refused":
        assert answer.problems, what
        helps = any(NEXT_COMMAND.search(each.hint) for each in answer.problems)
        assert answer.alternatives or helps, (what, answer.problems)
        return
    assert answer.args, what
    assert (answer.image is None) == (answer.runtime == "process"), what
    assert answer.arch, what
    assert answer.backend, what
    experimental = answer.support in ("experimental", "unknown", "unsupported")
    assert not experimental or "allow_experimental" in what, what
    if answer.memory.free_bytes is not None and answer.verdict == "ok":
        assert (answer.memory.need_bytes or 0) <= answer.memory.free_bytes, what


@pytest.mark.parametrize("name", BUILT)
def test_whatever_is_asked_of_a_machine_that_was_built(
    name: str, built: Callable[[str], Here]
) -> None:
    for what, answer in plans(built(name)):
        check(what, answer)


@needs_recordings
@pytest.mark.parametrize("name", RECORDED)
def test_whatever_is_asked_of_a_machine_that_was_recorded(name: str) -> None:
    """Each machine is asked every third question, and three machines together all of them."""
    here = here_of(detect(FIXTURES / name), root=FIXTURES / name)
    for what, answer in plans(here, every=3, first=RECORDED.index(name)):
        check(what, answer)


# -- what these machines are for


def asked(here: Here, model: str, **wishes: Any) -> Planned:
    return plan(here, shipped().resolve(model), Wishes(runtime="docker", **wishes))


def test_only_the_chosen_cards_node_is_given(built: Callable[[str], Here]) -> None:
    here = built("old_and_new")
    for gpu, own, other in (("0", "renderD128", "renderD129"), ("1", "renderD129", "renderD128")):
        answer = asked(here, "qwen3-8b", gpu=gpu)
        assert answer.verdict == "ok"
        assert f"/dev/dri/{own}" in answer.devices
        assert f"/dev/dri/{other}" not in answer.devices


def test_no_variable_of_one_arch_reaches_the_other(built: Callable[[str], Here]) -> None:
    here = built("old_and_new")
    by_arch = {answer.arch: answer for answer in (asked(here, "qwen3-8b", gpu=g) for g in "01")}
    assert by_arch["gfx906"].env["HSA_ENABLE_SDMA"] == "0"
    assert "HSA_ENABLE_SDMA" not in by_arch["gfx1100"].env
    assert "HSA_OVERRIDE_GFX_VERSION" in by_arch["gfx906"].env_cleared


def test_an_integrated_gpu_is_not_taken_before_the_card(built: Callable[[str], Here]) -> None:
    answer = asked(built("xtx_and_apu"), "qwen3-8b")
    assert [gpu.arch for gpu in answer.gpus] == ["gfx1100"]


def test_a_free_card_is_taken_before_a_full_one(built: Callable[[str], Here]) -> None:
    answer = asked(built("two_xtx"), "qwen3-8b")
    assert (answer.verdict, [gpu.id for gpu in answer.gpus]) == ("ok", ["0000:43:00.0"])


def test_the_first_slice_with_room_is_taken_by_its_own_id(built: Callable[[str], Here]) -> None:
    answer = asked(built("sliced"), "qwen3-8b", backend="llamacpp")
    assert answer.verdict == "ok"
    assert len(answer.devices) == 1
    (gpu,) = answer.gpus
    assert answer.devices[0] == gpu.mig[0].uuid
