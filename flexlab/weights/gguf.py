"""What a GGUF file says of itself, read without believing it.

The layout is that of the GGUF specification (versions 2 and 3, little endian): magic, version,
counts, key-value pairs, tensor descriptions, then the tensors, which are never read. Every count
and length in the file is held against the bytes that the file really has, so that a damaged or
hostile file costs neither memory nor time.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path
from typing import BinaryIO

import msgspec

from flexlab.core.errors import WeightsError
from flexlab.core.text import clean_line
from flexlab.core.units import show_bytes
from flexlab.weights import ggml

MAGIC = b"GGUF"
_WITHOUT_MAGIC = "it does not begin with the word GGUF"

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q",
            11: "<q", 12: "<d"}  # fmt: skip
_STRING_MAX_BYTES = 16 * 1024**2
_KEY_MAX_BYTES = 64 * 1024
_KEPT_ITEMS_MAX = 4096
"""Longer arrays (tokens, merges) are skipped; only their length is kept."""
_HEADER_MAX_BYTES = 256 * 1024**2
_ITEMS_MAX = 1 << 22
_PAIRS_MAX = 1 << 16
_TENSORS_MAX = 1 << 18
_DIMENSIONS_MAX = 8
_PARAMETERS_MAX = 1 << 60
_DEFAULT_ALIGNMENT = 32

_POOLING = {0: "none", 1: "mean", 2: "cls", 3: "last", 4: "rank"}
# llama.cpp's llama_ftype; newer numbers are shown as a number.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K",
    11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S",
    17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M",
    30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip

_Scalar = int | float | bool | str
_Value = _Scalar | list[int | float | bool] | None


class GgufHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the metadata that planning and people need; None where the file says nothing."""

    version: int
    architecture: str
    name: str | None = None
    layers: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    """Per layer; the highest where layers differ."""
    kv_heads_total: int | None = None
    """Summed over all layers: what a KV cache is made of."""
    context_length: int | None = None
    """In tokens, as trained."""
    embedding_length: int | None = None
    key_length: int | None = None
    """Per head; EMBEDDING / HEADS where the file does not say otherwise."""
    value_length: int | None = None
    vocabulary: int | None = None
    sliding_window: int | None = None
    experts: int | None = None
    file_type: str | None = None
    """The quantisation's name, such as `Q4_K_M`."""
    chat_template: str | None = None
    pooling: str | None = None
    """`mean`, `cls`, `last` or `rank`: an embedding or reranking model; None otherwise."""
    shard: int | None = None
    shards: int | None = None
    """Number of this file (from 0) and of all files, where the model is split."""
    parameters: int | None = None
    """Weights in this file."""
    tensor_bytes: int | None = None
    """Size of the tensors in this file."""
    whole_bytes: int | None = None
    """How large the file must be at the least to hold every tensor that the header names."""


class _Tensor(msgspec.Struct, frozen=True):
    """One tensor as the header describes it."""

    parameters: int
    end: int
    """Behind its last byte, counted from where the tensors begin."""


def check_magic(path: Path) -> None:
    """Raises WeightsError unless the file begins as a GGUF file does."""
    with _open(path) as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise _not_gguf(path, _WITHOUT_MAGIC)


def check_whole(path: Path, header: GgufHeader | None = None) -> None:
    """Raises WeightsError (code `not_gguf` or `gguf_truncated`) unless the file is a GGUF file and
    as long as its header says. Reads no tensors; with a `header` read before, nothing at all."""
    header = header or read_header(path)
    try:
        here_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    if header.whole_bytes is not None and here_bytes < header.whole_bytes:
        here, wanted = show_bytes(here_bytes), show_bytes(header.whole_bytes)
        if here == wanted:
            here, wanted = f"{here_bytes} bytes", f"{header.whole_bytes}"
        raise _truncated(path, f"{here} here, its header wants {wanted}")


def read_header(path: Path) -> GgufHeader:
    """Read the metadata. Raises WeightsError when the file is not a GGUF file, or is cut short."""
    with _open(path) as stream:
        reader = _Reader(stream, os.fstat(stream.fileno()).st_size)
        try:
            return _read(reader)
        except _CutShort as problem:
            raise _truncated(path, str(problem)) from None
        except _Malformed as problem:
            raise _not_gguf(path, str(problem)) from None
        except OSError as error:
            raise _unreadable(path, error) from error


class _Malformed(Exception):
    """Why the bytes cannot be a GGUF header."""


class _CutShort(Exception):
    """They begin as a GGUF header does, and end too early."""


class _Reader:
    """Reads little-endian values and never past the end of the file."""

    def __init__(self, stream: BinaryIO, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.offset = 0
        self._stream = stream
        self._end = min(size_bytes, _HEADER_MAX_BYTES)

    def take(self, count: int) -> bytes:
        self._claim(count)
        data = self._stream.read(count)
        if len(data) != count:  # it was cut while we read
            raise self._too_short()
        return data

    def skip(self, count: int) -> None:
        self._claim(count)
        self._stream.seek(count, os.SEEK_CUR)

    def number(self, layout: str) -> int:
        return int(self.scalar(layout))

    def scalar(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def string(self, limit_bytes: int) -> str:
        length = self.number("<Q")
        if length > limit_bytes:
            raise _Malformed(f"it holds a text of {length} bytes")
        return self.take(length).decode("utf-8", errors="replace")

    def skip_strings(self, count: int) -> None:
        """Past `count` strings; each one costs at least the eight bytes of its length."""
        for _ in range(count):
            self.skip(self.number("<Q"))

    def count(self, limit: int, what: str) -> int:
        """A count that the rest of the file must be able to hold, one byte each at the least."""
        value = self.number("<Q")
        if value > limit:
            raise _Malformed(f"it claims {value} {what}")
        if value > self._end - self.offset:
            raise self._too_short()
        return value

    def _claim(self, count: int) -> None:
        if count > self._end - self.offset:
            raise self._too_short()
        self.offset += count

    def _too_short(self) -> Exception:
        if self._end < self.size_bytes:
            return _Malformed(f"its header is longer than {show_bytes(_HEADER_MAX_BYTES)}")
        return _CutShort(
            f"it ends in the middle of its header ({show_bytes(self.size_bytes)} here)"
        )


def _read(reader: _Reader) -> GgufHeader:
    if reader.size_bytes < len(MAGIC) or reader.take(len(MAGIC)) != MAGIC:
        raise _Malformed(_WITHOUT_MAGIC if reader.size_bytes else "it is empty")
    version = reader.number("<I")
    if version not in (2, 3):
        raise _Malformed(f"its format version {version} is none that this program knows")
    tensor_count = reader.count(_TENSORS_MAX, "tensors")
    pair_count = reader.count(_PAIRS_MAX, "entries")
    values: dict[str, _Value] = {}
    lengths: dict[str, int] = {}
    for _ in range(pair_count):
        key = reader.string(_KEY_MAX_BYTES)
        values[key] = _read_value(reader, reader.number("<I"), key, lengths)
    tensors = [_read_tensor(reader) for _ in range(tensor_count)]
    start = _tensors_start(reader, values)
    return msgspec.structs.replace(
        _header(version, values, lengths),
        parameters=sum(tensor.parameters for tensor in tensors),
        tensor_bytes=max(0, reader.size_bytes - start),
        whole_bytes=max((start + tensor.end for tensor in tensors), default=reader.offset),
    )


def _read_value(reader: _Reader, kind: int, key: str, lengths: dict[str, int]) -> _Value:
    if layout := _SCALARS.get(kind):
        return reader.scalar(layout)
    if kind == _STRING:
        return reader.string(_STRING_MAX_BYTES)
    if kind != _ARRAY:
        raise _Malformed(f"it holds a value of the unknown type {kind}")
    item_kind = reader.number("<I")
    length = lengths[key] = reader.count(_ITEMS_MAX, "items in one list")
    if item_kind == _STRING:
        reader.skip_strings(length)
        return None
    item_layout = _SCALARS.get(item_kind)
    if item_layout is None:  # the format allows lists of lists; no known writer makes them
        raise _Malformed(f"it holds a list of the unknown type {item_kind}")
    if length > _KEPT_ITEMS_MAX:
        reader.skip(length * struct.calcsize(item_layout))
        return None
    return [reader.scalar(item_layout) for _ in range(length)]


def _read_tensor(reader: _Reader) -> _Tensor:
    reader.skip(reader.number("<Q"))  # its name
    count = reader.number("<I")
    if count > _DIMENSIONS_MAX:
        raise _Malformed(f"it claims a tensor of {count} dimensions")
    dimensions = [reader.number("<Q") for _ in range(count)]
    parameters = math.prod(dimensions)
    kind, offset = reader.number("<I"), reader.number("<Q")
    if max(parameters, offset) > _PARAMETERS_MAX:
        raise _Malformed("it claims a tensor that no machine could hold")
    return _Tensor(parameters, offset + ggml.tensor_bytes(kind, dimensions))


def _tensors_start(reader: _Reader, values: dict[str, _Value]) -> int:
    """Where the tensors begin: the end of the header, rounded up to the alignment."""
    alignment = _number(values.get("general.alignment")) or _DEFAULT_ALIGNMENT
    if alignment.bit_count() != 1:
        raise _Malformed(f"its alignment of {alignment} bytes is no power of two")
    return -(-reader.offset // alignment) * alignment


def _header(version: int, values: dict[str, _Value], lengths: dict[str, int]) -> GgufHeader:
    architecture = _text(values.get("general.architecture"))
    if not architecture:
        raise _Malformed("it does not name its architecture")

    def own(key: str) -> _Value:
        return values.get(f"{architecture}.{key}")

    layers, heads = _number(own("block_count")), _number(own("attention.head_count"))
    embedding = _number(own("embedding_length"))
    kv_heads = own("attention.head_count_kv")
    if kv_heads is None:
        kv_heads = own("attention.head_count")
    head_length = embedding // heads if embedding and heads else None
    file_type = _number(values.get("general.file_type"))
    pooling = _number(own("pooling_type"))
    return GgufHeader(
        version=version,
        architecture=architecture,
        name=_text(values.get("general.name")),
        layers=layers,
        heads=heads,
        kv_heads=_number(kv_heads),
        kv_heads_total=_total(kv_heads, layers),
        context_length=_number(own("context_length")),
        embedding_length=embedding,
        key_length=_number(own("attention.key_length")) or head_length,
        value_length=_number(own("attention.value_length")) or head_length,
        vocabulary=_number(own("vocab_size")) or lengths.get("tokenizer.ggml.tokens"),
        sliding_window=_number(own("attention.sliding_window")),
        experts=_number(own("expert_count")),
        file_type=None if file_type is None else _FILE_TYPES.get(file_type, str(file_type)),
        chat_template=_template(values.get("tokenizer.chat_template")),
        pooling=None if not pooling else _POOLING.get(pooling, str(pooling)),
        shard=_number(values.get("split.no")),
        shards=_number(values.get("split.count")),
    )


def _number(value: _Value) -> int | None:
    """A whole number that is not negative; of a list the highest."""
    if isinstance(value, list):
        found = [number for item in value if (number := _number(item)) is not None]
        return max(found, default=None)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def _total(kv_heads: _Value, layers: int | None) -> int | None:
    if isinstance(kv_heads, list):
        return sum(number for item in kv_heads if (number := _number(item)) is not None)
    each = _number(kv_heads)
    return each * layers if each is not None and layers is not None else None


def _text(value: _Value) -> str | None:
    return clean_line(value) if isinstance(value, str) else None


def _template(value: _Value) -> str | None:
    """Kept as it is: it is a program for the engine, not a text for the terminal."""
    return value if isinstance(value, str) else None


def _open(path: Path) -> BinaryIO:
    try:
        return open(path, "rb", buffering=1024**2)
    except OSError as error:
        raise _unreadable(path, error) from error


def _not_gguf(path: Path, why: str) -> WeightsError:
    return WeightsError(f"not a GGUF file: {path}: {why}", "name another file", code="not_gguf")


def _truncated(path: Path, why: str) -> WeightsError:
    return WeightsError(
        f"{path.name} is incomplete: {why}",
        f"copy or download the whole file again: {path}",
        code="gguf_truncated",
    )


def _unreadable(path: Path, error: OSError) -> WeightsError:
    return WeightsError(
        f"cannot read {path}: {error.strerror or error}",
        f"ls -l {path} shows whether it is there and whose it is",
    )
