"""A small OpenAI client for the CLI's own questions: one streamed answer over http.client."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from flexlab.core.errors import FlexLabError, ProxyError
from flexlab.core.text import os_sentence

CONNECT_TIMEOUT_S = 10.0
PATIENCE_S = 10.0
"""Without a token for this long, the user is told that the wait goes on."""

GATEWAY_GONE = "gateway_gone"
"""Code of the error when nobody listens: the daemon has ended."""

Say = Callable[[str], None]


@dataclass
class Answer:
    """What was measured and counted while an answer streamed in. None while unknown."""

    text: str = ""
    ttft_s: float | None = None
    """From the request to the first piece of text."""
    tokens_per_s: float | None = None
    """Of generation alone: the first token's wait does not count."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None


class AnswerStream:
    """Iterate for the pieces of text; `answer` then holds the whole and its numbers.

    Closing it early hangs up, which ends the generation.
    """

    def __init__(
        self,
        address: str,
        path: str,
        body: Mapping[str, object],
        *,
        say: Say = lambda _text: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.answer = Answer()
        self._say = say
        self._patience_s = patience_s
        self._address = address
        self._path = path
        self._body = {**body, "stream": True, "stream_options": {"include_usage": True}}

    def __iter__(self) -> Generator[str, None, None]:
        started_at = time.monotonic()
        first_at: float | None = None
        with self._patience() as patience, _post(self._address, self._path, self._body) as response:
            for event in _events(response):
                piece = self._take(event)
                if piece and first_at is None:
                    patience.cancel()
                    first_at = time.monotonic()
                    self.answer.ttft_s = first_at - started_at
                if piece:
                    self.answer.text += piece
                    yield piece
        if first_at is not None and self.answer.tokens_per_s is None:
            seconds = time.monotonic() - first_at
            tokens = (self.answer.completion_tokens or 0) - 1
            self.answer.tokens_per_s = tokens / seconds if tokens > 0 and seconds > 0 else None

    @contextlib.contextmanager
    def _patience(self) -> Iterator[threading.Timer]:
        """Says once that the first token is late. There is no limit: prompts may be long."""
        text = f"waiting for the first token ({self._patience_s:.0f} s) ..."
        timer = threading.Timer(self._patience_s, self._say, (text,))
        timer.daemon = True
        timer.start()
        try:
            yield timer
        finally:
            timer.cancel()

    def _take(self, event: dict[str, Any]) -> str:
        if isinstance(error := event.get("error"), dict):
            raise _refused(error, 502)
        if isinstance(usage := event.get("usage"), dict):
            self.answer.prompt_tokens = usage.get("prompt_tokens")
            self.answer.completion_tokens = usage.get("completion_tokens")
        if isinstance(timings := event.get("timings"), dict):
            # llama.cpp's own clock: without our network and printing.
            self.answer.tokens_per_s = timings.get("predicted_per_second")
        choices = event.get("choices") or [{}]
        choice = choices[0] if isinstance(choices[0], dict) else {}
        self.answer.finish_reason = choice.get("finish_reason") or self.answer.finish_reason
        delta = choice.get("delta")
        piece = delta.get("content") if isinstance(delta, dict) else choice.get("text")
        return piece if isinstance(piece, str) else ""


@contextlib.contextmanager
def _post(
    address: str, path: str, body: Mapping[str, object]
) -> Iterator[http.client.HTTPResponse]:
    where = urlsplit(address)
    connection = http.client.HTTPConnection(
        where.hostname or "127.0.0.1", where.port, timeout=CONNECT_TIMEOUT_S
    )
    try:
        _connect(connection, address)
        # A model may have to load first; its deadline is the gateway's queue_timeout.
        connection.sock.settimeout(None)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        connection.request("POST", path, json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status >= 400:
            raise _refused(_error_of(response.read()), response.status)
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise ProxyError(
            f"the answer from {address} was cut: {_why(error)}", "flexlab ps shows what runs"
        ) from error
    finally:
        connection.close()


def _connect(connection: http.client.HTTPConnection, address: str) -> None:
    try:
        connection.connect()
    except OSError as error:
        raise ProxyError(
            f"nothing answers at {address}: {_why(error)}",
            "flexlab up MODEL starts the daemon",
            code=GATEWAY_GONE,
        ) from error


def _why(error: Exception) -> str:
    return os_sentence(error) if isinstance(error, OSError) else str(error)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _error_of(body: bytes) -> dict[str, Any]:
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return {"message": body.decode(errors="replace")[:200] or "no reason given"}
    return error if isinstance(error, dict) else {"message": str(error)}


def _refused(error: Mapping[str, Any], status: int) -> FlexLabError:
    hint = error.get("hint")
    return FlexLabError(
        str(error.get("message") or f"the gateway answered {status}"),
        hint if isinstance(hint, str) else None,
        code=str(error.get("code") or "failed"),
    )
