"""What DRM's fdinfo says of processes, and who of several is counted for a shared file."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from gpu_processes import KIB, process, told
from hypothesis import given, settings
from hypothesis import strategies as st

from flexlab.gpus import fdinfo
from flexlab.gpus.fdinfo import Client, parse, walk

SLOT = "0000:03:00.0"
OTHER = "0000:0b:00.0"


def client(driver: str = "amdgpu", **values: object) -> Client:
    found = parse(told(SLOT, 7, driver, **values))
    assert found is not None
    return found


# -- one file


def test_a_client_is_known_by_its_card_and_number() -> None:
    found = parse(told("0000:2D:00.0", 42))
    assert found is not None
    assert (found.slot, found.id) == ("0000:2d:00.0", 42)


@pytest.mark.parametrize("missing", ["drm-pdev", "drm-client-id"])
def test_a_file_without_a_card_or_a_number_is_no_client(missing: str) -> None:
    lines = told(SLOT, 7, memory_vram="1 KiB").splitlines()
    assert parse("\n".join(line for line in lines if not line.startswith(missing))) is None


def test_memory_that_is_not_told_is_unknown() -> None:
    found = client(engine_gfx="5 ns")
    assert (found.vram_bytes, found.gtt_bytes) == (None, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("12", 12), ("12 KiB", 12 * KIB), ("3 MiB", 3 * KIB**2), ("2 GiB", 2 * KIB**3),
     ("12 kB", None), ("-1 KiB", None), ("1.5 MiB", None), ("KiB", None), ("", None)],
)  # fmt: skip
def test_units(text: str, size: int | None) -> None:
    assert client(memory_vram=text).vram_bytes == size


@pytest.mark.parametrize(
    ("driver", "regions", "vram", "gtt"),
    [
        ("amdgpu", {"memory_vram": "8 KiB", "memory_gtt": "2 KiB", "memory_cpu": "5 KiB"}, 8, 2),
        ("xe", {"resident_vram0": "8 KiB", "resident_vram1": "4 KiB", "resident_gtt": "1 KiB"},
         12, 1),
        ("xe", {"resident_system": "3 KiB", "resident_gtt": "1 KiB"}, None, 4),
        ("i915", {"resident_local0": "8 KiB", "resident_system0": "2 KiB"}, 8, 2),
        ("i915", {"resident_system0": "2 KiB", "resident_stolen-system0": "1 KiB"}, None, 3),
    ],
)  # fmt: skip
def test_each_driver_has_its_own_names_of_memory(
    driver: str, regions: dict[str, str], vram: int | None, gtt: int
) -> None:
    found = client(driver, **regions)
    assert found.vram_bytes == (None if vram is None else vram * KIB)
    assert found.gtt_bytes == gtt * KIB


def test_what_is_really_there_counts_before_what_was_asked_for() -> None:
    """And neither is added: all are views of the same memory."""
    found = client("xe", total_vram0="64 KiB", resident_vram0="16 KiB", shared_vram0="8 KiB")
    assert found.vram_bytes == 16 * KIB
    assert client(memory_vram="9 KiB", resident_vram="7 KiB").vram_bytes == 7 * KIB
    assert client(total_vram="64 KiB", memory_vram="9 KiB").vram_bytes == 9 * KIB
    assert client(total_vram="64 KiB").vram_bytes == 64 * KIB


def test_a_clock_is_no_memory() -> None:
    found = client("xe", cycles_rcs=5, total_cycles_rcs=100, total_cycles_vram0=9)
    assert found.vram_bytes is None
    assert found.cycles == {"rcs": (5, 100)}


def test_an_engine_that_is_there_twice_is_full_when_both_work() -> None:
    found = client("i915", engine_video="600 ns", engine_capacity_video=2, engine_render="5 ns")
    assert found.busy_ns == {"video": 300, "render": 5}


VALUES = st.one_of(
    st.integers(-5, 2**70).map(str),
    st.builds("{} {}".format, st.integers(0, 2**40), st.sampled_from(["KiB", "MiB", "ns", "xB"])),
    st.text(max_size=12),
)
KEYS = st.one_of(
    st.sampled_from(
        ["drm-pdev", "drm-client-id", "drm-memory-vram", "drm-resident-vram0", "drm-total-gtt",
         "drm-engine-gfx", "drm-engine-capacity-gfx", "drm-cycles-rcs", "drm-total-cycles-rcs"]
    ),
    st.text(max_size=12).map(lambda name: f"drm-{name}"),
    st.text(max_size=12),
)  # fmt: skip


@given(st.lists(st.tuples(KEYS, VALUES), max_size=20), st.booleans())
def test_any_text_is_read_and_no_number_is_below_nothing(
    lines: list[tuple[str, str]], whole: bool
) -> None:
    head = told(SLOT, 7) if whole else ""
    found = parse(head + "".join(f"{key}:\t{value}\n" for key, value in lines))
    if found is None:
        assert not whole
        return
    sizes = [size for size in (found.vram_bytes, found.gtt_bytes) if size is not None]
    counters = [*found.busy_ns.values(), *(n for pair in found.cycles.values() for n in pair)]
    assert all(number >= 0 for number in [*sizes, *counters])


@given(st.text())
def test_any_garbage_is_read(text: str) -> None:
    parse(text)


# -- all processes


def test_only_gpu_files_are_looked_at(tmp_path: Path) -> None:
    process(tmp_path, 10, {4: told(SLOT, 7, memory_vram="8 KiB")})
    process(tmp_path, 11)
    forged = process(tmp_path, 12, {4: told(SLOT, 8, memory_vram="8 KiB")}, node="/tmp/note")
    assert forged.is_dir()
    walked = walk(tmp_path)
    assert {key: pid for key, (pid, _) in walked.clients.items()} == {(SLOT, 7): 10}
    assert (walked.complete, walked.unreadable) == (True, 0)


def test_one_process_may_have_several_files_of_several_cards(tmp_path: Path) -> None:
    files = {4: told(SLOT, 7), 5: told(SLOT, 8), 6: told(OTHER, 7), 9: told(SLOT, 7)}
    process(tmp_path, 10, files)
    assert set(walk(tmp_path).clients) == {(SLOT, 7), (SLOT, 8), (OTHER, 7)}


def test_a_shared_file_is_counted_for_the_process_that_opened_it(tmp_path: Path) -> None:
    """Numbers, not names: 9 comes before 10."""
    for pid in (10, 9, 100):
        process(tmp_path, pid, {4: told(SLOT, 7)})
    assert walk(tmp_path).clients[SLOT, 7][0] == 9


@pytest.mark.parametrize("keeper", ["systemd-logind", "seatd", "elogind-daemon"])
def test_a_desktop_counts_for_itself_and_not_for_who_opened_the_card_for_it(
    tmp_path: Path, keeper: str
) -> None:
    process(tmp_path, 5, {4: told(SLOT, 7), 6: told(SLOT, 8)}, name=keeper)
    process(tmp_path, 10, {4: told(SLOT, 7)}, name="gnome-shell")
    process(tmp_path, 11, {4: told(SLOT, 7)}, name="gjs")
    owners = {key: pid for key, (pid, _) in walk(tmp_path).clients.items()}
    assert owners == {(SLOT, 7): 10, (SLOT, 8): 5}


@given(
    st.dictionaries(
        st.integers(1, 60),
        st.dictionaries(st.integers(3, 9), st.tuples(st.integers(1, 5), st.booleans()), max_size=4),
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_every_client_is_counted_once(processes: dict[int, dict[int, tuple[int, bool]]]) -> None:
    """Whoever shares it: the sum over all is that of the distinct clients."""
    root = Path(tempfile.mkdtemp())
    try:
        distinct: dict[tuple[str, int], int] = {}
        for pid, files in processes.items():
            clients = {}
            for number, (client_id, first_card) in files.items():
                slot = SLOT if first_card else OTHER
                distinct[slot, client_id] = client_id * KIB
                clients[number] = told(slot, client_id, memory_vram=f"{client_id} KiB")
            process(root, pid, clients)
        walked = walk(root)
        sizes = {key: found.vram_bytes for key, (_, found) in walked.clients.items()}
        assert sizes == distinct
        for (slot, client_id), (pid, _) in walked.clients.items():
            assert (client_id, slot == SLOT) in processes[pid].values()
    finally:
        shutil.rmtree(root)


def test_what_ends_meanwhile_is_left_out(tmp_path: Path) -> None:
    gone = process(tmp_path, 10, {4: told(SLOT, 7)})
    (gone / "fdinfo" / "4").unlink()
    ended = process(tmp_path, 11, {4: told(SLOT, 8)})
    shutil.rmtree(ended / "fd")
    process(tmp_path, 12, {4: told(SLOT, 9)})
    walked = walk(tmp_path)
    assert (set(walked.clients), walked.complete) == ({(SLOT, 9)}, True)


def test_processes_that_may_not_be_looked_at_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid in (10, 11):
        process(tmp_path, pid, {4: told(SLOT, pid)})
    real = os.listdir

    def listdir(path: str | Path) -> list[str]:
        if str(path).endswith("/10/fd"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    walked = walk(tmp_path)
    assert (set(walked.clients), walked.unreadable) == ({(SLOT, 11)}, 1)


def test_a_walk_that_takes_too_long_says_that_it_is_not_whole(tmp_path: Path) -> None:
    process(tmp_path, 10, {4: told(SLOT, 7)})
    walked = walk(tmp_path, budget_s=-1.0)
    assert (walked.clients, walked.complete) == ({}, False)


@pytest.mark.parametrize("name", ["self", "²", "٣", "0", "1" * 40, "irq"])
def test_other_names_in_proc_are_no_processes(tmp_path: Path, name: str) -> None:
    (tmp_path / "proc" / name / "fd").mkdir(parents=True)
    process(tmp_path, 10, {4: told(SLOT, 7)})
    assert len(walk(tmp_path).clients) == 1


def test_no_proc_is_an_answer(tmp_path: Path) -> None:
    assert walk(tmp_path) == ({}, 0, True)


def test_the_kernels_own_proc_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file that this process holds open in the place of a node."""
    read: list[str] = []

    def note(path: Path) -> str:
        read.append(str(path))
        return told(SLOT, 7)

    monkeypatch.setattr(fdinfo, "_NODE", f"{tmp_path}/dri/")
    monkeypatch.setattr(fdinfo, "read_text", note)
    node = tmp_path / "dri" / "renderD128"
    node.parent.mkdir()
    with node.open("w") as file:
        walked = walk(Path("/"), budget_s=60.0)
        assert read == [f"/proc/{os.getpid()}/fdinfo/{file.fileno()}"]
    assert walked.clients[SLOT, 7][0] == os.getpid()
