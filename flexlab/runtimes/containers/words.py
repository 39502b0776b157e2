"""What an engine's refusals mean, in one sentence with its mend. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from flexlab.core.errors import LaunchError
from flexlab.core.text import clean_line


class Known(NamedTuple):
    """One refusal that is told apart."""

    match: str
    code: str
    message: str
    hint: str


# Searched in this order, in the engine's own message, without regard to case.
KNOWN = (
    Known(
        r"could not select device driver|unknown or invalid runtime name: nvidia|"
        r"nvidia-container-cli|unknown runtime specified nvidia",
        "no_nvidia_runtime",
        "this engine cannot hand over NVIDIA GPUs: the NVIDIA Container Toolkit is missing",
        "install nvidia-container-toolkit, then: sudo nvidia-ctk runtime configure "
        "--runtime=docker && sudo systemctl restart docker",
    ),
    Known(
        r"unresolvable CDI devices|CDI device injection failed",
        "no_cdi_device",
        "the engine does not know this GPU by CDI",
        "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml",
    ),
    Known(
        r"error gathering device information while adding custom device \"([^\"]+)\"",
        "device_missing",
        "a device of the plan is not there for the engine: {0}",
        "flexlab gpus says whether the driver is loaded; a new login or a reboot may be due",
    ),
    Known(
        r"port is already allocated|address already in use",
        "port_taken",
        "the port was taken by another program",
        "try again",
    ),
    Known(
        r"no space left on device",
        "no_space",
        "the engine's disk is full",
        "docker system df; flexlab images ls",
    ),
    Known(
        r"bind source path does not exist: (\S+)|mount source path '?([^' ]+)'? .*does not exist",
        "mount_missing",
        "a folder or file to mount is not there for the engine: {0}",
        "is the engine rootless, or another machine's? flexlab doctor",
    ),
    Known(
        r"no such image|manifest unknown|not found: manifest",
        "no_image",
        "the engine does not have the image",
        "flexlab up MODEL fetches it",
    ),
    Known(
        r"exec: \"([^\"]+)\": (?:executable file not found|stat )",
        "no_program",
        "the image has no program {0}",
        "--image names another one; flexlab plan shows what is started",
    ),
)


def text_of(error: BaseException) -> str:
    """The engine's own words, without the SDK's URL around them."""
    return clean_line(str(getattr(error, "explanation", None) or error))


def launch_error(model: str, text: str) -> LaunchError:
    """The engine's refusal of a create or a start."""
    plain = clean_line(text)
    for known in KNOWN:
        found = re.search(known.match, plain, re.IGNORECASE)
        if found:
            part = next((group for group in found.groups() if group), "")
            message = known.message.format(part)
            return LaunchError(f"{model}: {message}", known.hint, code=known.code)
    return LaunchError(f"the container engine refused {model}: {plain[:300]}", "flexlab doctor")


def pull_problem(image: str, status: int | None, text: str) -> tuple[str, str, str]:
    """(code, message, hint) of a pull that failed. `status`: of the engine's HTTP answer."""
    plain = clean_line(text)
    registry = image.partition("/")[0] if "." in image.partition("/")[0] else "docker.io"
    if re.search(r"toomanyrequests|too many requests|429", plain, re.IGNORECASE):
        return (
            "registry_limit",
            f"{registry} lets nobody from here pull for now (429): {image}",
            f"docker login {registry}, or try again in an hour",
        )
    if re.search(r"unauthorized|authentication required|denied|forbidden", plain, re.IGNORECASE):
        return (
            "registry_denied",
            f"{registry} does not give {image} to this user, or has no such image",
            f"docker login {registry}",
        )
    if status == 404 or re.search(r"manifest unknown|not found|no such", plain, re.IGNORECASE):
        return (
            "image_missing",
            f"{registry} has no {image}",
            "--image names another one; flexlab plan shows what else would run",
        )
    if re.search(r"no space left", plain, re.IGNORECASE):
        return "no_space", f"the engine's disk is full: {image}", "docker system df"
    if re.search(
        r"no such host|connection refused|network is unreachable|timeout|i/o timeout|dial tcp",
        plain,
        re.IGNORECASE,
    ):
        return (
            "registry_unreachable",
            f"{registry} cannot be reached from the engine: {plain[:160]}",
            "is there a network, or a proxy for dockerd? What came so far is kept",
        )
    return (
        "pull_failed",
        f"pulling {image} broke off: {plain[:200]}",
        "try again: layers that are complete are not fetched twice",
    )
