"""`flexlab run`: one prompt, or a chat in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
from typing import Annotated

import typer

from flexlab.cli import output
from flexlab.cli.chat import Chat, ask
from flexlab.cli.common import (
    BackendOption,
    ExperimentalOption,
    GpuOption,
    ImageOption,
    JsonOption,
    RuntimeOption,
    SetOption,
    VariantOption,
    model_word,
    need_words,
    runtime_name,
    typed,
    verb_app,
    wishes_of,
)
from flexlab.cli.ensure import Ready, ensure_up
from flexlab.cli.stream import Answer
from flexlab.cli.up import RUNTIMES
from flexlab.core.errors import UsageError

PIPE_PATIENCE_S = 2.0

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
            metavar="[PROMPT]...",
            help="What to ask. A pipe's text is put behind it. Without both, you chat.",
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
    runtime: RuntimeOption = None,
    backend: BackendOption = None,
    gpu: GpuOption = None,
    variant: VariantOption = None,
    image: ImageOption = None,
    settings: SetOption = None,
    allow_experimental: ExperimentalOption = False,
    as_json: JsonOption = False,
) -> None:
    """Ask a model one thing, or chat with it. Starts it as `flexlab up` does."""
    need_words([model] if model else [], "MODEL", "flexlab run MODEL [PROMPT]...")
    question = _question(prompt or [])
    if question is None and as_json:
        raise UsageError("--json needs a prompt", "flexlab run MODEL PROMPT --json")
    word = model_word(model or "")
    wishes = wishes_of(
        runtime=runtime_name(runtime, RUNTIMES),
        backend=backend,
        variant=variant,
        gpu=gpu,
        image=image,
        settings=settings,
        allow_experimental=allow_experimental,
    )
    ready = ensure_up(word, wishes)
    given = {"max_tokens": max_tokens, "temperature": temperature}
    options: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    messages = [{"role": "system", "content": typed(system)}] if system else []
    if question is None:
        Chat(word, wishes, ready, options, messages).talk()
        return
    messages.append({"role": "user", "content": question})
    answer = ask(ready, messages, options, shown=not as_json)
    if as_json:
        output.answer_json(_as_json(ready, answer))


def _question(prompt: list[str]) -> str | None:
    """The prompt's words and what a pipe holds; None means that a person wants to chat."""
    words = "" if prompt == ["-"] else typed(" ".join(prompt)).strip()
    if not prompt and output.is_terminal(sys.stdin):
        return None
    piped = "" if words and not _is_piped() else _read_stdin()
    if not words and not piped:
        raise UsageError("the prompt is empty", "flexlab run MODEL 'your question'")
    return "\n\n".join(part for part in (words, piped) if part)


def _is_piped() -> bool:
    """Whether stdin is something that holds text: no terminal, no null device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except OSError:  # no descriptor behind it
        return True
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)


def _read_stdin() -> str:
    """All of it. Where nothing comes for a while, it is said what is waited for."""
    with contextlib.suppress(OSError):
        if not select.select([sys.stdin.fileno()], [], [], PIPE_PATIENCE_S)[0]:
            output.say("reading the prompt from stdin, until its end; </dev/null leaves it out")
    return sys.stdin.buffer.read().decode("utf-8", errors="replace").strip()


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
