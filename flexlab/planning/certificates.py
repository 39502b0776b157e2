"""Features that are admitted only by evidence. Fails closed: whatever does not match is refused.

A feature is in use when one of the settings that a certificate `asks` for has a value. It is
admitted when one certificate of the backend matches the arch, the image by its digest and every
setting of its envelope. On the CPU no certificate is needed, since each was made on a GPU, but the
bounds of the settings that it asks for hold there too.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flexlab.backends.model_paths import is_below
from flexlab.recipes.certificate_schema import Bound, Certificate
from flexlab.spec.machine import Problem
from flexlab.spec.plan import Admission

_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}")


def judge(
    backend: str,
    settings: Mapping[str, object],
    *,
    arch: str | None,
    image: str | None,
    on_cpu: bool,
    certificates: Sequence[Certificate],
    contract: str | None = None,
    certified: Mapping[str, object] | None = None,
) -> list[Admission]:
    """One admission for each capability whose settings are in use, with all that is wrong.

    `contract`: that of the variant's weights, where it states one: they are what was certified, so
    that no setting takes them out of their certificate. `certified`: the variant's own settings;
    another one that differs from them was not part of the proof.
    """
    by_capability: dict[str, list[Certificate]] = {}
    for certificate in certificates:
        if certificate.backend == backend and _in_use(certificate, settings, contract):
            by_capability.setdefault(certificate.capability, []).append(certificate)
    return [
        _on_the_cpu(capability, known[0], settings)
        if on_cpu
        else _by_certificate(capability, known, _Asked(settings, arch, image, contract, certified))
        for capability, known in by_capability.items()
    ]


class _Asked(NamedTuple):
    """What is held against a certificate."""

    settings: Mapping[str, object]
    arch: str | None
    image: str | None
    contract: str | None
    certified: Mapping[str, object] | None


def bound_image(
    backend: str,
    settings: Mapping[str, object],
    arch: str | None,
    known: Sequence[Certificate],
    contract: str | None = None,
) -> str | None:
    """The image that the features in use are bound to on this arch; None where none is."""
    for certificate in known:
        wanted = certificate.backend == backend and _in_use(certificate, settings, contract)
        if wanted and arch in certificate.archs:
            return certificate.image
    return None


def _in_use(certificate: Certificate, settings: Mapping[str, object], contract: str | None) -> bool:
    if contract is not None and contract == certificate.contract:
        return True
    return any(settings.get(name) is not None for name in certificate.asks)


def _on_the_cpu(
    capability: str, certificate: Certificate, settings: Mapping[str, object]
) -> Admission:
    problems = tuple(_outside(certificate, settings, certificate.asks))
    why = "on the CPU no certificate is needed; its bounds hold all the same"
    return Admission(
        capability=capability,
        admitted=not problems,
        why=problems[0].message if problems else why,
        problems=problems,
    )


def _by_certificate(capability: str, known: Sequence[Certificate], asked: _Asked) -> Admission:
    """By the certificate that comes closest, so that a refusal names what is left to change."""
    judged = [(tuple(_against(one, asked)), one) for one in known]
    problems, closest = min(judged, key=lambda pair: len(pair[0]))
    why = problems[0].message if problems else f"certified since {closest.since}: {closest.proof}"
    return Admission(
        capability=capability,
        admitted=not problems,
        why=why,
        certificate=closest.name,
        limits=closest.limits,
        contract=closest.contract,
        problems=problems,
    )


def _against(certificate: Certificate, asked: _Asked) -> Iterator[Problem]:
    settings, arch, image, contract, certified = asked
    other_arch = arch not in certificate.archs
    mend = "leave the feature out; flexlab recipes lists what fits here"
    if not other_arch:
        mend = f"--image {certificate.image}"
    yield from _incomplete(certificate)
    where = f"certificate {certificate.name}"
    if other_arch:
        yield Problem(
            code="certificate_arch",
            message=f"{certificate.capability} is certified on {', '.join(certificate.archs)}, "
            f"and this is {arch or 'an unknown arch'}; {where} does not carry across archs",
            hint="leave the feature out, or use a certified card",
        )
    if image is None or not _DIGEST.fullmatch(image):
        yield Problem(
            code="certificate_tag",
            message=f"{image or 'an image without a name'} is not pinned by its digest, and "
            f"{where} is for one digest only",
            hint=mend,
        )
    elif image != certificate.image:
        yield Problem(
            code="certificate_digest",
            message=f"{image} is another artifact than {where} was made with",
            hint=mend,
        )
    if contract != certificate.contract:
        yield Problem(
            code="certificate_contract",
            message=f"{where} is for weights of {_contract(certificate.contract)}, and these are "
            f"of {_contract(contract)}",
            hint="a model recipe states the contract that its weights were made by",
        )
    yield from _outside(certificate, settings, tuple(certificate.envelope))
    if certified is not None and contract is not None:
        yield from _not_proved(certificate, settings, certified)


def _not_proved(
    certificate: Certificate, settings: Mapping[str, object], certified: Mapping[str, object]
) -> Iterator[Problem]:
    """What the envelope does not name was run as the variant states it, and not otherwise."""
    for name, value in settings.items():
        if name in certificate.envelope or _means(value) == _means(certified.get(name)):
            continue
        yield Problem(
            code="certificate_envelope",
            message=f"{name} is {_shown(value)}, and {certificate.capability} was proved with "
            f"{_shown(certified.get(name))} only",
            hint=f"leave out --set {name}",
        )


def _contract(digest: str | None) -> str:
    return f"the contract sha256:{digest}" if digest else "no contract"


def _incomplete(certificate: Certificate) -> Iterator[Problem]:
    """The schema lets no such certificate in; one that was made otherwise is none either."""
    missing = [
        name
        for name in ("name", "image", "since", "proof", "source", "reason")
        if not str(getattr(certificate, name, "") or "").strip()
    ]
    if getattr(certificate, "evidence", None) != "tested":
        missing.append("evidence")
    if not _DIGEST.fullmatch(str(getattr(certificate, "image", ""))):
        missing.append("digest")
    try:
        datetime.date.fromisoformat(str(getattr(certificate, "since", "")))
    except ValueError:
        missing.append("since")
    if not getattr(certificate, "envelope", None):
        missing.append("envelope")
    if missing:
        yield Problem(
            code="certificate_incomplete",
            message=f"the certificate for {certificate.capability} lacks its "
            f"{', '.join(dict.fromkeys(missing))}: it proves nothing",
            hint="flexlab recipes check FILE says what is wrong in it",
        )


def _outside(
    certificate: Certificate, settings: Mapping[str, object], names: Sequence[str]
) -> Iterator[Problem]:
    for name in names:
        bound, value = certificate.envelope.get(name), settings.get(name)
        if bound is None or _within(bound, value):
            continue
        wanted = _wanted(bound)
        yield Problem(
            code="certificate_envelope",
            message=f"{name} is {_shown(value)}, and {certificate.capability} was proved "
            f"with {wanted} only",
            hint=f"--set {name}={wanted.split()[-1]}"
            if bound.below is None
            else f"--set {name}={bound.below}/.flexlab/slots/NAME",
        )


def _within(bound: Bound, value: object) -> bool:
    if bound.at_most is not None:
        return isinstance(value, int) and not isinstance(value, bool) and value <= bound.at_most
    if bound.below is not None:
        return isinstance(value, str) and is_below(value, bound.below)
    return _means(value) == _means(bound.exactly)


def _means(value: object) -> tuple[str, object]:
    """For comparison: numbers by value, JSON texts by what they say, true never as 1."""
    if isinstance(value, bool):
        return "bool", value
    if isinstance(value, int | float):
        return "number", float(value)
    if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
        try:
            return "json", json.dumps(json.loads(value), sort_keys=True)
        except ValueError:
            return "text", value
    return "text", value


def _wanted(bound: Bound) -> str:
    if bound.at_most is not None:
        return f"at most {bound.at_most}"
    if bound.below is not None:
        return f"a path below {bound.below}"
    return _shown(bound.exactly)


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, float):
        return f"{value:.2f}"
    return value if isinstance(value, str) else json.dumps(value)
