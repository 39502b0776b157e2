"""What a backend recipe may say: what varies by an engine's image, version or build.

As in model recipes, every block carries its evidence. A backend's Python file knows the rest.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flexlab.core.fields import Bytes, Seconds
from flexlab.recipes.fields import (
    Arch,
    Code,
    EngineBuild,
    EnvName,
    Evidenced,
    HttpPath,
    ImageName,
    InsidePath,
    Name,
    RegularExpression,
    Sentence,
    Strict,
    Version,
)
from flexlab.spec.plan import OnDisconnect, Probe

CpuFlags = dict[Literal["x86_64", "aarch64"], tuple[str, ...]]
"""Per architecture, as /proc/cpuinfo writes them: what a build was compiled for."""


class Image(Strict):
    """A container image of an engine, and on what it runs."""

    image: ImageName

    archs: tuple[Arch, ...] = Field(min_length=1)
    """What it holds code for; `cpu` where it runs without a GPU."""

    platforms: tuple[Literal["linux/amd64", "linux/arm64"], ...] = Field(min_length=1)

    entrypoint: Literal["image", "command"]
    """image: it has its own entrypoint and gets arguments only; command: `program` is given."""

    program: tuple[str, ...] = ()
    """What starts the engine inside; needed to clear a variable that the image bakes in."""

    port: int = Field(ge=1, le=65535)
    """Inside the container."""

    build: EngineBuild | None = None
    """The engine's own version or build number (b8173, 0.12.3); unset: it moves with the tag."""

    cuda: Version | None = None
    rocm: Version | None = None
    driver_min: Version | None = None
    """NVIDIA driver branch that these archs need with this image."""

    cpu_flags: CpuFlags | None = None
    """Instructions that its engine uses without asking, per architecture; unset: any CPU will
    do."""

    env_baked: dict[EnvName, str] | None = None
    """Variables that its config sets; unset: nobody looked."""

    marks: tuple[Literal["gptq_shuffle_guarded"], ...] = ()
    """What a rule of a GPU recipe asks for; counts with evidence `tested` on a digest only."""

    private: bool = False
    """On a registry that strangers cannot pull from: never chosen without a certificate."""

    built_from: Name | None = None
    """Folder in compose/images: an image of our own, which has to be built first."""

    built_bytes: Bytes | None = None
    build_time: Seconds | None = None


class Images(Evidenced):
    """Images to choose from, the best first."""

    choices: tuple[Image, ...] = Field(min_length=1)


class Container(Evidenced):
    """What an engine in a container needs beside its image."""

    models: InsidePath = "/models"
    """Where its weights are mounted, read-only."""

    shm: Bytes | None = None
    """Shared memory; unset: the engine's default of 64 MiB is enough."""

    writable: tuple[InsidePath, ...] = ()
    """Folders that it must write to, beside /tmp."""

    cache: InsidePath | None = None
    """Where it keeps what it compiles; a volume, kept by image and arch."""


class Embedded(Evidenced):
    """What the engine inside FlexLab's own child process needs of a machine."""

    cpu_flags: CpuFlags
    """Per architecture, as /proc/cpuinfo writes them: what the build was compiled for."""

    archs: tuple[Arch, ...] = ("cpu",)
    """What the build holds code for."""

    libraries: tuple[str, ...] = ()
    """Shared libraries that are not part of the package."""


class Times(Evidenced):
    """Default limits of a start and a stop; a start is renewed by progress."""

    start_timeout: Seconds
    stop_timeout: Seconds


class Ready(Evidenced):
    """The HTTP question that tells loading from ready; the backend reads the answer."""

    path: HttpPath
    interval: Seconds = 0.1
    timeout: Seconds = 3.0

    def probe(self) -> Probe:
        """As a launch plan holds it."""
        return Probe(path=self.path, interval_s=self.interval, timeout_s=self.timeout)


class Clients(Evidenced):
    """What happens to work whose client has left."""

    abort: Literal["always", "stream_only", "never"]
    """stream_only: the engine notices only while it streams, so it is asked with stream=true."""

    on_disconnect: OnDisconnect
    """cancel: close the connection to the engine; drain: let it end its answer."""


class Routes(Evidenced):
    """The allow-list: whatever is not named here is never passed on."""

    allow: tuple[HttpPath, ...] = Field(min_length=1)
    metrics: HttpPath | None = None
    """Where tokens per second are read, for ourselves."""


class Memory(Evidenced):
    """What an engine takes beside weights and KV cache."""

    overhead: Bytes


class Driver(Evidenced):
    """What the driver and the kernels of one program take of a GPU, where `memory.overhead` is in
    the host's RAM."""

    bytes: Bytes


class Environment(Evidenced):
    """Variables that every start of the engine gets."""

    variables: dict[EnvName, str]


class ErrorPattern(Strict):
    """A line of an engine's log that tells why it failed."""

    match: RegularExpression
    """Searched in each line."""

    code: Code
    message: Sentence
    """For people; `{line}` becomes the line itself."""

    hint: Sentence
    """What to do, best as a command."""


class Errors(Evidenced):
    """Known failures, the most precise first."""

    patterns: tuple[ErrorPattern, ...] = Field(min_length=1)


class BackendRecipe(Strict):
    """What varies by an engine's image, version or build; its Python file knows the rest."""

    name: Name
    aliases: tuple[Name, ...] = ()
    description: Sentence
    times: Times
    ready: Ready
    clients: Clients
    routes: Routes
    memory: Memory
    driver: Driver | None = None
    environment: tuple[Environment, ...] = ()
    errors: tuple[Errors, ...] = ()
    embedded: Embedded | None = None
    images: tuple[Images, ...] = ()
    container: Container | None = None

    @property
    def env(self) -> dict[str, str]:
        """All variables of all blocks; a later block wins."""
        return {
            name: value for block in self.environment for name, value in block.variables.items()
        }

    @property
    def image_choices(self) -> tuple[tuple[Image, Images], ...]:
        """Every image with the block that holds its evidence, in order of preference."""
        return tuple((image, block) for block in self.images for image in block.choices)

    @property
    def patterns(self) -> tuple[ErrorPattern, ...]:
        """All known failures, in the order of the file."""
        return tuple(pattern for block in self.errors for pattern in block.patterns)
