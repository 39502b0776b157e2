"""One card as NVML tells it: every call by itself, so that one that fails changes nothing else.

A call is made by its name on the module that is passed in: old drivers lack new calls, and another
package (nvidia-ml-py3) provides an older module under the same name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from flexlab.core.text import clean_line
from flexlab.gpus.arch import sm_name
from flexlab.gpus.bus import plain_slot
from flexlab.gpus.nvidia_card import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    RESET_REQUIRED,
    UNKNOWN_ERROR,
    DriverCard,
    Process,
    throttle_words,
)
from flexlab.spec.machine import MigSlice

# Arguments of NVML (nvml.h).
_SENSOR_GPU = 0
_CLOCK_SM, _CLOCK_MEMORY = 1, 2
_FIELD_MEMORY_TEMPERATURE = 82
_NO_INSTANCE = 0xFFFFFFFF
_BAD = frozenset({GPU_IS_LOST, RESET_REQUIRED})
_PROFILE = re.compile(r"MIG (\S+)$")


class Device:
    """One card, or NVML itself. A call that fails gives None and leaves its code in `errors`."""

    def __init__(self, nvml: ModuleType, handle: Any = None) -> None:
        self.nvml = nvml
        self.errors: set[int] = set()
        self._arguments = () if handle is None else (handle,)

    def get(self, name: str, *arguments: Any) -> Any:
        """The call `name` for this card."""
        function = getattr(self.nvml, name, None)
        if function is None:
            self.errors.add(FUNCTION_NOT_FOUND)
            return None
        try:
            return function(*self._arguments, *arguments)
        except self.nvml.NVMLError as error:
            self.errors.add(code_of(error))
        except ValueError:  # a name that is no UTF-8
            self.errors.add(UNKNOWN_ERROR)
        return None

    @property
    def fault(self) -> int | None:
        """GPU_IS_LOST or RESET_REQUIRED, if any call said so."""
        return min(self.errors & _BAD, default=None)


def read_card(device: Device, number: int) -> DriverCard:
    """Everything about one card."""
    live = read_live(device)
    capability = device.get("nvmlDeviceGetCudaComputeCapability")
    pci = device.get("nvmlDeviceGetPciInfo")
    pci_id = getattr(pci, "pciDeviceId", 0) or 0
    minor = device.get("nvmlDeviceGetMinorNumber")
    return live._replace(
        number=number,
        name=text_of(device.get("nvmlDeviceGetName")),
        uuid=text_of(device.get("nvmlDeviceGetUUID")),
        slot=_bus_id(pci),
        # The device is the upper half, the vendor the lower one.
        pci_id=f"10de:{pci_id >> 16:04x}" if pci_id & 0xFFFF == 0x10DE else None,
        arch=sm_name(*capability) if capability and capability[0] > 0 else None,
        minor=minor if isinstance(minor, int) else None,
        fault=device.fault,
    )


def read_live(device: Device) -> DriverCard:
    """What changes from one reading to the next."""
    in_mig_mode = is_mig(device)
    slices = tuple(_slices(device)) if in_mig_mode else ()
    numbers = dict(_numbers(device))
    bits = device.get("nvmlDeviceGetCurrentClocksEventReasons")
    if bits is None:  # its name up to driver 530
        bits = device.get("nvmlDeviceGetCurrentClocksThrottleReasons")
    return DriverCard(
        number=-1,
        is_mig=in_mig_mode,
        slices=slices,
        numbers=numbers,
        throttle=throttle_words(bits or 0),
        fault=device.fault,
    )


def _numbers(device: Device) -> Iterator[tuple[str, float]]:
    yield from _memory(device).items()
    rates = device.get("nvmlDeviceGetUtilizationRates")
    if rates is not None:
        yield "busy_percent", float(rates.gpu)
        yield "memory_busy_percent", float(rates.memory)
    for name, call, arguments, divisor in (
        ("power_w", "nvmlDeviceGetPowerUsage", (), 1000),
        ("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", (), 1000),
        ("clock_core_mhz", "nvmlDeviceGetClockInfo", (_CLOCK_SM,), 1),
        ("clock_memory_mhz", "nvmlDeviceGetClockInfo", (_CLOCK_MEMORY,), 1),
        ("fan_percent", "nvmlDeviceGetFanSpeed", (), 1),
        ("fan_rpm", "nvmlDeviceGetFanSpeedRPM", (), 1),
        ("temp_gpu_c", "nvmlDeviceGetTemperature", (_SENSOR_GPU,), 1),
    ):
        value = device.get(call, *arguments)
        if value is not None:
            yield name, value / divisor
    fields = device.get("nvmlDeviceGetFieldValues", [_FIELD_MEMORY_TEMPERATURE])
    if fields and fields[0].nvmlReturn == 0 and fields[0].value.uiVal:  # 0: no sensor
        yield "temp_mem_c", float(fields[0].value.uiVal)


def _memory(device: Device) -> dict[str, int]:
    """Version 2 keeps what the driver holds back apart; version 1 counts it as used."""
    version = getattr(device.nvml, "nvmlMemory_v2", None)
    memory = device.get("nvmlDeviceGetMemoryInfo", version) if version else None
    if memory is None:
        memory = device.get("nvmlDeviceGetMemoryInfo")
    if memory is None or not memory.total:
        return {}
    found = {"vram_total_bytes": memory.total, "vram_used_bytes": memory.used}
    reserved = getattr(memory, "reserved", None)
    return found if reserved is None else {**found, "vram_reserved_bytes": reserved}


def is_mig(device: Device) -> bool:
    """Whether it is cut into slices now."""
    mode = device.get("nvmlDeviceGetMigMode")
    return bool(mode) and mode[0] == 1  # [now, after the next reset]


def slice_devices(device: Device) -> Iterator[Device]:
    """Its MIG slices."""
    for number in range(device.get("nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = Device(device.nvml).get(
            "nvmlDeviceGetMigDeviceHandleByIndex", *device._arguments, number
        )
        if handle is not None:  # numbers have gaps
            yield Device(device.nvml, handle)


def _slices(device: Device) -> Iterator[MigSlice]:
    for part in slice_devices(device):
        uuid = text_of(part.get("nvmlDeviceGetUUID"))
        if uuid is None:
            continue
        memory = _memory(part)
        profile = _PROFILE.search(text_of(part.get("nvmlDeviceGetName")) or "")
        yield MigSlice(
            uuid=uuid,
            gi=part.get("nvmlDeviceGetGpuInstanceId"),
            profile=profile[1] if profile else None,
            vram_total_bytes=memory.get("vram_total_bytes"),
            vram_used_bytes=memory.get("vram_used_bytes"),
        )


def processes_of(device: Device) -> Iterator[Process]:
    """One entry for each kind of context that a process has on it."""
    for kind in ("Compute", "Graphics", "MPSCompute"):
        call = f"nvmlDeviceGet{kind}RunningProcesses"
        entries = device.get(f"{call}_v3")
        if entries is None:  # driver 510 and older
            entries = device.get(f"{call}_v2")
        for entry in entries or []:
            gi = getattr(entry, "gpuInstanceId", None)
            yield Process(
                pid=entry.pid,
                vram_bytes=entry.usedGpuMemory,
                gi=None if gi == _NO_INSTANCE else gi,
            )


def slot_of(device: Device) -> str | None:
    """Its PCI slot, as sysfs writes it."""
    return _bus_id(device.get("nvmlDeviceGetPciInfo"))


def _bus_id(pci: Any) -> str | None:
    try:
        return plain_slot(text_of(getattr(pci, "busId", None)))
    except ValueError:  # the binding decodes it, whatever it holds
        return None


def cuda_version(number: int | None) -> str | None:
    """12080 is 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def text_of(value: str | bytes | None) -> str | None:
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return clean_line(text or "")[:120] or None


def code_of(error: Exception) -> int:
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else UNKNOWN_ERROR
