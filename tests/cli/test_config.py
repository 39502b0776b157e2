"""`flexlab config`, and variables that other commands meet."""

from __future__ import annotations

import json

import pytest
from cli_process import Flexlab
from fake_daemon import FakeDaemon

from flexlab.cli import variables
from flexlab.core import paths
from flexlab.core.settings import Settings
from flexlab.core.validate import known_keys


def test_config_show_says_what_decided_a_value(flexlab_here: Flexlab) -> None:
    paths.config_dir().mkdir(parents=True)
    paths.settings_file().write_text("port: 9000\nidle_timeout: 5min\n")
    shown = json.loads(flexlab_here("config", "show", "--json", FLEXLAB_PORT="9001").stdout)
    assert shown["port"] == {"value": 9001, "source": "FLEXLAB_PORT", "key": "port"}
    assert shown["idle_timeout_s"]["value"] == 300
    assert shown["idle_timeout_s"]["source"] == "settings.yaml:2"


def test_config_check_reports_all_that_is_wrong(flexlab_here: Flexlab) -> None:
    paths.config_dir().mkdir(parents=True)
    paths.settings_file().write_text("prot: 1\nidle_timeout: soon\n")
    shown = flexlab_here("config", "check")
    assert shown.returncode == 2
    assert "settings.yaml:1" in shown.stderr
    assert "settings.yaml:2" in shown.stderr


def test_config_path_works_while_the_settings_are_wrong(flexlab_here: Flexlab) -> None:
    shown = flexlab_here("config", "path", "--json", FLEXLAB_PORT="x")
    assert json.loads(shown.stdout)["settings"] == str(paths.settings_file())


def test_config_show_still_shows_what_is_right(flexlab_here: Flexlab) -> None:
    paths.config_dir().mkdir(parents=True)
    paths.settings_file().write_text("port: 9000\nidle_timeout: soon\n")
    shown = flexlab_here("config", "show", FLEXLAB_LINGER="9", FLEXLAB_QUEUE_LIMIT="x")
    assert shown.returncode == 2
    rows = {line.split()[0]: line.split()[1:] for line in shown.stdout.splitlines()}
    assert rows["port"] == ["9000", "settings.yaml:1"]
    assert rows["idle_timeout"] == ["15m", "default"]
    assert rows["linger"] == ["9", "s", "FLEXLAB_LINGER"]
    assert "settings.yaml:2" in shown.stderr
    assert "FLEXLAB_QUEUE_LIMIT" in shown.stderr
    assert "hint: flexlab config show" not in shown.stderr


@pytest.mark.parametrize("pending", [(), ("host", "port")])
def test_config_show_says_what_counts_from_the_next_start_of_the_daemon_on(
    flexlab_here: Flexlab, daemon: FakeDaemon, pending: tuple[str, ...]
) -> None:
    daemon.pending = pending
    shown = flexlab_here("config", "show")
    assert shown.returncode == 0
    assert ("host, port" in shown.stderr) == bool(pending)
    assert ("flexlab down --daemon" in shown.stderr) == bool(pending)


def test_commands_that_read_no_settings_warn_of_variables_that_do_not_count(
    flexlab_here: Flexlab,
) -> None:
    shown = flexlab_here("ps", FLEXLAB_PROT="1", FLEXLAB_PORT="x", FLEXLAB_LINGER="5s")
    assert shown.returncode == 0
    assert "FLEXLAB_PROT is no setting (did you mean FLEXLAB_PORT?)" in shown.stderr
    assert "FLEXLAB_PORT=x is not understood" in shown.stderr
    assert "LINGER" not in shown.stderr


def test_every_setting_is_known_as_a_variable() -> None:
    settings = {key.upper() for key in known_keys(Settings)}
    assert settings == set(variables.KNOWN) - set(variables.NO_SETTINGS)
