"""One file over HTTP: what is kept, what is asked for again, and what a user is told."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_server import Fault, Server, running

from flexlab.core.errors import WeightsError
from flexlab.spec.lab import Progress
from flexlab.weights.http import Access, Patience, retry_after_s, show_url
from flexlab.weights.progress import Meter
from flexlab.weights.transfer import Download, download

CONTENT = random.Random(7).randbytes(1_500_000)
OTHER = random.Random(8).randbytes(1_400_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = 700_000


@pytest.fixture
def server() -> Iterator[Server]:
    with running() as server:
        server.files["/model.gguf"] = CONTENT
        yield server


class Desk:
    """A download with everything that a test wants to know afterwards."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.waits: list[float] = []
        self.reports: list[Progress] = []
        self.job = Download(
            url=f"{server.url}/model.gguf", target=folder / "m" / "model.gguf", sha256=SHA256
        )
        self.patience = Patience(connect_s=5, stall_s=5, tries=3, sleep=self.waits.append)

    def fetch(self, **changes: object) -> str:
        job = replace(self.job, **changes)  # type: ignore[arg-type]
        return download(job, Meter(self.reports.append), self.patience)

    @property
    def names(self) -> list[str]:
        return sorted(path.name for path in self.job.target.parent.iterdir())


@pytest.fixture
def desk(server: Server, tmp_path: Path) -> Desk:
    return Desk(server, tmp_path)


def never_decreases(reports: list[Progress]) -> bool:
    done = [report.done_bytes for report in reports if report.done_bytes is not None]
    return done == sorted(done)


def test_a_file_gets_its_name_when_it_is_whole(desk: Desk) -> None:
    assert desk.fetch() == SHA256
    assert desk.job.target.read_bytes() == CONTENT
    assert desk.names == ["model.gguf"]
    assert desk.reports[0].phase == "weights"
    assert "model.gguf from 127.0.0.1" in desk.reports[0].text


def test_a_broken_connection_is_resumed_where_it_broke(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=HALF), Fault(cut_after=100_000)]
    desk.fetch()
    assert desk.job.target.read_bytes() == CONTENT
    ranges = [one.range for one in server.asked]
    assert ranges == [None, f"bytes={HALF}-", f"bytes={HALF + 100_000}-"]
    assert never_decreases(desk.reports)
    assert any(report.phase == "waiting" for report in desk.reports)


def test_tries_that_bring_something_new_do_not_count(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=100_000) for _ in range(10)]
    desk.fetch()
    assert desk.job.target.read_bytes() == CONTENT
    assert len(server.asked) == 11


def test_a_server_without_ranges_sends_all_again_and_progress_stays(
    server: Server, desk: Desk
) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=HALF), Fault(ranges=False)]
    desk.fetch()
    assert desk.job.target.read_bytes() == CONTENT
    assert never_decreases(desk.reports)


def test_a_server_that_always_breaks_and_has_no_ranges_is_given_up(
    server: Server, desk: Desk
) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=HALF, ranges=False) for _ in range(20)]
    with pytest.raises(WeightsError, match="3 tries"):
        desk.fetch()
    assert len(server.asked) == 3


def test_a_file_that_changed_half_way_is_fetched_anew(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=HALF, body=OTHER)]
    desk.fetch()
    assert desk.job.target.read_bytes() == CONTENT
    assert server.asked[1].range is not None
    assert "if-range" in server.asked[1].headers


def test_a_changed_file_is_noticed_without_the_servers_help(server: Server, desk: Desk) -> None:
    """The server ignores If-Range and sends the rest of another file."""
    part = {"ETag": '"new"', "Content-Range": f"bytes {HALF}-1399999/1400000"}
    server.faults["/model.gguf"] = [
        Fault(cut_after=HALF),
        Fault(body=OTHER[HALF:], headers={**part, "Content-Length": "700000"}, status=206),
    ]
    desk.fetch()
    assert desk.job.target.read_bytes() == CONTENT


def test_a_part_that_is_complete_needs_no_server(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=HALF), Fault(status=404)]
    with pytest.raises(WeightsError):
        desk.fetch()
    part = desk.job.target.with_name("model.gguf.part")
    part.write_bytes(CONTENT)
    asked = len(server.asked)
    assert desk.fetch() == SHA256
    assert len(server.asked) == asked


def test_a_part_longer_than_the_file_is_thrown_away(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(cut_after=HALF), Fault(status=404)]
    with pytest.raises(WeightsError):
        desk.fetch()
    desk.job.target.with_name("model.gguf.part").write_bytes(CONTENT + b"x")
    assert desk.fetch() == SHA256


def test_a_part_of_something_else_is_thrown_away(server: Server, desk: Desk) -> None:
    server.files["/model.gguf"] = OTHER
    server.faults["/model.gguf"] = [Fault(cut_after=HALF), Fault(status=404)]
    with pytest.raises(WeightsError):
        desk.fetch(sha256=hashlib.sha256(OTHER).hexdigest())
    server.files["/model.gguf"] = CONTENT
    desk.fetch()
    assert server.asked[-1].range is None
    assert desk.job.target.read_bytes() == CONTENT


def test_a_wrong_checksum_is_set_aside_and_fetched_once_more(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(body=OTHER)]
    assert desk.fetch() == SHA256
    assert desk.job.target.read_bytes() == CONTENT
    assert desk.job.target.with_name("model.gguf.bad").read_bytes() == OTHER
    assert len(server.asked) == 2
    assert never_decreases(desk.reports)


def test_a_checksum_that_stays_wrong_is_an_error(server: Server, desk: Desk) -> None:
    server.files["/model.gguf"] = OTHER
    with pytest.raises(WeightsError) as caught:
        desk.fetch()
    assert caught.value.code == "weights_checksum"
    assert SHA256 in caught.value.message
    assert len(server.asked) == 2
    assert desk.names == ["model.gguf.bad", "model.gguf.part.json"]


def test_another_size_than_the_recipe_states_is_refused_before_the_download(desk: Desk) -> None:
    with pytest.raises(WeightsError, match="1234 bytes were expected"):
        desk.fetch(size_bytes=1234)
    assert desk.job.target.with_name("model.gguf.part").stat().st_size == 0


def test_a_disk_without_room_is_refused_before_the_download(server: Server, desk: Desk) -> None:
    with pytest.raises(WeightsError) as caught:
        desk.fetch(extra_bytes=1 << 60)
    assert caught.value.code == "disk_full"
    assert "free" in caught.value.message
    assert str(desk.job.target.parent) in caught.value.message
    assert desk.job.target.with_name("model.gguf.part").stat().st_size == 0


@pytest.mark.parametrize(
    ("status", "code", "tries"),
    [
        (401, "weights_unauthorized", 1),
        (403, "weights_forbidden", 1),
        (404, "weights_not_found", 1),
        (418, "weights_unreachable", 1),
        (429, "weights_rate_limited", 3),
        (503, "weights_unreachable", 3),
    ],
)
def test_refusals_are_told_apart(
    server: Server, desk: Desk, status: int, code: str, tries: int
) -> None:
    server.faults["/model.gguf"] = [Fault(status=status) for _ in range(9)]
    with pytest.raises(WeightsError) as caught:
        desk.fetch()
    assert caught.value.code == code
    assert str(status) in caught.value.message
    assert len(server.asked) == tries


def test_waits_double_and_a_server_that_says_how_long_is_believed(
    server: Server, desk: Desk
) -> None:
    busy = Fault(status=429, headers={"Retry-After": "7"})
    server.faults["/model.gguf"] = [Fault(status=503), busy]
    desk.fetch()
    assert desk.waits == [0.5, 7.0]


def test_a_server_that_asks_for_an_hour_is_not_waited_for(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(status=429, headers={"Retry-After": "3600"})]
    with pytest.raises(WeightsError, match="to wait 1h"):
        desk.fetch()
    assert desk.waits == []


def test_a_stalled_server_is_tried_again_and_then_named(server: Server, desk: Desk) -> None:
    server.faults["/model.gguf"] = [Fault(hold_after=HALF), *[Fault(hold_after=0)] * 3]
    desk.patience = replace(desk.patience, stall_s=0.1)
    with pytest.raises(WeightsError) as caught:
        desk.fetch()
    assert caught.value.code == "weights_stalled"
    assert "no data from 127.0.0.1" in caught.value.message
    assert server.asked[1].range is not None
    assert desk.job.target.with_name("model.gguf.part").stat().st_size >= HALF - 65536


def test_no_server_at_all_is_one_sentence(tmp_path: Path) -> None:
    with running() as server:
        desk = Desk(server, tmp_path)
    with pytest.raises(WeightsError) as caught:
        desk.fetch()
    assert caught.value.code == "weights_unreachable"
    assert "cannot reach 127.0.0.1" in caught.value.message
    assert desk.waits == [0.5, 1.0]


def test_a_token_does_not_follow_a_redirect_to_another_server(server: Server, desk: Desk) -> None:
    with running() as mirror:
        mirror.files["/cdn"] = CONTENT
        server.faults["/model.gguf"] = [
            Fault(status=302, headers={"Location": f"{mirror.url}/cdn?signature=secret"})
        ]
        desk.fetch(access=Access(headers={"Authorization": "Bearer hf_secret"}))
    assert server.asked[0].headers["authorization"] == "Bearer hf_secret"
    assert "authorization" not in mirror.asked[0].headers
    assert not any("secret" in report.text for report in desk.reports)


def test_a_redirect_to_a_local_file_is_refused(server: Server, desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(CONTENT)
    target = (tmp_path / "secret").as_uri()
    server.faults["/model.gguf"] = [Fault(status=302, headers={"Location": target})]
    with pytest.raises(WeightsError):
        desk.fetch()


FULL_DISK = """
import sys
from pathlib import Path
from flexlab.core.errors import WeightsError
from flexlab.weights import files
from flexlab.weights.http import Patience
from flexlab.weights.progress import Meter
from flexlab.weights.transfer import Download, download

files.free_bytes = lambda folder: None  # as on a disk that cannot be asked
folder = Path(sys.argv[2])
try:
    download(Download(sys.argv[1], folder / "model.gguf"), Meter(lambda _: None), Patience(tries=1))
except WeightsError as error:
    print(error.code, (folder / "model.gguf.part").stat().st_size, error.message)
"""


def test_a_disk_that_fills_up_half_way_keeps_what_is_there(server: Server, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    mount = [unshare or "", "-rm", "sh", "-c"]
    small_disk = f"mount -t tmpfs -o size=1m none {tmp_path}"
    if unshare is None or subprocess.run([*mount, small_disk], capture_output=True).returncode:
        pytest.skip("no mount namespace for a small disk here")
    command = f"{small_disk} && exec {sys.executable} -c '{FULL_DISK}' {server.url}/model.gguf "
    result = subprocess.run(
        [*mount, command + str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=60,
    )
    code, size_bytes, message = result.stdout.split(" ", 2)
    assert code == "disk_full", result.stderr
    assert 900_000 < int(size_bytes) <= 1024**2
    assert "what was fetched is kept" in message


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "move", "end", "say", "expect"]), st.integers(0, 999)),
        max_size=60,
    )
)
def test_progress_never_decreases_and_never_passes_its_total(
    steps: list[tuple[str, int]],
) -> None:
    reports: list[Progress] = []
    clock = iter(range(10_000))
    meter = Meter(reports.append, clock=lambda: next(clock) * 0.15)
    for step, number in steps:
        if step == "begin":
            meter.begin(number)
        elif step == "move":
            meter.move(number)
        elif step == "end":
            meter.end()
        elif step == "say":
            meter.say("weights", "x")
        else:
            meter.expect(number)
    assert never_decreases(reports)
    for report in reports:
        assert report.total_bytes is None or (report.done_bytes or 0) <= report.total_bytes
        assert report.eta_s is None or report.eta_s >= 0


def test_speed_counts_only_what_came_now_and_reports_are_few() -> None:
    reports: list[Progress] = []
    now = [0.0]
    meter = Meter(reports.append, clock=lambda: now[0])
    meter.expect(2000)
    meter.begin(1000)
    meter.say("weights", "x")
    for step in range(100):
        now[0] += 0.01
        meter.move(1000 + step)
    assert 4 <= len(reports) <= 6
    assert reports[-1].bytes_per_s == pytest.approx(100, rel=0.2)
    assert reports[-1].eta_s == pytest.approx(9, rel=0.3)


def test_a_proxy_that_cannot_be_used_is_one_sentence(desk: Desk) -> None:
    with pytest.raises(WeightsError, match="proxy"):
        desk.fetch(access=Access(proxy="nonsense://me:secret@x"))


def test_addresses_are_shown_without_secrets() -> None:
    url = "https://user:pw@index.example:8443/simple/x.whl?signature=abc#sha256=1"
    assert show_url(url) == "https://index.example:8443/simple/x.whl"


def test_retry_after_may_be_a_date() -> None:
    date = {"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}
    assert retry_after_s(date, now=lambda: 90.0) == 10.0
    assert retry_after_s({"retry-after": "soon"}) is None
    assert retry_after_s({}) is None
