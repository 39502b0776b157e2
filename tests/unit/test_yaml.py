"""Strict YAML: what people write means what it looks like, and every mistake has a place."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from flexlab.core.errors import RecipeError
from flexlab.core.yaml import MAX_FILE_BYTES, Document, dump, load


def data(text: str) -> object:
    document = load(text, RecipeError)
    assert document.flaws == []
    return document.data


def flaws(text: str) -> list[tuple[int, int, str]]:
    return sorted((f.line, f.column, f.text) for f in load(text, RecipeError).flaws)


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        load(text, RecipeError, name="x.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("OFF", "OFF"),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("y", "y"),
        ("22:22", "22:22"),
        ("1:30:00", "1:30:00"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0755", 755),
        ("0o755", 493),
        ("0x1F", 31),
        ("-7", -7),
        ("11.0", 11.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("-.INF", -math.inf),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("'true'", "true"),
        ('"11.0"', "11.0"),
        ("!!str 11.0", "11.0"),
        ("=", "="),
    ],
)
def test_plain_values_follow_yaml_1_2(written: str, meant: object) -> None:
    found = data(f"key: {written}")
    assert found == {"key": meant}
    assert type(found["key"]) is type(meant)


def test_not_a_number_is_one() -> None:
    assert math.isnan(data("key: .nan")["key"])  # type: ignore[index]


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "\ufeff"])
def test_a_file_without_content_is_an_empty_mapping_or_nothing(text: str) -> None:
    assert not data(text)


def test_anchors_and_aliases_work() -> None:
    assert data("a: &x [1, 2]\nb: *x") == {"a": [1, 2], "b": [1, 2]}


def test_all_flaws_of_a_file_are_found_in_one_go() -> None:
    assert flaws("a: 1\nb: {a: 1, a: 2}\n11.0: x\n<<: {c: 1}\n? [k]\n: v\nt: !run x\na: 3") == [
        (2, 11, "key 'a' stands twice; the first is on line 2"),
        (3, 1, 'a key must be text; put it in quotes: "11.0"'),
        (4, 1, "merge keys (<<) are not part of YAML 1.2; write the keys out"),
        (5, 3, "a key must be text, not a list or a mapping"),
        (7, 4, "the tag !run is not understood here; leave it out"),
        (8, 1, "key 'a' stands twice; the first is on line 1"),
    ]


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system", "!!binary", "!!timestamp", "!x"]
)
def test_foreign_tags_are_refused_and_never_run(tag: str) -> None:
    assert "leave it out" in flaws(f"a: {tag} ['true']")[0][2]


@pytest.mark.parametrize(
    ("text", "place_and_word"),
    [
        ("a:\n\tb: 1\n", "x.yaml:2:1: a tab"),
        ("a:\n  b: 1\n \tc: 2\n", "x.yaml:3:2: a tab"),
        ("a: b: c\n", "x.yaml:1:5: a second `: `"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:1: a second document"),
        ("a: 'open\n", "the file ends inside quotes"),
        ("a: [1, 2\n", "a bracket that is not closed"),
        ("a: *nobody\n", "x.yaml:1:4: an alias (*name) without its anchor"),
        ("a: b\x07\n", "x.yaml:1:5: a control character"),
        ("- " * 2000, "nested too deeply"),
        ("[" * 60 + "]" * 60, "too much"),
    ],
)
def test_what_is_no_yaml_is_explained_with_its_place(text: str, place_and_word: str) -> None:
    assert place_and_word in refusal(text)


def test_aliases_that_multiply_are_refused() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "aliases that multiply" in refusal("\n".join(lines))


def test_an_alias_inside_its_own_anchor_is_refused() -> None:
    assert flaws("a: &a [1, *a]") == [(1, 4, "an alias inside its own anchor")]


def test_a_number_of_too_many_digits_is_a_flaw_not_a_crash() -> None:
    assert flaws("a: " + "9" * 5000) == [(1, 4, "a number with too many digits")]


def test_positions_count_from_one_in_characters() -> None:
    document = load("ä: {ö: 1,\n    ü: [x, yy]}\n", RecipeError, name="f")
    assert document.position(("ä", "ö")) == (1, 8)
    assert document.position(("ä", "ü", 1)) == (2, 12)
    assert document.position(("ä", "ü"), key=True) == (2, 5)
    assert document.position(("ä", "absent")) == document.position(("ä",))
    assert document.where(("ä", "ü")) == "f:2"


def test_numbers_know_how_they_were_written() -> None:
    assert load("a: 11.0\nb: [0x10]", RecipeError).written == {("a",): "11.0", ("b", 0): "0x10"}


def test_files_that_cannot_be_read_are_one_sentence(tmp_path: Path) -> None:
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nb: ä\n".encode("latin-1"))
    big = tmp_path / "big.yaml"
    big.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for file, words in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path, "Is a directory"),
        (latin, ":2:4: not UTF-8"),
        (big, "more than 1024 KiB"),
    ):
        with pytest.raises(RecipeError) as caught:
            load(file, RecipeError)
        assert words in str(caught.value)
        assert str(file) in str(caught.value)


TEXTS = st.text(
    st.characters(
        exclude_categories=["Cs", "Cc", "Cn"], exclude_characters="\ufeff\u2028\u2029\x85"
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(TEXTS, VALUES, max_size=5))
@example({"a": "0o14", "b": "1e3", "no": "no", "c": "1:30", "<<": ["=", "<<"], "d": "2024-01-01"})
def test_what_is_written_is_read_back(value: dict[str, object]) -> None:
    text = dump(value)
    assert data(text) == value
    assert yaml.safe_load(text) == value


def outcome(source: Path | str) -> Document | RecipeError:
    try:
        return load(source, RecipeError)
    except RecipeError as error:
        return error


@given(st.text(alphabet="ab:-[]{}&*!#|>'\"%@`, \t\n01.~?<", max_size=60))
def test_any_text_is_data_or_a_recipe_error(text: str) -> None:
    found = outcome(text)
    if isinstance(found, RecipeError):
        assert str(found).startswith("<text>:")
    else:
        assert all(flaw.line >= 1 and flaw.column >= 1 for flaw in found.flaws)


@given(content=st.binary(max_size=80))
def test_any_bytes_are_data_or_a_recipe_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_bytes(content)
    found = outcome(file)
    assert isinstance(found, Document) or str(found).startswith(f"{file}:")


@given(TEXTS)
def test_only_true_and_false_are_booleans(word: str) -> None:
    found = outcome(f"key: {word}")
    if isinstance(found, Document) and isinstance(found.data.get("key"), bool):
        assert word.split("#")[0].strip().lower() in ("true", "false")
