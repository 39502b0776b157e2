"""Which container image runs an engine on a device, and why the others do not. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexlab.planning import cpus
from flexlab.planning.devices import Device, shown
from flexlab.planning.question import Locate, by_name
from flexlab.recipes.backend_schema import BackendRecipe, Image, Images
from flexlab.spec.machine import Cpu, Problem
from flexlab.spec.plan import Evidence, Reason

ASSUMED_PLATFORM = "linux/amd64"
_BUILD_IN_TAG = re.compile(r":(?:[\w.-]*-)?([bv]?[0-9]{4,}|v?[0-9]+\.[0-9]+\.[0-9]+)\b")
"""`server-b8173`, `v0.19.0`, `0.12.3-rocm`."""


class Chosen(NamedTuple):
    """An image, what is known of it, and what a plan has to say about the choice."""

    name: str | None
    """None: none fits, as `problems` say; without any: the runtime starts no image."""
    facts: Image | None
    """None for an image of the user's that no recipe knows."""
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Problem, ...] = ()
    """What has to be said of it; without a name, why none fits."""
    tested: bool = False
    """Somebody ran this image on this arch: what a mark on it needs to count."""
    evidence: Evidence = "tested"
    refused: tuple[Problem, ...] = ()
    """Why the image that was asked for cannot run this model."""


def choose(
    backend: BackendRecipe,
    cards: Sequence[Device],
    *,
    platform: str | None,
    cpu: Cpu | None = None,
    wish: str | None = None,
    bound: str | None = None,
    engine_min: str | None = None,
    locate: Locate = by_name,
) -> Chosen:
    """The image for `cards`: the user's, else the one that a certificate binds, else the first
    of the recipe's that holds code for their archs, runs on the platform, suits the driver and the
    CPU, and has an engine that is new enough for the model. `cpu` None: unknown suits."""
    if wish is not None:
        return _asked_for(backend, cards, wish, platform or ASSUMED_PLATFORM, cpu, engine_min)
    if bound is not None:
        reason = Reason(
            choice=f"image {bound}", because="a certificate binds it", source=locate(backend)
        )
        return _known(backend, cards, bound, reason)
    against: list[Problem] = []
    passed_over: list[Reason] = []
    archs = {card.arch for card in cards}
    for image, block, at in _choices(backend):
        if image.private or None in archs or not archs <= set(image.archs):
            continue
        where = locate(backend, "images", at)
        problem = _unfit(image, cards, platform or ASSUMED_PLATFORM, cpu, engine_min)
        if problem is not None:
            against.append(problem)
            passed_over.append(
                Reason(choice=f"not {image.image}", because=problem.message, source=where)
            )
            continue
        told = _reason(image, block, cards, platform or ASSUMED_PLATFORM, where)
        return Chosen(
            image.image,
            image,
            (*passed_over, told),
            _costs(image),
            block.evidence == "tested",
            block.evidence,
        )
    return Chosen(None, None, problems=tuple(against) or (_none(backend, cards),))


def _choices(backend: BackendRecipe) -> Iterator[tuple[Image, Images, int]]:
    for at, block in enumerate(backend.images):
        for image in block.choices:
            yield image, block, at


def facts_of(backend: BackendRecipe, name: str, arch: str | None) -> Image | None:
    """What the recipe knows of an image, preferably of its use on `arch`.

    Another tag of a repository that it knows starts like the others; its tag may tell the build.
    """
    known = [image for image, _ in backend.image_choices if image.image == name]
    if known:
        return next((image for image in known if arch in image.archs), known[0])
    alike = [
        image
        for image, _ in backend.image_choices
        if repository(image.image) == repository(name) and not image.private and arch in image.archs
    ]
    if not alike:
        return None
    build = _BUILD_IN_TAG.search(name)
    changes = {
        "image": name,
        "build": build[1] if build else None,
        "marks": (),
        "driver_min": None,
        "cpu_flags": None,
        "built_from": None,
    }
    return alike[0].model_copy(update=changes)


def repository(image: str) -> str:
    """Without tag and digest, and with the registry that is meant where none is named."""
    name = image.partition("@")[0]
    first, _, last = name.rpartition("/")
    plain = f"{first}/{last.partition(':')[0]}" if first else last.partition(":")[0]
    return plain.removeprefix("docker.io/")


def is_older(version: str | None, floor: str | None) -> bool:
    """Whether a version or build is known and below `floor`; unknown is no reason to refuse."""
    if version is None or floor is None:
        return False
    try:
        return _numbers(version) < _numbers(floor)
    except ValueError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """Of `12.8` as of `b8173` and `v0.19.0`."""
    return tuple(int(part) for part in version.lstrip("bv").split("."))


def _asked_for(
    backend: BackendRecipe,
    cards: Sequence[Device],
    wish: str,
    platform: str,
    cpu: Cpu | None,
    engine_min: str | None,
) -> Chosen:
    """The user's choice counts; what is known to fail is refused all the same."""
    reason = Reason(choice=f"image {wish}", because="asked for", source="option --image")
    chosen = _known(backend, cards, wish, reason)
    facts, arch = chosen.facts, cards[0].arch
    if facts is None:
        return chosen
    if arch in facts.archs:
        unfit = _unfit(facts, cards, platform, cpu, engine_min)
        return chosen._replace(refused=(unfit,) if unfit else ())
    archs = [one for image, _, _ in _choices(backend) if image.image == wish for one in image.archs]
    told = Problem(
        code="image_arch",
        message=f"{wish} is not known to hold code for {arch or 'an unknown arch'}; "
        f"it is there for {', '.join(dict.fromkeys(archs))}",
        hint="leave out --image, and one that does is chosen",
    )
    old = _too_old(facts, engine_min)
    return chosen._replace(problems=(*chosen.problems, told), refused=(old,) if old else ())


def _known(backend: BackendRecipe, cards: Sequence[Device], name: str, reason: Reason) -> Chosen:
    arch = cards[0].arch
    facts = facts_of(backend, name, arch)
    blocks = [block for image, block, _ in _choices(backend) if image is facts]
    known: Evidence = blocks[0].evidence if blocks else "untested"
    # What was seen on one arch says nothing of another.
    evidence: Evidence = known if facts is not None and arch in facts.archs else "untested"
    return Chosen(name, facts, (reason,), _notes(backend, name), evidence == "tested", evidence)


def _notes(backend: BackendRecipe, name: str) -> tuple[Problem, ...]:
    facts = facts_of(backend, name, None)
    if facts is None or not facts.private:
        return ()
    registry = name.partition("/")[0]
    return (
        Problem(
            code="image_private",
            message=f"{name} is on the private registry {registry}: "
            "only who has an account there can pull it",
            hint=f"docker login {registry}, or leave the certified feature out",
        ),
    )


def _unfit(
    image: Image,
    cards: Sequence[Device],
    platform: str,
    cpu: Cpu | None,
    engine_min: str | None,
) -> Problem | None:
    if platform not in image.platforms:
        return Problem(
            code="image_platform",
            message=f"{image.image} is built for {', '.join(image.platforms)}, "
            f"and this machine is {platform}",
            hint="flexlab plan with another --backend, or --image with one built for it",
        )
    if image.rocm is not None and (problem := _without_kfd(cards)) is not None:
        return problem
    driver = cards[0].gpu.driver_version if cards[0].gpu else None
    if is_older(driver, image.driver_min):
        return Problem(
            code="driver_too_old",
            message=f"{image.image} needs the NVIDIA driver {image.driver_min} on "
            f"{cards[0].arch}, and this one is {driver}",
            hint=f"update the driver to {image.driver_min} or newer; flexlab recipes lists what "
            "runs with this one",
        )
    return _cpu_too_old(image, cpu, platform) or _too_old(image, engine_min)


def _cpu_too_old(image: Image, cpu: Cpu | None, platform: str | None) -> Problem | None:
    needed = {str(arch): flags for arch, flags in (image.cpu_flags or {}).items()}
    missing = cpus.missing_flags(needed, cpu, platform)
    if cpu is None or not missing:
        return None
    return Problem(
        code="image_cpu_flags",
        message=f"{image.image} is compiled for {', '.join(missing)}, which {cpus.called(cpu)} "
        "lacks",
        hint="leave out --image, and one for older CPUs is chosen where there is one; a virtual "
        "machine may hide flags that its host has (choose the CPU type host)",
    )


def _without_kfd(cards: Sequence[Device]) -> Problem | None:
    """ROCm would find no card, and most engines then run on the CPU without a word."""
    found = (problem for card in cards if card.gpu for problem in card.gpu.problems)
    return next((problem for problem in found if problem.code == "no_kfd"), None)


def _too_old(image: Image, engine_min: str | None) -> Problem | None:
    if not is_older(image.build, engine_min):
        return None
    return Problem(
        code="engine_too_old",
        message=f"{image.image} holds build {image.build}, and this model needs {engine_min}",
        hint=f"--image with one of build {engine_min} or newer, or another --backend",
    )


def _reason(
    image: Image, block: Images, cards: Sequence[Device], platform: str, where: str
) -> Reason:
    archs = " and ".join(dict.fromkeys(card.arch or "?" for card in cards))
    because = (
        f"it holds code for {archs} on {platform}. {block.reason.removesuffix('.')} "
        f"({block.evidence}, {block.date})"
    )
    return Reason(choice=f"image {image.image}", because=because, source=where)


def _costs(image: Image) -> tuple[Problem, ...]:
    if image.built_from is None:
        return ()
    size = f", {_round_bytes(image.built_bytes)}" if image.built_bytes else ""
    time = f", about {_round_seconds(image.build_time)}" if image.build_time else ""
    return (
        Problem(
            code="image_build_needed",
            message=f"{image.image} is an image of our own that nobody publishes: "
            f"it is built once{size}{time}",
            hint=f"compose/images/{image.built_from}/build builds it",
        ),
    )


def _round_bytes(size: int) -> str:
    return f"{size / 1e9:.0f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _round_seconds(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} seconds"


def _none(backend: BackendRecipe, cards: Sequence[Device]) -> Problem:
    return Problem(
        code="no_image",
        message=f"no image of {backend.name} is known that holds code for "
        f"{cards[0].arch or 'an unknown arch'} ({shown(cards)})",
        hint="--image names one of your own; flexlab plan with another --backend",
    )
