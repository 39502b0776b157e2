"""What nvidia-smi says, as XML or CSV, and how the program itself is run."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.core.units import MIB
from flexlab.gpus import nvidia_tool
from flexlab.gpus.nvidia_card import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    RESET_REQUIRED,
    TIMEOUT,
    UNKNOWN_ERROR,
    VERSION_MISMATCH,
    DriverCard,
)
from flexlab.gpus.nvidia_smi import parse, parse_csv, parse_xml, with_listed_slices

UUID = "GPU-00000000-0000-4000-8000-000000000001"
NO_VALUES = ["N/A", "[N/A]", "[Not Supported]", "[Unknown Error]", "ERR!", "", "-1 MiB", "9" * 400]


def gpu_xml(body: str, slot: str = "00000000:01:00.0") -> str:
    return f'<gpu id="{slot}"><product_name>NVIDIA X</product_name>{body}</gpu>'


def log_xml(*gpus: str) -> str:
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n'
        "<nvidia_smi_log><driver_version>570.1.2</driver_version><cuda_version>12.8</cuda_version>"
        + "".join(gpus)
        + "</nvidia_smi_log>"
    )


def only_card(text: str) -> DriverCard:
    answer = parse(text)
    assert answer is not None
    (card,) = answer.cards
    return card


class TestXml:
    def test_identity_is_the_slot_in_sysfs_form(self) -> None:
        body = (
            f"<uuid>{UUID}</uuid><minor_number>3</minor_number><pci>"
            "<pci_bus_id>0000000F:01:00.0</pci_bus_id><pci_device_id>1EB810DE</pci_device_id></pci>"
        )
        card = only_card(log_xml(gpu_xml(body, slot="00000000:02:00.0")))

        assert (card.slot, card.uuid, card.minor) == ("000f:01:00.0", UUID, 3)
        assert card.pci_id == "10de:1eb8"

    @pytest.mark.parametrize("text", ["000000DE", "[REDACTED]", "000010DE", ""])
    def test_a_blanked_device_id_is_unknown(self, text: str) -> None:
        body = f"<pci><pci_device_id>{text}</pci_device_id></pci>"
        assert only_card(log_xml(gpu_xml(body))).pci_id is None

    def test_memory_is_the_cards_and_not_its_first_slices(self) -> None:
        """MIG slices stand before the card's own memory and have the same tags."""
        part = (
            "<mig_device><gpu_instance_id>{gi}</gpu_instance_id>"
            "<compute_instance_id>0</compute_instance_id><fb_memory_usage>"
            "<total>19968 MiB</total><used>12 MiB</used></fb_memory_usage></mig_device>"
        )
        body = (
            f"<uuid>{UUID}</uuid><mig_mode><current_mig>Enabled</current_mig></mig_mode>"
            f"<mig_devices>{part.format(gi=3)}{part.format(gi=4)}</mig_devices>"
            "<fb_memory_usage><total>81920 MiB</total><used>50 MiB</used></fb_memory_usage>"
        )
        card = only_card(log_xml(gpu_xml(body)))

        assert card.numbers["vram_total_bytes"] == 81920 * MIB
        assert [part.vram_total_bytes for part in card.slices] == [19968 * MIB] * 2
        assert [part.uuid for part in card.slices] == [f"MIG-{UUID}/3/0", f"MIG-{UUID}/4/0"]

    def test_a_mode_that_is_off_has_no_slices(self) -> None:
        mode = "<mig_mode><current_mig>Disabled</current_mig></mig_mode>"
        body = f"{mode}<mig_devices>None</mig_devices>"
        card = only_card(log_xml(gpu_xml(body)))
        assert (card.is_mig, card.slices) == (False, ())

    @pytest.mark.parametrize(
        ("body", "watts"),
        [
            ("<power_readings><power_draw>8.93 W</power_draw></power_readings>", 8.93),
            ("<gpu_power_readings><power_draw>67.03 W</power_draw></gpu_power_readings>", 67.03),
            (
                "<gpu_power_readings><average_power_draw>N/A</average_power_draw>"
                "<instant_power_draw>16.42 W</instant_power_draw></gpu_power_readings>",
                16.42,
            ),
            (
                "<gpu_power_readings><average_power_draw>139.62 W</average_power_draw>"
                "<instant_power_draw>142.33 W</instant_power_draw></gpu_power_readings>"
                "<module_power_readings><power_draw>500 W</power_draw></module_power_readings>",
                139.62,
            ),
            ("<power_readings><power_draw>[Unknown Error]</power_draw></power_readings>", None),
        ],
    )
    def test_power_in_each_drivers_layout(self, body: str, watts: float | None) -> None:
        assert only_card(log_xml(gpu_xml(body))).numbers.get("power_w") == watts

    @pytest.mark.parametrize("text", [*NO_VALUES, "0 MiB"])
    def test_memory_that_is_not_told_is_absent(self, text: str) -> None:
        body = f"<fb_memory_usage><total>{text}</total></fb_memory_usage>"
        assert "vram_total_bytes" not in only_card(log_xml(gpu_xml(body))).numbers

    def test_nothing_used_is_a_value(self) -> None:
        body = "<fb_memory_usage><used>0 MiB</used></fb_memory_usage>"
        assert only_card(log_xml(gpu_xml(body))).numbers["vram_used_bytes"] == 0

    @pytest.mark.parametrize("era", ["event", "throttle"])
    def test_why_it_is_slow(self, era: str) -> None:
        def reason(name: str, state: str) -> str:
            return f"<clocks_{era}_reason_{name}>{state}</clocks_{era}_reason_{name}>"

        body = (
            f"<clocks_{era}_reasons>"
            + reason("gpu_idle", "Active")
            + reason("sw_power_cap", "Active")
            + reason("hw_slowdown", "Not Active")
            + reason("sw_thermal_slowdown", "Active")
            + f"</clocks_{era}_reasons>"
        )
        assert only_card(log_xml(gpu_xml(body))).throttle == ("power", "thermal")

    @pytest.mark.parametrize(
        ("body", "fault"),
        [
            ("<utilization><gpu_util>GPU is lost</gpu_util></utilization>", GPU_IS_LOST),
            ("<fan_speed>[GPU requires reset]</fan_speed>", RESET_REQUIRED),
            ("<gpu_recovery_action>Reset</gpu_recovery_action>", RESET_REQUIRED),
            ("<gpu_recovery_action>None</gpu_recovery_action>", None),
            ("<gpu_recovery_action>Drain and Reset</gpu_recovery_action>", None),
            (
                "<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status>",
                RESET_REQUIRED,
            ),
        ],
    )
    def test_broken_cards(self, body: str, fault: int | None) -> None:
        assert only_card(log_xml(gpu_xml(body))).fault == fault

    def test_processes(self) -> None:
        body = (
            "<processes><process_info><pid>835</pid><type>C</type>"
            "<process_name>/usr/bin/llama-server</process_name><used_memory>550 MiB</used_memory>"
            "</process_info><process_info><pid>9</pid><process_name>N/A</process_name>"
            "<used_memory>N/A</used_memory></process_info><process_info><pid>x</pid>"
            "</process_info></processes>"
        )
        found = only_card(log_xml(gpu_xml(body))).processes

        assert [(each.pid, each.name, each.vram_bytes) for each in found] == [
            (835, "llama-server", 550 * MIB),
            (9, None, None),
        ]

    def test_a_log_that_is_cut_off_keeps_its_whole_cards(self) -> None:
        text = log_xml(gpu_xml(""), gpu_xml("<uuid>GPU-1234</uuid>", slot="00000000:02:00.0"))
        answer = parse_xml(text[: text.index("<uuid>")])

        assert answer is not None
        assert [card.slot for card in answer.cards] == ["0000:01:00.0"]
        assert answer.driver_version == "570.1.2"

    def test_a_card_without_a_handle_is_told_before_the_log(self) -> None:
        warning = "Unable to determine the device handle for GPU0000:08:00.0: Unknown Error\n"
        answer = parse(warning + log_xml(gpu_xml("")))

        assert answer is not None
        assert {card.slot: card.fault for card in answer.cards} == {
            "0000:01:00.0": None,
            "0000:08:00.0": GPU_IS_LOST,
        }

    def test_windows_wide_characters(self) -> None:
        """A shell that writes UTF-16: the reader of files leaves the zero bytes out."""
        raw = log_xml(gpu_xml("")).encode("utf-16").replace(b"\0", b"")
        assert only_card(raw.decode("utf-8", errors="replace")).name == "NVIDIA X"


class TestCsv:
    def test_units_stand_in_the_header_or_with_the_values_or_nowhere(self) -> None:
        rows = (
            "name, memory.total [MiB]\nA, 24576",
            "name, memory.total [MiB]\nA, 24576 MiB",
            "name, memory.total\nA, 24576",
            "name, memory.total [KiB]\nA, 25165824",
            "name, memory.total [GiB]\nA, 24",
        )
        for text in rows:
            assert only_card(text).numbers["vram_total_bytes"] == 24576 * MIB

    def test_columns_count_by_name_and_not_by_place(self) -> None:
        text = (
            "driver_version, compute_cap, pci.bus_id, name, temperature.gpu, uuid, power.draw [W]\n"
            f"580.1, 12.1, 0000000F:01:00.0, NVIDIA GB10, 35, {UUID}, 11.17 W\n"
        )
        card = only_card(text)

        assert (card.arch, card.slot, card.name, card.uuid) == (
            "sm_121", "000f:01:00.0", "NVIDIA GB10", UUID,
        )  # fmt: skip
        assert card.numbers == {"temp_gpu_c": 35, "power_w": 11.17}

    @pytest.mark.parametrize("text", NO_VALUES)
    def test_values_that_are_none(self, text: str) -> None:
        card = only_card(f"name, memory.total [MiB], compute_cap\nOrin (nvgpu), {text}, {text}\n")
        assert (card.numbers, card.arch, card.name) == ({}, None, "Orin (nvgpu)")

    def test_a_lost_card_beside_a_sound_one(self) -> None:
        text = (
            "index, name, memory.used [MiB]\n0, [GPU is lost], [GPU is lost]\n1, NVIDIA B, 5 MiB\n"
        )
        answer = parse_csv(text)

        assert answer is not None
        assert [(card.number, card.name, card.fault) for card in answer.cards] == [
            (0, None, GPU_IS_LOST),
            (1, "NVIDIA B", None),
        ]

    @pytest.mark.parametrize("text", ["", "No devices were found\n", "24576, 3\n", "name\n", "\0"])
    def test_no_card(self, text: str) -> None:
        assert parse(text) is None

    def test_lines_that_fit_no_header_are_left_out(self) -> None:
        card = only_card("\ufeffname, uuid\r\nwarning\r\nA, GPU-1234\r\nA, b, c\r\n")
        assert (card.name, card.uuid) == ("A", "GPU-1234")


class TestAnything:
    @given(st.text(max_size=300))
    def test_no_text_raises(self, text: str) -> None:
        parse(text)
        parse_xml(text)
        parse_csv(f"name, uuid, memory.total [MiB]\n{text}")

    @given(st.integers(min_value=0), st.text(max_size=4))
    def test_a_log_that_breaks_anywhere_gives_whole_cards_only(self, at: int, garbage: str) -> None:
        memory = "<fb_memory_usage><total>1024 MiB</total></fb_memory_usage>"
        text = log_xml(gpu_xml(memory), gpu_xml(memory, slot="00000000:02:00.0"))
        answer = parse_xml(text[: at % len(text)] + garbage)

        for card in answer.cards if answer is not None else ():
            assert card.numbers == {"vram_total_bytes": 1024 * MIB}

    @given(st.text(alphabet="0123456789.-+eE MiBWC%[]NA/", max_size=12))
    def test_a_size_is_never_negative_nor_made_up(self, text: str) -> None:
        body = f"<fb_memory_usage><total>{text}</total><used>{text}</used></fb_memory_usage>"
        numbers = only_card(log_xml(gpu_xml(body))).numbers

        assert all(value >= 0 for value in numbers.values())
        if not any(letter.isdigit() for letter in text):
            assert numbers == {}

    def test_deep_nesting_is_survived(self) -> None:
        assert parse_xml("<nvidia_smi_log>" + "<a>" * 100_000) is None


LISTING = f"""GPU 0: NVIDIA A100 (UUID: {UUID})
  MIG 1g.5gb      Device  0: (UUID: MIG-aaaa-1)
  MIG 2g.10gb     Device  1: (UUID: MIG-bbbb-2)
GPU 1: NVIDIA A100 (UUID: GPU-other)
"""


@pytest.mark.parametrize(
    ("slices", "wanted"),
    [
        (2, [("MIG-aaaa-1", 1, "1g.5gb"), ("MIG-bbbb-2", 2, "2g.10gb")]),
        (1, [(f"MIG-{UUID}/1/0", 1, None)]),
    ],
)
def test_slices_get_their_uuid_from_the_list(
    slices: int, wanted: list[tuple[str, int, str | None]]
) -> None:
    """Not where the list counts other slices than the log: they changed in between."""
    parts = "".join(
        f"<mig_device><gpu_instance_id>{gi}</gpu_instance_id></mig_device>"
        for gi in range(1, slices + 1)
    )
    body = (
        f"<uuid>{UUID}</uuid><mig_mode><current_mig>Enabled</current_mig></mig_mode>"
        f"<mig_devices>{parts}</mig_devices>"
    )
    answer = parse_xml(log_xml(gpu_xml(body)))
    assert answer is not None

    (card,) = with_listed_slices(answer, LISTING).cards

    assert [(part.uuid, part.gi, part.profile) for part in card.slices] == wanted


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where an nvidia-smi of the test's own goes: the only one that is found."""
    monkeypatch.setattr(nvidia_tool, "_FOLDERS", ())
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    if any(os.path.exists(f"{folder}/nvidia-smi") for folder in ("/usr/bin", "/bin")):
        pytest.skip("there is an nvidia-smi on this machine")
    return tmp_path / "nvidia-smi"


def write_program(path: Path, body: str) -> None:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


class TestProgram:
    def test_no_program(self, program: Path) -> None:
        assert nvidia_tool.ask().fault == LIBRARY_NOT_FOUND

    def test_xml(self, program: Path) -> None:
        write_program(program, f"[ \"$*\" = '-q -x' ] && cat <<'END'\n{log_xml(gpu_xml(''))}\nEND")
        assert [card.name for card in nvidia_tool.ask().cards] == ["NVIDIA X"]

    def test_csv_where_xml_is_garbage_and_a_column_is_not_known(self, program: Path) -> None:
        write_program(
            program,
            'case "$*" in\n'
            "*compute_cap*) echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2;;\n"
            "*--query-gpu*) echo 'index, name'; echo '0, NVIDIA Y';;\n"
            "*) echo garbage; exit 1;;\nesac",
        )
        assert [card.name for card in nvidia_tool.ask().cards] == ["NVIDIA Y"]

    @pytest.mark.parametrize(
        ("body", "fault"),
        [
            ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", 18),
            ("echo 'Failed to initialize NVML: Driver/library version mismatch'", 18),
            (
                "echo 'NVIDIA-SMI has failed because it could not communicate with the NVIDIA "
                "driver.'; exit 9",
                DRIVER_NOT_LOADED,
            ),
            ("echo 'No devices were found'; exit 6", 6),
            ("echo nonsense", UNKNOWN_ERROR),
            ("exit 0", UNKNOWN_ERROR),
        ],
    )
    def test_why_there_is_no_card(self, program: Path, body: str, fault: int) -> None:
        write_program(program, body)
        assert nvidia_tool.ask().fault == fault
        assert VERSION_MISMATCH == 18

    def test_one_that_hangs_is_killed_with_its_children(self, program: Path) -> None:
        pids = program.with_name("pids")
        write_program(program, f"sleep 600 &\necho $$ $! >{pids}\necho '<nvidia_smi_log>'\nwait")
        begun = time.monotonic()

        fault = nvidia_tool.ask(0.5).fault

        assert fault == TIMEOUT
        assert time.monotonic() - begun < 3
        parent, child = map(int, pids.read_text().split())
        assert ends(parent)
        assert ends(child)

    def test_its_stdin_is_empty(self, program: Path) -> None:
        write_program(program, f'IFS= read -r line && exit 1\necho "{csv_line()}"')
        assert [card.name for card in nvidia_tool.ask(2).cards] == ["NVIDIA Z"]

    def test_much_output_is_read(self, program: Path) -> None:
        write_program(program, f"head -c 1000000 /dev/zero | tr '\\0' '\\n'\necho \"{csv_line()}\"")
        assert [card.name for card in nvidia_tool.ask().cards] == ["NVIDIA Z"]

    def test_a_child_that_holds_the_output_open_is_not_waited_for(self, program: Path) -> None:
        write_program(program, f'sleep 600 &\necho "{csv_line()}"')
        begun = time.monotonic()

        assert [card.name for card in nvidia_tool.ask(20).cards] == ["NVIDIA Z"]
        assert time.monotonic() - begun < 10

    def test_a_file_that_is_no_program(self, program: Path) -> None:
        program.write_bytes(b"\x7fELF nothing")
        program.chmod(0o755)
        assert nvidia_tool.ask().fault == LIBRARY_NOT_FOUND


class TestShared:
    def test_one_run_serves_many_readings(self, program: Path) -> None:
        runs = program.with_name("runs")
        write_program(program, f'echo run >>{runs}\necho "{csv_line()}"')
        shared = nvidia_tool.SharedAnswer()

        names = [shared.get().cards[0].name for _ in range(5)]

        assert names == ["NVIDIA Z"] * 5
        assert runs.read_text().count("run") == 1

    def test_no_answer_is_an_error(self, program: Path) -> None:
        write_program(program, "exit 9")
        with pytest.raises(OSError, match="nvidia-smi"):
            nvidia_tool.SharedAnswer().get()


def csv_line() -> str:
    return "index, name\n0, NVIDIA Z"


def ends(pid: int) -> bool:
    """Whether it is over, or is within some seconds: a signal takes its time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5)[0])
    finally:
        os.close(descriptor)
