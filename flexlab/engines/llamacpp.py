"""`python -m flexlab.engines.llamacpp ARGS`: xllamacpp behind llama-server's own long options.

xllamacpp is llama.cpp's C++ server in a Python extension and has no option parser, so that the
words are mapped to its parameters here. Process, Docker and Kubernetes runtimes thus share one
argv. Nothing is printed when it listens: /health answers 503 while loading and 200 afterwards.

Ends with 0 on SIGTERM or SIGINT once it listens, 2 on wrong options, and with a code of
`spec.engine` when it cannot serve; the cause and its mend are then one line on stderr.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from flexlab.core.text import clean_line
from flexlab.engines.llamacpp_options import Options, WrongOptions, parse
from flexlab.spec import engine

EXIT_USAGE = 2
GGUF_MAGIC = b"GGUF"
INSTALL_EMBEDDED = "pip install 'flexlab[embedded]'"
SYSTEM_LIBRARIES = {"libgomp.so.1": "libgomp1", "libstdc++.so.6": "libstdc++6"}
"""What the wheel does not bring along -> the package of Debian and Ubuntu that has it."""


class CannotServe(Exception):
    """One sentence with its mend, and the exit code that says the same."""

    def __init__(self, exit_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


def check_gguf(path: str, what: str) -> None:
    """xllamacpp says the same RuntimeError for every wrong file, so each is judged first."""
    try:
        with Path(path).open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except FileNotFoundError:
        raise CannotServe(
            engine.EXIT_BAD_MODEL,
            f"there is no {what} file {path}; put it back, or name another one",
        ) from None
    except OSError as error:
        reason = error.strerror or error
        raise CannotServe(
            engine.EXIT_BAD_MODEL, f"cannot read the {what} file {path}: {reason}; see ls -l"
        ) from None
    if magic != GGUF_MAGIC:
        raise CannotServe(
            engine.EXIT_BAD_MODEL,
            f"{path} is not a GGUF file (it does not begin with GGUF); name another one",
        )


def check_slot_folder(path: str) -> None:
    """llama.cpp finds out at the first snapshot only, and then answers 500."""
    if not Path(path).is_dir():
        raise WrongOptions(f"--slot-save-path: there is no folder {path}; create it (mkdir -p)")
    if not os.access(path, os.W_OK | os.X_OK):
        raise WrongOptions(f"--slot-save-path: {path} cannot be written to; see ls -ld")


def check_port(host: str, port: int) -> None:
    """Whether `host:port` can be listened on; a taken port has no name in xllamacpp either."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As the server itself binds: connections in TIME_WAIT do not make a port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CannotServe(
                engine.EXIT_PORT_TAKEN,
                f"cannot listen on {host}:{port} ({error.strerror}); "
                "start it again on another port (ss -ltnp shows who has this one)",
            ) from None


def read_keys(path: str | None) -> list[str]:
    """The keys in `path`, one a line; an inherited /dev/fd/N is closed once it has been read."""
    if path is None:
        return []
    try:
        keys = Path(path).read_text(encoding="utf-8").split()
        inherited = path.removeprefix("/dev/fd/")
        if inherited.isdigit() and path != inherited:
            os.close(int(inherited))
    except (OSError, UnicodeDecodeError) as error:
        raise CannotServe(
            engine.EXIT_BAD_KEY_FILE,
            f"cannot read the API key file {path}: {getattr(error, 'strerror', None) or error}; "
            "give --api-key-file a readable file with one key a line",
        ) from None
    if not keys:
        # An empty list of keys would mean a server that is open to every user of this machine.
        raise CannotServe(
            engine.EXIT_BAD_KEY_FILE,
            f"the API key file {path} is empty; write one key a line or leave the option out",
        )
    return keys


def load_library() -> Any:
    """The xllamacpp module. Raises CannotServe with the command that installs what is missing."""
    # Without this, waiting OpenMP threads spin: 10 to 20 times slower on a busy machine (measured).
    # libgomp reads it once, when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import xllamacpp
    except ModuleNotFoundError as error:
        raise CannotServe(
            engine.EXIT_EMBEDDED_MISSING,
            f"the embedded engine is not installed ({error}); {INSTALL_EMBEDDED}",
        ) from None
    except ImportError as error:
        for library, package in SYSTEM_LIBRARIES.items():
            if library in str(error):
                raise CannotServe(
                    engine.EXIT_LIBRARY_MISSING,
                    f"a system library is missing ({error}); sudo apt-get install -y {package}",
                ) from None
        raise CannotServe(
            engine.EXIT_EMBEDDED_MISSING,
            f"the embedded engine cannot be loaded ({error}); {INSTALL_EMBEDDED}",
        ) from None
    return xllamacpp


def parameters(options: Options, keys: list[str], library: Any) -> Any:
    """`options` as xllamacpp's CommonParams. Raises CannotServe where this version differs."""
    params = library.CommonParams()
    try:
        _fill(params, options, library)
        params.api_keys = keys
    except (AttributeError, KeyError, TypeError) as error:
        version = getattr(library, "__version__", "of this version")
        raise CannotServe(
            engine.EXIT_EMBEDDED_MISSING,
            f"xllamacpp {version} is not one that FlexLab knows ({error}); {INSTALL_EMBEDDED}",
        ) from None
    return params


def _fill(params: Any, options: Options, library: Any) -> None:
    params.model.path = options.model
    params.model_alias = set(options.aliases)
    params.hostnames = [options.host]
    params.port = options.port
    params.n_ctx = options.ctx_size
    params.n_parallel = options.parallel
    params.n_gpu_layers = options.n_gpu_layers
    params.use_jinja = options.jinja
    params.embedding = options.embeddings
    params.ui = False
    # Always on: FlexLab's own rates, busy slots and context come from these three.
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    _fill_threads(params, options)
    _fill_speculation(params.speculative, options, library)
    params.lora_adapters = [library.CommonAdapterLoraInfo(path, 1.0) for path in options.loras]
    if options.mmproj is not None:
        params.mmproj.path = options.mmproj
    if options.reasoning_budget is not None:
        params.sampling.reasoning_budget_tokens = options.reasoning_budget
    optional = {
        "n_batch": options.batch_size,
        "n_ubatch": options.ubatch_size,
        "cache_ram_mib": options.cache_ram_mib,
        "chat_template": options.chat_template,
        "n_predict": options.n_predict,
        "slot_save_path": options.slot_save_path,
        "flash_attn_type": _member(
            library.llama_flash_attn_type, "LLAMA_FLASH_ATTN_TYPE", options.flash_attention
        ),
        "cache_type_k": _member(library.ggml_type, "GGML_TYPE", options.cache_type_k),
        "cache_type_v": _member(library.ggml_type, "GGML_TYPE", options.cache_type_v),
        "pooling_type": _member(library.llama_pooling_type, "LLAMA_POOLING_TYPE", options.pooling),
        "reasoning_format": _member(
            library.common_reasoning_format, "COMMON_REASONING_FORMAT", options.reasoning_format
        ),
    }
    for name, value in optional.items():
        if value is not None:
            setattr(params, name, value)


def _fill_threads(params: Any, options: Options) -> None:
    if options.threads is not None:
        params.cpuparams.n_threads = options.threads
    batch = options.threads_batch or options.threads
    if batch is not None:
        params.cpuparams_batch.n_threads = batch


def _fill_speculation(speculative: Any, options: Options, library: Any) -> None:
    """Drafts within draft_min and draft_max.

    Only drafts of a second model heed `draft.n_max` and `draft.n_min`. Those of n-grams are
    `size_m` tokens long and are thrown away below `size_n`, which is also how many tokens have to
    be the same before one is made (xllamacpp 2026.10.11549, tried with 4, 8, 16 and 48).
    """
    kind = _member(library.common_speculative_type, "COMMON_SPECULATIVE_TYPE", options.spec_type)
    if kind is None:
        return
    speculative.types = [kind]
    ngram = speculative.ngram_simple
    fewest = max(ngram.size_n, options.draft_min or 0)
    most = max(ngram.size_m, fewest) if options.draft_max is None else options.draft_max
    ngram.size_n, ngram.size_m = min(fewest, most), most


def _member(enumeration: Any, prefix: str, word: str | None) -> Any:
    if word is None:
        return None
    return enumeration[f"{prefix}_{word.upper().replace('-', '_')}"]


def serve(options: Options) -> None:
    """Load the model and serve until SIGTERM or SIGINT. Raises CannotServe."""
    keys = read_keys(options.api_key_file)
    files = {options.model: "model"}
    files |= {path: "projector" for path in (options.mmproj,) if path is not None}
    files |= dict.fromkeys(options.loras, "adapter")
    for path, what in files.items():
        check_gguf(path, what)
    if options.slot_save_path is not None:
        check_slot_folder(options.slot_save_path)
    check_port(options.host, options.port)
    library = load_library()
    params = parameters(options, keys, library)
    try:
        # Blocks while it loads; HTTP already answers 503. A SIGTERM meanwhile ends the process.
        server = library.Server(params)
    except RuntimeError as error:
        raise CannotServe(
            engine.EXIT_LOAD_FAILED,
            f"llama.cpp could not load {' with '.join(files)} ({error}); "
            "the cause is in the log lines before this one",
        ) from None
    _wait_for_end(server)
    # Its destructor waits for ever, in about every second run, for an answer that is being written
    # (xllamacpp 2026.10.11549); there is nothing to save, and the kernel frees the rest at once.
    os._exit(0)


def _wait_for_end(_server: object) -> None:
    """Until SIGTERM or SIGINT; the server answers for as long as it is held here."""
    ended = threading.Event()

    def end(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # asked twice: at once
        ended.set()

    # Only now: some versions of xllamacpp put handlers of their own there in Server().
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    ended.wait()


def run(argv: list[str], serve: Callable[[Options], None] = serve) -> int:
    """The exit code for these words; whatever is wrong is one line on stderr."""
    try:
        serve(parse(argv))
    except WrongOptions as error:
        _say(str(error))
        return EXIT_USAGE
    except CannotServe as error:
        _say(str(error))
        return error.exit_code
    return 0


def _say(sentence: str) -> None:
    print(f"{engine.SENTENCE_PREFIX}{clean_line(sentence)}", file=sys.stderr, flush=True)


def main() -> NoReturn:
    """The program's entry point."""
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
