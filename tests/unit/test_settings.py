"""Settings: what wins, who set it, and what a wrong one says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from flexlab.core import paths
from flexlab.core.errors import SettingsError
from flexlab.core.settings import Settings, load_settings
from flexlab.core.units import GIB, MIB


def write(text: str) -> Path:
    file = paths.settings_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def problems(options: dict[str, object] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load_settings(options)
    assert caught.value.exit_code == 2
    assert "flexlab config" in (caught.value.hint or "")
    return str(caught.value).splitlines()


def test_without_anything_the_defaults_hold(home: Path) -> None:
    loaded = load_settings()
    assert loaded.settings == Settings()
    assert set(loaded.sources.values()) == {"default"}
    assert loaded.settings.models_dir == home / ".local/share/flexlab/models"
    assert loaded.settings.host == "127.0.0.1"
    assert loaded.warnings == ()


def test_an_option_beats_a_variable_beats_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write("# mine\nport: 1\nlinger: 1s\nqueue_limit: 1\nidle_timeout: 15min\n")
    monkeypatch.setenv("FLEXLAB_PORT", "2")
    monkeypatch.setenv("FLEXLAB_LINGER", "2s")
    loaded = load_settings({"port": 3, "host": None, "start_timeout": "1h"})
    got = loaded.settings
    assert (got.port, got.linger_s, got.queue_limit) == (3, 2.0, 1)
    assert (got.idle_timeout_s, got.start_timeout_s) == (900.0, 3600.0)
    assert {name: source for name, source in loaded.sources.items() if source != "default"} == {
        "port": "option",
        "linger_s": "FLEXLAB_LINGER",
        "queue_limit": "settings.yaml:4",
        "idle_timeout_s": "settings.yaml:5",
        "start_timeout_s": "option",
    }


def test_a_value_that_equals_its_default_still_knows_who_set_it() -> None:
    write("port: 8484\n")
    assert load_settings().sources["port"] == "settings.yaml:1"


def test_sizes_lists_and_paths_are_written_as_people_write_them(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("ram_limit: 8G\nmodels_dir: ~/big\nallow_origins: ['http://a:1', https://b.example]\n")
    monkeypatch.setenv("FLEXLAB_RAM_RESERVE", "512M")
    monkeypatch.setenv("FLEXLAB_LOG_MAX", "1MiB")
    got = load_settings().settings
    assert (got.ram_limit_bytes, got.ram_reserve_bytes) == (8 * GIB, 512 * MIB)
    assert got.log_max_bytes == MIB
    assert got.models_dir == home / "big"
    assert got.allow_origins == ("http://a:1", "https://b.example")
    monkeypatch.setenv("FLEXLAB_ALLOW_ORIGINS", "http://x, http://y")
    assert load_settings().settings.allow_origins == ("http://x", "http://y")


def test_everything_wrong_is_named_at_once_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("prot: 9000\nidle_timeout: soon\nruntime: dokcer\nport: '5'\nport: 6\n")
    monkeypatch.setenv("FLEXLAB_PORT", "80000")
    monkeypatch.setenv("FLEXLAB_RAM_LIMIT", "much")
    assert problems({"queue_limit": "many", "hots": "x"}) == [
        f"{file}:1:1: unknown key 'prot'; did you mean 'port'?",
        f"{file}:2:15: idle_timeout: 'soon' is not a time such as 90s, 15min or 1h",
        f"{file}:3:10: runtime: 'dokcer' is not one of process, docker, k3s; "
        "did you mean 'docker'?",
        f"{file}:4:7: port: a whole number is wanted, not '5'",
        f"{file}:5:1: key 'port' stands twice; the first is on line 4",
        "FLEXLAB_PORT: must be less than or equal to 65535, not '80000'",
        "FLEXLAB_RAM_LIMIT: 'much' is not a size such as 512M or 1.5G",
        "--queue-limit: a whole number is wanted, not 'many'",
        "--hots is no setting; did you mean 'host'?",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "localhost", "my-box.lan", "7up"])
def test_hosts_that_are_valid(host: str) -> None:
    assert Settings(host=host).host == host


@pytest.mark.parametrize(
    "host", ["", "1.2.3", "300.1.1.1", "[::1]", "a b", "-x", "http://x", "x:1"]
)
def test_hosts_that_are_not(host: str) -> None:
    with pytest.raises(ValidationError, match="is not an address or name"):
        Settings(host=host)


@pytest.mark.parametrize("origin", ["*", "a.example", "http://a/b", "null", "ftp://a", "http://"])
def test_an_origin_is_scheme_and_host(origin: str) -> None:
    with pytest.raises(ValidationError, match="is not an origin"):
        Settings(allow_origins=(origin,))


def test_a_relative_models_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXLAB_MODELS_DIR", "models")
    assert problems() == ["FLEXLAB_MODELS_DIR: 'models' must be an absolute path, or start with ~"]


def test_the_home_of_nobody_is_refused() -> None:
    file = write("models_dir: ~nobody-of-this-name/models\n")
    assert problems() == [
        f"{file}:1:13: models_dir: '~nobody-of-this-name/models' names a user that does not exist"
    ]


def test_variables_that_nobody_reads_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEXLAB_STATE_DIR", "FLEXLAB_OWNER", "FLEXLAB_TEST_X", "FLEXLAB_INSTANCE"):
        monkeypatch.setenv(name, "/tmp/x")
    monkeypatch.setenv("FLEXLAB_PROT", "1")
    monkeypatch.setenv("FLEXLAB_ZZZ", "1")
    assert load_settings().warnings == (
        "FLEXLAB_PROT is no setting; did you mean FLEXLAB_PORT?",
        "FLEXLAB_ZZZ is no setting",
    )


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEXLAB_PORT", "")
    assert load_settings().sources["port"] == "default"


def test_nothing_is_replaced_in_text() -> None:
    write("models_dir: /srv/${USER}\n")
    assert load_settings().settings.models_dir == Path("/srv/${USER}")


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "---\n{}\n"])
def test_an_empty_file_is_fine(text: str) -> None:
    write(text)
    assert load_settings().settings == Settings()


@pytest.mark.parametrize(
    ("text", "words"),
    [("- port", "a mapping is wanted"), ("port: [", ":2:1: "), ("port:\n\t1", "a tab")],
)
def test_a_file_that_is_no_settings_is_explained(text: str, words: str) -> None:
    file = write(text)
    (problem,) = problems()
    assert words in problem
    assert problem.startswith(str(file))


def test_an_unreadable_file_names_the_cause() -> None:
    file = paths.settings_file()
    file.mkdir(parents=True)
    assert problems() == [f"{file}: cannot be read: Is a directory"]


def test_a_dangling_link_is_not_the_same_as_no_file() -> None:
    file = paths.settings_file()
    file.parent.mkdir(parents=True)
    file.symlink_to(file.parent / "gone.yaml")
    assert "cannot be read: No such file" in problems()[0]


def test_settings_cannot_be_changed_on_the_way() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().settings.port = 1  # type: ignore[misc]


def test_rows_speak_in_keys() -> None:
    rows = {key: (value, source) for key, value, source in load_settings().rows()}
    assert rows["idle_timeout"] == (900.0, "default")
    assert "idle_timeout_s" not in rows
    assert len(rows) == len(Settings.model_fields)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
def test_any_text_of_a_variable_is_a_value_or_a_settings_error(text: str) -> None:
    names = ("PORT", "HOST", "IDLE_TIMEOUT", "RAM_LIMIT", "MODELS_DIR", "ALLOW_ORIGINS", "RUNTIME")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setenv(f"FLEXLAB_{name}", text)
        try:
            wrong = ""
            load_settings()
        except SettingsError as error:
            wrong = str(error)
    assert all(re.match(r"FLEXLAB_\w+: \S", line) for line in wrong.splitlines())
