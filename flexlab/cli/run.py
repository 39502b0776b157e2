"""`flexlab run`: one prompt, or a chat in the terminal."""

from __future__ import annotations

import contextlib
import sys
from typing import Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import (
    JsonOption,
    key_values,
    model_word,
    need_words,
    typed,
    verb_app,
)
from flexlab.cli.ensure import Ready, ensure_up
from flexlab.cli.stream import Answer, AnswerStream
from flexlab.cli.up import runtime_name
from flexlab.core.errors import FlexLabError, UsageError
from flexlab.spec.plan import Wishes

LEAVE_WORDS = ("/bye", "/exit", "/quit")
HELP = "/bye leaves, /clear forgets the conversation; Ctrl-C stops an answer, or leaves"

Message = dict[str, str]

app = verb_app()


@app.command()
def run(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="As for `flexlab up`.", show_default=False),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="What to ask. Without one it is read from a pipe, or you chat.",
            show_default=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest answer, in tokens.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, metavar="T", help="0 is the least random.")
    ] = None,
    runtime: Annotated[str | None, typer.Option(metavar="NAME", help="As for `up`.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="As for `up`.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a model one thing, or chat with it. Starts it as `flexlab up` does."""
    need_words([model] if model else [], "MODEL", "flexlab run MODEL [PROMPT]...")
    question = _question(prompt or [])
    if question is None and as_json:
        raise UsageError("--json needs a prompt", "flexlab run MODEL PROMPT --json")
    wishes = Wishes(runtime=runtime_name(runtime), settings=key_values(settings or []))
    ready = ensure_up(model_word(model or ""), wishes)
    options: dict[str, object] = {}
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    if temperature is not None:
        options["temperature"] = temperature
    messages: list[Message] = [{"role": "system", "content": typed(system)}] if system else []
    if question is None:
        _chat(ready, messages, options)
        return
    messages.append({"role": "user", "content": question})
    answer = _ask(ready, messages, options, shown=not as_json)
    if as_json:
        output.answer_json(_as_json(ready, answer))


def _question(prompt: list[str]) -> str | None:
    """The prompt's words, else what a pipe holds; None means that a person wants to chat."""
    if prompt and prompt != ["-"]:
        return typed(" ".join(prompt))
    if prompt != ["-"] and output.is_terminal(sys.stdin):
        return None
    text = sys.stdin.buffer.read().decode("utf-8", errors="replace").strip()
    if not text:
        raise UsageError("the prompt is empty", "flexlab run MODEL 'your question'")
    return text


def _ask(
    ready: Ready, messages: list[Message], options: dict[str, object], *, shown: bool = True
) -> Answer:
    body = {"model": ready.model.name, "messages": messages, **options}
    stream = AnswerStream(ready.address, "/v1/chat/completions", body)
    pieces = iter(stream)
    try:
        for piece in pieces:
            if shown:
                output.answer_piece(piece)
    finally:
        pieces.close()
        if shown and stream.answer.text:
            output.answer_piece("\n")
    return stream.answer


def _chat(ready: Ready, messages: list[Message], options: dict[str, object]) -> None:
    """A conversation. Ctrl-C stops the answer that streams; without one, it leaves."""
    with contextlib.suppress(ImportError):
        # Line editing and history for input(); some Pythons are built without it.
        import readline  # noqa: F401

    output.say(f"chatting with {ready.model.name}; {HELP}")
    kept = len(messages)
    while (words := _read_line()) is not None:
        if words in LEAVE_WORDS:
            return
        if words == "/clear":
            del messages[kept:]
        elif words.startswith("/"):
            output.say(HELP)
        elif words:
            messages.append({"role": "user", "content": words})
            _turn(ready, messages, options)


def _turn(ready: Ready, messages: list[Message], options: dict[str, object]) -> None:
    """One question and its answer; a failed question is forgotten and can be asked again."""
    try:
        answer = _ask(ready, messages, options)
    except KeyboardInterrupt:
        output.say("(stopped)")
        messages.pop()
    except FlexLabError as error:
        output.show_error(error)
        messages.pop()
    else:
        messages.append({"role": "assistant", "content": answer.text})


def _read_line() -> str | None:
    """A line that the user typed; None when they leave by Ctrl-D or Ctrl-C."""
    try:
        return typed(input("> ")).strip()
    except (EOFError, KeyboardInterrupt):
        output.say("")
        return None


def _as_json(ready: Ready, answer: Answer) -> dict[str, object]:
    return {
        "model": ready.model.name,
        "content": answer.text,
        "finish_reason": answer.finish_reason,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "ttft_s": answer.ttft_s,
        "tokens_per_s": answer.tokens_per_s,
    }
