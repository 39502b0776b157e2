"""Before a daemon serves: the lock, the word to whoever started it, and who may reach it."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from flexlab.core import paths
from flexlab.core.errors import FlexLabError, SettingsError
from flexlab.core.settings import Settings, load_settings
from flexlab.daemon.lockfile import Lock, take_lock
from flexlab.daemon.main import require_private, run


def test_only_one_daemon_gets_the_lock() -> None:
    first = take_lock()
    assert first is not None
    assert take_lock() is None
    first.close()
    second = take_lock()
    assert second is not None
    second.close()


def test_the_lock_file_tells_clients_where_to_go_and_nothing_before_that(tmp_path: Path) -> None:
    with closing(taken()) as lock:
        assert json.loads(paths.lock_file().read_text()) == {}
        lock.announce(socket=tmp_path / "control.sock", address="http://127.0.0.1:1")
        told = json.loads(paths.lock_file().read_text())
        assert told["pid"] == os.getpid()
        assert told["socket"] == str(tmp_path / "control.sock")
        lock.withdraw()
        assert json.loads(paths.lock_file().read_text()) == {}


def taken() -> Lock:
    lock = take_lock()
    assert lock is not None
    return lock


def heard(read: int) -> dict[str, object]:
    with os.fdopen(read) as pipe:
        return dict(json.loads(pipe.read()))


def test_a_second_daemon_says_that_there_is_one() -> None:
    read, write = os.pipe()
    with closing(taken()):
        assert run(load_settings(), externals={}, detached=True, ready_fd=write) == 0
    assert heard(read) == {"already": True}


def test_a_second_daemon_in_the_foreground_is_an_error() -> None:
    with closing(taken()), pytest.raises(FlexLabError) as told:
        run(load_settings(), externals={}, detached=False, ready_fd=None)
    assert told.value.code == "already_running"


def test_a_state_folder_that_cannot_be_used_reaches_whoever_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    monkeypatch.setenv("FLEXLAB_STATE_DIR", str(in_the_way))
    read, write = os.pipe()
    with pytest.raises(FlexLabError):
        run(load_settings(), externals={}, detached=True, ready_fd=write)
    error = heard(read)["error"]
    assert isinstance(error, dict)
    assert str(in_the_way) in error["message"]
    assert "FLEXLAB_STATE_DIR" in error["hint"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_this_machine_alone_needs_no_word(host: str) -> None:
    require_private(Settings(host=host))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.10", "nas.lan"])
def test_listening_to_the_network_must_be_meant(host: str) -> None:
    with pytest.raises(SettingsError) as told:
        require_private(Settings(host=host))
    assert "--open-to-network" in (told.value.hint or "")
    require_private(Settings(host=host, open_to_network=True))
