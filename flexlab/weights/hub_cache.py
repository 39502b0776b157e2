"""The user's own Hugging Face cache: looked into, used in place, never written and never deleted.

Its layout is public: `models--ORG--REPO/refs/REV` holds a commit, `snapshots/COMMIT/PATH` links to
`blobs/ETAG`, and the ETag of a large file is its sha256. huggingface_hub is not asked, since this
runs for `ls` and `ps` too, and importing it costs more than both.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from flexlab.spec.plan import Weight
from flexlab.spec.source import HfSource, shard_pattern

DEFAULT_REVISION = "main"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def cache_folder() -> Path:
    """Where huggingface_hub keeps repositories, by the same variables in the same order."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if chosen := os.environ.get(variable):
            return _expanded(chosen)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def snapshot(source: HfSource, commit: str | None = None) -> Path | None:
    """The folder of this commit, or of the commit that the source's revision last meant there."""
    repository = cache_folder() / f"models--{source.org}--{source.repo}"
    commit = commit or _commit(repository, source.revision or DEFAULT_REVISION)
    if commit is None:
        return None
    folder = repository / "snapshots" / commit
    return folder if os.path.isdir(folder) else None


def file_of(source: HfSource, weight: Weight) -> Path | None:
    """The weight's one file, when the cache can vouch for it without reading it."""
    folder = snapshot(source) if source.is_file else None
    # The parts of a split model must keep their names side by side; a blob alone will not do.
    if folder is None or source.path is None or shard_pattern(source.path):
        return None
    blob = cached_file(folder, source.path, weight.size_bytes)
    if blob is None or weight.sha256 not in (None, checksum_by_name(blob)):
        return None
    return blob


def cached_file(folder: Path, path: str, size_bytes: int | None = None) -> Path | None:
    """The file of a snapshot behind its link, None when absent or of another size."""
    try:
        found = (folder / path).resolve(strict=True)
        size = found.stat().st_size
    except OSError:
        return None
    return found if size_bytes in (None, size) else None


def checksum_by_name(blob: Path) -> str | None:
    """The sha256 that huggingface_hub checked when it stored the blob, None for a small file."""
    return blob.name if _SHA256.fullmatch(blob.name) else None


def _expanded(folder: str) -> Path:
    # Not Path.expanduser: that raises where a user has no home.
    return Path(os.path.expanduser(os.path.expandvars(folder)))


def _commit(repository: Path, revision: str) -> str | None:
    if _COMMIT.fullmatch(revision):
        return revision
    try:
        text = (repository / "refs" / revision).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return text if _COMMIT.fullmatch(text) else None
