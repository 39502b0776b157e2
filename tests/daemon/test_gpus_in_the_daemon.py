"""The GPUs as a daemon shows them: live, and of the machine that is there now."""

from __future__ import annotations

from pathlib import Path

from daemon_lab import Start
from gpu_trees import GIB, Tree

from flexlab.spec.lab import Snapshot
from flexlab.spec.machine import Gpu

SLOT = "0000:03:00.0"


def gpu(snapshot: Snapshot, gpu_id: str = SLOT) -> Gpu | None:
    return next((one for one in snapshot.gpus if one.id == gpu_id), None)


async def test_a_card_is_shown_with_its_values_of_now(start: Start, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "machine").cpu().ram().amd(vram=24 * GIB, vram_used=GIB, busy=3)
    lab = await start(root=tree.root)
    shown = gpu(lab.service.lab.snapshot())
    assert shown is not None
    assert (shown.vram_used_bytes, shown.busy_percent) == (GIB, 3)
    tree.write("sys/class/drm/card0/device/mem_info_vram_used", 9 * GIB)
    tree.write("sys/class/drm/card0/device/gpu_busy_percent", 77)

    def now() -> tuple[int | None, float | None, int | None]:
        one = gpu(lab.service.lab.snapshot())
        assert one is not None
        return one.vram_used_bytes, one.busy_percent, one.pool_free_bytes

    await lab.until(lambda: now() == (9 * GIB, 77, 15 * GIB))
    (sample,) = lab.service.lab.snapshot().gpu_samples
    assert sample.values["busy_percent"].value == 77
    # What others hold of the card is no room for models.
    await lab.until(lambda: lab.service.scheduler.pools[SLOT].foreign_bytes == 9 * GIB)


async def test_a_card_that_comes_later_is_found(start: Start, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "machine").cpu().ram().amd()
    lab = await start(root=tree.root)
    other = "0000:43:00.0"
    tree.amd(other, card=1, minor=129, node=2)
    await lab.until(lambda: gpu(lab.service.lab.snapshot(), other), limit_s=40)
    assert other in lab.service.scheduler.pools


async def test_a_machine_without_a_gpu_has_no_hardware_helper(start: Start) -> None:
    lab = await start()
    assert lab.service.lab.snapshot().gpus == ()
    assert lab.service.hardware.latest is None
