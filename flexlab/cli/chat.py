"""Questions and answers: one, or a conversation in the terminal."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from flexlab.cli import output
from flexlab.cli.common import typed
from flexlab.cli.ensure import Ready, ensure_up
from flexlab.cli.signals import Terminated
from flexlab.cli.stream import GATEWAY_GONE, Answer, AnswerStream
from flexlab.core.errors import FlexLabError
from flexlab.core.text import counted
from flexlab.spec.plan import Wishes

LEAVE_WORDS = ("/bye", "/exit", "/quit")
HELP = "/bye leaves, /clear forgets the conversation; Ctrl-C stops an answer, or leaves"
GONE_CODES = frozenset({GATEWAY_GONE, "model_not_found", "model_not_installed"})
"""Refusals after which it helps to start daemon and model again."""

Message = dict[str, str]


def ask(
    ready: Ready, messages: list[Message], options: dict[str, object], *, shown: bool = True
) -> Answer:
    """One answer, shown on stdout as it comes, and whatever is odd about it on stderr."""
    body = {"model": ready.model.name, "messages": messages, **options}
    stream = AnswerStream(ready.address, "/v1/chat/completions", body, say=output.say)
    pieces = iter(stream)
    try:
        for piece in pieces:
            if shown:
                output.answer_piece(piece)
    finally:
        pieces.close()
        if shown and stream.answer.text:
            output.answer_piece("\n")
    if note := _note(stream.answer, options.get("max_tokens")):
        output.say(note)
    return stream.answer


def _note(answer: Answer, max_tokens: object) -> str | None:
    if answer.finish_reason == "length":
        count = answer.completion_tokens
        if isinstance(max_tokens, int) and (count is None or count >= max_tokens):
            return f"(stopped after {counted(max_tokens, 'token')}: --max-tokens)"
        return "(stopped: the context is full)"
    return None if answer.text else "(empty answer)"


@dataclass
class Chat:
    """A conversation. Ctrl-C stops the answer that streams; without one, it leaves."""

    word: str
    """What was typed for the model."""
    wishes: Wishes
    ready: Ready
    options: dict[str, object]
    messages: list[Message] = field(default_factory=list)

    def talk(self) -> None:
        """Until the user leaves."""
        with contextlib.suppress(ImportError):
            # Line editing and history for input(); some Pythons are built without it.
            import readline  # noqa: F401

        output.say(f"chatting with {self.ready.model.name}; {HELP}")
        kept = len(self.messages)
        while (words := _read_line()) is not None:
            if words in LEAVE_WORDS:
                return
            if words == "/clear":
                del self.messages[kept:]
                output.say("conversation forgotten")
            elif words.startswith("/"):
                output.say(f"no command {words.split()[0]}; {HELP}")
            elif words:
                self._turn(words)

    def _turn(self, words: str) -> None:
        """One question and its answer; a failed question is forgotten and can be asked again."""
        self.messages.append({"role": "user", "content": words})
        try:
            answer = self._answer()
        except Terminated:
            raise
        except KeyboardInterrupt:
            output.say("(stopped)")
            self.messages.pop()
        except output.AnswerLost:
            raise
        except FlexLabError as error:
            output.show_error(error)
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer.text})

    def _answer(self) -> Answer:
        try:
            return ask(self.ready, self.messages, self.options)
        except FlexLabError as error:
            if error.code not in GONE_CODES:
                raise
        # Somebody ended the daemon, or it moved to another port: once, as `run` itself does.
        self.ready = ensure_up(self.word, self.wishes)
        return ask(self.ready, self.messages, self.options)


def _read_line() -> str | None:
    """A line that the user typed; None when they leave: Ctrl-D, Ctrl-C, a terminal that closed."""
    try:
        return typed(input("> ")).strip()
    except Terminated:
        raise
    except (EOFError, KeyboardInterrupt, OSError):
        output.say("")
        return None
