"""Names of architectures as compilers write them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexlab.gpus.arch import gfx_name, sm_name, sm_of_text


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (70001, "gfx701"),
        (80003, "gfx803"),
        (90000, "gfx900"),
        (90006, "gfx906"),
        (90010, "gfx90a"),
        (90012, "gfx90c"),
        (90402, "gfx942"),
        (90500, "gfx950"),
        (100306, "gfx1036"),
        (110003, "gfx1103"),
        (110501, "gfx1151"),
        (120001, "gfx1201"),
    ],
)
def test_a_kernel_version_has_the_name_that_llvm_gives_it(version: int, name: str) -> None:
    assert gfx_name(version) == name


@given(st.integers(1, 99), st.integers(0, 15), st.integers(0, 15))
def test_minor_and_stepping_are_one_hexadecimal_digit_each(
    major: int, minor: int, stepping: int
) -> None:
    name = gfx_name(major * 10_000 + minor * 100 + stepping)
    assert name is not None
    digits = re.fullmatch(r"gfx([0-9]+)([0-9a-f])([0-9a-f])", name)
    assert digits is not None
    assert (int(digits[1]), int(digits[2], 16), int(digits[3], 16)) == (major, minor, stepping)


@given(st.integers(), st.integers())
def test_two_versions_never_share_a_name(one: int, other: int) -> None:
    if one != other and gfx_name(one) is not None:
        assert gfx_name(one) != gfx_name(other)


@pytest.mark.parametrize("version", [0, -90000, 9, 9999, 90016, 91600, 2**64 - 1])
def test_what_is_no_version_has_no_name(version: int) -> None:
    assert gfx_name(version) is None


@pytest.mark.parametrize(
    ("text", "name"), [("8.6", "sm_86"), (" 12.1\n", "sm_121"), ("9.0", "sm_90")]
)
def test_a_compute_capability_in_text(text: str, name: str) -> None:
    major, minor = text.strip().split(".")
    assert sm_of_text(text) == name == sm_name(int(major), int(minor))


@given(st.text() | st.sampled_from(["[N/A]", "", "8", "8.", ".6", "0.0", "8.66", "ERR!", "８.６"]))
def test_other_text_is_no_compute_capability(text: str) -> None:
    if not re.fullmatch(r"\s*[1-9][0-9]?\.[0-9]\s*", text):
        assert sm_of_text(text) is None
