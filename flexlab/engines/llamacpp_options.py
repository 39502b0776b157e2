"""llama-server's long options, the subset that FlexLab's llama.cpp backend uses."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
POOLING_TYPES = ("none", "mean", "cls", "last", "rank")
REASONING_FORMATS = ("auto", "none", "deepseek", "deepseek-legacy")
FLASH_ATTENTION = {"on": "enabled", "off": "disabled", "auto": "auto"}

_SHORT_MAX = 2**16 - 1
"""llama.cpp holds the lengths of n-grams in 16 bits."""


class WrongOptions(Exception):
    """One sentence: which word is wrong and what would be right."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for; None leaves llama.cpp's own default."""

    model: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    ctx_size: int = 0
    """Of all slots together, as llama-server counts it; 0 is the model's own."""
    parallel: int = 1
    n_gpu_layers: int = -1
    threads: int | None = None
    threads_batch: int | None = None
    batch_size: int | None = None
    ubatch_size: int | None = None
    flash_attention: str | None = None
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    cache_ram_mib: int | None = None
    jinja: bool = True
    chat_template: str | None = None
    embeddings: bool = False
    pooling: str | None = None
    n_predict: int | None = None
    """Tokens of an answer whose request names no limit."""
    mmproj: str | None = None
    loras: tuple[str, ...] = ()
    reasoning_format: str | None = None
    reasoning_budget: int | None = None
    spec_type: str | None = None
    draft_max: int | None = None
    draft_min: int | None = None
    slot_save_path: str | None = None
    """Of a folder, with its last slash."""
    api_key_file: str | None = None


class _Parser(argparse.ArgumentParser):
    """argparse, but a wrong word is one sentence for the caller and not a usage screen."""

    def __init__(self, **settings: Any) -> None:
        self.words: list[str] = []
        super().__init__(**settings)

    def add(self, word: str, **rules: Any) -> None:
        """One long option."""
        self.words.append(word)
        self.add_argument(word, **rules)

    def error(self, message: str) -> NoReturn:
        raise WrongOptions(f"{message}; --help lists the options")


def parse(argv: list[str]) -> Options:
    """The options of these words. Raises WrongOptions."""
    parser = _parser()
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        raise WrongOptions(_unknown_sentence(unknown[0], parser.words))
    _check_together(given)
    return Options(
        model=given.model,
        aliases=tuple(name.strip() for name in given.alias.split(",") if name.strip()),
        host=given.host,
        port=given.port,
        ctx_size=given.ctx_size,
        parallel=given.parallel,
        n_gpu_layers=given.n_gpu_layers,
        threads=given.threads,
        threads_batch=given.threads_batch,
        batch_size=given.batch_size,
        ubatch_size=given.ubatch_size,
        flash_attention=FLASH_ATTENTION.get(given.flash_attn),
        cache_type_k=given.cache_type_k,
        cache_type_v=given.cache_type_v,
        cache_ram_mib=given.cache_ram,
        jinja=given.jinja,
        chat_template=given.chat_template,
        embeddings=given.embeddings or given.reranking,
        pooling="rank" if given.reranking else given.pooling,
        n_predict=given.n_predict,
        mmproj=given.mmproj,
        loras=tuple(path for path in given.lora.split(",") if path),
        reasoning_format=given.reasoning_format,
        reasoning_budget=given.reasoning_budget,
        spec_type=given.spec_type,
        draft_max=given.spec_draft_n_max,
        draft_min=given.spec_draft_n_min,
        slot_save_path=_folder(given.slot_save_path),
        api_key_file=given.api_key_file,
    )


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m flexlab.engines.llamacpp",
        description="llama.cpp's server (xllamacpp) with llama-server's own long options.",
        allow_abbrev=False,
    )
    add = parser.add
    add("--model", required=True, metavar="FILE", help="GGUF file")
    add("--alias", default="", metavar="NAME[,NAME]", help="names that requests call it by")
    add("--host", default="127.0.0.1", metavar="ADDRESS")
    add("--port", type=_port, default=8080, metavar="N", help="0 takes a free one")
    add("--ctx-size", type=_count, default=0, metavar="N", help="tokens of all slots together")
    add("--parallel", type=_positive, default=1, metavar="N", help="slots")
    add("--n-gpu-layers", type=int, default=-1, metavar="N")
    add("--threads", type=_positive, metavar="N")
    add("--threads-batch", type=_positive, metavar="N")
    add("--batch-size", type=_positive, metavar="N")
    add("--ubatch-size", type=_positive, metavar="N")
    add("--flash-attn", choices=tuple(FLASH_ATTENTION))
    add("--cache-type-k", choices=CACHE_TYPES)
    add("--cache-type-v", choices=CACHE_TYPES)
    add("--cache-ram", type=int, metavar="MIB", help="prompt cache; 0 none, -1 without limit")
    add("--jinja", action=argparse.BooleanOptionalAction, default=True)
    add("--chat-template", metavar="TEMPLATE", help="its text, or the name of a built-in one")
    add("--n-predict", type=_unlimited, metavar="N", help="tokens of an answer; -1: no limit")
    add("--embeddings", action="store_true")
    add("--pooling", choices=POOLING_TYPES)
    add("--reranking", action="store_true", help="/v1/rerank, for a model with a rank head")
    add("--mmproj", metavar="FILE", help="projector for images and sounds")
    add("--lora", default="", metavar="FILE[,FILE]", help="adapters, each at full strength")
    add("--reasoning-format", choices=REASONING_FORMATS)
    add("--reasoning-budget", type=_unlimited, metavar="N", help="tokens; 0 none, -1 no limit")
    add("--spec-type", choices=("none", "ngram-simple"), help="draft from what was said before")
    add("--spec-draft-n-max", type=_short_positive, metavar="N", help="most tokens of a draft")
    add("--spec-draft-n-min", type=_short_count, metavar="N", help="fewest tokens of a draft")
    add("--slot-save-path", metavar="FOLDER")
    add("--api-key-file", metavar="FILE", help="one key a line; /dev/fd/N for an inherited one")
    for always_on in ("--metrics", "--slots", "--props"):
        add(always_on, action="store_true", help="always on here")
    add("--no-webui", action="store_true", help="there is none here")
    return parser


def _check_together(given: argparse.Namespace) -> None:
    if given.reranking and (given.embeddings or given.pooling not in (None, "rank")):
        raise WrongOptions("--reranking pools by itself; leave --embeddings and --pooling out")
    most, fewest = given.spec_draft_n_max, given.spec_draft_n_min
    if most is not None and fewest is not None and fewest > most:
        raise WrongOptions(f"--spec-draft-n-min {fewest} is more than --spec-draft-n-max {most}")


def _unknown_sentence(word: str, known_words: list[str]) -> str:
    option = word.partition("=")[0]
    near = get_close_matches(option, known_words, n=1)
    mend = f"did you mean {near[0]}?" if near else "--help lists the options"
    return f"unknown option {option}; {mend}"


def _folder(path: str | None) -> str | None:
    # llama.cpp joins this with a file name and adds no separator of its own.
    return path if path is None or path.endswith("/") else f"{path}/"


def _port(text: str) -> int:
    return _bounded(text, low=0, high=65535)


def _count(text: str) -> int:
    return _bounded(text, low=0)


def _positive(text: str) -> int:
    return _bounded(text, low=1)


def _unlimited(text: str) -> int:
    return _bounded(text, low=-1)


def _short_count(text: str) -> int:
    return _bounded(text, low=0, high=_SHORT_MAX)


def _short_positive(text: str) -> int:
    return _bounded(text, low=1, high=_SHORT_MAX)


def _bounded(text: str, *, low: int, high: int = 2**31 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text} is not between {low} and {high}")
    return value
