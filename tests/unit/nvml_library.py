"""A stand-in for libnvidia-ml.so.1, below the real package nvidia-ml-py.

pynvml looks up functions of the library by name and passes ctypes arguments to them; here they are
Python functions that fill them in. So the binding, its structs and its errors are the real ones;
what a real driver answers is not proven by it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

Code = int
Process = tuple[int, int | None]
"""pid, bytes."""


@dataclass
class FakeCard:
    """What the library says of one card, or of one MIG slice; None: not supported."""

    name: str = "NVIDIA GeForce RTX 3090"
    uuid: str = "GPU-0"
    bus_id: str | None = "00000000:01:00.0"
    device_id: int = 0x220410DE
    capability: tuple[int, int] | None = (8, 6)
    minor: int | None = 0
    total: int | None = 24 << 30
    used: int = 1 << 30
    reserved: int = 300 << 20
    numbers: dict[str, int] = field(default_factory=dict)
    """Call -> value, for calls that return one."""
    temperature_memory: int | None = None
    reasons: int = 0
    mig: bool = False
    slices: list[FakeCard | None] = field(default_factory=list)
    gi: int | None = None
    processes: dict[str, list[Process]] = field(default_factory=dict)
    fails: Code | None = None
    """Every call gives this code."""
    no_handle: Code | None = None


class FakeLibrary:
    """The functions that are there; any other is unknown to pynvml, as in an older driver."""

    def __init__(self, *cards: FakeCard, driver: str = "580.95.05", missing: str = "") -> None:
        self.cards = list(cards)
        self.init_code: Code = 0
        self.began = 0
        self.ended = 0
        self.uninitialized = False
        """Somebody else ended NVML: calls for a card fail until it is begun again."""
        self._driver = driver
        self._missing = missing.split()
        self._handles: dict[int, FakeCard] = {}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "_missing"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def __getattr__(self, name: str) -> Callable[..., Code]:
        if name not in NUMBERS:
            raise AttributeError(name)
        return lambda handle, *rest: self._number(name, handle, rest)

    def nvmlInitWithFlags(self, flags: int) -> Code:
        self.began += self.init_code == 0
        self.uninitialized = False
        return self.init_code

    def nvmlShutdown(self) -> Code:
        self.ended += 1
        return 0

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> Code:
        buffer.value = self._driver.encode()
        return 0

    def nvmlSystemGetCudaDriverVersion_v2(self, version: Any) -> Code:
        version._obj.value = 13000
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> Code:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> Code:
        card = self.cards[index.value]
        if card.no_handle is not None:
            return card.no_handle
        self._give(handle, card)
        return 0

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> Code:
        return self._text(handle, buffer, "name")

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> Code:
        return self._text(handle, buffer, "uuid")

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or card.bus_id is None:
            return _code(card)
        info._obj.busId = card.bus_id
        info._obj.pciDeviceId = card.device_id
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or card.capability is None:
            return _code(card)
        major._obj.value, minor._obj.value = card.capability
        return 0

    def nvmlDeviceGetMinorNumber(self, handle: Any, number: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or card.minor is None:
            return _code(card)
        number._obj.value = card.minor
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or card.total is None:
            return _code(card)
        # Version 1 counts what is held back as used.
        memory._obj.total, memory._obj.used = card.total, card.used + card.reserved
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or card.total is None:
            return _code(card)
        memory._obj.total, memory._obj.used = card.total, card.used
        memory._obj.reserved = card.reserved
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or "busy" not in card.numbers:
            return _code(card)
        rates._obj.gpu, rates._obj.memory = card.numbers["busy"], card.numbers["memory_busy"]
        return 0

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, values: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        known = card.temperature_memory
        values._obj[0].nvmlReturn = 3 if known is None else 0
        values._obj[0].value.uiVal = known or 0
        return 0

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, reasons: Any) -> Code:
        return self._reasons(handle, reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, reasons: Any) -> Code:
        return self._reasons(handle, reasons)

    def nvmlDeviceGetMigMode(self, handle: Any, now: Any, pending: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        now._obj.value = pending._obj.value = int(card.mig)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, part: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        found = card.slices[index.value] if index.value < len(card.slices) else None
        if found is None:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        self._give(part, found)
        return 0

    def nvmlDeviceGetGpuInstanceId(self, handle: Any, instance: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int) or card.gi is None:
            return _code(card)
        instance._obj.value = card.gi
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, *arguments: Any) -> Code:
        return self._processes("compute", *arguments)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, *arguments: Any) -> Code:
        return self._processes("graphics", *arguments)

    def _processes(self, kind: str, handle: Any, count: Any, entries: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        listed = card.processes.get(kind, [])
        if listed and entries is None:
            count._obj.value = len(listed)
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        count._obj.value = len(listed)
        for entry, (pid, size) in zip(entries or [], listed, strict=False):
            entry.pid = pid
            entry.usedGpuMemory = 2**64 - 1 if size is None else size
            entry.gpuInstanceId = 0xFFFFFFFF if card.gi is None else card.gi
        return 0

    def _number(self, name: str, handle: Any, rest: tuple[Any, ...]) -> Code:
        card = self._card(handle)
        key = f"{name}:{rest[0].value}" if len(rest) == 2 else name
        if isinstance(card, int) or key not in card.numbers:
            return _code(card)
        value = rest[-1]._obj
        if name == "nvmlDeviceGetFanSpeedRPM":
            value.speed = card.numbers[key]
        else:
            value.value = card.numbers[key]
        return 0

    def _reasons(self, handle: Any, reasons: Any) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        reasons._obj.value = card.reasons
        return 0

    def _text(self, handle: Any, buffer: Any, attribute: str) -> Code:
        card = self._card(handle)
        if isinstance(card, int):
            return card
        buffer.value = getattr(card, attribute).encode("utf-8", "surrogateescape")
        return 0

    def _give(self, handle: Any, card: FakeCard) -> None:
        number = id(card)
        self._handles[number] = card
        ctypes.cast(ctypes.pointer(handle._obj), ctypes.POINTER(ctypes.c_void_p))[0] = number

    def _card(self, handle: Any) -> FakeCard | Code:
        if self.uninitialized:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        card = self._handles[ctypes.cast(handle, ctypes.c_void_p).value or 0]
        return card if card.fails is None else card.fails


NUMBERS = (
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetClockInfo",
    "nvmlDeviceGetFanSpeed",
    "nvmlDeviceGetFanSpeedRPM",
    "nvmlDeviceGetTemperature",
)


def _code(card: FakeCard | Code) -> Code:
    return card if isinstance(card, int) else int(pynvml.NVML_ERROR_NOT_SUPPORTED)
