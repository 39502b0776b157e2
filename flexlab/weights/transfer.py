"""One file over HTTP: resumed, checked, and named only when it is whole.

Beside the target stand FILE.part (the bytes so far) and FILE.part.json (what the server said of
the file). Both survive any kind of end. The checksum is taken while the bytes come in; a resumed
part is read once more first.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flexlab.core.errors import WeightsError
from flexlab.core.units import show_bytes
from flexlab.weights import files
from flexlab.weights.http import (
    Access,
    Patience,
    Transient,
    judge,
    open_client,
    persist,
    requests_to,
    show_host,
    show_url,
)
from flexlab.weights.progress import Meter

if TYPE_CHECKING:
    import httpx

_BLOCK_BYTES = 1024**2
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+|\*)")


@dataclass(frozen=True)
class Download:
    """What to fetch and what is known of it. `size_bytes` and `sha256` are None when unknown."""

    url: str
    target: Path
    size_bytes: int | None = None
    sha256: str | None = None
    access: Access = field(default_factory=Access)
    extra_bytes: int = 0
    """Disk space that is needed besides, for what will be unpacked."""

    @property
    def label(self) -> str:
        """For people: the file and the server."""
        return f"{self.target.name} from {show_host(self.url)}"


class _Note(msgspec.Struct, frozen=True, kw_only=True):
    """FILE.part.json: whose part it is. A part without a matching note is thrown away."""

    key: str
    etag: str | None = None
    total_bytes: int | None = None


def download(job: Download, meter: Meter, patience: Patience) -> str:
    """Fetch it to `job.target`; returns its sha256. Raises WeightsError.

    A file with the wrong checksum is set aside as FILE.bad and fetched once more.
    """
    part = files.beside(job.target, files.PART_SUFFIX)
    try:
        files.make_folder(job.target.parent)
        for is_last in (False, True):
            found = _fetch_part(job, part, meter, patience)
            if job.sha256 is None or found == job.sha256:
                files.finish(part, job.target)
                files.beside(job.target, files.NOTE_SUFFIX).unlink(missing_ok=True)
                meter.end()
                return found
            os.replace(part, files.beside(job.target, files.BAD_SUFFIX))
            if not is_last:
                meter.say("weights", f"{job.target.name} has a wrong checksum: fetching it again")
    except OSError as error:
        raise files.disk_trouble(part, error) from error
    raise WeightsError(
        f"{job.target.name} from {show_host(job.url)} has a wrong checksum, twice: "
        f"sha256 {found}, wanted {job.sha256}; it is set aside as {job.target.name}"
        f"{files.BAD_SUFFIX}",
        "the file was changed or damaged at its source; a newer recipe may name the new checksum",
        code="weights_checksum",
    )


def _fetch_part(job: Download, path: Path, meter: Meter, patience: Patience) -> str:
    with _Part(job, path) as part:
        part.resume(meter)
        meter.begin(part.position)
        if not part.is_complete:
            with open_client(job.access, patience) as client:
                persist(lambda: _attempt(job, part, client, meter), patience, meter)
        return part.digest.hexdigest()


class _Part:
    """FILE.part, open for appending, with its checksum so far."""

    def __init__(self, job: Download, path: Path) -> None:
        self._job = job
        self._note_path = files.beside(job.target, files.NOTE_SUFFIX)
        # Unbuffered: what was received is in the kernel's hands, whatever happens to us.
        self._stream = io.FileIO(path, "a+")
        self.digest = hashlib.sha256()
        self.position = 0
        self.highest = 0
        self.etag: str | None = None
        self.total_bytes = job.size_bytes

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def is_complete(self) -> bool:
        return self.total_bytes is not None and self.position == self.total_bytes

    def resume(self, meter: Meter) -> None:
        """Take over what an earlier fetch left, if it is of the same file."""
        size_bytes = os.fstat(self._stream.fileno()).st_size
        note = self._read_note()
        if size_bytes == 0:
            return
        if note is None or note.key != self._key or size_bytes > (note.total_bytes or size_bytes):
            self.restart()
            return
        self.etag = note.etag
        self.total_bytes = self.total_bytes or note.total_bytes
        meter.say("verify", f"{self._job.target.name}: checking what is already here")
        self._stream.seek(0)
        while block := self._stream.read(_BLOCK_BYTES):
            self.digest.update(block)
            self.position += len(block)
        self.highest = self.position

    def restart(self) -> None:
        """Throw away what is here."""
        self._stream.truncate(0)
        self.digest = hashlib.sha256()
        self.position = 0
        self.etag = None
        self.total_bytes = self._job.size_bytes

    def learn(self, etag: str | None, total_bytes: int | None) -> None:
        """Keep what the server says, before the first byte of it is kept."""
        self.etag = etag
        self.total_bytes = total_bytes
        note = _Note(key=self._key, etag=etag, total_bytes=total_bytes)
        files.write_whole(self._note_path, msgspec.json.encode(note))

    def append(self, block: bytes) -> None:
        view = memoryview(block)
        while view:
            written = self._stream.write(view)
            self.digest.update(view[:written])
            self.position += written
            view = view[written:]

    @property
    def _key(self) -> str:
        """Mirrors and signed addresses change; a checksum does not."""
        return self._job.sha256 or show_url(self._job.url)

    def _read_note(self) -> _Note | None:
        try:
            return msgspec.json.decode(self._note_path.read_bytes(), type=_Note)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None


def _attempt(job: Download, part: _Part, client: httpx.Client, meter: Meter) -> None:
    before = part.highest
    meter.begin(part.position)
    meter.say("weights", job.label)
    try:
        with (
            requests_to(job.url),
            client.stream("GET", job.url, headers=_range_headers(part)) as response,
        ):
            if _accept(job, part, response):
                _receive(part, response, meter)
    except Transient as trouble:
        part.highest = max(part.highest, part.position)
        trouble.progressed = part.highest > before
        raise
    if part.total_bytes is not None and part.position < part.total_bytes:
        raise Transient(
            f"{show_host(job.url)} ended the file early",
            code="weights_broken",
            progressed=part.position > before,
        )


def _range_headers(part: _Part) -> dict[str, str]:
    if not part.position:
        return {}
    headers = {"Range": f"bytes={part.position}-"}
    if part.etag and not part.etag.startswith("W/"):  # a weak one is not allowed here (RFC 9110)
        headers["If-Range"] = part.etag
    return headers


def _accept(job: Download, part: _Part, response: httpx.Response) -> bool:
    """Make the part fit the answer; False when it turns out to be complete already."""
    start, total = _content_range(response)
    if response.status_code == 416 and part.position:
        if total is not None and total == part.position:
            part.total_bytes = total
            return False
        part.restart()
        raise Transient(f"the file at {show_host(job.url)} has changed", code="weights_changed")
    judge(response, job.access)
    etag = response.headers.get("etag")
    if response.status_code == 206:
        same_etag = part.etag is None or etag is None or etag == part.etag
        same_total = part.total_bytes is None or total is None or total == part.total_bytes
        if start != part.position or not (same_etag and same_total):
            part.restart()
            raise Transient(f"the file at {show_host(job.url)} has changed", code="weights_changed")
    else:  # 200: no ranges here, or the file has changed
        if part.position:
            part.restart()
        total = _content_length(response)
    _check_size(job, total)
    if total is not None:
        files.check_space(job.target.parent, total - part.position + job.extra_bytes)
    part.learn(etag or part.etag, total if total is not None else part.total_bytes)
    return True


def _receive(part: _Part, response: httpx.Response, meter: Meter) -> None:
    meter.expect_file(part.total_bytes)
    meter.begin(part.position)
    # Raw, since what is counted and resumed is what stands in the file, never a decoded form; and
    # as it comes, since a collected chunk would be lost when the connection breaks.
    for block in response.iter_raw():
        if part.total_bytes is not None and part.position + len(block) > part.total_bytes:
            part.restart()
            raise Transient("the server sends more than it announced", code="weights_changed")
        part.append(block)
        meter.move(part.position)


def _check_size(job: Download, total: int | None) -> None:
    if job.size_bytes is None or total is None or total == job.size_bytes:
        return
    raise WeightsError(
        f"{show_url(job.url)} has {show_bytes(total)} ({total} bytes), "
        f"{job.size_bytes} bytes were expected",
        "the file was changed at its source; a newer recipe may name the new one",
        code="weights_checksum",
    )


def _content_range(response: httpx.Response) -> tuple[int | None, int | None]:
    match = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", "").strip())
    if match is None:
        return None, None
    start, total = match.groups()
    return int(start) if start else None, None if total == "*" else int(total)


def _content_length(response: httpx.Response) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None
