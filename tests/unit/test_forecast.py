"""What would happen here: beside those who run already, and which way out a refusal shows."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from forecast_lab import here_of, running, snapshot_of
from planning_lab import card, shipped, with_cards

from flexlab.core.errors import UsageError
from flexlab.core.units import GIB
from flexlab.forecast.here import Here
from flexlab.forecast.outlook import outlook, outlooks
from flexlab.forecast.planned import Alternative, Planned, plan
from flexlab.spec.lab import InstanceView, ModelView
from flexlab.spec.machine import Machine, Problem
from flexlab.spec.plan import Wishes

SLOT = "0000:03:00.0"
OTHER = "other"
XTX = with_cards(card())
VII = with_cards(card(0, "gfx906", 16 * GIB))


def planned(here: Here, model: str = "qwen3-8b", **wishes: Any) -> Planned:
    return plan(here, shipped().resolve(model), Wishes(**{"runtime": "docker", **wishes}))


def beside(
    *there: tuple[ModelView, InstanceView], used: dict[str, int] | None = None, **wishes: Any
) -> Planned:
    """Qwen3 8B (8 GB in llama.cpp) on a card of 24 GiB, beside these."""
    held = used or {}
    for _, instance in there:
        held = {pool: held.get(pool, 0) + size for pool, size in instance.claims.items()}
    machine = with_cards(card(), used=held)
    here = here_of(machine, snapshot_of(machine, *there))
    return planned(here, **{"backend": "llamacpp", **wishes})


def codes(answer: Planned) -> set[str]:
    return {problem.code for problem in answer.problems}


# -- who else is there


def test_alone_it_is_ok_and_displaces_nobody() -> None:
    answer = beside()
    assert (answer.verdict, answer.would_displace, answer.limits) == ("ok", (), ())
    assert answer.memory.need_bytes == sum(answer.memory.terms.values())
    assert answer.memory.free_bytes == 24 * GIB - 1_200_000_000  # less what is kept free


def test_beside_one_that_leaves_room_nobody_has_to_go() -> None:
    answer = beside(running(OTHER, {SLOT: 10 * GIB}))
    assert (answer.verdict, answer.would_displace) == ("ok", ())


def test_an_idle_model_in_the_way_would_make_room() -> None:
    answer = beside(running(OTHER, {SLOT: 18 * GIB}))
    assert (answer.verdict, answer.would_displace) == ("swap", (OTHER,))
    assert not codes(answer)
    # The whole model after a swap is better than a smaller one beside it.
    assert answer.limits == ()


def test_only_who_is_in_the_way_has_to_go() -> None:
    answer = beside(
        running("small", {SLOT: GIB}), running(OTHER, {SLOT: 16 * GIB}), running("host", {"ram": 1})
    )
    assert answer.would_displace == (OTHER,)


def test_a_busy_equal_is_waited_for() -> None:
    answer = beside(running(OTHER, {SLOT: 18 * GIB}, busy=1))
    assert (answer.verdict, answer.would_displace) == ("swap", (OTHER,))
    (problem,) = answer.problems
    assert problem.code == "waits"
    assert OTHER in problem.message
    assert problem.hint


def test_a_pinned_model_in_the_way_refuses_and_says_how_to_go_on() -> None:
    answer = beside(running(OTHER, {SLOT: 22 * GIB}, pinned=True))
    assert (answer.verdict, answer.would_displace) == ("refused", ())
    assert codes(answer) == {"pinned_in_the_way"}
    assert f"flexlab down {OTHER}" in answer.problems[0].hint
    # As full as any other plan.
    assert (answer.backend, answer.arch, answer.support) == ("llamacpp", "gfx1100", "full")
    assert answer.args


@pytest.mark.parametrize("ours", [True, False])
def test_beside_what_never_goes_it_is_given_smaller_where_its_recipe_allows(ours: bool) -> None:
    """A pinned model, or another program that holds the memory."""
    if ours:
        answer = beside(running(OTHER, {SLOT: 17 * GIB}, pinned=True))
    else:
        machine = with_cards(card(), used={SLOT: 17 * GIB})
        answer = planned(here_of(machine), backend="llamacpp")
    assert (answer.verdict, answer.would_displace) == ("ok", ())
    assert [limit.what for limit in answer.limits] == ["context_size"]


def test_another_program_that_leaves_too_little_is_told_with_the_numbers() -> None:
    machine = with_cards(card(), used={SLOT: 22 * GIB})
    answer = planned(here_of(machine), backend="llamacpp")
    assert (answer.verdict, codes(answer)) == ("refused", {"no_memory"})
    assert "other programs" in answer.problems[0].message


def test_a_free_card_is_taken_before_anybody_is_displaced() -> None:
    machine = with_cards(card(0), card(1), used={SLOT: 20 * GIB})
    here = here_of(machine, snapshot_of(machine, running(OTHER, {SLOT: 20 * GIB})))
    answer = planned(here, backend="llamacpp")
    assert (answer.verdict, answer.would_displace) == ("ok", ())
    assert [gpu.id for gpu in answer.gpus] == ["0000:04:00.0"]


def test_the_group_of_a_card_takes_in_its_text_model_and_no_other_cards() -> None:
    machine = with_cards(card(0), card(1), used={SLOT: 2 * GIB})
    here = here_of(machine, snapshot_of(machine, running(OTHER, {SLOT: 2 * GIB})))
    on_its_card = planned(here, "video-gen", gpu="0")
    assert (on_its_card.verdict, on_its_card.would_displace) == ("swap", (OTHER,))
    assert on_its_card.group == "7900xtx-textgen"
    elsewhere = planned(here, "video-gen")
    assert (elsewhere.verdict, elsewhere.would_displace) == ("ok", ())
    assert [gpu.index for gpu in elsewhere.gpus] == [1]


# -- another machine


def test_of_a_recorded_machine_docker_is_assumed_and_that_is_said_last() -> None:
    answer = planned(here_of(XTX), runtime=None)
    assert answer.runtime == "docker"
    assert answer.problems[-1].code == "runtime_assumed"


# -- ways out


def followed(here: Here, model: str, way: Alternative) -> Planned:
    """What its command plans."""
    words = shlex.split(way.command)
    assert words[:3] == ["flexlab", "plan", model]
    wishes: dict[str, Any] = {"settings": {}}
    rest = iter(words[3:])
    for option in rest:
        if option == "--allow-experimental":
            wishes["allow_experimental"] = True
        elif option == "--set":
            name, _, value = next(rest).partition("=")
            wishes["settings"][name] = value
        else:
            wishes[option.removeprefix("--")] = next(rest)
    return plan(here, shipped().resolve(model), Wishes(**wishes))


MACHINES: dict[str, Machine] = {
    "xtx": XTX,
    "vii": VII,
    "maxwell": with_cards(card(0, "sm_52", 4 * GIB, "nvidia")),
    "old-driver": with_cards(card(0, "sm_86", 24 * GIB, "nvidia", driver_version="470.1")),
    "ada": with_cards(card(0, "sm_89", 16 * GIB, "nvidia")),
    "two": with_cards(card(0, total=16 * GIB), card(1, total=16 * GIB)),
    "mixed": with_cards(card(0, total=8 * GIB), card(1, "sm_89", 8 * GIB, "nvidia")),
    "unlisted": with_cards(card(0, "gfx1033", 8 * GIB)),
    "none": with_cards(),
}
WISHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "vllm": {"backend": "vllm"},
    "mlc": {"backend": "mlc"},
    "diffusers": {"backend": "diffusers"},
    "gpu": {"gpu": "0"},
    "cpu": {"gpu": "cpu"},
    "experimental": {"allow_experimental": True},
    "image": {"image": "mine/engine:1", "allow_experimental": True},
    "too-long": {"settings": {"context_size": "40000", "cache_ram_mib": "200000"}},
    "outside": {"settings": {"slot_save_path": "/etc"}},
    "certified": {"settings": {"spec_type": "ngram-simple", "draft_max": "9", "draft_min": "1"}},
}


@pytest.mark.parametrize("wish", WISHES)
@pytest.mark.parametrize("machine", MACHINES)
def test_every_way_that_is_shown_really_is_open(machine: str, wish: str) -> None:
    here = here_of(MACHINES[machine])
    for recipe in shipped().models():
        try:
            answer = planned(here, recipe.name, **WISHES[wish])
        except UsageError:
            continue  # not for this model, or not on this machine
        for way in answer.alternatives:
            then = followed(here, recipe.name, way)
            assert then.verdict == "ok", (way.command, then.problems)
            assert then.variant == way.variant
            assert (then.backend, then.arch) == (way.backend, way.arch)


def test_another_way_keeps_the_wishes_that_it_was_found_with() -> None:
    settings = {"context_size": "5000"}
    answer = planned(here_of(XTX), settings=settings, image="mine/engine:1")
    assert answer.verdict == "ok"
    assert answer.alternatives
    for way in answer.alternatives:
        then = followed(here_of(XTX), "qwen3-8b", way)
        assert (then.verdict, then.image) == ("ok", "mine/engine:1")
        assert then.args.count("5000") == 1 or way.backend in ("ollama", "mlc")


def test_no_way_is_shown_that_others_leave_no_room_for() -> None:
    full = with_cards(card(), used={SLOT: 23 * GIB})
    answer = planned(here_of(full))
    assert (answer.verdict, codes(answer)) == ("refused", {"no_memory"})
    assert {way.arch for way in answer.alternatives} == {"x86_64"}
    second = with_cards(card(0), card(1), used={SLOT: 23 * GIB})
    ways = planned(here_of(second)).alternatives
    assert ways
    assert {way.devices for way in ways} == {("0000:04:00.0",)}


def test_a_refusal_shows_the_nearest_way_first() -> None:
    here = here_of(VII)
    lighter = planned(here, backend="llamacpp", settings={"slot_save_path": "/etc"})
    assert {way.backend for way in lighter.alternatives} == {"llamacpp"}
    experimental = planned(here, "sdxl-base")
    assert experimental.verdict == "refused"
    assert all("--allow-experimental" in way.command for way in experimental.alternatives)
    assert experimental.alternatives


def test_where_no_card_can_the_cpu_is_shown_and_never_taken_by_itself() -> None:
    here = here_of(MACHINES["old-driver"])
    answer = planned(here)
    assert (answer.verdict, answer.arch) == ("refused", "sm_86")
    assert answer.alternatives
    assert all(way.command.endswith("--gpu cpu") for way in answer.alternatives)


def test_where_the_card_that_was_asked_for_has_no_driver_the_way_on_is_shown() -> None:
    no_driver = Problem(code="no_driver", message="no driver", hint="install it")
    here = here_of(with_cards(card(0, usable=False, problems=(no_driver,))))
    answer = planned(here, gpu="0")
    assert answer.verdict == "refused"
    assert (answer.problems[0].code, answer.arch) == ("no_driver", "gfx1100")
    assert {way.devices for way in answer.alternatives} == {("cpu",)}


def test_a_model_for_gpus_only_says_so_where_none_is_usable() -> None:
    answer = planned(here_of(MACHINES["none"]), "video-gen")
    assert (answer.verdict, answer.problems[0].code) == ("refused", "no_device")
    assert (answer.backend, answer.arch) == ("diffusers", "x86_64")
    assert "flexlab recipes" in answer.problems[0].hint


@pytest.mark.parametrize(
    "wishes", [{"backend": "vlm"}, {"variant": "q9"}, {"gpu": "7"}, {"settings": {"x": "1"}}]
)
def test_a_wish_for_what_does_not_exist_is_no_plan(wishes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        planned(here_of(XTX), **wishes)
    assert caught.value.hint


# -- the outlook


def fit(here: Here, model: str, **wishes: Any) -> str:
    found = outlook(here, shipped().resolve(model), Wishes(runtime="docker", **wishes))
    assert found.because
    return found.fit


def test_one_word_says_what_a_model_would_do_here() -> None:
    roomy = here_of(XTX)
    assert fit(roomy, "qwen3-8b") == "fits"
    assert fit(roomy, "qwen3.6-27b-fable-gptq") == "no"
    small = here_of(with_cards(card(total=8 * GIB)))
    assert fit(small, "qwen3-8b") == "limits"
    assert fit(small, "qwen3-32b") == "no"
    assert fit(here_of(VII), "qwen3-1.7b", backend="vllm") == "untested"
    # What was run there was another image than the one that FlexLab builds.
    assert fit(roomy, "video-gen") == "untested"


def test_a_swap_is_told_with_whom_it_would_displace() -> None:
    machine = with_cards(card(), used={SLOT: 18 * GIB})
    here = here_of(machine, snapshot_of(machine, running(OTHER, {SLOT: 18 * GIB})))
    found = outlook(here, shipped().resolve("qwen3-8b"), Wishes(runtime="docker"))
    assert (found.fit, found.verdict, found.would_displace) == ("swap", "swap", (OTHER,))
    assert OTHER in found.because


def test_the_outlook_names_limits_needs_and_reasons() -> None:
    small = here_of(with_cards(card(total=8 * GIB)))
    limited = outlook(small, shipped().resolve("qwen3-8b"), Wishes(runtime="docker"))
    assert limited.limits
    assert limited.because.startswith(limited.limits[0].what)
    assert limited.need_bytes is not None
    assert limited.free_bytes is not None
    assert limited.need_bytes <= limited.free_bytes
    refused = outlook(small, shipped().resolve("qwen3-32b"), Wishes(runtime="docker"))
    assert refused.because == refused.problems[0].message


def test_every_shipped_model_has_its_line_and_a_wrong_wish_spoils_only_its_own() -> None:
    models = shipped().models()
    found = outlooks(here_of(XTX), models, Wishes(runtime="docker", backend="comfyui"))
    assert [one.model for one in found] == [recipe.name for recipe in models]
    by_name = {one.model: one for one in found}
    assert by_name["sdxl-base"].backend == "comfyui"
    assert by_name["qwen3-8b"].fit == "no"
    assert "comfyui" in by_name["qwen3-8b"].because
