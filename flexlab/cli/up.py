"""`flexlab up`."""

from __future__ import annotations

import json
import shlex
from typing import Annotated

import typer

from flexlab.cli import output
from flexlab.cli.common import (
    BackendOption,
    ExperimentalOption,
    GpuOption,
    ImageOption,
    JsonOption,
    ModelArgument,
    RuntimeOption,
    SetOption,
    VariantOption,
    model_word,
    need_words,
    runtime_name,
    verb_app,
    wishes_of,
)
from flexlab.cli.ensure import Ready, ensure_up
from flexlab.cli.stream import Answer, AnswerStream
from flexlab.core.errors import FlexLabError, UsageError
from flexlab.core.units import show_seconds
from flexlab.spec.lab import InstanceView, ModelView
from flexlab.spec.plan import Keep
from flexlab.spec.source import is_source

PROBE_TOKENS = 24
PROBE_PROMPT = "Count from one to ten."
RUNTIMES = ("process", "docker")
"""Those of this version; more have names (RuntimeName), and will come."""
KEEP: dict[bool | None, Keep | None] = {None: None, True: "warm", False: "cold"}

app = verb_app()


@app.command()
def up(
    model: ModelArgument = None,
    runtime: RuntimeOption = None,
    backend: BackendOption = None,
    gpu: GpuOption = None,
    variant: VariantOption = None,
    image: ImageOption = None,
    settings: SetOption = None,
    allow_experimental: ExperimentalOption = False,
    keep: Annotated[
        bool | None,
        typer.Option("--keep/--no-keep", help="Keep it warm: it comes back after a preemption."),
    ] = None,
    pin: Annotated[
        bool | None,
        typer.Option("--pin/--no-pin", help="Never stop it to make room for another model."),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Keep the recipe derived from a source or path.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be launched, as `plan` does.")
    ] = False,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="Skip the speed probe.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Start a model and wait until it answers.

    Starts the daemon when none runs, downloads the weights where they are missing, and leaves
    both daemon and model running. Ctrl-C withdraws the wish and keeps what was downloaded.
    """
    need_words([model] if model else [], "MODEL", "flexlab up MODEL [OPTIONS]")
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
    if dry_run:
        from flexlab.cli.plan import tell

        tell(word, wishes, None, as_json=as_json)
        return
    if save and not is_source(word):
        raise UsageError(f"{word} has a recipe already", "--save is for sources and paths")
    ready = ensure_up(word, wishes, keep=KEEP[keep], pin=pin)
    if save:
        from flexlab.cli.recipes import save_derived

        save_derived(word)
    probe = None if no_probe or ready.was_running else _probe(ready)
    if as_json:
        output.answer_json(_as_json(ready, probe))
    else:
        _tell(ready, probe, says_hold=keep is not None or pin is not None)


def route_and_body(model: ModelView) -> tuple[str, dict[str, object]] | None:
    """A request that the model can answer, as people would paste it; None if it makes no text."""
    if not model.capabilities or "chat" in model.capabilities:
        messages = [{"role": "user", "content": PROBE_PROMPT}]
        return "/v1/chat/completions", {"model": model.name, "messages": messages}
    if "completions" in model.capabilities:
        return "/v1/completions", {"model": model.name, "prompt": PROBE_PROMPT}
    if "embeddings" in model.capabilities:
        return "/v1/embeddings", {"model": model.name, "input": PROBE_PROMPT}
    return None


def curl_line(address: str, route: str, body: dict[str, object]) -> str:
    """Works when pasted into a POSIX shell."""
    words = ["curl", address + route, "-H", "Content-Type: application/json", "-d"]
    return shlex.join([*words, json.dumps(body)])


def _probe(ready: Ready) -> Answer | None:
    """A short streamed answer through the gateway. A failure is said; the model stays up."""
    request = route_and_body(ready.model)
    if request is None or request[0] == "/v1/embeddings":
        return None
    route, body = request
    body = {**body, "max_tokens": PROBE_TOKENS}
    stream = AnswerStream(ready.address, route, body, say=output.say)
    try:
        for _piece in stream:
            pass
    except KeyboardInterrupt:
        name = shlex.quote(ready.model.name)
        output.say(f"{name} is ready and stays; flexlab down {name} stops it")
        raise
    except FlexLabError as error:
        output.say(f"note: the speed probe failed: {error}")
        return None
    return stream.answer


def _tell(ready: Ready, probe: Answer | None, *, says_hold: bool) -> None:
    model = ready.model
    if ready.was_running:
        output.answer(f"{model.name} is running at {ready.address}/v1")
        if says_hold:
            output.answer("\n".join(_hold(model)))
        return
    output.answer(f"{model.name} is ready{where(ready.instance)}\n")
    output.answer(f"  endpoint  {ready.address}/v1")
    output.answer(f"  model     {model.name}")
    if probe is not None and probe.ttft_s is not None:
        rate = f", then {probe.tokens_per_s:.1f} tokens/s" if probe.tokens_per_s else ""
        output.answer(f"  speed     first token after {probe.ttft_s:.2f} s{rate}")
    if says_hold:
        output.answer("\n".join(f"  {line}" for line in _hold(model)))
    output.answer(f"  stop it   flexlab down {shlex.quote(model.name)}")
    if request := route_and_body(model):
        output.answer(f"  try it    (paste this line)\n\n{curl_line(ready.address, *request)}")


def _hold(model: ModelView) -> list[str]:
    """What --keep and --pin, of now or of before, mean for it."""
    lines = []
    if model.keep == "warm":
        lines.append("kept      it stays when idle, and comes back after it made room")
    if model.pinned:
        lines.append("pinned    it stays when idle, and never makes room for another model")
    return lines or ["not kept  it is unloaded when idle, or to make room for another model"]


def where(instance: InstanceView | None) -> str:
    """` (llamacpp on the CPU, loaded in 2.1 s)`; empty for a server that runs elsewhere."""
    if instance is None:
        return ""
    devices = ", ".join("the CPU" if device == "cpu" else device for device in instance.devices)
    took = f", loaded in {show_seconds(instance.load_s)}" if instance.load_s is not None else ""
    return f" ({instance.backend} on {devices}{took})" if devices else f" ({instance.backend})"


def _as_json(ready: Ready, probe: Answer | None) -> dict[str, object]:
    return {
        "model": ready.model.name,
        "endpoint": f"{ready.address}/v1",
        "was_running": ready.was_running,
        "keep": ready.model.keep,
        "pinned": ready.model.pinned,
        "waited_s": round(ready.waited_s, 3),
        "variant": ready.instance.variant if ready.instance else None,
        "instance": ready.instance,
        "probe": {
            "ttft_s": probe.ttft_s,
            "tokens_per_s": probe.tokens_per_s,
            "completion_tokens": probe.completion_tokens,
        }
        if probe
        else None,
    }
