"""Which container image runs an engine on a device, and why the others do not. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flexlab.planning.devices import Device
from flexlab.recipes.backend_schema import BackendRecipe, Image, Images
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Reason

ASSUMED_PLATFORM = "linux/amd64"


class Chosen(NamedTuple):
    """An image, what is known of it, and what a plan has to say about the choice."""

    name: str | None
    """None: none fits, as `problems` say; without any: the runtime starts no image."""
    facts: Image | None
    """None for an image of the user's that no recipe knows."""
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Problem, ...] = ()
    tested: bool = False
    """Somebody ran this image: what a mark on it needs to count."""


def choose(
    backend: BackendRecipe,
    device: Device,
    *,
    platform: str | None,
    wish: str | None = None,
    bound: str | None = None,
    where: str = "",
) -> Chosen:
    """The image for `device`: the user's, else the one that a certificate binds, else the first
    of the recipe's that holds code for its arch, runs on the platform and suits the driver."""
    if wish is not None:
        return _asked_for(backend, device, wish)
    if bound is not None:
        reason = Reason(choice=f"image {bound}", because="a certificate binds it", source=where)
        return Chosen(
            bound, facts_of(backend, bound, device.arch), (reason,), _notes(backend, bound)
        )
    against: list[Problem] = []
    for image, block in backend.image_choices:
        if image.private or device.arch is None or device.arch not in image.archs:
            continue
        problem = _unfit(image, device, platform or ASSUMED_PLATFORM)
        if problem is not None:
            against.append(problem)
            continue
        told = _reasons(image, block, where, against)
        return Chosen(image.image, image, told, _costs(image), block.evidence == "tested")
    return Chosen(None, None, problems=tuple(against) or (_none(backend, device),))


def facts_of(backend: BackendRecipe, name: str, arch: str | None) -> Image | None:
    """What the recipe knows of an image, preferably of its use on `arch`."""
    known = [image for image, _ in backend.image_choices if image.image == name]
    return next((image for image in known if arch in image.archs), known[0] if known else None)


def is_older(version: str | None, floor: str | None) -> bool:
    """Whether a version is known and below `floor`; unknown is never a reason to refuse."""
    if version is None or floor is None:
        return False
    try:
        return _numbers(version) < _numbers(floor)
    except ValueError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _asked_for(backend: BackendRecipe, device: Device, wish: str) -> Chosen:
    reason = Reason(choice=f"image {wish}", because="asked for", source="option --image")
    return _known(backend, device, wish, reason)


def _known(backend: BackendRecipe, device: Device, name: str, reason: Reason) -> Chosen:
    facts = facts_of(backend, name, device.arch)
    tested = any(
        image is facts and block.evidence == "tested" for image, block in backend.image_choices
    )
    return Chosen(name, facts, (reason,), _notes(backend, name), tested)


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


def _unfit(image: Image, device: Device, platform: str) -> Problem | None:
    if platform not in image.platforms:
        return Problem(
            code="image_platform",
            message=f"{image.image} is built for {', '.join(image.platforms)}, "
            f"and this machine is {platform}",
            hint="flexlab plan with another --backend, or --image with one built for it",
        )
    driver = device.gpu.driver_version if device.gpu else None
    if is_older(driver, image.driver_min):
        return Problem(
            code="driver_too_old",
            message=f"{image.image} needs the NVIDIA driver {image.driver_min} on {device.arch}, "
            f"and this one is {driver}",
            hint=f"update the driver to {image.driver_min} or newer",
        )
    return None


def _reasons(
    image: Image, block: Images, where: str, against: Iterable[Problem]
) -> tuple[Reason, ...]:
    passed_over = [
        Reason(choice="not the image before it", because=problem.message, source=where)
        for problem in against
    ]
    because = f"{block.reason.removesuffix('.')} ({block.evidence}, {block.date})"
    return (*passed_over, Reason(choice=f"image {image.image}", because=because, source=where))


def _costs(image: Image) -> tuple[Problem, ...]:
    if image.built_from is None:
        return ()
    size = f", {image.built_bytes / 1e9:.0f} GB" if image.built_bytes else ""
    time = f", about {image.build_time / 60:.0f} minutes" if image.build_time else ""
    return (
        Problem(
            code="image_build_needed",
            message=f"{image.image} is an image of our own that nobody publishes: "
            f"it is built once{size}{time}",
            hint=f"docker build -t {image.image} compose/images/{image.built_from}",
        ),
    )


def _none(backend: BackendRecipe, device: Device) -> Problem:
    return Problem(
        code="no_image",
        message=f"no image of {backend.name} is known that holds code for "
        f"{device.arch or 'an unknown arch'} ({device.shown})",
        hint="--image names one of your own; flexlab plan with another --backend",
    )
