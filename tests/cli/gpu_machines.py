"""Machines with GPUs, for tests of what is shown of them."""

from __future__ import annotations

from typing import Any

from flexlab.spec.machine import RAM_POOL, Cpu, Gpu, Machine, Pool, Problem

GIB = 1024**3
DENIED = Problem(
    code="render_denied",
    message="/dev/dri/renderD129 cannot be opened by this user",
    hint="sudo usermod -aG render $USER, then log in again",
)
RAM = Pool(id=RAM_POOL, kind="ram", total_bytes=32 * GIB, used_bytes=8 * GIB, reserve_bytes=GIB)


def card(index: int = 0, **more: Any) -> Gpu:
    """A Radeon with 24 GiB of its own, under some load."""
    slot = f"0000:{index + 3:02x}:00.0"
    plain = Gpu(
        index=index,
        id=slot,
        pool=slot,
        vendor="amd",
        arch="gfx1100",
        name="AMD Radeon RX 7900 XTX",
        pci_slot=slot,
        driver="amdgpu",
        vram_total_bytes=24 * GIB,
        vram_used_bytes=3 * GIB // 2,
        pool_total_bytes=24 * GIB,
        pool_free_bytes=24 * GIB - 3 * GIB // 2,
        busy_percent=97.0,
        power_w=204.4,
        temps_c={"junction": 81.0, "edge": 61.0},
    )
    return Gpu(**{name: getattr(plain, name) for name in plain.__struct_fields__} | more)


def apu(index: int = 0, **more: Any) -> Gpu:
    """An APU whose models live in the host's RAM."""
    shared: dict[str, Any] = {
        "name": "AMD Radeon 780M",
        "arch": "gfx1103",
        "pool": RAM_POOL,
        "is_apu": True,
        "unified": True,
        "vram_total_bytes": GIB // 2,
        "vram_used_bytes": GIB // 4,
        "gtt_total_bytes": 16 * GIB,
        "gtt_used_bytes": GIB,
        "pool_total_bytes": 16 * GIB,
        "pool_free_bytes": 15 * GIB,
    }
    return card(index, **shared | more)


def unusable(index: int = 0, problem: Problem = DENIED, **more: Any) -> Gpu:
    """A card that is there and can be neither used nor read."""
    dark: dict[str, Any] = {
        "usable": False,
        "problems": (problem,),
        "vram_used_bytes": None,
        "pool_free_bytes": None,
        "busy_percent": None,
        "power_w": None,
        "temps_c": {},
    }
    return card(index, **dark | more)


def machine(*gpus: Gpu, **more: Any) -> Machine:
    """They and a CPU of 16 threads with 32 GiB."""
    plain: dict[str, Any] = {
        "hostname": "box",
        "platform": "linux/amd64",
        "cpu": Cpu(
            name="AMD Ryzen 7 5800X3D",
            threads_total=16,
            threads_usable=16,
            flags=frozenset({"avx2", "avx", "fma"}),
        ),
        "gpus": gpus,
        "pools": (RAM,),
    }
    return Machine(**plain | more)
