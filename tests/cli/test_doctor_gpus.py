"""What `flexlab doctor` says where there are GPUs, or should be."""

from __future__ import annotations

import grp
import json
import os
import pwd
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_process import Flexlab
from gpu_machines import DENIED, GIB, apu, card, machine, unusable

from flexlab.cli.finding import Finding
from flexlab.cli.gpu_checks import examine_gpus
from flexlab.gpus.drivers import FLOORS, branch, floors_of
from flexlab.spec.machine import DeviceNode, Gpu, Problem

GTX_980 = {"vendor": "nvidia", "name": "NVIDIA GeForce GTX 980 Ti", "arch": "sm_52"}
RTX_3080 = {"vendor": "nvidia", "name": "NVIDIA GeForce RTX 3080", "arch": "sm_86"}


def examine(root: Path, *gpus: Gpu, **more: object) -> list[Finding]:
    return list(examine_gpus(root, machine(*gpus, **more)))


def about(subject: str, findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.subject == subject]


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


# --- Cards ----------------------------------------------------------------------------------------


def test_usable_cards_are_counted_by_kind(tmp_path: Path) -> None:
    [usable] = about("gpu", examine(tmp_path, card(0), card(1), card(2, arch=None, name="X")))
    assert usable.level == "ok"
    assert usable.text == (
        "3 GPUs can be used: 2 x AMD Radeon RX 7900 XTX (gfx1100), X (arch unknown)"
    )


def test_a_machine_without_a_gpu_is_told_as_one(tmp_path: Path) -> None:
    [only] = examine(tmp_path)
    assert (only.level, only.text) == ("ok", "none of AMD, NVIDIA or Intel on the bus")


def test_every_card_that_is_not_usable_is_warned_of_with_its_mend(tmp_path: Path) -> None:
    lost = Problem(code="gpu_lost", message="the card fell off the bus", hint="reboot")
    found = about("gpu", examine(tmp_path, unusable(0), unusable(1), unusable(2, lost)))
    assert [finding.level for finding in found] == ["warn", "warn"]
    assert found[0].text == f"0-1: {DENIED.message}"
    assert found[0].mend == DENIED.hint
    assert found[1].text == "2 AMD Radeon RX 7900 XTX: the card fell off the bus"


def test_a_card_that_sleeps_is_no_warning(tmp_path: Path) -> None:
    asleep = Problem(code="asleep", message="it sleeps", hint="nothing to do")
    levels = {finding.level for finding in examine(tmp_path, card(asleep=True, problems=(asleep,)))}
    assert levels == {"ok"}


def test_a_display_device_that_detection_passed_over_is_warned_of(tmp_path: Path) -> None:
    for slot in ("0000:03:00.0", "0000:0a:00.0"):
        device = {"vendor": "0x10de", "device": "0x2206", "class": "0x030000"}
        folder = f"sys/bus/pci/devices/{slot}"
        write(tmp_path, {f"{folder}/{name}": text for name, text in device.items()})
    [missed] = [f for f in examine(tmp_path, card(0)) if f.level == "warn"]
    assert "PCI 0000:0a:00.0 (10de:2206)" in missed.text
    assert missed.mend is not None
    assert "lspci" in missed.mend
    said = Problem(code="not_compute", message="0000:0a:00.0 is a display adapter", hint="none")
    told = [f for f in examine(tmp_path, card(0), findings=(said,)) if f.level == "warn"]
    assert [finding.text for finding in told] == [said.message]


# --- Access ---------------------------------------------------------------------------------------


def test_nodes_that_can_be_opened_are_told(tmp_path: Path) -> None:
    write(tmp_path, {"dev/kfd": "", "dev/dri/renderD128": ""})
    nodes = (DeviceNode(path="/dev/kfd"), DeviceNode(path="/dev/dri/renderD128"))
    [told] = about("device nodes", examine(tmp_path, card(nodes=nodes)))
    assert told.text == "/dev/kfd, /dev/dri/renderD128 can be opened"


def test_a_root_without_a_dev_folder_says_nothing_about_access(tmp_path: Path) -> None:
    nodes = (DeviceNode(path="/dev/kfd"),)
    assert about("device nodes", examine(tmp_path, card(nodes=nodes))) == []


def test_a_login_that_is_older_than_its_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    denied = SimpleNamespace(
        node=DeviceNode(path="/dev/kfd", gid=44105), exists=True, allowed=False
    )
    monkeypatch.setattr("flexlab.cli.gpu_checks.look", lambda *_: denied)
    monkeypatch.setattr(os, "getgrouplist", lambda *_: [0, 44105])
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="render"))
    name = pwd.getpwuid(os.getuid()).pw_name
    gpu = unusable(nodes=(DeviceNode(path="/dev/kfd", gid=44105),))
    [told] = about("groups", examine(Path("/"), gpu))
    assert told.text == f"{name} is in render, but this login began before that"
    monkeypatch.setattr(os, "getgrouplist", lambda *_: [0])
    assert about("groups", examine(Path("/"), gpu)) == []


# --- NVIDIA ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "driver", "level", "text"),
    [
        (RTX_3080, "580.95.05", "ok", "580.95.05 runs images of CUDA 12 and 13 on sm_86"),
        (RTX_3080, "570.86", "ok", "570.86 runs images of CUDA 12 on sm_86; CUDA 13 needs 580"),
        (RTX_3080, "470.1", "warn", "470.1 is too old for sm_86: CUDA 12 needs 525, CUDA 13"),
        (GTX_980, "580.95", "ok", "580.95 runs images of CUDA 12 on sm_52"),
        (GTX_980, "550.90", "warn", "550.90 is too old for sm_52: CUDA 12 needs 570 or newer"),
        (GTX_980 | {"arch": "sm_37"}, "470.1", "warn", "images of CUDA 12 and 13 hold nothing"),
    ],
)
def test_a_driver_is_held_against_what_images_need(
    tmp_path: Path, gpu: dict[str, str], driver: str, level: str, text: str
) -> None:
    [told] = about("nvidia driver", examine(tmp_path, card(driver_version=driver, **gpu)))
    assert told.level == level
    assert told.text.startswith(text)
    assert (told.mend is None) == (level == "ok")


def test_maxwell_is_never_told_to_run_cuda_13(tmp_path: Path) -> None:
    [told] = about("nvidia driver", examine(tmp_path, card(driver_version="595.1", **GTX_980)))
    assert "13" not in told.text


@pytest.mark.parametrize("driver", [None, "", "N/A", "unknown.x"])
def test_an_unknown_driver_is_not_judged(tmp_path: Path, driver: str | None) -> None:
    gpu = card(driver_version=driver, **RTX_3080)
    assert about("nvidia driver", examine(tmp_path, gpu)) == []
    unknown = card(driver_version="580.1", vendor="nvidia", arch=None)
    assert about("nvidia driver", examine(tmp_path, unknown)) == []


def test_eight_equal_cards_are_judged_once(tmp_path: Path) -> None:
    cards = [card(i, driver_version="580.95", **RTX_3080) for i in range(8)]
    assert len(about("nvidia driver", examine(tmp_path, *cards))) == 1


def test_a_jetson_counts_its_drivers_differently(tmp_path: Path) -> None:
    write(tmp_path, {"proc/device-tree/compatible": "nvidia,p3737\0nvidia,tegra234\0"})
    gpu = card(driver_version="35.4.1", vendor="nvidia", arch="sm_87", name="Orin")
    assert about("nvidia driver", examine(tmp_path, gpu)) == []


def test_floors_name_their_source_and_one_generation_each() -> None:
    assert all(floor.source for floor in FLOORS)
    assert [floor.cuda for floor in floors_of("sm_121")] == [12, 13]
    assert floors_of("gfx1100") == ()
    assert branch("535.104.05") == 535


@pytest.mark.parametrize(
    ("files", "level", "said"),
    [
        ({"usr/bin/nvidia-ctk": ""}, "ok", "toolkit /usr/bin/nvidia-ctk"),
        (
            {"etc/cdi/nvidia.yaml": "kind: nvidia.com/gpu\n"},
            "ok",
            "CDI /etc/cdi/nvidia.yaml",
        ),
        (
            {"usr/bin/docker": "", "etc/cdi/other.yaml": "kind: vendor.com/net\n"},
            "warn",
            "no NVIDIA container toolkit and no CDI specification",
        ),
        (
            {
                "usr/bin/nvidia-container-runtime": "",
                "run/cdi/nvidia.json": '{"kind": "nvidia.com/gpu"}',
            },
            "ok",
            "toolkit /usr/bin/nvidia-container-runtime; CDI /run/cdi/nvidia.json",
        ),
    ],
)
def test_container_support_is_looked_for_below_the_root(
    tmp_path: Path, files: dict[str, str], level: str, said: str
) -> None:
    write(tmp_path, files)
    [told] = about("nvidia containers", examine(tmp_path, card(**RTX_3080)))
    assert told.level == level
    assert said in told.text
    assert about("nvidia containers", examine(tmp_path, card())) == []


def test_one_folder_by_two_names_is_one_specification(tmp_path: Path) -> None:
    write(tmp_path, {"run/cdi/nvidia.yaml": "kind: nvidia.com/gpu\n", "var/x": ""})
    (tmp_path / "var/run").symlink_to("../run")
    [told] = about("nvidia containers", examine(tmp_path, card(**RTX_3080)))
    assert told.text.count("nvidia.yaml") == 1


def test_a_recording_without_programs_says_nothing_about_containers(tmp_path: Path) -> None:
    assert about("nvidia containers", examine(tmp_path, card(**RTX_3080))) == []


# --- WSL and shared memory ------------------------------------------------------------------------


def test_wsl_is_recognised_and_a_missing_dxg_is_mended(tmp_path: Path) -> None:
    [told] = about("wsl", examine(tmp_path, card(**RTX_3080), wsl=True))
    assert told.level == "ok"
    write(tmp_path, {"dev/null": ""})
    [told] = about("wsl", examine(tmp_path, wsl=True))
    assert told.level == "warn"
    assert told.mend is not None
    assert "wsl --shutdown" in told.mend
    write(tmp_path, {"dev/dxg": "", "usr/lib/wsl/lib/libnvidia-ml.so.1": ""})
    [told] = about("wsl", examine(tmp_path, wsl=True))
    assert "/usr/lib/wsl/lib" in told.text
    assert about("wsl", examine(tmp_path)) == []


def test_what_an_apu_may_map_is_told_with_its_kernel_parameter(tmp_path: Path) -> None:
    [told] = about("shared memory", examine(tmp_path, apu(gtt_total_bytes=120 * GIB)))
    assert told.text.startswith("0 AMD Radeon 780M may map 120.0G of the RAM")
    assert "ttm.pages_limit" in told.text
    assert about("shared memory", examine(tmp_path, card())) == []


# --- The verb -------------------------------------------------------------------------------------


def test_a_recorded_machine_is_examined_and_nothing_of_this_one(
    flexlab_here: Flexlab, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/meminfo": "MemTotal: 32000000 kB\nMemAvailable: 30000000 kB\n"})
    shown = flexlab_here("doctor", "--sysroot", str(tmp_path), "--json", FLEXLAB_PORT="wrong")
    assert shown.returncode == 0
    subjects = [finding["subject"] for finding in json.loads(shown.stdout)["findings"]]
    assert subjects == ["cpu", "memory", "gpu"]


def test_a_recorded_cpu_is_held_against_the_engine_of_its_own_platform(
    flexlab_here: Flexlab, tmp_path: Path
) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor: 0\nvendor_id: GenuineIntel\nflags: fpu sse4_2\n"})
    shown = flexlab_here("doctor", "--sysroot", str(tmp_path))
    assert shown.returncode == 1
    assert "it lacks avx2" in shown.stdout
    write(tmp_path, {"proc/cpuinfo": "processor: 0\nFeatures: fp asimd\nCPU implementer: 0x41\n"})
    assert flexlab_here("doctor", "--sysroot", str(tmp_path)).returncode == 0
