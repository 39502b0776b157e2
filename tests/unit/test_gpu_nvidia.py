"""NVIDIA cards: the driver's view joined with the bus, live readings and holders.

NVML is a stand-in below the real binding (nvml_library); the trees are written by the tests.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nvml_library import FakeCard, FakeLibrary

from flexlab.core.units import GIB, MIB
from flexlab.gpus import nvidia, nvidia_live, nvidia_tool, nvml
from flexlab.gpus.bus import read_bus
from flexlab.gpus.source import Found
from flexlab.spec.machine import Gpu

UUID = "GPU-00000000-0000-4000-8000-000000000001"
SLOT, OTHER = "0000:01:00.0", "0000:02:00.0"
RTX_3090, GTX_980_TI, RTX_4080, GB10 = "2204", "17c8", "2704", "2e12"
HEADER = "index, name, uuid, pci.bus_id, memory.total [MiB], memory.used [MiB], compute_cap\n"


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def add_pci(root: Path, slot: str, device: str, driver: str | None, kind: str = "030000") -> None:
    folder = f"sys/bus/pci/devices/{slot}"
    write(root, f"{folder}/class", f"0x{kind}\n")
    write(root, f"{folder}/vendor", "0x10de\n")
    write(root, f"{folder}/device", f"0x{device}\n")
    write(root, f"{folder}/uevent", f"DRIVER={driver}\n" if driver else "PCI_CLASS=30000\n")


def add_proc(root: Path, slot: str, uuid: str, *, excluded: str = "No") -> None:
    text = (
        f"Model: \t\t NVIDIA GeForce RTX 3090\nGPU UUID: \t {uuid}\nDevice Minor: \t 4\n"
        f"GPU Excluded:\t {excluded}\n"
    )
    write(root, f"proc/driver/nvidia/gpus/{slot}/information", text)
    version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.133.07  Release Build\n"
    write(root, "proc/driver/nvidia/version", version)


def find(root: Path) -> Found:
    return nvidia.find(root, read_bus(root))


def only(root: Path) -> Gpu:
    (gpu,) = find(root).gpus
    return gpu


def codes(gpu: Gpu) -> list[str]:
    return [problem.code for problem in gpu.problems]


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree that is taken for the running system, where drivers are asked; no program is found."""
    monkeypatch.setattr(nvidia, "SYSTEM", tmp_path)
    monkeypatch.setattr(nvidia_live, "SYSTEM", tmp_path)
    monkeypatch.setattr(nvidia_tool, "_FOLDERS", ())
    monkeypatch.setattr(nvidia_tool, "SHARED", nvidia_tool.SharedAnswer())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


Install = Callable[[FakeLibrary], FakeLibrary]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def installed(library: FakeLibrary) -> FakeLibrary:
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(nvml, "_session", None)
        return library

    yield installed
    nvml._forget()


class TestBusOnly:
    """A tree in which nobody can be asked."""

    def test_a_card_with_nvidias_driver_is_usable_and_known_by_table(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, "nvidia")

        gpu = only(tmp_path)

        assert (gpu.id, gpu.arch, gpu.usable) == (SLOT, "sm_86", True)
        assert gpu.vram_total_bytes == 24 * GIB
        assert (gpu.driver_version, gpu.uuid, gpu.vram_used_bytes) == (None, None, None)

    def test_a_headless_card_counts(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, "20b2", "nvidia", kind="030200")
        assert only(tmp_path).arch == "sm_80"

    @pytest.mark.parametrize(
        ("driver", "code"),
        [
            (None, "no_driver"),
            ("nouveau", "nouveau_driver"),
            ("vfio-pci", "vfio"),
            ("nvidiafb", "no_driver"),
        ],
    )
    def test_other_drivers(self, tmp_path: Path, driver: str | None, code: str) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, driver)

        gpu = only(tmp_path)

        assert (gpu.usable, codes(gpu), gpu.driver) == (False, [code], driver)
        assert gpu.nodes == ()

    def test_a_driver_that_is_not_told_is_no_refusal_where_drm_has_the_card(
        self, tmp_path: Path
    ) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, None)
        write(tmp_path, "sys/class/drm/renderD129/device/uevent", f"PCI_SLOT_NAME={SLOT}\n")
        write(tmp_path, "sys/class/drm/renderD129/device/vendor", "0x10de\n")
        write(tmp_path, "sys/class/drm/renderD129/device/device", f"0x{RTX_3090}\n")

        gpu = only(tmp_path)

        assert (gpu.usable, gpu.driver, gpu.render_minor) == (True, None, 129)

    def test_a_container_without_the_bus(self, tmp_path: Path) -> None:
        add_proc(tmp_path, SLOT, UUID)

        gpu = only(tmp_path)

        assert (gpu.id, gpu.uuid, gpu.driver) == (SLOT, UUID, "nvidia")
        assert (gpu.arch, gpu.driver_version, gpu.usable) == ("sm_86", "570.133.07", True)
        assert gpu.nodes[0].path == "/dev/nvidia4"

    def test_an_excluded_card(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, "nvidia")
        add_proc(tmp_path, SLOT, UUID, excluded="Yes")
        assert (only(tmp_path).usable, codes(only(tmp_path))) == (False, ["excluded"])

    def test_a_display_adapter_is_a_finding(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, "0041", None)
        add_pci(tmp_path, OTHER, RTX_3090, "nvidia")

        found = find(tmp_path)

        assert [gpu.id for gpu in found.gpus] == [OTHER]
        assert [problem.code for problem in found.findings] == ["not_compute"]
        assert SLOT in found.findings[0].message

    def test_an_unknown_card_is_usable(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, "ffff", "nvidia")

        gpu = only(tmp_path)

        assert (gpu.usable, gpu.arch, gpu.vram_total_bytes) == (True, None, None)
        assert codes(gpu) == ["arch_unknown", "memory_unknown"]
        assert "ffff" in gpu.name

    def test_a_sleeping_card_is_usable_and_says_so(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, "nvidia")
        write(tmp_path, f"sys/bus/pci/devices/{SLOT}/power/runtime_status", "suspended\n")

        gpu = only(tmp_path)

        assert (gpu.usable, gpu.asleep, codes(gpu)) == (True, True, ["asleep"])

    def test_a_node_that_may_not_be_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The system's refusal is a stand-in: root, as whom tests may run, is refused nothing."""
        add_pci(tmp_path, SLOT, RTX_3090, "nvidia")
        write(tmp_path, "dev/nvidiactl", "")
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        assert (only(tmp_path).usable, codes(only(tmp_path))) == (False, ["render_denied"])

    def test_nodes_that_are_there_are_named_with_their_group(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, "nvidia")
        write(tmp_path, "dev/nvidiactl", "")
        group = os.stat(tmp_path / "dev/nvidiactl").st_gid
        assert [(node.path, node.gid) for node in only(tmp_path).nodes] == [
            ("/dev/nvidiactl", group)
        ]


class TestRecording:
    def test_it_is_presence_by_itself(self, tmp_path: Path) -> None:
        row = f"0, NVIDIA GeForce RTX 3090, {UUID}, 00000000:01:00.0, 24576, 1508, 8.6"
        write(tmp_path, "nvidia-smi.csv", HEADER + row)

        gpu = only(tmp_path)

        assert (gpu.id, gpu.uuid, gpu.arch, gpu.driver) == (SLOT, UUID, "sm_86", "nvidia")
        assert (gpu.vram_total_bytes, gpu.is_apu) == (24 * GIB, False)

    def test_the_bus_gives_what_it_lacks(self, tmp_path: Path) -> None:
        add_pci(tmp_path, SLOT, RTX_3090, "nvidia")
        write(tmp_path, "nvidia-smi.csv", HEADER + "0, Graphics Device, , 01:00.0, 24268, 1, [N/A]")

        gpu = only(tmp_path)

        assert (gpu.arch, gpu.pci_id) == ("sm_86", "10de:2204")
        assert "3090" in gpu.name
        assert gpu.vram_total_bytes == 24268 * MIB

    def test_a_card_beside_it_keeps_its_own_reason(self, tmp_path: Path) -> None:
        add_pci(tmp_path, OTHER, RTX_4080, "vfio-pci")
        add_pci(tmp_path, "0000:03:00.0", RTX_4080, "nvidia")
        write(tmp_path, "nvidia-smi.csv", HEADER + f"0, A, {UUID}, {SLOT}, 8192, 1, 8.6")

        found = {gpu.id: codes(gpu) for gpu in find(tmp_path).gpus}

        assert found == {SLOT: [], OTHER: ["vfio"], "0000:03:00.0": ["gpu_lost"]}

    def test_a_card_without_a_slot_is_found_by_its_uuid(self, tmp_path: Path) -> None:
        add_proc(tmp_path, SLOT, UUID)
        add_proc(tmp_path, OTHER, UUID.replace("1", "2"))
        write(tmp_path, "nvidia-smi.csv", f"name, uuid, memory.total [MiB]\nA, {UUID}, 512")

        found = {gpu.id: gpu.vram_total_bytes for gpu in find(tmp_path).gpus}

        assert found[SLOT] == 512 * MIB
        assert set(found) == {SLOT, OTHER}

    def test_memory_that_cannot_be_read_is_not_the_hosts(self, tmp_path: Path) -> None:
        """A card of its own memory that does not say how much is unknown, never unified."""
        write(tmp_path, "proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB\n")
        row = f"0, NVIDIA GeForce RTX 3090, {UUID}, {SLOT}, [N/A], [N/A], 8.6"
        write(tmp_path, "nvidia-smi.csv", HEADER + row)

        gpu = only(tmp_path)

        assert (gpu.unified, gpu.vram_total_bytes, gpu.usable) == (False, None, True)
        assert codes(gpu) == ["memory_unknown"]

    @pytest.mark.parametrize("told", ["[N/A]", "122880"])
    def test_a_gpu_without_memory_of_its_own_shares_the_hosts(
        self, tmp_path: Path, told: str
    ) -> None:
        """Whether its driver says so or gives odd values (XuehaiPan/nvitop#208)."""
        write(tmp_path, "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB\n")
        row = f"0, NVIDIA GB10, {UUID}, 0000000F:01:00.0, {told}, {told}, 12.1"
        write(tmp_path, "nvidia-smi.csv", HEADER + row)

        gpu = only(tmp_path)
        (source,) = nvidia.sources(tmp_path, [gpu])

        assert (gpu.unified, gpu.is_apu, gpu.vram_total_bytes) == (True, True, 1000 * 1024)
        assert source.read().numbers["vram_used_bytes"] == 600 * 1024

    def test_slices_and_who_is_in_them(self, tmp_path: Path) -> None:
        part = (
            "<mig_device><gpu_instance_id>{gi}</gpu_instance_id><fb_memory_usage>"
            "<total>1024 MiB</total><used>{gi} MiB</used></fb_memory_usage></mig_device>"
        )
        process = (
            "<process_info><gpu_instance_id>{gi}</gpu_instance_id><pid>{pid}</pid>"
            "<process_name>x</process_name></process_info>"
        )
        write(
            tmp_path,
            "nvidia-smi.xml",
            f"<nvidia_smi_log><gpu id='{SLOT}'><uuid>{UUID}</uuid>"
            "<mig_mode><current_mig>Enabled</current_mig></mig_mode>"
            f"<mig_devices>{part.format(gi=0)}{part.format(gi=5)}</mig_devices><processes>"
            f"{process.format(gi=0, pid=70)}{process.format(gi=9, pid=71)}</processes></gpu>"
            "</nvidia_smi_log>",
        )

        gpu = only(tmp_path)
        (source,) = nvidia.sources(tmp_path, [gpu])

        assert gpu.usable
        assert source.read().numbers[f"mig:MIG-{UUID}/5/0:vram_used_bytes"] == 5 * MIB
        assert [(each.gpu, each.pid) for each in nvidia.holders(tmp_path, [gpu])] == [
            (f"MIG-{UUID}/0/0", 70),
            (SLOT, 71),
        ]

    def test_mig_mode_without_slices(self, tmp_path: Path) -> None:
        write(
            tmp_path,
            "nvidia-smi.xml",
            f"<nvidia_smi_log><gpu id='{SLOT}'><mig_mode><current_mig>Enabled</current_mig>"
            "</mig_mode><temperature><gpu_temp>30 C</gpu_temp></temperature></gpu>"
            "</nvidia_smi_log>",
        )

        gpu = only(tmp_path)
        (source,) = nvidia.sources(tmp_path, [gpu])

        assert (gpu.usable, codes(gpu)) == (False, ["mig_empty"])
        assert "-cgi" in gpu.problems[0].hint
        assert source.read().numbers == {"temp_gpu_c": 30}

    def test_xml_is_completed_by_csv(self, tmp_path: Path) -> None:
        """XML has no compute capability, and a card may be newer than our table."""
        write(
            tmp_path,
            "nvidia-smi.xml",
            f"<nvidia_smi_log><gpu id='{SLOT}'><product_name>NVIDIA Q1</product_name></gpu>"
            "</nvidia_smi_log>",
        )
        assert only(tmp_path).arch is None
        write(tmp_path, "nvidia-smi.csv", HEADER + f"0, NVIDIA Q1, {UUID}, {SLOT}, 5, 1, 13.7")
        assert (only(tmp_path).arch, only(tmp_path).name) == ("sm_137", "NVIDIA Q1")

    def test_a_recording_that_changes_is_read_anew(self, tmp_path: Path) -> None:
        row = f"0, A, {UUID}, {SLOT}, 100, "
        write(tmp_path, "nvidia-smi.csv", HEADER + row + "7, 8.6")
        (source,) = nvidia.sources(tmp_path, [only(tmp_path)])
        assert source.read().numbers["vram_used_bytes"] == 7 * MIB

        write(tmp_path, "nvidia-smi.csv", HEADER + row + "70, 8.6")

        assert source.read().numbers["vram_used_bytes"] == 70 * MIB

    def test_two_cards_of_one_uuid_are_not_mixed_up(self, tmp_path: Path) -> None:
        rows = f"0, A, {UUID}, {SLOT}, 100, 1, 8.6\n1, B, {UUID}, {OTHER}, 200, 2, 8.9\n"
        write(tmp_path, "nvidia-smi.csv", HEADER + rows)

        gpus = find(tmp_path).gpus
        used = [
            source.read().numbers["vram_used_bytes"] for source in nvidia.sources(tmp_path, gpus)
        ]

        assert [(gpu.id, gpu.arch) for gpu in gpus] == [(SLOT, "sm_86"), (OTHER, "sm_89")]
        assert used == [1 * MIB, 2 * MIB]

    def test_wsl_has_no_slot_of_ours(self, tmp_path: Path) -> None:
        write(tmp_path, "proc/version", "Linux version 5.15-microsoft-standard-WSL2\n")
        write(tmp_path, "nvidia-smi.csv", HEADER + f"0, A, {UUID}, {SLOT}, 100, 1, 8.6")

        gpu = only(tmp_path)
        (source,) = nvidia.sources(tmp_path, [gpu])

        assert (gpu.id, gpu.pci_slot, gpu.driver) == (UUID, None, "dxgkrnl")
        assert [node.path for node in gpu.nodes] == ["/dev/dxg"]
        assert source.read().numbers["vram_used_bytes"] == MIB


class TestTegra:
    def add_board(self, root: Path, chip: str = "tegra234") -> None:
        board = f"nvidia,p3737-0000+p3701-0005\0nvidia,p3701-0005\0nvidia,{chip}\0"
        write(root, "proc/device-tree/compatible", board)
        write(root, "proc/meminfo", "MemTotal: 1000 kB\nMemAvailable: 400 kB\n")

    @pytest.mark.parametrize(
        ("chip", "arch"),
        [("tegra210", "sm_53"), ("tegra194", "sm_72"), ("tegra234", "sm_87"), ("tegra999", None)],
    )
    def test_it_is_known_without_any_driver_to_ask(
        self, tmp_path: Path, chip: str, arch: str | None
    ) -> None:
        self.add_board(tmp_path, chip)

        gpu = only(tmp_path)

        assert (gpu.id, gpu.arch, gpu.driver) == (f"{chip}-gpu", arch, "nvgpu")
        assert (gpu.unified, gpu.is_apu, gpu.usable) == (True, True, True)
        assert gpu.vram_total_bytes == 1000 * 1024

    def test_a_driver_that_says_not_available_is_no_other_gpu(self, tmp_path: Path) -> None:
        self.add_board(tmp_path)
        text = "name, uuid, memory.total [MiB]\nOrin (nvgpu), GPU-1234, [N/A]\n"
        write(tmp_path, "nvidia-smi.csv", text)
        assert (only(tmp_path).id, only(tmp_path).arch) == ("GPU-1234", "sm_87")

    def test_sensors(self, tmp_path: Path) -> None:
        self.add_board(tmp_path)
        for number, (kind, value) in enumerate(
            [("tj-thermal", "49812"), ("GPU-therm", "47250"), ("cpu-thermal", "50000")]
        ):
            write(tmp_path, f"sys/class/thermal/thermal_zone{number}/type", f"{kind}\n")
            write(tmp_path, f"sys/class/thermal/thermal_zone{number}/temp", f"{value}\n")
        write(tmp_path, "sys/class/devfreq/17000000.gpu/device/load", "437\n")
        write(tmp_path, "sys/class/devfreq/17000000.gpu/cur_freq", "1300500000\n")

        (source,) = nvidia.sources(tmp_path, [only(tmp_path)])

        assert source.read().numbers == {
            "vram_total_bytes": 1000 * 1024, "vram_used_bytes": 600 * 1024,
            "temp_tj_c": 49.812, "temp_gpu_c": 47.25,
            "busy_percent": 43.7, "clock_core_mhz": 1300.5,
        }  # fmt: skip

    @pytest.mark.parametrize("text", ["-256000", "", "garbage", "999999999"])
    def test_a_zone_that_is_off_has_no_temperature(self, tmp_path: Path, text: str) -> None:
        self.add_board(tmp_path)
        write(tmp_path, "sys/class/thermal/thermal_zone0/type", "gpu-thermal")
        write(tmp_path, "sys/class/thermal/thermal_zone0/temp", text)
        (source,) = nvidia.sources(tmp_path, [only(tmp_path)])
        assert "temp_gpu_c" not in source.read().numbers

    def test_a_board_without_nvidias_driver(self, tmp_path: Path) -> None:
        self.add_board(tmp_path)
        write(tmp_path, "dev/null", "")
        assert (only(tmp_path).usable, codes(only(tmp_path))) == (False, ["no_driver"])

        write(tmp_path, "dev/nvmap", "")
        assert [node.path for node in only(tmp_path).nodes] == ["/dev/nvmap"]
        assert only(tmp_path).usable


class TestRunningSystem:
    def test_nvml_and_the_bus_are_one_card(self, system: Path, install: Install) -> None:
        add_pci(system, SLOT, RTX_3090, "nvidia")
        add_proc(system, SLOT, UUID)
        card = FakeCard(uuid=UUID, minor=4, processes={"compute": [(77, 5 * MIB)]})
        install(FakeLibrary(card))

        gpu = only(system)
        (source,) = nvidia.sources(system, [gpu])

        assert (gpu.id, gpu.uuid, gpu.usable, codes(gpu)) == (SLOT, UUID, True, [])
        assert (gpu.driver_version, gpu.cuda_version) == ("580.95.05", "13.0")
        assert source.read().numbers["vram_used_bytes"] == GIB
        assert [(each.pid, each.vram_bytes) for each in nvidia.holders(system, [gpu])] == [
            (77, 5 * MIB)
        ]

    @pytest.mark.parametrize(
        ("code", "wanted"), [(18, "driver_mismatch"), (9, "no_driver"), (999, "not_answering")]
    )
    def test_nvml_that_refuses(
        self, system: Path, install: Install, code: int, wanted: str
    ) -> None:
        add_pci(system, SLOT, RTX_3090, "nvidia")
        add_proc(system, SLOT, UUID)
        add_pci(system, OTHER, RTX_4080, "vfio-pci")
        install(FakeLibrary()).init_code = code

        found = find(system)

        assert {gpu.id: codes(gpu) for gpu in found.gpus} == {SLOT: [wanted], OTHER: ["vfio"]}
        assert not any(gpu.usable for gpu in found.gpus)
        assert nvidia.sources(system, found.gpus) == []
        if code == 18:
            assert "570.133.07" in found.gpus[0].problems[0].message

    def test_a_lost_card_beside_a_sound_one(self, system: Path, install: Install) -> None:
        add_pci(system, SLOT, RTX_3090, "nvidia")
        add_pci(system, OTHER, RTX_4080, "nvidia")
        install(FakeLibrary(FakeCard(), FakeCard(no_handle=15)))

        found = {gpu.id: (gpu.usable, codes(gpu)) for gpu in find(system).gpus}

        assert found == {SLOT: (True, []), OTHER: (False, ["gpu_lost"])}

    def test_no_library_and_no_program(self, system: Path, install: Install) -> None:
        add_pci(system, SLOT, RTX_3090, "nvidia")
        install(FakeLibrary()).init_code = 12
        assert codes(only(system)) == ["nvml_missing"]

    def test_the_program_where_there_is_no_library(self, system: Path, install: Install) -> None:
        """Its answer to the search serves the first reading, too."""
        add_pci(system, SLOT, RTX_3090, "nvidia")
        install(FakeLibrary()).init_code = 12
        program = system / "bin/nvidia-smi"
        write(system, "bin/nvidia-smi", f"#!/bin/sh\necho 'name, pci.bus_id'\necho 'A, {SLOT}'\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

        gpu = only(system)
        program.unlink()
        (source,) = nvidia.sources(system, [gpu])

        assert (gpu.name, gpu.usable) == ("A", True)
        assert source.read().numbers == {}

    @pytest.mark.parametrize("driver", [None, "nouveau", "vfio-pci"])
    def test_without_nvidias_driver_its_library_is_not_loaded(
        self, system: Path, install: Install, driver: str | None
    ) -> None:
        add_pci(system, SLOT, RTX_3090, driver)
        library = install(FakeLibrary(FakeCard()))

        find(system)

        assert library.began == 0

    def test_a_sleeping_card_is_not_woken(self, system: Path, install: Install) -> None:
        add_pci(system, SLOT, RTX_3090, "nvidia")
        state = f"sys/bus/pci/devices/{SLOT}/power/runtime_status"
        write(system, state, "suspended\n")
        library = install(FakeLibrary(FakeCard()))

        gpu = only(system)
        (source,) = nvidia.sources(system, [gpu])
        reading = source.read()
        nvidia.holders(system, [gpu])

        assert (gpu.asleep, gpu.usable, reading.asleep, reading.numbers) == (True, True, True, {})
        assert library.began == 0

        write(system, state, "active\n")
        assert source.read().numbers["vram_total_bytes"] == 24 * GIB

    def test_a_card_that_gets_lost_says_so_in_its_reading(
        self, system: Path, install: Install
    ) -> None:
        add_pci(system, SLOT, RTX_3090, "nvidia")
        card = FakeCard()
        install(FakeLibrary(card))
        (source,) = nvidia.sources(system, [only(system)])
        card.fails = 15

        with pytest.raises(OSError, match="lost"):
            source.read()

    def test_slices_of_a_card(self, system: Path, install: Install) -> None:
        add_pci(system, SLOT, "20b2", "nvidia")
        part = FakeCard(uuid="MIG-1", gi=1, total=10 * GIB, processes={"compute": [(5, MIB)]})
        card = FakeCard(name="NVIDIA A100-SXM4-80GB", mig=True, slices=[part])
        install(FakeLibrary(card))

        gpu = only(system)

        assert [part.uuid for part in gpu.mig] == ["MIG-1"]
        assert [(each.gpu, each.pid) for each in nvidia.holders(system, [gpu])] == [("MIG-1", 5)]

        card.slices = []
        assert codes(only(system)) == ["mig_empty"]

    def test_a_driver_without_a_card_to_show_it_on_is_a_finding(
        self, system: Path, install: Install
    ) -> None:
        write(system, "proc/driver/nvidia/version", "")
        install(FakeLibrary()).init_code = 18
        assert [problem.code for problem in find(system).findings] == ["driver_mismatch"]


FILES = (
    f"sys/bus/pci/devices/{SLOT}/uevent",
    f"sys/bus/pci/devices/{SLOT}/device",
    f"sys/bus/pci/devices/{SLOT}/vendor",
    f"sys/bus/pci/devices/{SLOT}/class",
    f"proc/driver/nvidia/gpus/{SLOT}/information",
    "proc/driver/nvidia/version",
    "proc/meminfo",
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.sampled_from(FILES), st.sampled_from(["", "\0" * 64, "garbage \0\n", "-1", "0x", None]))
def test_a_bad_file_changes_no_other_card(
    tmp_path_factory: pytest.TempPathFactory, path: str, text: str | None
) -> None:
    """None: there is a folder in its place, so that reading it fails."""
    root = tmp_path_factory.mktemp("machine")
    add_pci(root, SLOT, RTX_3090, "nvidia")
    add_pci(root, OTHER, GTX_980_TI, "nvidia")
    add_proc(root, SLOT, UUID)
    write(root, "proc/meminfo", "MemTotal: 1000 kB\n")
    (root / path).unlink()
    if text is None:
        (root / path).mkdir()
    else:
        write(root, path, text)

    found = {gpu.id: gpu for gpu in find(root).gpus}

    assert (found[OTHER].arch, found[OTHER].usable) == ("sm_52", True)
    assert 0 not in [gpu.vram_total_bytes for gpu in found.values()]
    assert found[SLOT].arch in ("sm_86", None)


RECORDED = Path(__file__).parents[3] / "shared/fixtures/gpu"


@pytest.mark.skipif(not RECORDED.is_dir(), reason="no recorded machines beside the repository")
def test_recorded_machines_are_read_without_a_raise() -> None:
    for root in sorted(RECORDED.glob("nvidia-*")):
        found = find(root)
        assert found.gpus, root.name
        for source in nvidia.sources(root, found.gpus):
            source.read()
        nvidia.holders(root, found.gpus)
