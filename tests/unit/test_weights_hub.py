"""`hf://`: files, patterns and repositories of a hub, its refusals, and the user's own cache."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from weights_server import Fault, Server, forget_network_settings, running

from flexlab.core.errors import WeightsError
from flexlab.spec.lab import Progress
from flexlab.spec.plan import Weight
from flexlab.spec.source import HfSource, parse_source
from flexlab.weights.fetch import fetch
from flexlab.weights.http import Patience
from flexlab.weights.hub import HubFile, choose
from flexlab.weights.store import Store

COMMIT = "0123456789abcdef0123456789abcdef01234567"
NEXT_COMMIT = "f" * 40
API = "/api/models/org/repo/revision/main"
GGUF = b"GGUF" + random.Random(3).randbytes(300_000)
FILES = {
    "model.Q4.gguf": GGUF,
    "model.Q8.gguf": b"GGUF" + random.Random(4).randbytes(500_000),
    "big-00001-of-00002.gguf": b"GGUF" + bytes(9000),
    "big-00002-of-00002.gguf": b"GGUF" + bytes(8000),
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": random.Random(5).randbytes(200_000),
    "pytorch_model.bin": b"\x80\x04pickle",
    ".gitattributes": b"*.gguf filter=lfs",
}
TOKEN = "hf_averysecrettoken"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class FakeHub:
    """The two routes of a hub: what a repository holds, and its files."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.publish(FILES)

    def publish(self, files: dict[str, bytes], commit: str = COMMIT, route: str = API) -> None:
        siblings = []
        for path, data in files.items():
            entry: dict[str, object] = {"rfilename": path, "size": len(data), "blobId": "x"}
            if path.endswith((".gguf", ".safetensors", ".bin")):
                entry["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append(entry)
            self.server.files[self.path_of(path, commit)] = data
        listing = {"id": "org/repo", "sha": commit, "siblings": siblings, "gated": False}
        self.server.files[route] = json.dumps(listing).encode()

    @staticmethod
    def path_of(path: str, commit: str = COMMIT) -> str:
        return f"/org/repo/resolve/{commit}/{path}"

    @property
    def fetched(self) -> list[str]:
        return [one.path.rpartition("/")[2] for one in self.server.asked if "/resolve/" in one.path]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_network_settings(monkeypatch)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield FakeHub(server)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def get(store: Store, source: str, *, said: list[Progress] | None = None, **known: object) -> Path:
    patience = Patience(connect_s=5, stall_s=5, tries=2, sleep=lambda _: None)
    reports: list[Progress] = [] if said is None else said
    weight = Weight(source=source, **known)  # type: ignore[arg-type]
    return fetch(weight, store, reports.append, patience)


def test_one_file(hub: FakeHub, store: Store) -> None:
    source = "hf://org/repo/model.Q4.gguf"
    path = get(store, source)
    assert path == store.models_dir / "hf" / "org" / "repo" / "main" / "model.Q4.gguf"
    assert path.read_bytes() == GGUF
    assert store.installed(Weight(source=source)) == path
    item = store.item(parse_source(source))
    assert item is not None
    assert (item.revision, item.sha256, item.verified) == (COMMIT, sha256(GGUF), True)


def test_a_pattern_of_one_file_is_that_file(hub: FakeHub, store: Store) -> None:
    assert get(store, "hf://org/repo/*Q4*.gguf").name == "model.Q4.gguf"


def test_the_first_part_of_a_split_model_brings_the_others(hub: FakeHub, store: Store) -> None:
    said: list[Progress] = []
    path = get(store, "hf://org/repo/big-00001-of-00002.gguf", said=said)
    assert path.name == "big-00001-of-00002.gguf"
    assert path.with_name("big-00002-of-00002.gguf").stat().st_size == 8004
    assert {report.total_bytes for report in said[-2:]} == {17_008}
    assert get(store, "hf://org/repo/big-*.gguf") == path
    first = sha256(FILES["big-00001-of-00002.gguf"])
    weight = Weight(source="hf://org/repo/big-*.gguf", sha256=first)
    assert store.installed(weight) == path


def test_a_repository_is_a_folder_without_pickle_files(hub: FakeHub, store: Store) -> None:
    files = {"config.json", "model.safetensors", "pytorch_model.bin", ".gitattributes"}
    hub.publish({name: FILES[name] for name in files})
    path = get(store, "hf://org/repo")
    assert path.is_dir()
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
    assert store.installed(Weight(source="hf://org/repo")) == path


def test_pickle_files_are_refused_unless_asked_for(hub: FakeHub, store: Store) -> None:
    for source in ("hf://org/repo/pytorch_model.bin", "hf://org/repo/pytorch*"):
        with pytest.raises(WeightsError) as caught:
            get(store, source)
        assert caught.value.code == "weights_pickle"
    assert hub.fetched == []
    assert get(store, "hf://org/repo/pytorch_model.bin", allow_pickle=True).is_file()


def test_a_fetch_that_was_cut_goes_on_with_the_file_that_is_missing(
    hub: FakeHub, store: Store
) -> None:
    second = "big-00002-of-00002.gguf"
    hub.server.faults[hub.path_of(second)] = [Fault(status=403)]
    with pytest.raises(WeightsError):
        get(store, "hf://org/repo/big-00001-of-00002.gguf")
    assert store.installed(Weight(source="hf://org/repo/big-00001-of-00002.gguf")) is None
    [entry] = [one for one in store.entries() if one.state == "partial"]
    assert (entry.size_bytes, entry.total_bytes) == (9004, 17_008)
    get(store, "hf://org/repo/big-00001-of-00002.gguf")
    assert hub.fetched == ["big-00001-of-00002.gguf", second, second]


def test_a_revision_is_asked_for_and_kept_apart(hub: FakeHub, store: Store) -> None:
    route = "/api/models/org/repo/revision/refs%2Fpr%2F1"
    hub.publish({"model.Q4.gguf": GGUF}, NEXT_COMMIT, route)
    path = get(store, "hf://org/repo@refs%2Fpr%2F1/model.Q4.gguf")
    assert path.parent.name == "refs%2Fpr%2F1"
    assert get(store, "hf://org/repo/model.Q4.gguf") != path


def test_another_checksum_than_the_recipes_is_refused_before_the_download(
    hub: FakeHub, store: Store
) -> None:
    with pytest.raises(WeightsError) as caught:
        get(store, "hf://org/repo/model.Q4.gguf", sha256="0" * 64)
    assert caught.value.code == "weights_checksum"
    assert hub.fetched == []


def test_a_checksum_cannot_be_stated_for_a_folder(hub: FakeHub, store: Store) -> None:
    with pytest.raises(WeightsError, match="has no checksum"):
        get(store, "hf://org/repo", sha256="0" * 64)


def test_a_token_that_may_not_be_read_is_one_sentence(
    hub: FakeHub, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path))  # a folder: reading it fails
    with pytest.raises(WeightsError, match="token cannot be read"):
        get(store, "hf://org/repo/model.Q4.gguf")


def test_a_file_that_is_no_gguf_is_not_installed(hub: FakeHub, store: Store) -> None:
    hub.publish({"model.Q4.gguf": b"<html>please log in</html>"})
    with pytest.raises(WeightsError, match="not a GGUF file"):
        get(store, "hf://org/repo/model.Q4.gguf")
    assert store.installed(Weight(source="hf://org/repo/model.Q4.gguf")) is None


def test_a_missing_file_names_those_that_are_there(hub: FakeHub, store: Store) -> None:
    with pytest.raises(WeightsError, match=r"has no file model\.Q5\.gguf") as caught:
        get(store, "hf://org/repo/model.Q5.gguf")
    assert "model.Q4.gguf" in (caught.value.hint or "")


def test_names_that_lead_out_of_the_folder_are_passed_over(
    hub: FakeHub, store: Store, tmp_path: Path
) -> None:
    hub.publish({"../../evil.gguf": GGUF, "/etc/evil.gguf": GGUF, "good.gguf": GGUF})
    get(store, "hf://org/repo")
    assert hub.fetched == ["good.gguf"]


@pytest.mark.parametrize(
    ("status", "header", "token", "code", "words"),
    [
        (401, "GatedRepo", None, "weights_gated", "HF_TOKEN"),
        (403, "GatedRepo", TOKEN, "weights_gated", "/org/repo"),
        (401, "RepoNotFound", None, "weights_unauthorized", "HF_TOKEN"),
        (401, "", TOKEN, "weights_unauthorized", "hf auth"),
        (403, "", TOKEN, "weights_forbidden", "fine-grained"),
        (404, "RepoNotFound", TOKEN, "weights_not_found", "look at"),
        (404, "RevisionNotFound", TOKEN, "weights_not_found", "look at"),
        (429, "", TOKEN, "weights_rate_limited", "goes on"),
        (503, "", TOKEN, "weights_unreachable", "goes on"),
    ],
)
def test_a_hubs_refusals_are_told_apart_and_never_show_the_token(
    hub: FakeHub,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    header: str,
    token: str | None,
    code: str,
    words: str,
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.server.faults[API] = [Fault(status=status, headers={"X-Error-Code": header})] * 2
    said: list[Progress] = []
    with pytest.raises(WeightsError) as caught:
        get(store, "hf://org/repo/model.Q4.gguf", said=said)
    assert caught.value.code == code
    assert words in (caught.value.hint or "")
    assert str(status) in caught.value.message
    assert hub.server.asked[0].headers.get("authorization") == (token and f"Bearer {token}")
    assert TOKEN not in f"{caught.value.message} {caught.value.hint} {said}"


def test_a_gated_file_says_so_although_its_repository_is_shown(hub: FakeHub, store: Store) -> None:
    path = hub.path_of("model.Q4.gguf")
    hub.server.faults[path] = [Fault(status=403, headers={"X-Error-Code": "GatedRepo"})]
    with pytest.raises(WeightsError, match="is gated"):
        get(store, "hf://org/repo/model.Q4.gguf")


def test_a_server_that_is_no_hub(hub: FakeHub, store: Store) -> None:
    hub.server.files[API] = b"<html>captive portal</html>"
    with pytest.raises(WeightsError, match="does not answer as a hub") as caught:
        get(store, "hf://org/repo/model.Q4.gguf")
    assert "HF_ENDPOINT" in (caught.value.hint or "")


@pytest.mark.parametrize("where", ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "file"])
def test_the_token_is_found_and_appears_nowhere(
    hub: FakeHub, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """In a process of its own, as the daemon runs it: huggingface_hub reads paths at its import."""
    if where == "file":
        folder = home / ".cache" / "huggingface"
        folder.mkdir(parents=True)
        (folder / "token").write_text(TOKEN + "\n")
    else:
        monkeypatch.setenv(where, TOKEN)
    hub.server.faults[hub.path_of("model.Q8.gguf")] = [Fault(status=403)]
    sources = ["hf://org/repo/model.Q4.gguf", "hf://org/repo/model.Q8.gguf"]
    weights = [{"source": source} for source in sources]
    done = subprocess.run(
        [sys.executable, "-m", "flexlab.weights.fetch"],
        input=json.dumps({"weights": weights, "models_dir": str(tmp_path / "models")}).encode(),
        capture_output=True,
        timeout=60,
    )
    assert json.loads(done.stdout.splitlines()[-1])["error"]["code"] == "weights_forbidden"
    authorized = {one.headers.get("authorization") for one in hub.server.asked}
    assert authorized == {f"Bearer {TOKEN}"}
    kept = b"".join(path.read_bytes() for path in (tmp_path / "models/.flexlab").iterdir())
    assert TOKEN.encode() not in done.stdout + done.stderr + kept


class Cache:
    """A Hugging Face cache as huggingface_hub lays it out."""

    def __init__(self, home: Path, commit: str = COMMIT) -> None:
        self.root = home / ".cache" / "huggingface" / "hub" / "models--org--repo"
        self.snapshot = self.root / "snapshots" / commit
        for folder in (self.snapshot, self.root / "blobs", self.root / "refs"):
            folder.mkdir(parents=True)
        (self.root / "refs" / "main").write_text(commit)

    def add(self, name: str, data: bytes, blob_name: str | None = None) -> Path:
        blob = self.root / "blobs" / (blob_name or sha256(data))
        blob.write_bytes(data)
        (self.snapshot / name).symlink_to(blob)
        return blob


def test_a_file_in_the_users_cache_is_used_in_place(store: Store, home: Path) -> None:
    blob = Cache(home).add("model.Q4.gguf", GGUF)
    weight = Weight(source="hf://org/repo/model.Q4.gguf", sha256=sha256(GGUF))
    assert store.installed(weight) == blob
    assert get(store, weight.source, sha256=weight.sha256) == blob  # no hub is there to be asked
    assert store.remove(weight) == 0
    assert blob.exists()


def test_the_cache_is_believed_only_when_size_and_checksum_fit(store: Store, home: Path) -> None:
    Cache(home).add("model.Q4.gguf", GGUF)
    source = "hf://org/repo/model.Q4.gguf"
    assert store.installed(Weight(source=source)) is not None
    assert store.installed(Weight(source=source, size_bytes=5)) is None
    assert store.installed(Weight(source=source, sha256="0" * 64)) is None
    assert store.installed(Weight(source="hf://org/repo@other/model.Q4.gguf")) is None
    assert store.installed(Weight(source="hf://org/repo/absent.gguf")) is None


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
def test_the_cache_may_lie_elsewhere(
    store: Store, home: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    blob = Cache(home).add("model.Q4.gguf", GGUF)
    weight = Weight(source="hf://org/repo/model.Q4.gguf")
    hf_home = home / ".cache" / "huggingface"
    monkeypatch.setenv(variable, str(hf_home if variable == "HF_HOME" else hf_home / "hub"))
    assert store.installed(weight) == blob
    monkeypatch.setenv(variable, str(home / "empty"))
    assert store.installed(weight) is None


def test_a_repository_in_the_users_cache_is_used_in_place(
    hub: FakeHub, store: Store, home: Path
) -> None:
    hub.publish({name: FILES[name] for name in ("config.json", "model.safetensors")})
    cache = Cache(home)
    cache.add("config.json", FILES["config.json"], "a" * 40)
    blob = cache.add("model.safetensors", FILES["model.safetensors"])
    weight = Weight(source="hf://org/repo")
    assert get(store, weight.source) == cache.snapshot
    assert store.installed(weight) == cache.snapshot
    assert hub.fetched == []
    assert [entry.in_place for entry in store.entries()] == [True]
    assert store.remove(weight) == 0
    assert blob.exists()
    assert store.installed(weight) is None


def test_a_repository_that_the_cache_holds_in_part_is_fetched(
    hub: FakeHub, store: Store, home: Path
) -> None:
    hub.publish({name: FILES[name] for name in ("config.json", "model.safetensors")})
    Cache(home).add("config.json", FILES["config.json"], "a" * 40)
    assert get(store, "hf://org/repo") == store.models_dir / "hf" / "org" / "repo" / "main"


def test_a_damaged_blob_is_named_and_not_touched(hub: FakeHub, store: Store, home: Path) -> None:
    damaged = b"GGUF" + bytes(len(GGUF) - 4)
    blob = Cache(home).add("model.Q4.gguf", damaged, "b" * 40)
    with pytest.raises(WeightsError, match="Hugging Face cache has a wrong checksum"):
        get(store, "hf://org/repo/model.Q4.gguf", sha256=sha256(GGUF))
    assert blob.read_bytes() == damaged


def test_offline_is_said(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE"):
        get(store, "hf://org/repo/model.Q4.gguf")


def test_what_a_pattern_means() -> None:
    offered = [HubFile(name, 1, None) for name in ("a/x.gguf", "a/y.gguf", "b[1].gguf", "c.txt")]

    def chosen(path: str) -> list[str]:
        source = HfSource(org="o", repo="r", path=path)
        return [file.path for file in choose(source, offered, allow_pickle=False)]

    assert chosen("*.gguf") == ["a/x.gguf", "a/y.gguf", "b[1].gguf"]
    assert chosen("a/*") == ["a/x.gguf", "a/y.gguf"]
    assert chosen("a/x.gguf") == ["a/x.gguf"]
