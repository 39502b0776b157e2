"""What could run here, and what is said where nothing can."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_lab import (
    BIG_SOURCE,
    FLAGS,
    SOURCE,
    ask,
    because,
    facts,
    machine,
    recipe,
    refused,
    source,
    variant,
)

from flexlab.core.units import GIB
from flexlab.planning.explain import describe, explain
from flexlab.planning.sizing import usable_bytes
from flexlab.recipes.catalogue import Catalogue
from flexlab.spec.machine import Gpu, Pool, Problem
from flexlab.spec.plan import Candidate, Candidates, Refusal, RuntimeFacts, RuntimeName, Wishes


def codes(refusal: Refusal) -> list[str]:
    return [problem.code for problem in refusal.problems]


def test_variants_come_in_the_recipes_order_each_with_its_reasons() -> None:
    items = ask().items
    assert [(c.variant, c.preference) for c in items] == [("q4", 0), ("q2", 1)]
    first = items[0]
    assert (first.runtime, first.arch, first.devices) == ("process", "x86_64", ("cpu",))
    assert source(first, "variant q4") == "recipes/models/small.yaml:1"
    assert source(first, "runtime process") == "default"
    assert "weights 93.8M" in because(first, "memory")
    assert all(r.choice and r.because and r.source for c in items for r in c.reasons)


def test_a_wish_beats_the_setting_and_the_setting_beats_the_default() -> None:
    known = facts(
        runtimes={
            name: RuntimeFacts(name=name, available=True) for name in ("process", "demo", "docker")
        }
    )
    by_setting = ask(known=known, default_runtime="demo").items[0]
    assert (by_setting.runtime, source(by_setting, "runtime")) == ("demo", "setting runtime")
    by_wish = ask(known=known, default_runtime="demo", wishes=Wishes(runtime="process")).items[0]
    assert (by_wish.runtime, source(by_wish, "runtime")) == ("process", "option --runtime")
    by_variant = ask(wishes=Wishes(variant="q2")).items
    assert [c.variant for c in by_variant] == ["q2"]
    assert source(by_variant[0], "variant") == "option --variant"


@pytest.mark.parametrize("spelling", ["llamacpp", "llama.cpp", "llama-cpp", "LLAMA.CPP"])
def test_a_backend_is_known_by_its_usual_spellings(spelling: str) -> None:
    candidate = ask(wishes=Wishes(backend=spelling)).items[0]
    assert candidate.backend == "llamacpp"
    assert source(candidate, "backend") == "option --backend"


@pytest.mark.parametrize(
    ("wishes", "code", "says"),
    [
        (Wishes(variant="q5"), "unknown_variant", "q4, q2"),
        (Wishes(backend="vlm"), "unknown_backend", "llamacpp"),
        (Wishes(gpu="0"), "unknown_gpu", "there are: none"),
        (Wishes(settings={"ctx_size": "1"}), "wrong_setting", "context_size"),
        (Wishes(settings={"context_size": "4k"}), "wrong_setting", "4k"),
        (Wishes(image="x:y"), "image_without_container", "--image"),
    ],
)
def test_a_wish_for_what_does_not_exist_is_the_askers_mistake(
    wishes: Wishes, code: str, says: str
) -> None:
    refusal = refused(ask(wishes=wishes))
    assert (refusal.code, refusal.status) == (code, 400)
    assert says in f"{refusal.message} {refusal.hint}"


def test_the_cpu_may_be_asked_for() -> None:
    assert source(ask(wishes=Wishes(gpu="cpu")).items[0], "CPU") == "option --gpu"


def test_a_cpu_without_the_instructions_is_refused_by_name() -> None:
    refusal = refused(ask(here=machine(flags=FLAGS - {"avx2", "bmi2"})))
    assert refusal.code == "cpu_flags_missing"
    assert "lacks avx2, bmi2" in refusal.message
    assert refusal.status == 503


def test_unreadable_flags_are_not_missing_flags() -> None:
    assert ask(here=machine(flags=frozenset())).items


def test_an_unknown_platform_is_not_a_wrong_one() -> None:
    assert ask(here=machine(platform=None)).items[0].arch == "cpu"
    arm = machine(platform="linux/arm64", flags=frozenset({"asimd"}))
    assert ask(here=arm).items[0].arch == "aarch64"


def test_another_runtime_does_not_need_the_embedded_engines_instructions() -> None:
    known = facts(runtimes={"demo": RuntimeFacts(name="demo", available=True)})
    here = machine(flags=frozenset({"sse2"}))
    assert ask(here=here, known=known, wishes=Wishes(runtime="demo")).items


def test_everything_that_is_in_the_way_is_said_at_once() -> None:
    missing = (
        Problem(
            code="embedded_missing", message="no engine", hint="pip install 'flexlab[embedded]'"
        ),
        Problem(code="libgomp_missing", message="no libgomp", hint="apt-get install libgomp1"),
    )
    known = facts(
        runtimes={"process": RuntimeFacts(name="process", available=False, problems=missing)}
    )
    refusal = refused(
        ask(
            known=known,
            here=machine(flags=frozenset({"sse2"}), total=2 * GIB),
            wishes=Wishes(settings={"cache_ram_mib": "99999", "lora": "/etc/adapter"}),
        )
    )
    assert codes(refusal)[:4] == [
        "embedded_missing", "libgomp_missing", "cpu_flags_missing", "path_outside_models",
    ]  # fmt: skip
    assert len(set(refusal.problems)) == len(refusal.problems)
    assert "pip install 'flexlab[embedded]'" in (refusal.hint or "")
    assert len(explain(refusal)) == len(refusal.problems)


def test_a_runtime_that_nobody_provides_names_those_that_work() -> None:
    refusal = refused(ask(wishes=Wishes(runtime="docker")))
    assert refusal.code == "runtime_unavailable"
    assert "process" in (refusal.hint or "")


def test_a_warning_of_the_runtime_goes_with_the_plan() -> None:
    warning = Problem(code="embedded_version", message="an odd version", hint="pip install")
    known = facts(
        runtimes={"process": RuntimeFacts(name="process", available=True, problems=(warning,))}
    )
    assert ask(known=known).items[0].problems == (warning,)


def test_weights_that_are_not_installed_are_no_obstacle() -> None:
    candidate = ask(known=facts(weights={}), shapes={}).items[0]
    assert candidate.needs[0].terms["weights"] == 98_362_432
    assert "rule of thumb" in because(candidate, "memory")


def test_a_model_of_unknown_size_is_not_refused_for_its_size() -> None:
    model = recipe(variant("q4", SOURCE, None), parameters=None)
    candidate = ask(model, known=facts(weights={}), shapes={}).items[0]
    assert "weights" not in candidate.needs[0].terms
    assert "weights and KV cache unknown" in because(candidate, "memory")


def test_the_real_size_of_the_files_beats_the_recipes() -> None:
    known = facts(weight_bytes={SOURCE: 99_000_000})
    assert ask(known=known).items[0].needs[0].terms["weights"] == 99_000_000


def test_broken_weights_are_refused_with_the_mend_that_fits_their_source() -> None:
    wrong = Problem(code="gguf_truncated", message="x.gguf is incomplete", hint="copy it again")
    hub = "hf://o/r@main/x.gguf"
    model = recipe(variant("own", SOURCE, None), variant("fetched", hub, None))
    refusal = refused(ask(model, broken={SOURCE: wrong, hub: wrong}))
    assert refusal.code == "gguf_truncated"
    own, fetched = refusal.problems
    assert own.hint == "copy it again"
    assert fetched.hint == "flexlab rm small and flexlab pull small fetch it anew"
    (candidate,) = ask(model, broken={SOURCE: wrong}).items
    assert candidate.variant == "fetched"
    assert "incomplete" in because(candidate, "not variant own")


def test_the_next_variant_is_taken_aloud_when_the_first_cannot_run() -> None:
    model = recipe(
        variant("q4", SOURCE, 20 * GIB), variant("q2", BIG_SOURCE, 40_000_000, context_size=1024)
    )
    (candidate,) = ask(model).items
    assert candidate.variant == "q2"
    assert "needs 20." in because(candidate, "not variant q4")


def test_a_context_beyond_the_training_is_cut_aloud() -> None:
    candidate = ask(wishes=Wishes(settings={"context_size": "32768"})).items[0]
    assert candidate.settings["context_size"] == 8192
    (limit,) = candidate.limits
    assert (limit.what, limit.wanted) == ("context_size", "32768")
    assert "8192" in limit.given


def test_a_candidate_says_the_context_that_one_request_gets() -> None:
    asked = {"context_size": "32768", "parallel": "2"}
    assert [c.context for c in ask().items] == [4096, 1024]
    assert ask(wishes=Wishes(settings=asked)).items[0].context == 8192


def settings_told(candidate: Candidate) -> list[tuple[str, str, str]]:
    at = [r.choice.partition(" ")[0] for r in candidate.reasons]
    first, last = at.index("CPU:") + 1, at.index("memory")
    return [(r.choice, r.because, r.source) for r in candidate.reasons[first:last]]


def test_each_setting_is_told_once_with_who_chose_it() -> None:
    where = "recipes/models/small.yaml:1"
    model = recipe(variant("q4", SOURCE, 98_362_432, context_size=2048, parallel=2, threads=3))
    assert settings_told(ask(model).items[0]) == [
        (
            "context 2048 tokens a request, 2 requests at a time, 3 threads",
            "the variant's settings",
            where,
        )
    ]
    wishes = Wishes(settings={"parallel": "4", "jinja": "false", "threads": "1"})
    assert settings_told(ask(model, wishes=wishes).items[0]) == [
        ("4 requests at a time, jinja false, 1 thread", "asked for", "option --set"),
        ("context 2048 tokens a request", "the variant's settings", where),
    ]
    defaults = recipe(variant("q4", SOURCE, 98_362_432))
    assert settings_told(ask(defaults, wishes=Wishes(settings={"parallel": "2"})).items[0]) == [
        ("2 requests at a time", "asked for", "option --set"),
        ("context 4096 tokens a request", "the default of llamacpp", "backend llamacpp"),
    ]
    cut = Wishes(settings={"context_size": "32768"})
    assert settings_told(ask(defaults, wishes=cut).items[0]) == [
        ("context 8192 tokens a request", "asked for, cut from 32768", "option --set")
    ]


def test_layers_on_a_gpu_that_is_not_used_are_given_up_aloud() -> None:
    candidate = ask(wishes=Wishes(settings={"n_gpu_layers": "20"})).items[0]
    assert candidate.settings["n_gpu_layers"] == 0
    assert candidate.limits[0].what == "n_gpu_layers"


def test_the_machine_is_described_in_one_line() -> None:
    assert describe(machine()) == ["CPU: Test CPU, 4 threads of 8; RAM 16.0G, 12.0G free"]
    assert describe(machine(total=None, threads=None)) == [
        "CPU: Test CPU, threads unknown; RAM unknown"
    ]


def test_an_image_that_may_bake_in_what_the_arch_must_not_get_is_no_candidate() -> None:
    """Whoever asks, not only `plan`: it is refused before anything is placed."""
    slot = "0000:03:00.0"
    gpu = Gpu(
        index=0, id=slot, pool=slot, vendor="amd", arch="gfx906", name="Radeon VII", best=True,
        pool_total_bytes=16 * GIB,
    )  # fmt: skip
    here = msgspec.structs.replace(
        machine(),
        gpus=(gpu,),
        pools=(*machine().pools, Pool(id=slot, kind="vram", total_bytes=16 * GIB)),
    )
    model = recipe(variant("q4", SOURCE, 98_362_432) | {"devices": ["gpu", "cpu"]})
    known = facts(runtimes={"docker": RuntimeFacts(name="docker", available=True)})

    def plan(image: str | None) -> Candidates:
        wishes = Wishes(runtime="docker", image=image)
        return ask(model, here, known, wishes, gpu_recipe=Catalogue.load().gpu)

    refusal = refused(plan("mine/llama:1"))
    assert codes(refusal) == ["env_uncleared"]
    (candidate,) = plan(None).items
    assert candidate.devices == (slot,)


def test_a_plan_is_explained_in_plain_sentences() -> None:
    lines = explain(ask())
    assert lines[0] == (
        "variant q4, because the recipe's order of preference: it was tried "
        "(recipes/models/small.yaml:1)"
    )
    assert lines == explain(ask().items[0])


TEXT = st.text(max_size=12)
MAYBE = st.none() | TEXT
RUNTIMES: tuple[RuntimeName | None, ...] = (None, "process", "docker", "k3s", "demo", "external")


@given(
    backend=MAYBE,
    chosen=MAYBE | st.sampled_from(["q4", "q2"]),
    gpu=MAYBE,
    settings=st.dictionaries(
        st.sampled_from(["context_size", "parallel", "jinja", "x", "contextSize"]) | TEXT,
        st.sampled_from(["1", "4096", "true", "null", "-1", "9" * 30]) | TEXT,
        max_size=3,
    ),
    runtime=st.sampled_from(RUNTIMES),
    total=st.none() | st.integers(1, 64 * GIB),
    threads=st.none() | st.integers(1, 512),
)
def test_whatever_is_asked_there_is_a_candidate_that_fits_or_a_refusal_with_a_hint(
    backend: str | None,
    chosen: str | None,
    gpu: str | None,
    settings: dict[str, str],
    runtime: RuntimeName | None,
    total: int | None,
    threads: int | None,
) -> None:
    here = machine(total=total, threads=threads)
    wishes = Wishes(backend=backend, variant=chosen, gpu=gpu, settings=settings, runtime=runtime)
    answer = ask(here=here, wishes=wishes)
    if not answer.items:
        refusal = refused(answer)
        assert refusal.problems
        return
    usable = usable_bytes(here.pool("ram"))
    for candidate in answer.items:
        (need,) = candidate.needs
        assert need.total_bytes == sum(need.terms.values())
        assert usable is None or need.total_bytes <= usable
    pairs = itertools.pairwise(candidate.preference for candidate in answer.items)
    assert all(one < two for one, two in pairs)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=type(answer)) == answer
