"""NVML, NVIDIA's management library, through the package nvidia-ml-py.

The only place that imports pynvml, inside a function: on a machine without NVIDIA that would cost
60 ms for nothing. One NVML per process serves the search for cards, readings and holders, from any
thread; a forked process begins its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Collection
from types import ModuleType
from typing import Any, NamedTuple

from flexlab.gpus.nvidia_card import (
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNINITIALIZED,
    Answer,
    Process,
)
from flexlab.gpus.nvml_device import (
    Device,
    code_of,
    cuda_version,
    is_mig,
    processes_of,
    read_card,
    read_live,
    slice_devices,
    slot_of,
    text_of,
)
from flexlab.spec.machine import GpuReading

# Where the library lies when the loader does not know it: WSL2, NixOS, container images.
_FOLDERS = ("/usr/lib/wsl/lib", "/run/opengl-driver/lib", "/usr/local/nvidia/lib64")
_LIBRARY = "libnvidia-ml.so.1"

_ORDINARY = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})
"""Errors that say something about one call only."""


class Unusable(Exception):
    """NVML itself cannot be used; `code` is its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"NVML fails with code {code}")
        self.code = code


class _Session(NamedTuple):
    """NVML after nvmlInit: it knows the cards of that moment."""

    nvml: ModuleType
    handles: dict[str, Any]
    """By PCI slot and by UUID."""
    in_order: list[Any]
    failures: list[int]
    """Return codes of cards that it counts and gives no handle for."""


_lock = threading.Lock()
_session: _Session | None = None


def _forget() -> None:
    """In a forked process: handles of the parent's NVML are not valid in it."""
    global _lock, _session
    _lock, _session = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def ask(expected: Collection[str] = ()) -> Answer:
    """All cards with their sensors. Raises Unusable.

    `expected` are PCI slots that its driver has: where NVML, begun earlier, misses one of them, it
    is begun anew, since it sees the cards of its beginning only.
    """
    before = _session
    session = _open()
    if session is before and not all(slot in session.handles for slot in expected):
        session = _open(instead_of=session)
    cards = [
        read_card(Device(session.nvml, handle), number)
        for number, handle in enumerate(session.in_order)
    ]
    system = Device(session.nvml)
    return Answer(
        tuple(cards),
        text_of(system.get("nvmlSystemGetDriverVersion")),
        cuda_version(system.get("nvmlSystemGetCudaDriverVersion_v2")),
        session.failures[0] if session.failures else None,
    )


def read(slot: str | None, uuid: str | None) -> GpuReading:
    """One card's sensors. Raises Unusable; OSError where the card is not there any more."""
    session = _open()
    device = _device(session, slot, uuid)
    card = read_live(device)
    if UNINITIALIZED in device.errors:
        device = _device(_open(instead_of=session), slot, uuid)
        card = read_live(device)
    if card.fault is not None:
        lost = card.fault == GPU_IS_LOST
        raise OSError("the GPU is lost" if lost else "the GPU requires a reset")
    if not card.numbers and device.errors - _ORDINARY:
        raise OSError(f"NVML fails with code {min(device.errors - _ORDINARY)}")
    return card.reading()


def processes(slot: str | None, uuid: str | None) -> list[Process]:
    """Who has a context on a card, or on one of its MIG slices. Raises Unusable and OSError."""
    device = _device(_open(), slot, uuid)
    slices = list(slice_devices(device)) if is_mig(device) else []
    found: dict[tuple[int, str | None], Process] = {}
    for part in slices or [device]:
        inside = text_of(part.get("nvmlDeviceGetUUID")) if slices else None
        for process in processes_of(part):
            key = (process.pid, inside)
            # Compute and graphics lists both have a process that does both, with one size.
            known = found.get(key, process)
            sizes = [size for size in (known.vram_bytes, process.vram_bytes) if size is not None]
            found[key] = process._replace(
                vram_bytes=max(sizes, default=None), slice_uuid=inside or process.slice_uuid
            )
    return list(found.values())


def _open(instead_of: _Session | None = None) -> _Session:
    """The session of this process; a new one in the place of `instead_of`."""
    global _session
    current = _session
    if current is not None and current is not instead_of:
        return current  # without the lock: a beginning that hangs stops no reading
    with _lock:
        if _session is not None:
            if _session is not instead_of:
                return _session
            with contextlib.suppress(_session.nvml.NVMLError):
                _session.nvml.nvmlShutdown()
        _session = None
        _session = _begin()
        return _session


def _begin() -> _Session:
    try:
        import pynvml
    except ImportError as error:
        raise Unusable(LIBRARY_NOT_FOUND) from error
    code = _init(pynvml)
    if code == LIBRARY_NOT_FOUND and _load_from_elsewhere():
        code = _init(pynvml)
    if code is not None:
        raise Unusable(code)
    session = _Session(pynvml, {}, [], [])
    count = Device(pynvml).get("nvmlDeviceGetCount") or 0
    for number in range(count):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
        except pynvml.NVMLError as error:
            session.failures.append(code_of(error))
            continue
        device = Device(pynvml, handle)
        session.in_order.append(handle)
        for key in (slot_of(device), text_of(device.get("nvmlDeviceGetUUID"))):
            if key:
                session.handles[key] = handle
    return session


def _init(nvml: ModuleType) -> int | None:
    """None, or why not."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return code_of(error)
    return None


def _load_from_elsewhere() -> bool:
    """Once loaded, the loader knows the library by its name, for pynvml too."""
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
            ctypes.CDLL(os.path.join(folder, _LIBRARY))
            return True
    return False


def _device(session: _Session, slot: str | None, uuid: str | None) -> Device:
    for key in (slot, uuid):
        if key is not None and key in session.handles:
            return Device(session.nvml, session.handles[key])
    raise OSError("the NVIDIA driver does not show this GPU any more")
