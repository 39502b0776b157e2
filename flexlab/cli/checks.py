"""What `flexlab doctor` looks at. Each check returns findings and raises nothing."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from flexlab import __version__, daemons
from flexlab.cli.finding import Finding, Level
from flexlab.cli.gpu_checks import examine_gpus
from flexlab.cli.recipes import broken_recipes
from flexlab.core import paths
from flexlab.core.errors import FlexLabError
from flexlab.core.settings import Settings, load_settings
from flexlab.core.text import counted, os_sentence
from flexlab.core.units import GIB, show_bytes
from flexlab.gpus import isolated
from flexlab.recipes.catalogue import Catalogue
from flexlab.runtimes.preflight import process_facts
from flexlab.spec.machine import RAM_POOL, Machine
from flexlab.spec.source import PypiSource
from flexlab.weights.store import Store

OLDEST_PYTHON = (3, 11)
SMALLEST_FREE_DISK_BYTES = 1 * GIB
SMALLEST_FREE_MEMORY_BYTES = GIB // 2
INDEX_TIMEOUT_S = 5.0
BACKEND = "llamacpp"
MACHINES = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
"""What recipes call a platform's processors."""


def examine(*, offline: bool) -> list[Finding]:
    """All findings, the basic ones first."""
    settings, judged_settings = _settings()
    findings = [_python(), *_folders(), *_engine(), *judged_settings]
    catalogue, judged_recipes = _recipes()
    findings += judged_recipes
    machine = isolated.detect(
        ram_reserve_bytes=settings.ram_reserve_bytes if settings else None,
        ram_budget_bytes=settings.ram_limit_bytes if settings else None,
    )
    findings += [*_cpu(machine, catalogue), _memory(machine), *examine_gpus(Path("/"), machine)]
    if settings is not None:
        findings += [_models_folder(settings), *_daemon_and_port(settings)]
    if catalogue is not None and not offline:
        findings += _index(catalogue)
    return findings


def examine_recorded(root: Path) -> list[Finding]:
    """Of the machine below `root`: what it has, nothing of what is installed on this one."""
    catalogue, _ = _recipes()
    machine = isolated.detect(root)
    return [*_cpu(machine, catalogue), _memory(machine), *examine_gpus(root, machine)]


def _python() -> Finding:
    text = f"{platform.python_version()} ({sys.executable}), FlexLab {__version__}"
    if sys.version_info < OLDEST_PYTHON:
        return Finding(subject="python", level="fail", text=text, mend="use Python 3.11 or newer")
    return Finding(subject="python", level="ok", text=text)


def _folders() -> Iterator[Finding]:
    for subject, folder, variable in (
        ("state folder", paths.state_dir(), "FLEXLAB_STATE_DIR"),
        ("data folder", paths.data_dir(), "FLEXLAB_DATA_DIR"),
    ):
        existing = _nearest_existing(folder)
        if _is_usable(existing):
            yield Finding(subject=subject, level="ok", text=str(folder))
        else:
            yield Finding(
                subject=subject,
                level="fail",
                text=f"{existing} is not a folder that can be written to",
                mend=f"{variable}=/some/folder chooses another one",
            )


def _nearest_existing(folder: Path) -> Path:
    """The folder, or of those above it the first that is there (or cannot be looked into)."""
    return next(place for place in (folder, *folder.parents) if os.path.lexists(place))


def _is_usable(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _engine() -> Iterator[Finding]:
    facts = process_facts()
    if facts.available:
        yield Finding(subject="engine", level="ok", text=f"xllamacpp {facts.version or '?'}")
    for problem in facts.problems:
        level: Level = "warn" if facts.available else "fail"
        yield Finding(subject="engine", level=level, text=problem.message, mend=problem.hint)


def _settings() -> tuple[Settings | None, list[Finding]]:
    try:
        loaded = load_settings()
    except FlexLabError as error:
        mend = error.hint or f"edit {paths.settings_file()}"
        return None, [Finding(subject="settings", level="fail", text=str(error), mend=mend)]
    changed = sum(source != "default" for source in loaded.sources.values())
    text = f"valid, {changed} set by file or variable"
    good = Finding(subject="settings", level="ok", text=text)
    odd = [
        Finding(subject="settings", level="warn", text=warning, mend="flexlab config show")
        for warning in loaded.warnings
    ]
    return loaded.settings, [good, *odd]


def _recipes() -> tuple[Catalogue | None, list[Finding]]:
    try:
        catalogue = Catalogue.load()
    except FlexLabError as error:
        failed = Finding(subject="recipes", level="fail", text=str(error), mend=error.hint)
        return None, [failed]
    findings = [
        Finding(
            subject="recipes",
            level="warn",
            text=f"skipped: {problems[0]}",
            mend=f"flexlab recipes check {shlex.quote(str(file))}, or remove that file",
        )
        for file, problems in broken_recipes(catalogue).items()
    ]
    models = counted(len(catalogue.models()), "model")
    good = Finding(subject="recipes", level="ok", text=models)
    return catalogue, [good, *findings]


def _cpu(machine: Machine, catalogue: Catalogue | None) -> Iterator[Finding]:
    """The flags that the embedded engine's build needs, as its recipe names them."""
    cpu = machine.cpu
    threads = "?" if cpu.threads_usable is None else str(cpu.threads_usable)
    text = f"{cpu.name or 'unknown'}, {threads} usable threads"
    if catalogue is None:
        return
    embedded = catalogue.backend(BACKEND).embedded
    needed = embedded.cpu_flags if embedded else {}
    here = MACHINES.get(machine.platform or "")
    wanted = next((flags for kind, flags in needed.items() if kind == here), ())
    missing = [flag for flag in wanted if flag not in cpu.flags]
    if missing and cpu.flags:
        yield Finding(
            subject="cpu",
            level="fail",
            text=f"{text}; it lacks {', '.join(missing)}, which the embedded engine needs",
            mend="this CPU is too old for the embedded engine; run models on another machine",
        )
    else:
        yield Finding(subject="cpu", level="ok", text=text)


def _memory(machine: Machine) -> Finding:
    pool = machine.pool(RAM_POOL)
    if pool is None or pool.total_bytes is None or pool.used_bytes is None:
        return Finding(
            subject="memory",
            level="warn",
            text="how much is free cannot be read",
            mend="set ram_limit in the settings file",
        )
    free_bytes = pool.total_bytes - pool.used_bytes - pool.reserve_bytes
    text = f"{show_bytes(max(0, free_bytes))} free of {show_bytes(pool.total_bytes)}"
    if free_bytes < SMALLEST_FREE_MEMORY_BYTES:
        mend = "flexlab down --all, or close other programs"
        return Finding(subject="memory", level="warn", text=text, mend=mend)
    return Finding(subject="memory", level="ok", text=text)


def _models_folder(settings: Settings) -> Finding:
    folder = settings.models_dir
    existing = _nearest_existing(folder)
    if not _is_usable(existing):
        return Finding(
            subject="models folder",
            level="fail",
            text=f"{existing} is not a folder that can be written to",
            mend="set models_dir in settings.yaml (or FLEXLAB_MODELS_DIR) to a folder of yours",
        )
    free_bytes = Store(settings.models_dir).disk_free()
    text = f"{show_bytes(free_bytes)} free for weights in {settings.models_dir}"
    if free_bytes is not None and free_bytes < SMALLEST_FREE_DISK_BYTES:
        mend = "flexlab ls shows what takes space; flexlab rm MODEL frees it"
        return Finding(subject="disk", level="warn", text=text, mend=mend)
    return Finding(subject="disk", level="ok", text=text)


def _daemon_and_port(settings: Settings) -> Iterator[Finding]:
    try:
        running = daemons.find()
        status = running.status() if running else None
    except FlexLabError as error:
        yield Finding(subject="daemon", level="fail", text=str(error), mend=error.hint)
        return
    if status is not None:
        text = f"FlexLab {status.flexlab_version}, pid {status.pid}, {status.address}"
        older = daemons.compare_versions(__version__, status.flexlab_version) > 0
        yield Finding(
            subject="daemon",
            level="warn" if older else "ok",
            text=text,
            mend="the next flexlab up replaces it; models keep running" if older else None,
        )
        return
    yield Finding(subject="daemon", level="ok", text="not running; flexlab up starts it")
    yield _port(settings)


def _port(settings: Settings) -> Finding:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return _taken(settings, error)
    return Finding(subject="port", level="ok", text=f"{settings.host}:{settings.port} is free")


def _taken(settings: Settings, error: OSError) -> Finding:
    # asyncio and the gateway's like, which no other check needs.
    from flexlab.gateway.listen import next_free_port, port_owner

    where = f"{settings.host}:{settings.port}"
    text, mend = f"{where} cannot be used: {os_sentence(error)}", "set host in the settings file"
    if error.errno in (errno.EADDRINUSE, errno.EACCES):
        owner = port_owner(settings.port) if error.errno == errno.EADDRINUSE else None
        text = f"{where} is taken by pid {owner.pid} ({owner.command})" if owner else text
        free = next_free_port(settings.host, max(settings.port + 1, 1024)) or "N"
        mend = f"FLEXLAB_PORT={free} flexlab up MODEL, or `port: {free}` in the settings file"
    return Finding(subject="port", level="fail", text=text, mend=mend)


def _index(catalogue: Catalogue) -> Iterator[Finding]:
    """Asks the index that pip uses for the first wheel that a recipe wants, as `pull` would."""
    # httpx costs 160 ms: not with --offline.
    from flexlab.weights.http import Patience
    from flexlab.weights.pip_config import load_pip_config
    from flexlab.weights.progress import Meter
    from flexlab.weights.pypi import show_place
    from flexlab.weights.simple_index import wheels_on_offer

    source = _first_wheel(catalogue)
    if source is None:
        return
    patience = Patience(connect_s=INDEX_TIMEOUT_S, stall_s=INDEX_TIMEOUT_S, tries=1)
    meter = Meter(lambda _progress: None)
    try:
        config = load_pip_config()
        for place in (*config.find_links, *config.indexes):
            if wheels_on_offer(source, place, config, meter, patience):
                text = f"{show_place(place)} offers {source.project} {source.version}"
                yield Finding(subject="package index", level="ok", text=text)
                return
        text = f"no index that pip uses offers {source.project} {source.version}"
        hint: str | None = None
    except FlexLabError as error:
        text, hint = str(error), error.hint
    yield Finding(
        subject="package index",
        level="warn",
        text=f"{text}; installed models still work",
        mend=hint or "pip config list shows which index is used",
    )


def _first_wheel(catalogue: Catalogue) -> PypiSource | None:
    sources = (
        weight.parsed
        for recipe in catalogue.models()
        for variant in recipe.variants
        for weight in variant.weights
    )
    return next((source for source in sources if isinstance(source, PypiSource)), None)
