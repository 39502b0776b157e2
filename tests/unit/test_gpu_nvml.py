"""What NVML says becomes cards, readings and holders.

The real package nvidia-ml-py runs, over a stand-in for the driver's library (nvml_library): that a
real driver answers as the stand-in does is not proven here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest
from nvml_library import FakeCard, FakeLibrary

from flexlab.gpus import nvml
from flexlab.gpus.nvidia_card import LIBRARY_NOT_FOUND, VERSION_MISMATCH

Install = Callable[[FakeLibrary], FakeLibrary]
LOST, RESET, NOT_SUPPORTED, UNKNOWN = 15, 16, 3, 999


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def installed(library: FakeLibrary) -> FakeLibrary:
        monkeypatch.setattr(pynvml, "nvmlLib", library)
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        monkeypatch.setattr(nvml, "_session", None)
        return library

    yield installed
    nvml._forget()


def test_a_machine_without_the_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real: nothing stands in for the loader, which finds no libnvidia-ml here."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value != LIBRARY_NOT_FOUND:
            pytest.skip("there is an NVML on this machine")
    else:
        pytest.skip("there is an NVIDIA card in this machine")
    monkeypatch.setattr(nvml, "_session", None)

    with pytest.raises(nvml.Unusable) as refused:
        nvml.ask()

    assert refused.value.code == LIBRARY_NOT_FOUND


def test_a_card_with_everything(install: Install) -> None:
    numbers = {
        "busy": 65, "memory_busy": 9, "nvmlDeviceGetPowerUsage": 139_620,
        "nvmlDeviceGetEnforcedPowerLimit": 320_000, "nvmlDeviceGetClockInfo:1": 1950,
        "nvmlDeviceGetClockInfo:2": 9251, "nvmlDeviceGetFanSpeed": 40,
        "nvmlDeviceGetTemperature:0": 71,
    }  # fmt: skip
    install(FakeLibrary(FakeCard(numbers=numbers, temperature_memory=84, reasons=0x24)))

    answer = nvml.ask()

    (card,) = answer.cards
    assert (answer.driver_version, answer.cuda_version) == ("580.95.05", "13.0")
    assert (card.slot, card.uuid, card.minor) == ("0000:01:00.0", "GPU-0", 0)
    assert (card.arch, card.pci_id) == ("sm_86", "10de:2204")
    assert card.throttle == ("power", "thermal")
    assert card.numbers == {
        "vram_total_bytes": 24 << 30, "vram_used_bytes": 1 << 30,
        "vram_reserved_bytes": 300 << 20, "busy_percent": 65, "memory_busy_percent": 9,
        "power_w": 139.62, "power_limit_w": 320, "clock_core_mhz": 1950, "clock_memory_mhz": 9251,
        "fan_percent": 40, "temp_gpu_c": 71, "temp_mem_c": 84,
    }  # fmt: skip


def test_what_a_card_does_not_support_is_absent(install: Install) -> None:
    install(FakeLibrary(FakeCard(total=None, capability=None, minor=None, bus_id=None)))

    (card,) = nvml.ask().cards

    assert card.numbers == {}
    assert (card.arch, card.minor, card.slot, card.fault) == (None, None, None, None)
    assert nvml.read(None, "GPU-0").numbers == {}


def test_an_old_driver_is_asked_with_the_older_calls(install: Install) -> None:
    missing = "nvmlDeviceGetMemoryInfo_v2 nvmlDeviceGetCurrentClocksEventReasons"
    install(FakeLibrary(FakeCard(reasons=0x40), missing=missing))

    (card,) = nvml.ask().cards

    assert card.numbers["vram_used_bytes"] == (1 << 30) + (300 << 20)
    assert "vram_reserved_bytes" not in card.numbers
    assert card.throttle == ("thermal",)


def test_a_name_that_is_no_text_is_unknown(install: Install) -> None:
    install(FakeLibrary(FakeCard(name="\udcff\udcfe")))

    (card,) = nvml.ask().cards

    assert card.name is None
    assert card.arch == "sm_86"


@pytest.mark.parametrize("code", [LOST, RESET])
def test_a_broken_card_changes_nothing_for_the_others(install: Install, code: int) -> None:
    broken = FakeCard(uuid="GPU-0", fails=None)
    sound = FakeCard(uuid="GPU-1", bus_id="00000000:02:00.0")
    install(FakeLibrary(broken, sound))
    assert [card.fault for card in nvml.ask().cards] == [None, None]

    broken.fails = code

    assert [card.fault for card in nvml.ask().cards] == [code, None]
    with pytest.raises(OSError, match="GPU"):
        nvml.read("0000:01:00.0", "GPU-0")
    assert nvml.read("0000:02:00.0", "GPU-1").numbers["vram_total_bytes"] == 24 << 30


def test_a_card_without_a_handle_is_a_fault_of_the_answer(install: Install) -> None:
    install(FakeLibrary(FakeCard(no_handle=LOST), FakeCard(bus_id="00000000:02:00.0")))

    answer = nvml.ask()

    assert [card.slot for card in answer.cards] == ["0000:02:00.0"]
    assert answer.fault == LOST


def test_a_driver_that_only_fails_is_an_error(install: Install) -> None:
    card = FakeCard()
    install(FakeLibrary(card))
    nvml.ask()

    card.fails = UNKNOWN

    with pytest.raises(OSError, match="999"):
        nvml.read("0000:01:00.0", None)


def test_an_updated_driver_gives_its_code(install: Install) -> None:
    library = install(FakeLibrary())
    library.init_code = VERSION_MISMATCH

    with pytest.raises(nvml.Unusable) as refused:
        nvml.ask()

    assert refused.value.code == VERSION_MISMATCH


def test_it_begins_once_for_all_questions(install: Install) -> None:
    library = install(FakeLibrary(FakeCard()))

    nvml.ask(["0000:01:00.0"])
    nvml.ask(["0000:01:00.0"])
    nvml.read("0000:01:00.0", None)
    nvml.processes("0000:01:00.0", None)

    assert (library.began, library.ended) == (1, 0)


def test_a_card_that_came_later_is_found(install: Install) -> None:
    library = install(FakeLibrary(FakeCard()))
    nvml.ask(["0000:01:00.0"])
    library.cards.append(FakeCard(uuid="GPU-1", bus_id="00000000:02:00.0"))

    slots = [card.slot for card in nvml.ask(["0000:01:00.0", "0000:02:00.0"]).cards]

    assert slots == ["0000:01:00.0", "0000:02:00.0"]
    assert (library.began, library.ended) == (2, 1)


def test_a_reading_begins_anew_what_another_ended(install: Install) -> None:
    library = install(FakeLibrary(FakeCard()))
    nvml.ask()
    library.uninitialized = True

    assert nvml.read("0000:01:00.0", None).numbers["vram_used_bytes"] == 1 << 30
    assert library.began == 2


def test_a_card_that_is_not_shown_any_more_is_an_error(install: Install) -> None:
    install(FakeLibrary(FakeCard()))

    with pytest.raises(OSError, match="does not show"):
        nvml.read("0000:09:00.0", "GPU-9")


FORKING = """
import os, pynvml
from nvml_library import FakeCard, FakeLibrary
from flexlab.gpus import nvml
library = pynvml.nvmlLib = FakeLibrary(FakeCard())
nvml.ask()
if os.fork() == 0:
    nvml.ask()
    os._exit(library.began)
print(os.waitstatus_to_exitcode(os.wait()[1]), library.began)
"""


def test_a_forked_process_begins_its_own() -> None:
    """In a process without threads: Python warns of a fork beside any."""
    tests = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", FORKING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])},
        capture_output=True,
        text=True,
        check=True,
    )

    assert run.stdout.split() == ["2", "1"]


def sliced() -> FakeCard:
    def part(gi: int, pid: int) -> FakeCard:
        return FakeCard(
            name="NVIDIA A100-SXM4-80GB MIG 1g.10gb",
            uuid=f"MIG-{gi}",
            gi=gi,
            total=10 << 30,
            used=gi << 20,
            processes={"compute": [(pid, 5 << 20)]},
        )

    return FakeCard(name="NVIDIA A100-SXM4-80GB", mig=True, slices=[part(0, 70), None, part(7, 71)])


def test_mig_slices_with_their_memory(install: Install) -> None:
    install(FakeLibrary(sliced()))

    (card,) = nvml.ask().cards

    assert card.is_mig
    assert [(part.uuid, part.gi, part.profile) for part in card.slices] == [
        ("MIG-0", 0, "1g.10gb"),
        ("MIG-7", 7, "1g.10gb"),
    ]
    assert [part.vram_total_bytes for part in card.slices] == [10 << 30] * 2
    assert nvml.read("0000:01:00.0", None).numbers["mig:MIG-7:vram_used_bytes"] == 7 << 20


def test_processes_of_slices_know_their_slice(install: Install) -> None:
    install(FakeLibrary(sliced()))

    found = nvml.processes("0000:01:00.0", None)

    assert [(each.pid, each.slice_uuid) for each in found] == [(70, "MIG-0"), (71, "MIG-7")]


def test_a_process_in_both_lists_is_one_and_an_unknown_size_stays_unknown(install: Install) -> None:
    processes = {"compute": [(7, 5 << 20), (8, None)], "graphics": [(7, 5 << 20), (9, 1 << 20)]}
    install(FakeLibrary(FakeCard(processes=processes)))

    found = {each.pid: each.vram_bytes for each in nvml.processes("0000:01:00.0", None)}

    assert found == {7: 5 << 20, 8: None, 9: 1 << 20}
