"""Why an NVIDIA card that is there cannot be used, in words, each with the next step."""

from __future__ import annotations

from flexlab.gpus import problems
from flexlab.gpus.nvidia_card import (
    DRIVER_NOT_LOADED,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    RESET_REQUIRED,
    TIMEOUT,
    VERSION_MISMATCH,
)
from flexlab.spec.machine import Problem

_DRIVER = (
    "install NVIDIA's driver of your distribution (nvidia-smi must list the card), then reboot"
)
_KERNEL_SAYS = "sudo dmesg | grep -i -e nvrm -e xid"
OF_ONE_CARD = frozenset({GPU_IS_LOST, RESET_REQUIRED, NO_PERMISSION})
"""Codes that NVML gives for one card while it shows others."""
_PASSED_ON = {"vfio-pci", "pci-stub", "xen-pciback"}


def for_driver(driver: str | None) -> Problem | None:
    """What the kernel driver that has the card means; None where it is NVIDIA's."""
    if driver == "nvidia":
        return None
    if driver in _PASSED_ON:
        return problems.passed_on()
    if driver in ("nouveau", "nova", "nova_core"):
        return Problem(
            code="nouveau_driver",
            message=f"the card runs on {driver}, which has no CUDA",
            hint=_DRIVER,
        )
    if driver is None:
        return problems.no_driver("NVIDIA", _DRIVER)
    return Problem(code="no_driver", message=f"its driver is {driver}, not nvidia", hint=_DRIVER)


def no_tegra_driver() -> Problem:
    """The device tree tells of a Tegra, and nothing in /dev is of NVIDIA's driver for it."""
    return Problem(
        code="no_driver",
        message="NVIDIA's driver of this board is not loaded (no /dev/nvmap)",
        hint="install JetPack (Jetson Linux) for this board; in a container: --runtime nvidia",
    )


def for_fault(code: int, loaded_version: str | None) -> Problem:
    """Why the driver shows no card at all, by NVML's return code."""
    if code == VERSION_MISMATCH:
        loaded = f" ({loaded_version} is loaded)" if loaded_version else ""
        return Problem(
            code="driver_mismatch",
            message="NVIDIA's driver was updated: its library and the loaded kernel module "
            f"differ{loaded}",
            hint="reboot; without one: stop all that uses the GPU, then sudo rmmod nvidia_uvm "
            "nvidia_drm nvidia_modeset nvidia && sudo modprobe nvidia",
        )
    if code in (LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND):
        return Problem(
            code="nvml_missing",
            message="the kernel has NVIDIA's driver, but its library libnvidia-ml.so.1 was not "
            "found",
            hint="install the driver's user part (libnvidia-compute or nvidia-utils); in a "
            "container: NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        )
    if code == DRIVER_NOT_LOADED:
        return Problem(
            code="no_driver",
            message="NVIDIA's driver is not loaded, or its files in /dev are not visible here",
            hint="sudo modprobe nvidia; in a container: pass the GPU on (--gpus all)",
        )
    if code in (GPU_IS_LOST, RESET_REQUIRED):
        return for_card(code)
    if code == NO_PERMISSION:
        return Problem(
            code="render_denied",
            message="NVIDIA's driver does not let this user ask for its cards",
            hint="ls -l /dev/nvidia* shows who may open them",
        )
    why = "does not answer" if code == TIMEOUT else f"shows no cards (NVML code {code})"
    return Problem(
        code="not_answering",
        message=f"NVIDIA's driver {why}",
        hint=f"{_KERNEL_SAYS}; a container that lost its GPU has to be made anew, not restarted",
    )


def for_card(code: int) -> Problem:
    """One card that the driver knows to be broken."""
    if code == RESET_REQUIRED:
        return Problem(
            code="reset_required",
            message="the card met a fault and has to be reset",
            hint="stop all that uses it, then sudo nvidia-smi --gpu-reset; else reboot",
        )
    return Problem(
        code="gpu_lost",
        message="the driver lost the card: it fell off the bus",
        hint=f"{_KERNEL_SAYS} shows when; reboot, then check power and seating",
    )


def not_shown() -> Problem:
    """Bound to a driver that works, and all the same not among the cards that it shows."""
    return Problem(
        code="gpu_lost",
        message="the driver has the card and does not show it here: it fell off the bus, or this "
        "container was not given it",
        hint=f"{_KERNEL_SAYS} shows which; in a container: pass the GPU on (--gpus all)",
    )


def excluded() -> Problem:
    """By the kernel module's parameter NVreg_ExcludedGpus."""
    return Problem(
        code="excluded",
        message="the driver is told to leave the card alone (NVreg_ExcludedGpus)",
        hint="grep -r ExcludedGpus /etc/modprobe.d shows where",
    )


def mig_empty(slot: str | None) -> Problem:
    """In MIG mode a card as such cannot be used, only its slices."""
    card = f" -i {slot}" if slot else ""
    return Problem(
        code="mig_empty",
        message="the card is in MIG mode and has no slices: nothing can run on it",
        hint=f"sudo nvidia-smi mig{card} -lgip lists profiles, sudo nvidia-smi mig{card} -cgi "
        f"PROFILE -C makes a slice; sudo nvidia-smi{card} -mig 0 ends MIG mode",
    )


def arch_unknown(name: str) -> Problem:
    """Newer than our tables, and the driver does not say it either."""
    return Problem(
        code="arch_unknown",
        message=f"the architecture of {name} is not known",
        hint="nvidia-smi --query-gpu=name,compute_cap --format=csv shows it",
    )
