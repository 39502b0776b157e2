"""The CPU below any root folder: what it is, and how much of it may be used."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexlab.gpus.cpu import quota_threads, read_cpu
from flexlab.gpus.inventory import detect

X86 = """processor\t: {n}
vendor_id\t: GenuineIntel
model name\t: Intel(R) Core(TM) i7-9999
flags\t\t: fpu sse2 avx avx2 fma f16c bmi2

"""
ARM = """processor\t: {n}
BogoMIPS\t: 2000.00
Features\t: fp asimd sve i8mm
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: {part}

"""
V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def x86(threads: int) -> str:
    return "".join(X86.format(n=n) for n in range(threads))


def test_an_x86_cpu_has_its_name_flags_and_threads(tmp_path: Path) -> None:
    cpu = read_cpu(write(tmp_path, {"proc/cpuinfo": x86(8)}))
    assert cpu.name == "Intel(R) Core(TM) i7-9999"
    assert (cpu.threads_total, cpu.threads_usable) == (8, 8)
    assert {"avx2", "fma", "f16c", "bmi2"} <= cpu.flags


def test_an_arm_cpu_is_named_by_its_cores(tmp_path: Path) -> None:
    text = "".join(ARM.format(n=n, part=part) for n, part in enumerate(["0xd87", "0xd85", "0xd87"]))
    root = write(tmp_path, {"proc/cpuinfo": text})
    cpu = read_cpu(root)
    assert cpu.name == "Cortex-A725 + Cortex-X925"
    assert cpu.threads_total == 3
    assert "i8mm" in cpu.flags
    assert detect(root).platform == "linux/arm64"


def test_an_arm_board_with_unknown_cores_is_named_by_its_device_tree(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {"proc/cpuinfo": ARM.format(n=0, part="0xfff"), "proc/device-tree/model": "Board 5\0"},
    )
    assert read_cpu(root).name == "Board 5"


def test_only_flags_that_all_threads_have_count(tmp_path: Path) -> None:
    text = X86.format(n=0) + X86.format(n=1).replace(" avx2", "")
    assert "avx2" not in read_cpu(write(tmp_path, {"proc/cpuinfo": text})).flags


@pytest.mark.parametrize(
    ("limit", "usable"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("garbage", 8), ("", 8)],
)
def test_a_v2_quota_lowers_the_threads_but_never_below_one(
    tmp_path: Path, limit: str, usable: int
) -> None:
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": x86(8),
            "proc/self/cgroup": "0::/user.slice/app\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/user.slice/app/cpu.max": limit,
        },
    )
    assert read_cpu(root).threads_usable == usable


def test_the_tightest_quota_on_the_way_up_binds(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "proc/self/mountinfo": V2_MOUNT,
            "sys/fs/cgroup/a/b/cpu.max": "800000 100000",
            "sys/fs/cgroup/a/cpu.max": "150000 100000",
            "sys/fs/cgroup/cpu.max": "400000 100000",
        },
    )
    assert quota_threads(root) == 1.5


def test_a_v1_quota_of_a_container_that_sees_the_hosts_path(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": x86(8),
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n0::/\n",
            "proc/self/mountinfo": "40 31 0:30 /docker/abc /sys/fs/cgroup/cpu,cpuacct ro master:1"
            " - cgroup cgroup rw,cpu,cpuacct\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert read_cpu(root).threads_usable == 3


def test_a_v1_quota_of_minus_one_is_no_limit(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "1:cpu:/\n",
            "proc/self/mountinfo": "40 31 0:30 / /cg/cpu rw - cgroup cgroup rw,cpu\n",
            "cg/cpu/cpu.cfs_quota_us": "-1\n",
            "cg/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert quota_threads(root) is None


def test_this_machine_gives_no_more_threads_than_this_process_may_use() -> None:
    cpu = read_cpu()
    assert cpu.threads_usable is not None
    assert 1 <= cpu.threads_usable <= len(os.sched_getaffinity(0))


def test_a_console_chip_an_audio_function_and_an_npu_are_no_gpus(tmp_path: Path) -> None:
    pci = "sys/bus/pci/devices"
    root = write(
        tmp_path,
        {
            f"{pci}/0000:03:00.0/class": "0x030000\n",
            f"{pci}/0000:03:00.0/vendor": "0x1002\n",
            f"{pci}/0000:03:00.1/class": "0x040300\n",  # its audio function
            f"{pci}/0000:03:00.1/vendor": "0x1002\n",
            f"{pci}/0000:04:00.0/class": "0x030200\n",
            f"{pci}/0000:04:00.0/vendor": "0x10de\n",
            f"{pci}/0000:05:00.0/class": "0x030000\n",  # a server's console
            f"{pci}/0000:05:00.0/vendor": "0x1a03\n",
            f"{pci}/0000:06:00.0/class": "0x120000\n",  # an NPU
            f"{pci}/0000:06:00.0/vendor": "0x8086\n",
            f"{pci}/0000:07:00.0/class": "0x030000\n",  # given to a virtual machine
            f"{pci}/0000:07:00.0/vendor": "0x10de\n",
            f"{pci}/0000:07:00.0/uevent": "DRIVER=vfio-pci\n",
        },
    )
    gpus = detect(root).gpus
    assert [gpu.id for gpu in gpus] == ["0000:03:00.0", "0000:04:00.0", "0000:07:00.0"]
    assert [problem.code for problem in gpus[2].problems] == ["vfio"]


GARBAGE = st.one_of(
    st.just(""),
    st.text(max_size=200),
    st.sampled_from(
        [
            "processor\t: x\n", "max", "max max", "0", "0 0", "-1", "1e9 1", "9" * 30,
            "MemTotal: kB\n", "MemTotal: 0 kB\n", "MemTotal: -5 kB\n", "MemAvailable:\n",
            "0::/../../x\n", "0::\n", ":::\n", "0::/a\0b\n", " - cgroup2\n",
            "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 c rw\n", "1 2 3 4 5 - cgroup c cpu,memory\n",
        ]
    ),
)  # fmt: skip
FILES = st.sampled_from(
    [
        "proc/cpuinfo", "proc/meminfo", "proc/self/cgroup", "proc/self/mountinfo",
        "proc/device-tree/model", "sys/fs/cgroup/cpu.max", "sys/fs/cgroup/memory.max",
        "sys/fs/cgroup/memory.current", "sys/fs/cgroup/memory.stat", "etc/hostname",
        "sys/bus/pci/devices/0000:01:00.0/class", "sys/bus/pci/devices/0000:01:00.0/vendor",
    ]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(tree=st.dictionaries(FILES, st.one_of(GARBAGE, st.just("<folder>"), st.just("<fifo>"))))
def test_no_tree_makes_detection_raise_or_turns_unknown_into_zero(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, str]
) -> None:
    root = tmp_path_factory.mktemp("root")
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text == "<folder>":
            path.mkdir()
        elif text == "<fifo>":
            os.mkfifo(path)
        else:
            path.write_bytes(text.encode("utf-8", "surrogatepass"))
    machine = detect(root)
    (pool,) = machine.pools
    for value in (machine.cpu.threads_total, machine.cpu.threads_usable, pool.total_bytes):
        assert value is None or value > 0
    assert machine.cpu.name != ""
    if "proc/meminfo" not in tree and "sys/fs/cgroup/memory.max" not in tree:
        assert pool.total_bytes is None
        assert pool.used_bytes is None


def test_detection_takes_less_than_ten_milliseconds(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": x86(64), "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 10 kB\n"}
    for number in range(100):
        files[f"sys/bus/pci/devices/0000:{number:02x}:00.0/class"] = "0x060000\n"
    root = write(tmp_path, files)
    times = []
    for _ in range(20):
        start = time.process_time()
        detect(root)
        times.append(time.process_time() - start)
    assert min(times) < 0.010
