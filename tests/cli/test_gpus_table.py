"""What the table of `flexlab gpus` says, cell by cell, in any width."""

from __future__ import annotations

import pytest
from cli_process import Flexlab
from gpu_machines import DENIED, GIB, apu, card, machine, unusable
from hypothesis import given
from hypothesis import strategies as st

from flexlab.cli import gpu_rows, table
from flexlab.gpus import isolated
from flexlab.spec.machine import Cpu, Gpu, Machine, MigSlice, Problem


def cells(gpu: Gpu) -> dict[str, str]:
    """The card's own row by the titles of the columns, `-` for what is empty."""
    row = next(gpu_rows.gpu_rows(gpu))
    titles = (column.title for column in gpu_rows.COLUMNS)
    return {title: cell or "-" for title, cell in zip(titles, row, strict=True)}


@pytest.fixture
def show(flexlab_here: Flexlab, monkeypatch: pytest.MonkeyPatch) -> object:
    """`show(machine)`: stdout of `flexlab gpus` on it."""

    def show(shown: Machine, *words: str, **env: str) -> str:
        monkeypatch.setattr(isolated, "detect", lambda *_, **__: shown)
        done = flexlab_here("gpus", *words, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return show


def test_a_card_in_use_shows_its_own_memory_and_its_load() -> None:
    assert cells(card(best=True)) == {
        "INDEX": "0*",
        "NAME": "Radeon RX 7900 XTX",
        "ARCH": "gfx1100",
        "MEMORY": "1.5/24.0G",
        "BUSY": "97%",
        "TEMP": "61C",
        "POWER": "204W",
        "STATE": "best",
    }


def test_what_is_unknown_is_no_zero_and_not_absent() -> None:
    shown = cells(
        card(arch=None, vram_used_bytes=None, busy_percent=None, temps_c={}, power_w=None)
    )
    assert shown["ARCH"] == shown["BUSY"] == shown["TEMP"] == shown["POWER"] == "?"
    assert shown["MEMORY"] == "?/24.0G"
    assert cells(card(vram_used_bytes=None, vram_total_bytes=None))["MEMORY"] == "?"
    assert cells(card(busy_percent=0.0, vram_used_bytes=0))["BUSY"] == "0%"
    assert cells(card(busy_percent=0.0, vram_used_bytes=0))["MEMORY"] == "0B/24.0G"


def test_a_card_that_cannot_be_used_has_no_load_and_says_why() -> None:
    shown = cells(unusable())
    assert shown["STATE"] == DENIED.code
    assert shown["BUSY"] == shown["TEMP"] == shown["POWER"] == "-"


def test_a_card_that_sleeps_says_so_and_is_not_unknown() -> None:
    shown = cells(card(asleep=True, best=True, busy_percent=None, power_w=None, temps_c={}))
    assert shown["STATE"] == "best, asleep"
    assert shown["BUSY"] == "-"


def test_shared_memory_shows_the_pool_and_never_the_small_carve_out() -> None:
    assert cells(apu())["MEMORY"] == "shared 1.0/16.0G"
    assert cells(apu(pool_free_bytes=None))["MEMORY"] == "shared ?/16.0G"


def test_an_apu_with_a_large_carve_out_shows_that() -> None:
    carved = apu(pool="0000:03:00.0", vram_total_bytes=96 * GIB, vram_used_bytes=25 * GIB)
    assert cells(carved)["MEMORY"] == "25.0/96.0G"


@pytest.mark.parametrize(
    ("temps", "shown"),
    [
        ({"junction": 81.0, "edge": 61.0}, "61C"),
        ({"gpu": 40.0, "mem": 90.0}, "40C"),
        ({"junction": 70.0, "mem": 84.0}, "84C"),
    ],
)
def test_the_temperature_is_that_of_the_chip_else_of_the_hottest_spot(
    temps: dict[str, float], shown: str
) -> None:
    assert cells(card(temps_c=temps))["TEMP"] == shown


def test_the_slices_of_a_card_stand_below_it(show) -> None:
    slices = (
        MigSlice(uuid="MIG-a", gi=1, profile="3g.20gb", vram_total_bytes=20 * GIB),
        MigSlice(uuid="MIG-b", gi=2, vram_total_bytes=10 * GIB, vram_used_bytes=GIB),
    )
    lines = show(machine(card(name="NVIDIA A100", mig=slices)), COLUMNS="100").splitlines()
    assert lines[1].startswith("0      A100")
    assert lines[2].startswith("└      MIG 3g.20gb (gi 1)")
    assert "?/20.0G" in lines[2]
    assert lines[3].startswith("└      MIG (gi 2)")
    assert "1.0/10.0G" in lines[3]


def test_the_cpu_is_the_last_row_with_the_ram(show) -> None:
    *_, last = show(machine(card()), COLUMNS="100").splitlines()
    assert last.split("  ")[0] == "cpu"
    assert "Ryzen 7 5800X3D" in last
    assert "8.0/32.0G" in last
    assert last.endswith("16 threads")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("NVIDIA GeForce RTX 3080", "GeForce RTX 3080"),
        ("Intel(R) Xeon(R) Processor", "Xeon Processor"),
        ("AMD GPU 1002:ffff", "GPU 1002:ffff"),
        ("Orin (nvgpu)", "Orin (nvgpu)"),
        ("NVIDIA", "NVIDIA"),
    ],
)
def test_the_maker_gives_way_to_what_tells_cards_apart(name: str, shown: str) -> None:
    assert cells(card(name=name))["NAME"] == shown


@pytest.mark.parametrize(
    ("usable", "total", "shown"),
    [(4, 16, "4 of 16 threads"), (16, 16, "16 threads"), (None, None, "? threads"),
     (2, None, "2 threads")],
)  # fmt: skip
def test_threads_that_may_not_be_used_are_told(
    usable: int | None, total: int | None, shown: str
) -> None:
    cpu = Cpu(name=None, threads_total=total, threads_usable=usable)
    assert gpu_rows.show_threads(cpu) == shown


def test_each_problem_is_told_once_with_its_mend_and_who_has_it(show) -> None:
    others = [unusable(index) for index in (1, 2, 4)]
    shown = show(machine(card(0), *others), COLUMNS="100")
    assert shown.count(DENIED.message) == 1
    assert f"1-2, 4: {DENIED.message}\n   -> {DENIED.hint}" in shown


def test_what_is_no_gpu_is_told_below_the_table(show) -> None:
    found = Problem(code="not_compute", message="0000:01:00.0 is a display adapter", hint="ignore")
    assert "0000:01:00.0 is a display adapter\n   -> ignore" in show(machine(findings=(found,)))


def test_forty_columns_keep_index_name_and_memory(show) -> None:
    shown = show(machine(card(best=True), unusable(1), apu(2)), COLUMNS="40")
    lines = shown.splitlines()
    assert lines[0].split() == ["INDEX", "NAME", "MEMORY"]
    assert lines[1].startswith("0*")
    assert "1.5/24.0G" in lines[1]
    assert max(map(len, lines)) <= 40
    assert "sudo usermod -aG render" in " ".join(shown.split())


@pytest.mark.parametrize(
    "env", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}, {"TERM": "dumb", "LANG": "C"}]
)
def test_a_terminal_without_unicode_gets_plain_ascii(show, env: dict[str, str]) -> None:
    sliced = card(name="NVIDIA A100 ™", mig=(MigSlice(uuid="MIG-a", profile="1g.5gb"),))
    shown = show(machine(sliced, name_with_escape()), COLUMNS="60", **env)
    assert "`-     MIG 1g.5gb" in shown
    assert "\x1b" not in shown


def name_with_escape() -> Gpu:
    return card(1, name="evil \x1b[31mcard\n")


names = st.text(max_size=60)
sizes = st.none() | st.integers(0, 10**13)
gpus = st.builds(
    card,
    index=st.integers(0, 200),
    name=names,
    arch=st.none() | st.just("gfx1100"),
    vram_total_bytes=sizes,
    vram_used_bytes=sizes,
    busy_percent=st.none() | st.floats(0, 100),
    power_w=st.none() | st.floats(0, 1e4),
    temps_c=st.dictionaries(st.sampled_from(["edge", "mem"]), st.floats(-50, 150)),
    asleep=st.booleans(),
    usable=st.booleans(),
    best=st.booleans(),
)


@given(shown=st.lists(gpus, max_size=4), width=st.integers(30, 120))
def test_no_machine_is_too_wide_for_its_terminal(shown: list[Gpu], width: int) -> None:
    rows = gpu_rows.device_rows(machine(*shown))
    lines = table.render(gpu_rows.COLUMNS, rows, width=width)
    assert max(map(table.cell_width, lines)) <= width
    assert lines[0].startswith("INDEX")


@given(numbers=st.sets(st.integers(0, 70), min_size=2))
def test_ranges_of_indexes_name_each_index_once(numbers: set[int]) -> None:
    told = gpu_rows.name_gpus([card(index) for index in sorted(numbers)])
    named: list[int] = []
    for part in told.split(", "):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(numbers)
