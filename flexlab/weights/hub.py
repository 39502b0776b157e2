"""`hf://`: a file, the files of a pattern, or a whole repository of a Hugging Face hub.

huggingface_hub says which hub (HF_ENDPOINT), who we are (HF_TOKEN, HUGGING_FACE_HUB_TOKEN, the
token file) and what a file's address is. The bytes come through our own transfer: it resumes
after any kind of end, reports every step, and notices a stall.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import quote

import msgspec

from flexlab.core.errors import WeightsError
from flexlab.core.text import clean_line
from flexlab.spec.plan import Weight
from flexlab.spec.source import HfSource, inner_path_problem, shard_pattern, weight_format
from flexlab.weights import files, hub_cache
from flexlab.weights.http import Access, Explain, Patience, get_document, show_host
from flexlab.weights.progress import Meter
from flexlab.weights.store import Item, ItemFile, Store
from flexlab.weights.transfer import Download, download


class _Lfs(msgspec.Struct):
    sha256: str | None = None
    size: int | None = None


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int | None = None
    lfs: _Lfs | None = None


class _Listing(msgspec.Struct):
    sha: str
    siblings: list[_Sibling] = []


@dataclass(frozen=True)
class HubFile:
    """One file of a repository, as the hub describes it."""

    path: str
    size_bytes: int | None
    sha256: str | None


@dataclass(frozen=True)
class Hub:
    """Which hub, and how it is reached."""

    endpoint: str
    access: Access


class HubFetch:
    """One fetch from a hub: ask what belongs to the source, then fetch what is not here yet."""

    def __init__(
        self, source: HfSource, weight: Weight, store: Store, meter: Meter, patience: Patience
    ) -> None:
        self._source = source
        self._weight = weight
        self._store = store
        self._meter = meter
        self._patience = patience
        self._hub = open_hub(source)

    def run(self) -> Item:
        """The item with every file here and checked. Raises WeightsError."""
        item = self._plan()
        before = self._store.item(self._source)
        self._meter.expect_file(item.total_bytes)
        if item.in_place:
            for file in item.files:
                self._check_cached(file)
            return item
        # Written at once, so that others can watch; what was completed before stays completed.
        done = {file.path: file for file in before.files if file.done} if before else {}
        item = _replace_files(item, [_known_done(file, done) for file in item.files])
        self._store.save(item)
        if item.total_bytes is not None:
            missing_bytes = item.total_bytes - self._store.fetched_bytes(item)
            files.check_space(self._store.models_dir, missing_bytes)
        for number, file in enumerate(item.files):
            finished = self._finish(item, file)
            item = _replace_files(item, [*item.files[:number], finished, *item.files[number + 1 :]])
            self._store.save(item)
        return item

    def _plan(self) -> Item:
        source, endpoint = self._source, self._hub.endpoint
        self._meter.say("weights", f"looking at {source.repo_id} on {show_host(endpoint)}")
        revision = quote(source.revision or hub_cache.DEFAULT_REVISION, safe="")
        url = f"{endpoint}/api/models/{source.repo_id}/revision/{revision}?blobs=true"
        document = get_document(url, self._hub.access, self._patience, self._meter)
        try:
            listing = msgspec.json.decode(document.text, type=_Listing)
        except msgspec.MsgspecError as error:
            raise WeightsError(
                f"{show_host(endpoint)} does not answer as a hub does: {clean_line(str(error))}",
                "echo $HF_ENDPOINT shows which hub is asked",
                code="weights_unreachable",
            ) from error
        chosen = choose(source, listing_files(listing), self._weight.allow_pickle)
        return _item(source, listing.sha, _pinned(source, chosen, self._weight.sha256), self._store)

    def _finish(self, item: Item, file: ItemFile) -> ItemFile:
        """The file, here and checked: known from before, found here, or fetched now."""
        target = self._store.absolute(file.path)
        size_bytes = files.size_of(target)
        if size_bytes is not None and size_bytes == file.size_bytes and self._is_right(file):
            self._meter.begin(size_bytes)
            self._meter.end()
        else:
            self._download(item, file, target)
        return msgspec.structs.replace(file, done=True, size_bytes=files.size_of(target))

    def _is_right(self, file: ItemFile) -> bool:
        return file.done or (file.sha256 is not None and self._hash(file) == file.sha256)

    def _download(self, item: Item, file: ItemFile, target: Path) -> None:
        from huggingface_hub import hf_hub_url

        inner = target.relative_to(self._store.home(self._source)).as_posix()
        url = hf_hub_url(
            self._source.repo_id, inner, revision=item.revision, endpoint=self._hub.endpoint
        )
        job = Download(
            url=url,
            target=target,
            size_bytes=file.size_bytes,
            sha256=file.sha256,
            access=self._hub.access,
        )
        download(job, self._meter, self._patience)

    def _check_cached(self, file: ItemFile) -> None:
        """A file of the user's cache; large ones bear their checksum as the blob's name."""
        path = Path(file.path)
        if file.sha256 in (None, hub_cache.checksum_by_name(path.resolve())):
            return
        if self._hash(file) != file.sha256:
            raise WeightsError(
                f"{path} in the Hugging Face cache has a wrong checksum",
                f"delete it, then the same command again: rm {path}",
                code="weights_checksum",
            )

    def _hash(self, file: ItemFile) -> str:
        path = self._store.absolute(file.path)
        self._meter.say("verify", f"{path.name}: checking what is already here")
        self._meter.begin()
        return files.hash_file(path, self._meter.move)


def _known_done(file: ItemFile, done: dict[str, ItemFile]) -> ItemFile:
    earlier = done.get(file.path)
    same = earlier is not None and earlier.sha256 == file.sha256
    return msgspec.structs.replace(file, done=same and file.sha256 is not None)


def _replace_files(item: Item, changed: Sequence[ItemFile]) -> Item:
    return msgspec.structs.replace(item, files=tuple(changed))


def open_hub(source: HfSource) -> Hub:
    """The hub that the user's environment names. Raises WeightsError when it is switched off."""
    # huggingface_hub costs 300 ms to import and is needed here only.
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise WeightsError(
            f"{source.uri} must be fetched, but HF_HUB_OFFLINE is set",
            "unset HF_HUB_OFFLINE, then the same command again",
            code="weights_unreachable",
        )
    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    try:
        token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    except OSError as error:
        raise WeightsError(
            f"the Hugging Face token cannot be read: {error.strerror or type(error).__name__}",
            "hf auth login stores it anew, HF_TOKEN goes before it",
            code="weights_unauthorized",
        ) from error
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    explain = _explain(source, endpoint, token is not None)
    return Hub(endpoint, Access(headers=headers, explain=explain))


def listing_files(listing: _Listing) -> list[HubFile]:
    """The files whose names can be trusted; size and checksum are those of the content."""
    return [
        HubFile(
            path=entry.rfilename,
            size_bytes=entry.lfs.size if entry.lfs and entry.lfs.size is not None else entry.size,
            sha256=entry.lfs.sha256 if entry.lfs else None,
        )
        for entry in listing.siblings
        if inner_path_problem(entry.rfilename) is None
    ]


def choose(source: HfSource, offered: list[HubFile], allow_pickle: bool) -> list[HubFile]:
    """Those that the source means, in the order of their names. Raises WeightsError.

    The first part of a split model stands for all of them. Of a whole repository, hidden files
    and (unless asked for) pickle files are left out.
    """
    if source.path is None:
        found = [file for file in offered if not file.path.startswith(".")]
    elif pattern := shard_pattern(source.path) if source.is_file else source.path:
        found = [file for file in offered if fnmatchcase(file.path, pattern)]
    else:
        found = [file for file in offered if file.path == source.path]
    allowed = [file for file in found if allow_pickle or weight_format(file.path) != "pickle"]
    if allowed:
        return sorted(allowed, key=lambda file: file.path)
    if found:
        raise WeightsError(
            f"{source.uri} has only pickle files, which can run any code when they are loaded",
            "look for a repository with safetensors or GGUF files",
            code="weights_pickle",
        )
    alike = [file.path for file in offered if weight_format(file.path) in ("gguf", "safetensors")]
    raise WeightsError(
        f"{source.repo_id} has no file {source.path or '*'}",
        f"it has {', '.join(alike[:5])}" if alike else "it has no weights that can be used here",
        code="weights_not_found",
    )


def _pinned(source: HfSource, chosen: list[HubFile], sha256: str | None) -> list[HubFile]:
    """With the recipe's checksum on the file that an engine is given. Raises WeightsError."""
    if sha256 is None:
        return chosen
    if not _is_one_model(source, chosen):
        raise WeightsError(
            f"{source.uri} is a folder, which has no checksum", "a commit after @ pins it instead"
        )
    first, *others = chosen
    if first.sha256 not in (None, sha256):
        raise WeightsError(
            f"{source.uri} has sha256 {first.sha256} on the hub, the recipe states {sha256}",
            "the file was changed at its source; a newer recipe may name the new one",
            code="weights_checksum",
        )
    return [replace(first, sha256=sha256), *others]


def _is_one_model(source: HfSource, chosen: list[HubFile]) -> bool:
    """One file, or all parts of one split GGUF model: an engine is given the first of them."""
    first = chosen[0].path
    if len(chosen) == 1 and (source.is_file or weight_format(first) == "gguf"):
        return True
    pattern = shard_pattern(first) if weight_format(first) == "gguf" else None
    return pattern is not None and all(fnmatchcase(file.path, pattern) for file in chosen)


def _item(source: HfSource, commit: str, chosen: list[HubFile], store: Store) -> Item:
    home = store.home(source)
    cached = _all_cached(source, commit, chosen)
    if cached is not None:
        paths = [str(path) for path in cached]
        folder = str(hub_cache.snapshot(source, commit))
    else:
        paths = [store.relative(home / file.path) for file in chosen]
        folder = store.relative(home)
    one_model = _is_one_model(source, chosen)
    sizes = [file.size_bytes for file in chosen]
    known = [size for size in sizes if size is not None]
    return Item(
        source=source.uri,
        path=paths[0] if one_model else folder,
        files=tuple(
            ItemFile(path=path, size_bytes=file.size_bytes, sha256=file.sha256)
            for path, file in zip(paths, chosen, strict=True)
        ),
        sha256=chosen[0].sha256 if one_model else None,
        revision=commit,
        total_bytes=sum(known) if len(known) == len(sizes) else None,
        in_place=cached is not None,
    )


def _all_cached(source: HfSource, commit: str, chosen: list[HubFile]) -> list[Path] | None:
    """Where the user's own cache holds every file of this commit; None when one is missing.

    A single file is used as its blob; several keep their names, so as links of the snapshot.
    """
    folder = hub_cache.snapshot(source, commit)
    if folder is None:
        return None
    blobs = [hub_cache.cached_file(folder, file.path, file.size_bytes) for file in chosen]
    found = [blob for blob in blobs if blob is not None]
    if len(found) < len(blobs):
        return None
    return found if len(found) == 1 else [folder / file.path for file in chosen]


def _explain(source: HfSource, endpoint: str, has_token: bool) -> Explain:
    """What a hub's no means: it says 401 where others say 404, and 403 for gated models."""
    page = f"{endpoint}/{source.repo_id}"

    def explain(status: int, headers: Mapping[str, str]) -> WeightsError | None:
        code = headers.get("x-error-code", "")
        if code == "GatedRepo" and status in (401, 403):
            how = "with the account of your token" if has_token else "then set HF_TOKEN"
            return WeightsError(
                f"{source.repo_id} is gated ({status}): its owner must grant access first",
                f"ask for it at {page}, {how}",
                code="weights_gated",
            )
        if status == 401 and has_token:
            return WeightsError(
                f"{show_host(endpoint)} does not accept the token (401)",
                "hf auth whoami tests it; HF_TOKEN or hf auth login sets another",
                code="weights_unauthorized",
            )
        if status == 401:
            return WeightsError(
                f"{source.repo_id} does not exist, or is private (401)",
                f"look at {page}; for a private one set HF_TOKEN or run hf auth login",
                code="weights_unauthorized",
            )
        if status == 403:
            return WeightsError(
                f"{source.repo_id} is forbidden to this token (403)",
                f"a fine-grained token needs read access to it; see {page}",
                code="weights_forbidden",
            )
        if status == 404:
            what = {
                "RevisionNotFound": f"has no revision {source.revision}",
                "EntryNotFound": f"has no file {posixpath.basename(source.path or '')}",
            }.get(code, "does not exist")
            return WeightsError(
                f"{source.repo_id} {what} (404)", f"look at {page}", code="weights_not_found"
            )
        return None

    return explain
