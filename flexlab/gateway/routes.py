"""Which request goes where: the OpenAI routes, what the gateway answers itself, and the raw route.

`judge` looks at the head (access, then path and method), `route` at the body (whose model). A
request only ever asks the lab for a lease; nothing here starts, stops or downloads anything.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol
from urllib.parse import unquote_to_bytes

import msgspec

from flexlab import __version__
from flexlab.core.errors import UnknownModel
from flexlab.core.near import near
from flexlab.gateway import metrics
from flexlab.gateway.access import Access
from flexlab.gateway.http import Answer, Head, error_answer, json_answer
from flexlab.gateway.observe import Observer
from flexlab.spec.lab import ModelView, Snapshot
from flexlab.spec.lease import Lease

Outcome = Lease | asyncio.Future[Lease] | Answer

INFERENCE_PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/embeddings": "embeddings",
}
"""Route -> what it asks of a model."""
_LIST_PATHS = ("/v1/models", "/models")
_UPSTREAM = b"/upstream/"
_SHORTCUT_FROM_BYTES = 64 * 1024
_NAME_SHOWN = 256
"""Characters of a name that was asked for, which may be anything, that are remembered."""


class Lab(Protocol):
    """What the router needs of the scheduler."""

    started_at: float

    def acquire(
        self,
        name: str,
        *,
        client: str,
        capability: str | None = None,
        since: float | None = None,
    ) -> Lease | asyncio.Future[Lease]:
        """A lease on a ready instance, or a future one. Raises (or resolves to) Refused.

        `capability` is what the route asks of a model (`chat`, ...); `since` the loop time at
        which a request first came that was cut and asks again. Cancelling the future withdraws
        the wish."""

    def models(self) -> Sequence[ModelView]: ...

    def snapshot(self) -> Snapshot: ...


class Listening(Protocol):
    """The settings that say who may ask (core.settings.Settings has them)."""

    @property
    def host(self) -> str: ...

    @property
    def allow_origins(self) -> tuple[str, ...]: ...


class Rule(msgspec.Struct, frozen=True):
    """One path: its name in metrics, the methods that it takes, and who handles it."""

    route: str
    methods: tuple[bytes, ...]
    handle: Callable[[Head, bytes], Outcome]


class _Body(msgspec.Struct):
    """Only the field that routes; the others are skipped, not built."""

    model: str | msgspec.UnsetType = msgspec.UNSET


_decode_body = msgspec.json.Decoder(_Body).decode
_model_first = re.compile(rb'\s*\{\s*"model"\s*:\s*"([^"\\]{1,256})"').match


class Router:
    """Implements proxy.Routes over a lab."""

    def __init__(self, lab: Lab, settings: Listening, observer: Observer | None = None) -> None:
        self._lab = lab
        self._access = Access(settings.host, settings.allow_origins)
        self.observer = observer or Observer()
        read = (b"GET", b"HEAD")
        self._rules: dict[bytes, Rule] = {
            path.encode(): Rule(path, (b"POST",), self._infer) for path in INFERENCE_PATHS
        }
        self._rules |= {
            path.encode(): Rule("/v1/models", read, self._list_models) for path in _LIST_PATHS
        }
        self._rules[b"/"] = Rule("/", read, self._greet)
        self._rules[b"/health"] = Rule("/health", read, self._health)
        self._rules[b"/metrics"] = Rule("/metrics", read, self._metrics)
        self._one_model = Rule("/v1/models/{model}", read, self._show_model)
        self._raw = Rule("/upstream", (), self._pass_raw)

    def admit(self, settings: Listening) -> None:
        """Who may ask from now on."""
        self._access = Access(settings.host, settings.allow_origins)

    # -- the seam to the data plane

    def judge(self, head: Head) -> Answer | None:
        """Access, path and method; before the body is read."""
        refusal = self._access.judge(head)
        if refusal is not None:
            head.route = head.route or "refused"
            return refusal
        rule = self._rules.get(head.path) or self._pattern(head.path)
        if rule is None:
            head.route = "unknown"
            return self._no_route(head)
        head.rule = rule
        head.route = rule.route
        if rule.methods and head.method not in rule.methods:
            return _wrong_method(head, rule)
        if head.upgrade and rule is self._raw and b"upgrade" in head.fields:
            head.tunnel = not head.body_expected
        return None

    def route(self, head: Head, body: bytes) -> Outcome:
        """To whom the request goes, now that all of it is here."""
        rule = head.rule
        assert isinstance(rule, Rule)
        return rule.handle(head, body)

    def _pattern(self, path: bytes) -> Rule | None:
        if path.startswith((b"/v1/models/", b"/models/")):
            return self._one_model
        return self._raw if path.startswith(_UPSTREAM) else None

    # -- inference

    def _infer(self, head: Head, body: bytes) -> Outcome:
        # Long prompts are long to parse (1 ms a MB on the loop). The first of two keys may win
        # here: that decides who is asked, not who may ask.
        if len(body) >= _SHORTCUT_FROM_BYTES and (first := _model_first(body)):
            name = first[1].decode(errors="replace")
        else:
            try:
                found = _decode_body(body).model
            except msgspec.ValidationError:
                return _bad_body("'model' must be a string in a JSON object", "invalid_type")
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                return _bad_body(f"the body is not JSON: {error}", "invalid_json", param=None)
            if found is msgspec.UNSET or not found:
                return _bad_body("'model' is missing: which model is asked?", "missing_model")
            name = found
        head.model = name[:_NAME_SHOWN]
        capability = INFERENCE_PATHS.get(head.route)
        return self._lab.acquire(name, client=head.client, capability=capability, since=head.since)

    def _pass_raw(self, head: Head, body: bytes) -> Outcome:
        """`/upstream/MODEL/...`: what follows the name goes to the engine as it came."""
        if not self._access.loopback:
            return error_answer(
                403, "loopback_only", "/upstream is open only where the gateway listens on loopback"
            )
        segments = head.path[len(_UPSTREAM) :].split(b"/")
        known = {name for model in self._lab.models() for name in (model.name, *model.aliases)}
        for count in range(len(segments), 0, -1):  # names may contain slashes: the longest wins
            name = _decoded(b"/".join(segments[:count]))
            if name in known:
                rest = b"/" + b"/".join(segments[count:])
                head.upstream_target = rest + b"?" + head.query if head.query else rest
                head.model = name
                return self._lab.acquire(name, client=head.client, since=head.since)
        return self._no_model(_decoded(segments[0]))

    # -- what the gateway answers itself

    def _list_models(self, head: Head, body: bytes) -> Answer:
        data = [self._model_entry(model) for model in self._lab.models() if model.installed]
        return json_answer({"object": "list", "data": data})

    def _show_model(self, head: Head, body: bytes) -> Answer:
        name = _decoded(head.path.partition(b"/models/")[2])
        for model in self._lab.models():
            if name == model.name or name in model.aliases:
                return json_answer(self._model_entry(model)) if model.installed else _absent(model)
        return self._no_model(name)

    def _model_entry(self, model: ModelView) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": int(self._lab.started_at),
            "owned_by": "flexlab",
            "aliases": model.aliases,
            "state": model.word,
            "context_length": model.context,
        }

    def _greet(self, head: Head, body: bytes) -> Answer:
        text = f"FlexLab {__version__} is running; the OpenAI API is at /v1\n"
        return Answer(200, text.encode(), b"text/plain; charset=utf-8")

    def _health(self, head: Head, body: bytes) -> Answer:
        uptime_s = round(time.time() - self._lab.started_at, 1)
        return json_answer({"status": "ok", "version": __version__, "uptime_s": uptime_s})

    def _metrics(self, head: Head, body: bytes) -> Answer:
        text = metrics.render_metrics(self.observer, self._lab.models(), self._lab.started_at)
        return Answer(200, text, metrics.CONTENT_TYPE)

    # -- refusals

    def _no_route(self, head: Head) -> Answer:
        routes = ", ".join(sorted(path.decode() for path in self._rules))
        path = head.path.decode("latin-1")
        return error_answer(404, "unknown_route", f"no route {path!r}; there are {routes}")

    def _no_model(self, name: str) -> Answer:
        known = [name for model in self._lab.models() for name in (model.name, *model.aliases)]
        error = UnknownModel(name, near(name, known))
        return error_answer(404, error.code, f"{error.message} ({error.hint})", param="model")


def _decoded(part: bytes) -> str:
    return unquote_to_bytes(part).decode(errors="replace")


def _absent(model: ModelView) -> Answer:
    message = f"{model.name} is not installed (flexlab pull {model.name})"
    return error_answer(404, "model_not_installed", message, param="model")


def _bad_body(message: str, code: str, param: str | None = "model") -> Answer:
    return error_answer(400, code, message, param=param)


def _wrong_method(head: Head, rule: Rule) -> Answer:
    allowed = _joined((*rule.methods, b"OPTIONS"))
    if head.method == b"OPTIONS":
        return Answer(204, headers=((b"allow", allowed),))
    method = head.method.decode()
    message = f"{method} is not for {rule.route}; it takes {allowed.decode()}"
    return error_answer(405, "method_not_allowed", message, (b"allow", allowed))


def _joined(words: Iterable[bytes]) -> bytes:
    return b", ".join(words)
