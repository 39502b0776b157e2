"""The embedded engine's words, and what it says when it cannot serve."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.backends.base import Site
from flexlab.backends.llamacpp import LlamaCpp, LlamaCppSettings
from flexlab.engines import llamacpp
from flexlab.engines.llamacpp import parameters, read_keys, run
from flexlab.engines.llamacpp_options import FLASH_ATTENTION, Options, WrongOptions, parse
from flexlab.spec.engine import SENTENCE_PREFIX, sentence_in
from flexlab.spec.plan import API_KEY_FILE, HOST, PORT

VALUES = {HOST: "127.0.0.1", PORT: "8123", API_KEY_FILE: "/dev/fd/9"}

backend_settings = st.builds(
    LlamaCppSettings,
    context_size=st.integers(1, 131072),
    parallel=st.integers(1, 64),
    n_gpu_layers=st.none() | st.integers(0, 200),
    threads=st.none() | st.integers(1, 64),
    threads_batch=st.none() | st.integers(1, 64),
    batch_size=st.none() | st.integers(1, 8192),
    flash_attention=st.sampled_from(["auto", "on"]),
    cache_type_k=st.sampled_from(["f16", "q8_0", "iq4_nl"]),
    cache_type_v=st.sampled_from(["f16", "q4_0"]),
    cache_ram_mib=st.integers(0, 9999),
    jinja=st.booleans(),
    chat_template=st.none() | st.just("chatml"),
    embeddings=st.booleans(),
)


@given(backend_settings, st.integers(1, 64))
def test_every_word_of_the_backend_is_understood(chosen: LlamaCppSettings, usable: int) -> None:
    words = LlamaCpp().argv(chosen, Site(model_path="/m.gguf", served_name="a/b", threads=usable))
    options = parse([VALUES.get(word, word) for word in words])
    assert (options.host, options.port, options.api_key_file) == ("127.0.0.1", 8123, "/dev/fd/9")
    assert (options.model, options.aliases) == ("/m.gguf", ("a/b",))
    assert options.ctx_size == chosen.context_size * chosen.parallel
    assert options.parallel == chosen.parallel
    assert options.threads == (chosen.threads or usable)
    assert options.cache_ram_mib == chosen.cache_ram_mib
    assert options.jinja is chosen.jinja
    assert options.embeddings is chosen.embeddings
    assert options.chat_template == chosen.chat_template
    assert options.flash_attention == FLASH_ATTENTION[chosen.flash_attention]


@given(st.lists(st.text(max_size=12) | st.sampled_from(["--model", "--port", "--slots", "-1"])))
def test_no_words_are_more_than_wrong(words: list[str]) -> None:
    words = [word for word in words if not word.startswith("-h") and word != "--help"]
    try:
        options = parse(words)
    except WrongOptions:
        return  # one sentence; anything else that it raises fails the test
    assert options.model in words


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model", "m", "--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["--model", "m", "--zzz=1"], "unknown option --zzz; --help lists the options"),
        (["--model", "m", "--port", "70000"], "argument --port: 70000 is not between 0 and 65535"),
        (["--model", "m", "--threads", "two"], "argument --threads: 'two' is not a whole number"),
        (["--model", "m", "--mod"], "unknown option --mod; did you mean --model?"),
        ([], "the following arguments are required: --model"),
    ],
)
def test_a_wrong_word_is_one_sentence_and_exit_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(SENTENCE_PREFIX + sentence)
    assert err.count("\n") == 1


def test_further_names_and_folders() -> None:
    options = parse(["--model", "m", "--alias", "a, b,", "--slot-save-path", "/var/slots"])
    assert options.aliases == ("a", "b")
    assert options.slot_save_path == "/var/slots/"  # llama.cpp adds no separator


def test_reranking_is_a_pooling() -> None:
    options = parse(["--model", "m", "--reranking"])
    assert (options.embeddings, options.pooling) == (True, "rank")
    with pytest.raises(WrongOptions, match="--reranking"):
        parse(["--model", "m", "--reranking", "--embeddings"])


def test_the_parameters_of_the_installed_engine() -> None:
    library = pytest.importorskip("xllamacpp", reason="needs the extra `embedded`")
    options = Options(
        model="/m.gguf",
        aliases=("a", "b"),
        host="127.0.0.1",
        port=8123,
        ctx_size=8192,
        parallel=2,
        n_gpu_layers=0,
        threads=3,
        batch_size=256,
        flash_attention="enabled",
        cache_type_k="q8_0",
        cache_ram_mib=64,
        jinja=False,
        embeddings=True,
        pooling="mean",
        slot_save_path="/s/",
    )
    made = parameters(options, ["k1", "k2"], library)
    assert made.model.path == "/m.gguf"
    assert made.model_alias == {"a", "b"}
    assert (made.hostnames, made.port, made.api_keys) == (["127.0.0.1"], 8123, ["k1", "k2"])
    assert (made.n_ctx, made.n_parallel, made.n_gpu_layers) == (8192, 2, 0)
    assert (made.cpuparams.n_threads, made.cpuparams_batch.n_threads) == (3, 3)
    assert (made.n_batch, made.n_ubatch, made.cache_ram_mib) == (256, 512, 64)
    assert made.flash_attn_type == library.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    assert made.cache_type_k == library.ggml_type.GGML_TYPE_Q8_0
    assert made.cache_type_v == library.ggml_type.GGML_TYPE_F16
    assert made.pooling_type == library.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    assert (made.use_jinja, made.embedding, made.ui) == (False, True, False)
    assert made.endpoint_metrics
    assert made.endpoint_slots
    assert made.endpoint_props


class TestWhatIsMissing:
    """Each is one line with its mend and an exit code of its own."""

    @pytest.fixture
    def gguf(self, tmp_path: Path) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(b"GGUF\x03\0\0\0")
        return path

    @pytest.fixture
    def taken_port(self) -> Iterator[int]:
        with socket.create_server(("127.0.0.1", 0)) as owner:
            yield owner.getsockname()[1]

    def said(self, capsys: pytest.CaptureFixture[str]) -> str:
        sentence = sentence_in(capsys.readouterr().err.splitlines())
        assert sentence is not None
        return sentence

    def test_no_model_file(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["--model", str(tmp_path / "no.gguf")]) == 90
        assert "there is no model file" in self.said(capsys)

    def test_a_file_that_is_no_gguf(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "page.gguf"
        path.write_text("<html>")
        assert run(["--model", str(path)]) == 90
        assert "not a GGUF file" in self.said(capsys)

    def test_a_folder_as_model(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["--model", str(tmp_path)]) == 90
        assert "Is a directory" in self.said(capsys)

    def test_a_taken_port(
        self, gguf: Path, taken_port: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["--model", str(gguf), "--port", str(taken_port)]) == 91
        assert f"127.0.0.1:{taken_port}" in self.said(capsys)

    def test_no_embedded_engine(
        self, gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setitem(sys.modules, "xllamacpp", None)
        assert run(["--model", str(gguf), "--port", "0"]) == 92
        assert "pip install 'flexlab[embedded]'" in self.said(capsys)

    @pytest.mark.parametrize(
        ("library", "package"), [("libgomp.so.1", "libgomp1"), ("libstdc++.so.6", "libstdc++6")]
    )
    def test_no_system_library(
        self,
        library: str,
        package: str,
        gguf: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        error = f"{library}: cannot open shared object file: No such file or directory"
        (tmp_path / "xllamacpp.py").write_text(f"raise ImportError({error!r})")
        monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        assert run(["--model", str(gguf), "--port", "0"]) == 93
        assert f"sudo apt-get install -y {package}" in self.said(capsys)

    def test_another_version_of_the_engine(
        self,
        gguf: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (tmp_path / "xllamacpp.py").write_text(
            "__version__ = '2030.1'\nclass CommonParams: __slots__ = ()\n"
        )
        monkeypatch.delitem(sys.modules, "xllamacpp", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
        assert run(["--model", str(gguf), "--port", "0"]) == 92
        assert "xllamacpp 2030.1" in self.said(capsys)
        sys.modules.pop("xllamacpp")

    @pytest.mark.parametrize("content", [None, "", " \n"])
    def test_a_key_file_without_a_key_never_means_an_open_server(
        self,
        content: str | None,
        gguf: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        path = tmp_path / "key"
        if content is not None:
            path.write_text(content)
        assert run(["--model", str(gguf), "--api-key-file", str(path)]) == 95
        assert str(path) in self.said(capsys)


def test_an_inherited_key_is_read_once_and_closed() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"one\ntwo\n")
    os.close(writing)
    assert read_keys(f"/dev/fd/{reading}") == ["one", "two"]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_waiting_threads_do_not_spin_unless_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xllamacpp", os)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    llamacpp.load_library()
    assert os.environ["OMP_WAIT_POLICY"] == "active"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    llamacpp.load_library()
    assert os.environ["OMP_WAIT_POLICY"] == "passive"
