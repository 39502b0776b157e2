"""Replacing the model's name inside a body, and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gateway.pool import replace_model

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["model", "a", 'q"']), inner),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["model", "a", "modelx", "\\"]), JSON), st.text(),
       st.sampled_from([None, 2]), st.booleans())  # fmt: skip
def test_only_the_top_level_value_changes(
    body: dict[str, object], name: str, indent: int | None, ascii_only: bool
) -> None:
    data = json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    renamed = json.loads(replace_model(data, name))
    wanted = dict(body)
    if isinstance(body.get("model"), str):
        wanted["model"] = name
    assert renamed == wanted


@pytest.mark.parametrize(
    ("body", "renamed"),
    [
        (b'{"model":"a"}', b'{"model":"b"}'),
        (
            b' { "x":{"model":"a"} , "model" :\n"a\\"," }',
            b' { "x":{"model":"a"} , "model" :\n"b" }',
        ),
        (b'{"m\\u006fdel":"a"}', b'{"m\\u006fdel":"b"}'),
        (b'{"model":"a","model":"c"}', b'{"model":"b","model":"b"}'),
        (b'{"x":"model","y":"a"}', b'{"x":"model","y":"a"}'),
        (b'["model","a"]', b'["model","a"]'),
        (b'{"model":7}', b'{"model":7}'),
        (b"", b""),
        (b'{"model":"a', b'{"model":"a'),
        (b'{"\\ud8":"a"}', b'{"\\ud8":"a"}'),
    ],
)
def test_bytes_stay_as_they_came(body: bytes, renamed: bytes) -> None:
    assert replace_model(body, "b") == renamed


@given(st.binary(max_size=80))
def test_no_body_raises(body: bytes) -> None:
    replace_model(body, "b")
