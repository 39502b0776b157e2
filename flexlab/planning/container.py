"""What a plan says of a container: its image's words, devices, folders and memory. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flexlab.backends.model_paths import MODELS_DIR, is_below
from flexlab.planning import images
from flexlab.planning.devices import Device
from flexlab.planning.environment import Environment, environment
from flexlab.planning.question import Locate, by_name
from flexlab.recipes.backend_schema import BackendRecipe, Container
from flexlab.recipes.gpu_schema import GpuRecipe
from flexlab.spec.plan import HOST, PORT, Candidate, Mount
from flexlab.spec.source import HfSource, PypiSource, parse_source

SLOTS = "slot_save_path"
ANY_ADDRESS = "0.0.0.0"
"""Inside its own network; outside it is published on the loopback only."""
_NOT_IN_A_NAME = re.compile(r"[^a-z0-9_.-]+")


class Parts(NamedTuple):
    """The container's part of a launch plan."""

    environment: Environment
    args: tuple[str, ...]
    mounts: tuple[Mount, ...]
    device_nodes: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    group_add: tuple[int, ...]
    shm_bytes: int | None
    port: int | None


def inside(source: str, container: Container) -> str:
    """Where weights of this source are in the container: a name that people recognise."""
    where = parse_source(source)
    if isinstance(where, HfSource):
        name = posixpath.basename(where.path) if where.path and where.is_file else where.repo
    elif isinstance(where, PypiSource):
        name = posixpath.basename(where.member)
    else:
        name = posixpath.basename(where.path)
    return posixpath.join(container.models, name)


def parts(
    candidate: Candidate,
    cards: Sequence[Device],
    backend: BackendRecipe,
    gpu: GpuRecipe | None,
    *,
    args: Iterable[str],
    own_env: Mapping[str, str],
    weights: Mapping[str, str],
    models_dir: str | None = None,
    locate: Locate = by_name,
) -> Parts:
    """`weights`: source -> path on this machine; `args`: the engine's words, with placeholders for
    what is always the same inside a container."""
    facts = images.facts_of(backend, candidate.image or "", cards[0].arch)
    port = facts.port if facts else _usual_port(backend)
    container = backend.container or _BARE
    fixed = {HOST: ANY_ADDRESS, PORT: str(port)}
    return Parts(
        environment=environment(
            backend.name, own_env, gpu, facts, devices=len(cards), locate=locate
        ),
        args=tuple(fixed.get(word, word) for word in args),
        mounts=tuple(_mounts(candidate, container, weights, models_dir)),
        device_nodes=tuple(dict.fromkeys(node for card in cards for node in _nodes(card))),
        gpu_uuids=tuple(uuid for card in cards for uuid in _uuids(card)),
        group_add=tuple(sorted({gid for card in cards for gid in _groups(card)})),
        shm_bytes=container.shm,
        port=port,
    )


def _usual_port(backend: BackendRecipe) -> int | None:
    return next((image.port for image, _ in backend.image_choices), None)


def _mounts(
    candidate: Candidate,
    container: Container,
    weights: Mapping[str, str],
    models_dir: str | None,
) -> Iterable[Mount]:
    targets = []
    for weight in candidate.weights:
        target = inside(weight.source, container)
        targets.append(target)
        yield Mount(source=weights[weight.source], target=target)
    for name in _named_below_models(candidate.settings, targets):
        place = posixpath.join(models_dir or MODELS_DIR, name)
        yield Mount(source=place, target=posixpath.join(MODELS_DIR, name))
    # A certified feature writes below the read-only weights: its own folder, and no other.
    if slots := candidate.settings.get(SLOTS):
        yield Mount(source=_volume("slots", candidate.model), target=str(slots), read_only=False)
    for target in container.writable:
        purpose = "cache" if target == container.cache else posixpath.basename(target) or "data"
        # What was compiled is right for one image and arch only.
        key = (candidate.image or "", candidate.arch) if purpose == "cache" else (candidate.model,)
        yield Mount(
            source=_volume(purpose, candidate.backend, *key), target=target, read_only=False
        )


def _named_below_models(settings: Mapping[str, object], covered: Iterable[str]) -> list[str]:
    """What settings name below /models beside the weights: files and folders right in it."""
    there = {target.removeprefix(MODELS_DIR + "/").partition("/")[0] for target in covered}
    found: dict[str, None] = {}
    for setting, value in settings.items():
        if setting == SLOTS or not isinstance(value, str):
            continue
        for path in value.split(","):
            if is_below(path, MODELS_DIR):
                name = path.removeprefix(MODELS_DIR + "/").partition("/")[0]
                if name not in there:
                    found[name] = None
    return list(found)


def _volume(*words: str) -> str:
    plain = (_NOT_IN_A_NAME.sub("-", word.lower()).strip("-.") for word in words)
    return "-".join(["flexlab", *plain])


def _nodes(device: Device) -> tuple[str, ...]:
    """AMD and Intel by their own nodes; NVIDIA's are its container toolkit's to give."""
    gpu = device.gpu
    return () if gpu is None or gpu.vendor == "nvidia" else tuple(node.path for node in gpu.nodes)


def _uuids(device: Device) -> tuple[str, ...]:
    gpu = device.gpu
    if gpu is None or gpu.vendor != "nvidia":
        return ()
    chosen = device.slice.uuid if device.slice else gpu.uuid
    return () if chosen is None else (chosen,)


def _groups(device: Device) -> set[int]:
    """Numbers, since an image has other names for them, or none."""
    nodes = device.gpu.nodes if device.gpu and device.gpu.vendor != "nvidia" else ()
    return {node.gid for node in nodes if node.gid is not None}


_BARE = Container(
    evidence="untested",
    reason="nothing is stated",
    source="the backend's recipe",
    date="2026-01-01",
)
