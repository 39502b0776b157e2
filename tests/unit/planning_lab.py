"""A small lab for planning tests: a machine, a model with two variants, the shipped backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from flexlab.core.units import GIB
from flexlab.planning.candidates import candidates
from flexlab.planning.render import render
from flexlab.recipes.backend_schema import BackendRecipe
from flexlab.recipes.catalogue import Catalogue
from flexlab.recipes.schema import ModelRecipe
from flexlab.spec.machine import Cpu, DeviceNode, Gpu, Machine, Pool, Vendor
from flexlab.spec.plan import (
    Candidate,
    Candidates,
    Facts,
    Grant,
    LaunchPlan,
    Refusal,
    RuntimeFacts,
    Wishes,
)

SOURCE = "file:///models/small.gguf"
BIG_SOURCE = "file:///models/big.gguf"
FLAGS = frozenset({"avx2", "fma", "f16c", "bmi2", "sse2"})


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """As a GGUF header says it; the defaults are those of SmolLM2-135M."""

    layers: int | None = 30
    heads: int | None = 9
    kv_heads_total: int | None = 90
    key_length: int | None = 64
    value_length: int | None = 64
    embedding_length: int | None = 576
    vocabulary: int | None = 49152
    context_length: int | None = 8192


@cache
def shipped() -> Catalogue:
    return Catalogue.load()


@cache
def backend_recipe(name: str) -> BackendRecipe:
    return shipped().backend(name)


def variant(name: str, source: str, size: int | None, **settings: object) -> dict[str, object]:
    return {
        "name": name,
        "backend": "llamacpp",
        "weights": [{"source": source, "size": size}],
        "devices": ["cpu"],
        "settings": settings,
        "evidence": "tested",
        "reason": "it was tried",
        "source": "a test",
        "date": "2026-01-31",
    }


def recipe(*variants: dict[str, object], **fields: Any) -> ModelRecipe:
    chosen = variants or (
        variant("q4", SOURCE, 98_362_432, context_size=4096),
        variant("q2", BIG_SOURCE, 40_000_000, context_size=1024),
    )
    return ModelRecipe.model_validate(
        {
            "name": "small",
            "description": "For tests.",
            "license": "Apache-2.0",
            "capabilities": ["chat"],
            "parameters": 134_515_008,
            "context": 8192,
            "variants": list(chosen),
            **fields,
        }
    )


def machine(
    *,
    total: int | None = 16 * GIB,
    reserve: int = GIB,
    threads: int | None = 4,
    flags: frozenset[str] = FLAGS,
    platform: str | None = "linux/amd64",
    budget: int | None = None,
) -> Machine:
    return Machine(
        hostname="lab",
        platform=platform,
        cpu=Cpu(name="Test CPU", threads_total=8, threads_usable=threads, flags=flags),
        pools=(
            Pool(
                id="ram",
                kind="ram",
                total_bytes=total,
                used_bytes=None if total is None else total // 4,
                reserve_bytes=reserve,
                budget_bytes=budget,
            ),
        ),
    )


def facts(**fields: Any) -> Facts:
    given: dict[str, Any] = {
        "runtimes": {"process": RuntimeFacts(name="process", available=True)},
        "weights": {SOURCE: "/models/small.gguf", BIG_SOURCE: "/models/big.gguf"},
        **fields,
    }
    return Facts(**given)


def ask(
    model: ModelRecipe | None = None,
    here: Machine | None = None,
    known: Facts | None = None,
    wishes: Wishes | None = None,
    **more: Any,
) -> Candidates:
    return candidates(
        model or recipe(),
        here or machine(),
        known or facts(),
        wishes or Wishes(),
        backend_recipe=backend_recipe,
        where="recipes/models/small.yaml:1",
        **{"shapes": {SOURCE: Shape(), BIG_SOURCE: Shape()}, **more},
    )


def refused(answer: object) -> Refusal:
    refusal: Refusal | None = getattr(answer, "refusal", None)
    assert refusal is not None
    assert refusal.hint
    return refusal


def because(candidate: Candidate, choice: str) -> str:
    return next(r.because for r in candidate.reasons if r.choice.startswith(choice))


def source(candidate: Candidate, choice: str) -> str:
    return next(r.source for r in candidate.reasons if r.choice.startswith(choice))


# -- machines with cards, and what FlexLab ships


def card(
    index: int = 0,
    arch: str = "gfx1100",
    total: int = 24 * GIB,
    vendor: Vendor = "amd",
    **more: Any,
) -> Gpu:
    """A card with nodes of its own (a real one's, by number); NVIDIA's with a driver of today."""
    slot = f"0000:{index + 3:02x}:00.0"
    facts: dict[str, Any] = {
        "index": index, "id": slot, "pool": slot, "pci_slot": slot, "vendor": vendor,
        "arch": arch, "name": f"{vendor} {arch}", "pool_total_bytes": total, "best": index == 0,
        "uuid": f"GPU-{index}", "driver_version": "580.65.06" if vendor == "nvidia" else None,
        "nodes": (
            *((DeviceNode(path="/dev/kfd", gid=992),) if vendor == "amd" else ()),
            DeviceNode(path=f"/dev/dri/renderD{128 + index}", gid=992),
        ),
    }  # fmt: skip
    return Gpu(**(facts | more))


def with_cards(*gpus: Gpu, ram: int = 64 * GIB, used: Mapping[str, int] | None = None) -> Machine:
    """A machine of these cards; `used` bytes by pool, nothing where none are named."""
    held = used or {}
    own = [
        Pool(id=part_id, kind="vram", total_bytes=size, used_bytes=held.get(part_id, 0))
        for gpu in gpus
        for part_id, size in (
            [(part.uuid, part.vram_total_bytes) for part in gpu.mig]
            or [(gpu.pool, gpu.pool_total_bytes)]
        )
        if part_id != "ram"
    ]
    host = Pool(id="ram", kind="ram", total_bytes=ram, used_bytes=held.get("ram", 0))
    return msgspec.structs.replace(machine(), gpus=gpus, pools=(host, *own))


def model_facts(model: ModelRecipe) -> Facts:
    """Docker, and every weight where it would be."""
    weights = [weight for variant in model.variants for weight in variant.plan_weights()]
    return Facts(
        runtimes={"docker": RuntimeFacts(name="docker", available=True)},
        weights={weight.source: "/models/here" for weight in weights},
    )


def ask_shipped(
    model: str | ModelRecipe,
    here: Machine,
    recipe_of: Callable[[str], BackendRecipe] = backend_recipe,
    **wishes: Any,
) -> Candidates:
    """What a model that FlexLab ships (or one for a test) could do on these cards, in docker."""
    known = shipped()
    chosen = known.resolve(model) if isinstance(model, str) else model
    return candidates(
        chosen,
        here,
        model_facts(chosen),
        Wishes(runtime="docker", **wishes),
        backend_recipe=recipe_of,
        gpu_recipe=known.gpu,
        certificates=known.certificates_of,
    )


def launched(candidate: Candidate, here: Machine) -> LaunchPlan:
    """A candidate with all that it needs granted."""
    return render(
        candidate,
        Grant(
            devices=candidate.devices,
            claims={need.pool: need.total_bytes for need in candidate.needs},
        ),
        machine=here,
        facts=model_facts(shipped().resolve(candidate.model)),
        backend_recipe=backend_recipe,
        gpu_recipe=shipped().gpu,
    )


def with_image(backend: str, *, evidence: str = "tested", **image: Any) -> BackendRecipe:
    """A backend as it is shipped, with one more image in front of the others."""
    recipe = backend_recipe(backend)
    block = {
        "choices": [
            {
                "platforms": ["linux/amd64"],
                "entrypoint": "image",
                "program": ["serve"],
                "port": 8000,
            }
            | image
        ],
        "evidence": evidence,
        "reason": "it was tried",
        "source": "a test",
        "date": "2026-01-31",
    }
    stated = recipe.model_dump(exclude_unset=True)
    return BackendRecipe.model_validate(stated | {"images": [block, *stated["images"]]})
