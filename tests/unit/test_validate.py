"""A wrong file is explained: every problem at its line, with the nearest valid key."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, model_validator

from flexlab.core.errors import RecipeError, SettingsError
from flexlab.core.fields import Bytes, Form, Seconds
from flexlab.core.near import did_you_mean, near
from flexlab.core.validate import WrongAt, validate
from flexlab.core.yaml import load


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Cat(Strict):
    kind: Literal["cat"]
    lives: int = Field(9, ge=1)
    mood: Literal["calm", "cross"] = "calm"


class Dog(Strict):
    kind: Literal["dog"]
    name: str
    cat: Cat | None = None


class Farm(Strict):
    animals: tuple[Annotated[Cat | Dog, Field(discriminator="kind")], ...] = ()
    env: dict[str, str] = {}
    open: bool = True
    wait_s: Seconds = Field(1.0, alias="wait")
    size: Bytes = 0
    code: Annotated[str, Form("[a-z]+", "a code (lower-case letters)")] = "x"

    @model_validator(mode="after")
    def _rule(self) -> Farm:
        if self.code == "zoo":
            raise WrongAt(("code",), "a farm is no zoo")
        return self


def problems(text: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        validate(Farm, load(text, RecipeError, name="f"), RecipeError, hint="mend it")
    assert caught.value.hint == "mend it"
    return str(caught.value).splitlines()


def test_a_right_document_becomes_the_model() -> None:
    text = "animals: [{kind: dog, name: Rex}]\nwait: 1h 30m\nsize: 1.5K\nopen: FALSE"
    farm = validate(Farm, load(text, RecipeError), RecipeError)
    assert farm.animals == (Dog(kind="dog", name="Rex"),)
    assert (farm.wait_s, farm.size, farm.open) == (5400.0, 1536, False)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("opne: true", "f:1:1: unknown key 'opne'; did you mean 'open'?"),
        ("q: 1", "f:1:1: unknown key 'q'; valid are animals, env, open, wait, size, code"),
        ("env:\n  HSA: 11.0", 'f:2:8: env.HSA: text is wanted; put it in quotes: "11.0"'),
        ("env:\n  A: TRUE", 'f:2:6: env.A: text is wanted; put it in quotes: "TRUE"'),
        ("env:\n  A:\n    b: c", "f:3:5: env.A: text is wanted, not a mapping"),
        ("env: [A]", "f:1:6: env: a mapping is wanted, not a list"),
        ("open: OFF", "f:1:7: open: true or false is wanted, not 'OFF'"),
        ("open: 1", "f:1:7: open: true or false is wanted, not 1"),
        ("animals: {}", "f:1:10: animals: a list is wanted, not a mapping"),
        ("animals:\n- kind: cat\n  lives: 0", "f:3:10: animals[0].lives: must be greater than or "
         "equal to 1, not 0"),
        ("animals:\n- kind: cat\n  lives: '3'", "f:3:10: animals[0].lives: a whole number is "
         "wanted, not '3'"),
        ("animals:\n- kind: cat\n  lives: 3.5", "f:3:10: animals[0].lives: a whole number is "
         "wanted, not 3.5"),
        ("animals:\n- kind: cat\n  mood: corss", "f:3:9: animals[0].mood: 'corss' is not one of "
         "calm, cross; did you mean 'cross'?"),
        ("animals:\n- kind: cow", "f:2:3: animals[0]: 'cow' is not one of cat, dog"),
        ("animals:\n- lives: 3", "f:2:3: animals[0]: key 'kind' is missing"),
        ("animals:\n- kind: dog", "f:2:3: animals[0]: key 'name' is missing"),
        ("animals:\n- kind: dog\n  nmae: x", "f:3:3: unknown key 'nmae'; did you mean 'name'?"),
        ("animals:\n- kind: dog\n  name: x\n  cat: {kind: cat, livse: 1}",
         "f:4:20: unknown key 'livse'; did you mean 'lives'?"),
        ("wait: soon", "f:1:7: wait: 'soon' is not a time such as 90s, 15min or 1h"),
        ("wait_s: 3", "f:1:1: unknown key 'wait_s'; did you mean 'wait'?"),
        ("size: 3 parsecs", "f:1:7: size: '3 parsecs' is not a size such as 512M or 1.5G"),
        ("code: A1", "f:1:7: code: 'A1' is not a code (lower-case letters)"),
        ("code: zoo", "f:1:7: code: a farm is no zoo"),
        ("- a", "f:1:1: a mapping is wanted, not a list"),
    ],
)  # fmt: skip
def test_a_problem_is_named_at_its_place(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_a_key_named_like_a_kind_is_not_mistaken_for_the_kind() -> None:
    text = "animals:\n- kind: dog\n  name: x\n  cat:\n    kind: cat\n    mood: bad"
    assert problems(text)[0].startswith("f:6:11: animals[0].cat.mood:")


def test_all_problems_of_a_file_come_together_in_its_order() -> None:
    text = "a: 1\nopen: OFF\nopen: true\nanimals:\n- kind: cat\n  lifes: 3\nenv: {X: 5}"
    assert [line.split(":")[1] for line in problems(text)] == ["1", "2", "3", "6", "7"]


def test_the_family_of_the_error_is_the_callers() -> None:
    with pytest.raises(SettingsError):
        validate(Farm, load("x: 1", SettingsError), SettingsError)


def test_control_characters_of_a_file_never_reach_a_message() -> None:
    assert all(line.isprintable() for line in problems('"a\\e[31mb\\n": 1\ncode: "\\e[2J"'))


def test_near_names() -> None:
    assert near("smollm", ["smollm2", "smollm2-135m", "qwen3-8b"]) == ("smollm2", "smollm2-135m")
    assert near("QWEN3-8b", ["qwen3-8b"]) == ("qwen3-8b",)
    assert near("zzz", ["qwen3-8b"]) == ()
    assert did_you_mean("prot", ["port", "host"]) == "; did you mean 'port'?"
    assert did_you_mean("zzz", ["port"]) == ""
