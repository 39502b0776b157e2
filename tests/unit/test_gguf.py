"""GGUF headers: what is read, and that no file, however broken, does more than raise one error."""

from __future__ import annotations

import os
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.core.errors import WeightsError
from flexlab.weights.gguf import check_magic, check_whole, read_header

U32, STRING, ARRAY = 4, 8, 9
F32, Q4_1, Q6_K, FROM_THE_FUTURE = 0, 3, 14, 999


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, value: int | str | list[int] | list[str]) -> bytes:
    if isinstance(value, int):
        return text(key) + struct.pack("<II", U32, value)
    if isinstance(value, str):
        return text(key) + struct.pack("<I", STRING) + text(value)
    kind = STRING if value and isinstance(value[0], str) else U32
    items = b"".join(text(v) if isinstance(v, str) else struct.pack("<I", v) for v in value)
    return text(key) + struct.pack("<IIQ", ARRAY, kind, len(value)) + items


def tensor(name: str, *dimensions: int, kind: int = F32, offset: int = 0) -> bytes:
    shape = b"".join(struct.pack("<Q", size) for size in dimensions)
    where = struct.pack("<IQ", kind, offset)
    return text(name) + struct.pack("<I", len(dimensions)) + shape + where


def gguf(pairs: list[bytes], tensors: list[bytes] | None = None, version: int = 3) -> bytes:
    tensors = tensors or []
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(pairs))
    return head + b"".join(pairs) + b"".join(tensors)


LLAMA = [
    pair("general.architecture", "llama"),
    pair("general.name", "Tiny\x1b[31m"),
    pair("general.file_type", 15),
    pair("llama.block_count", 4),
    pair("llama.attention.head_count", 8),
    pair("llama.attention.head_count_kv", 2),
    pair("llama.embedding_length", 512),
    pair("llama.context_length", 2048),
    pair("tokenizer.ggml.tokens", ["a", "b", "c"]),
    pair("tokenizer.chat_template", "{{ messages }}"),
]
GOOD = gguf(LLAMA, [tensor("a", 3, 5), tensor("b", 7)])
WHOLE = GOOD + bytes(-len(GOOD) % 32) + bytes(60)


def written(folder: Path, data: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(data)
    return path


def test_the_header_says_what_planning_needs(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, GOOD + bytes(-len(GOOD) % 32) + bytes(64)))
    assert (header.architecture, header.file_type, header.name) == ("llama", "Q4_K_M", "Tiny")
    assert (header.layers, header.heads, header.kv_heads, header.kv_heads_total) == (4, 8, 2, 8)
    assert (header.context_length, header.embedding_length) == (2048, 512)
    assert (header.key_length, header.value_length, header.vocabulary) == (64, 64, 3)
    assert header.chat_template == "{{ messages }}"
    assert (header.parameters, header.tensor_bytes) == (22, 64)
    assert header.pooling is None


def test_what_the_file_does_not_say_is_unknown(tmp_path: Path) -> None:
    header = read_header(written(tmp_path, gguf([pair("general.architecture", "new")])))
    assert header.layers is None
    assert header.kv_heads_total is None
    assert header.context_length is None
    assert header.file_type is None


def test_layers_may_differ_in_their_heads(tmp_path: Path) -> None:
    pairs = [
        pair("general.architecture", "mix"),
        pair("mix.block_count", 3),
        pair("mix.attention.head_count_kv", [0, 4, 8]),
    ]
    header = read_header(written(tmp_path, gguf(pairs)))
    assert (header.kv_heads, header.kv_heads_total) == (8, 12)


def test_an_embedding_model_and_a_split_model_are_told(tmp_path: Path) -> None:
    pairs = [
        pair("general.architecture", "bert"),
        pair("bert.pooling_type", 1),
        pair("split.no", 0),
        pair("split.count", 3),
    ]
    header = read_header(written(tmp_path, gguf(pairs)))
    assert (header.pooling, header.shard, header.shards) == ("mean", 0, 3)


def test_only_the_header_of_a_huge_file_is_read(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD)
    size_bytes = 5 * 1024**3
    os.truncate(path, size_bytes)  # sparse: a read of its tensors would take seconds and gigabytes
    header = read_header(path)
    assert header.tensor_bytes == size_bytes - (len(GOOD) + -len(GOOD) % 32)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"GGU", "does not begin with the word GGUF"),
        (b"<!doctype html><html>", "does not begin with the word GGUF"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "format version"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "tensors"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "entries"),
        (gguf([text("k") + struct.pack("<IQ", STRING, 1 << 62)]), "a text of"),
        (gguf([text("k") + struct.pack("<IIQ", ARRAY, U32, 1 << 62)]), "items in one list"),
        (gguf([text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(9)]), "unknown type 9"),
        (gguf([text("k") + struct.pack("<I", 99)]), "unknown type 99"),
        (gguf([pair("a", 1)]), "architecture"),
        (gguf(LLAMA, [tensor("a", *[1 << 40] * 3)]), "no machine could hold"),
        (gguf(LLAMA, [text("a") + struct.pack("<I", 1 << 31)]), "dimensions"),
        (gguf(LLAMA, [tensor("a", 1, offset=1 << 63)]), "no machine could hold"),
        (gguf([*LLAMA, pair("general.alignment", 33)]), "33 bytes is no power of two"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(WeightsError) as caught:
        read_header(written(tmp_path, data))
    assert caught.value.message.startswith("not a GGUF file")
    assert why in caught.value.message
    assert caught.value.code == "not_gguf"
    assert caught.value.hint


@pytest.mark.parametrize("kept", [4, 7, 23, 24, 60, len(GOOD) - 1])
def test_a_header_that_was_cut_is_told_from_a_file_of_another_kind(
    tmp_path: Path, kept: int
) -> None:
    path = written(tmp_path, GOOD[:kept])
    with pytest.raises(WeightsError, match=r"model\.gguf is incomplete: it ends") as caught:
        check_whole(path)
    assert caught.value.code == "gguf_truncated"
    assert str(path) in (caught.value.hint or "")


def whole(tensors: list[bytes], data_bytes: int, more: list[bytes] | None = None) -> bytes:
    """A file with `data_bytes` behind the place where its tensors begin."""
    head = gguf([*LLAMA, *(more or [])], tensors)
    return head + bytes(-len(head) % 32) + bytes(data_bytes)


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        ([tensor("a", 3, 5)], 60),
        ([tensor("a", 64, 2, kind=Q4_1)], 80),
        ([tensor("a", 256, 3, kind=Q6_K)], 630),
        ([tensor("b", 8, offset=96), tensor("a", 8)], 128),
        ([tensor("a", 1 << 20, kind=FROM_THE_FUTURE, offset=64)], 64),
        ([], 0),
    ],
)
def test_a_file_is_whole_when_its_last_tensor_is_there(
    tmp_path: Path, tensors: list[bytes], wanted: int
) -> None:
    check_whole(written(tmp_path, whole(tensors, wanted)))
    if wanted:
        with pytest.raises(WeightsError, match="its header wants") as caught:
            check_whole(written(tmp_path, whole(tensors, wanted - 1)))
        assert caught.value.code == "gguf_truncated"


def test_the_alignment_of_the_file_counts(tmp_path: Path) -> None:
    head = gguf([*LLAMA, pair("general.alignment", 4096)], [tensor("a", 1)])
    path = written(tmp_path, head + bytes(-len(head) % 4096) + bytes(4))
    check_whole(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(WeightsError, match="bytes here, its header wants"):
        check_whole(path)


def test_what_is_missing_is_said_in_sizes_that_differ(tmp_path: Path) -> None:
    path = written(tmp_path, whole([tensor("a", 1 << 20)], 1 << 21))
    with pytest.raises(WeightsError, match=r"2\.0M here, its header wants 4\.0M"):
        check_whole(path, read_header(path))


def test_a_missing_file_and_a_folder_are_one_sentence(tmp_path: Path) -> None:
    for path in (tmp_path / "none.gguf", tmp_path):
        with pytest.raises(WeightsError, match="cannot read"):
            check_magic(path)


def test_the_magic_alone_is_a_cheap_check(tmp_path: Path) -> None:
    check_magic(written(tmp_path, b"GGUF"))
    with pytest.raises(WeightsError, match="not a GGUF file"):
        check_magic(written(tmp_path, b"PK\x03\x04"))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file that was cut, or in which a few bytes were changed."""
    data = bytearray(WHOLE[: draw(st.just(len(WHOLE)) | st.integers(0, len(WHOLE)))])
    for _ in range(draw(st.integers(0, 4))):
        if data:
            data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@given(damaged() | st.binary(max_size=200) | st.binary(max_size=200).map(GOOD[:24].__add__))
def test_no_bytes_do_more_than_raise_one_error(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = written(Path(folder), data)
        problem = header = None
        try:
            header = read_header(path)
            check_whole(path, header)
        except WeightsError as error:
            problem = error
    assert problem is None or problem.code in ("not_gguf", "gguf_truncated")
    if problem is None:
        assert header is not None
        assert header.architecture
        assert (header.whole_bytes or 0) <= len(data)
