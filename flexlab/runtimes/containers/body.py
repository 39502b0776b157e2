"""A launch plan as the engine's API wants it. Pure.

Published on the loopback only, no privileges, only the devices of the plan, weights read-only; the
engine never restarts it by itself, since who runs is the scheduler's decision.
"""

from __future__ import annotations

from typing import Any, Literal

from flexlab import __version__
from flexlab.spec.instance import Launch
from flexlab.spec.plan import API_KEY_FILE, LaunchPlan

LABEL_INSTANCE = "flexlab.instance"
LABEL_OWNER = "flexlab.owner"
LABEL_PLAN = "flexlab.plan"
LABEL_VERSION = "flexlab.version"
LABEL_MODEL = "flexlab.model"
LABEL_LOG = "flexlab.log"
"""Where its last lines are kept once it is gone."""
KEY_FOLDER, KEY_NAME = ".flexlab", "api-key"
KEY_PATH = f"/{KEY_FOLDER}/{KEY_NAME}"
"""Inside, where the key between gateway and engine is laid before the start."""
LOOPBACK = "127.0.0.1"
LOG_OPTIONS = {"max-size": "8m", "max-file": "2"}

GpuWay = Literal["nvidia", "cdi"]
"""How NVIDIA devices are handed over: by the engine's own runtime, or by CDI names."""


def name_of(instance: str) -> str:
    """The container's name, for people who look with `docker ps`."""
    return f"flexlab-{instance}"


def labels(plan: LaunchPlan, launch: Launch) -> dict[str, str]:
    """By which it is found again, and known to be ours."""
    return {
        LABEL_INSTANCE: launch.instance,
        LABEL_OWNER: launch.installation,
        LABEL_PLAN: plan.hash,
        LABEL_VERSION: __version__,
        LABEL_MODEL: plan.model,
        LABEL_LOG: launch.log_path,
    }


def wants_key(plan: LaunchPlan) -> bool:
    """Whether the engine takes a key."""
    return API_KEY_FILE in (*(plan.command or ()), *plan.args)


def create_body(
    plan: LaunchPlan,
    launch: Launch,
    *,
    gpu_way: GpuWay = "nvidia",
    host_port: int = 0,
    init: bool = False,
) -> dict[str, Any]:
    """For POST /containers/create. `host_port` 0: the engine takes a free one; `init`: it has a
    small first process, without which a program that handles no SIGTERM ignores it as number 1."""
    port = f"{plan.port}/tcp"
    words = [KEY_PATH if word == API_KEY_FILE else word for word in plan.args]
    body: dict[str, Any] = {
        "Image": plan.image,
        "Cmd": words,
        "Env": [f"{name}={value}" for name, value in plan.env.items()],
        "ExposedPorts": {port: {}},
        "Labels": labels(plan, launch),
        "HostConfig": _host(plan, port, host_port, gpu_way, init),
    }
    if plan.command is not None:
        body["Entrypoint"] = list(plan.command)
    return body


def _host(
    plan: LaunchPlan, port: str, host_port: int, gpu_way: GpuWay, init: bool
) -> dict[str, Any]:
    host: dict[str, Any] = {
        "PortBindings": {port: [{"HostIp": LOOPBACK, "HostPort": str(host_port or "")}]},
        "Mounts": [
            {
                "Type": "bind" if mount.source.startswith("/") else "volume",
                "Source": mount.source,
                "Target": mount.target,
                "ReadOnly": mount.read_only,
            }
            for mount in plan.mounts
        ],
        "Devices": [
            {"PathOnHost": node, "PathInContainer": node, "CgroupPermissions": "rwm"}
            for node in plan.device_nodes
        ],
        "GroupAdd": [str(gid) for gid in plan.group_add],
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": LOG_OPTIONS},
    }
    if init:
        host["Init"] = True
    if plan.shm_bytes is not None:
        host["ShmSize"] = plan.shm_bytes
    if plan.gpu_uuids:
        host["DeviceRequests"] = [_gpu_request(plan.gpu_uuids, gpu_way)]
    return host


def _gpu_request(uuids: tuple[str, ...], way: GpuWay) -> dict[str, Any]:
    if way == "cdi":
        return {"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={uuid}" for uuid in uuids]}
    return {"Driver": "nvidia", "DeviceIDs": list(uuids), "Capabilities": [["gpu"]]}
