"""Prometheus' text format 0.0.4, written by hand: a dozen families do not need a client library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flexlab.gateway.observe import Histogram, How, Observer
from flexlab.spec.lab import ModelView

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


def render_metrics(observer: Observer, models: Sequence[ModelView], started_at: float) -> bytes:
    """Everything that /metrics shows."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: Iterable[tuple[Labels, float]]) -> None:
        lines.extend((f"# HELP flexlab_{name} {text}", f"# TYPE flexlab_{name} {kind}"))
        lines.extend(f"flexlab_{name}{_labels(of)} {_number(value)}" for of, value in samples)

    served = {name: counts for name, counts in observer.models.items() if name is not None}
    tokens = {name: counts.tokens for name, counts in served.items()}
    words = Counter[str](model.word for model in models)
    waiting = [((("model", model.name),), model.waiting) for model in models]
    family("start_time_seconds", "gauge", "Start of this daemon, Unix time.", [((), started_at)])
    family("models", "gauge", "Known models by state.", _by("state", words))
    family("requests_waiting", "gauge", "Requests that wait for a model.", waiting)
    in_flight = observer.in_flight
    family("requests_in_flight", "gauge", "Requests served or waiting.", [((), in_flight)])
    family("requests_total", "counter", "Requests that ended.", _requests(observer))
    family("requests_ended_total", "counter", "How they ended.", _by("how", observer.ends))
    family("tokens_total", "counter", "Generated (usage, else events).", _by("model", tokens))
    ttft = {name: counts.ttft for name, counts in served.items()}
    text = "From the request to the first byte of the answer's body."
    _histograms(lines, "flexlab_time_to_first_token_seconds", text, ttft)
    duration = {name: counts.duration for name, counts in served.items()}
    text = "From the request to the end of its answer."
    _histograms(lines, "flexlab_request_duration_seconds", text, duration)
    return ("\n".join(lines) + "\n").encode()


def _by(
    label: str, counts: Mapping[How, int] | Mapping[str, int]
) -> Iterable[tuple[Labels, float]]:
    for value, count in sorted(counts.items()):
        yield ((label, value),), count


def _requests(observer: Observer) -> Iterable[tuple[Labels, float]]:
    for model, counts in observer.models.items():
        for (route, status), count in counts.requests.items():
            yield (("model", model or ""), ("route", route), ("status", str(status or 0))), count


def _histograms(lines: list[str], name: str, text: str, by_model: Mapping[str, Histogram]) -> None:
    lines += (f"# HELP {name} {text}", f"# TYPE {name} histogram")
    for model, histogram in sorted(by_model.items()):
        count = 0
        for bound, more in zip((*histogram.bounds, None), histogram.counts, strict=True):
            count += more
            edge = "+Inf" if bound is None else _number(bound)
            lines.append(f"{name}_bucket{_labels((('model', model), ('le', edge)))} {count}")
        labels = _labels((("model", model),))
        lines.append(f"{name}_sum{labels} {_number(histogram.total)}")
        lines.append(f"{name}_count{labels} {count}")


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
