"""The RAM pool: the machine's memory, lowered by what our control groups allow."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexlab.core.units import GIB, MIB
from flexlab.gpus.memory import default_reserve, sample_ram

MEMINFO = f"MemTotal: {16 * MIB} kB\nMemFree: 1 kB\nMemAvailable: {12 * MIB} kB\n"  # 16 and 12 GiB
V2 = {
    "proc/self/cgroup": "0::/user/app\n",
    "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/box\n0::/\n",
    "proc/self/mountinfo": "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
}


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    pool = sample_ram(tree(tmp_path, {"proc/meminfo": MEMINFO}))
    assert pool.id == "ram"
    assert pool.total_bytes == 16 * GIB
    assert pool.used_bytes == 4 * GIB


def test_an_old_kernel_without_memavailable_leaves_use_unknown(tmp_path: Path) -> None:
    pool = sample_ram(tree(tmp_path, {"proc/meminfo": "MemTotal: 1048576 kB\nMemFree: 5 kB\n"}))
    assert pool.total_bytes == GIB
    assert pool.used_bytes is None


def test_a_v2_limit_of_an_ancestor_lowers_the_pool(tmp_path: Path) -> None:
    files = {
        **V2,
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/user/app/memory.max": "max\n",
        "sys/fs/cgroup/user/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/user/memory.current": f"{3 * GIB}\n",
        "sys/fs/cgroup/user/memory.stat": f"anon 1\nactive_file {GIB}\ninactive_file {GIB}\n",
    }
    pool = sample_ram(tree(tmp_path, files))
    assert pool.total_bytes == 4 * GIB
    assert pool.used_bytes == GIB


def test_memory_high_binds_as_well_as_memory_max(tmp_path: Path) -> None:
    files = {
        **V2,
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/user/app/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/user/app/memory.high": f"{2 * GIB}\n",
        "sys/fs/cgroup/user/app/memory.current": "0\n",
    }
    pool = sample_ram(tree(tmp_path, files))
    assert (pool.total_bytes, pool.used_bytes) == (2 * GIB, 0)


def test_free_is_what_the_tightest_limit_leaves(tmp_path: Path) -> None:
    # The group could have 8 GiB more, but the machine has 1 GiB left.
    files = {
        **V2,
        "proc/meminfo": f"MemTotal: {16 * MIB} kB\nMemAvailable: {MIB} kB\n",
        "sys/fs/cgroup/user/app/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/user/app/memory.current": "0\n",
    }
    pool = sample_ram(tree(tmp_path, files))
    assert pool.total_bytes == 8 * GIB
    assert pool.used_bytes == 7 * GIB


def test_a_v1_limit_lowers_the_pool(tmp_path: Path) -> None:
    files = {
        **V1,
        "proc/meminfo": MEMINFO,
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n",
        "sys/fs/cgroup/memory/box/memory.stat": f"total_inactive_file {512 * MIB}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    pool = sample_ram(tree(tmp_path, files))
    assert (pool.total_bytes, pool.used_bytes) == (2 * GIB, 512 * MIB)


def test_no_limit_in_a_group_is_not_a_pool_of_eight_exbibytes(tmp_path: Path) -> None:
    files = {**V1, "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "9223372036854771712\n"}
    assert sample_ram(tree(tmp_path, files)).total_bytes is None


def test_an_unreadable_usage_leaves_use_unknown(tmp_path: Path) -> None:
    files = {**V2, "proc/meminfo": MEMINFO, "sys/fs/cgroup/user/app/memory.max": f"{GIB}\n"}
    pool = sample_ram(tree(tmp_path, files))
    assert (pool.total_bytes, pool.used_bytes) == (GIB, None)


@pytest.mark.parametrize(
    ("total", "reserve"),
    [(None, 512 * MIB), (2 * GIB, 512 * MIB), (100 * GIB, 5 * GIB)],
)
def test_the_reserve_is_five_percent_and_at_least_512_mib(total: int | None, reserve: int) -> None:
    assert default_reserve(total) == reserve


def test_settings_replace_the_reserve_and_state_a_budget(tmp_path: Path) -> None:
    pool = sample_ram(
        tree(tmp_path, {"proc/meminfo": MEMINFO}), reserve_bytes=0, budget_bytes=2 * GIB
    )
    assert (pool.reserve_bytes, pool.budget_bytes) == (0, 2 * GIB)
    assert pool.total_bytes == 16 * GIB


def test_this_machine_has_memory() -> None:
    pool = sample_ram()
    assert pool.total_bytes is not None
    assert pool.used_bytes is not None
    assert 0 <= pool.used_bytes <= pool.total_bytes
