"""A document against a pydantic model: every problem at its line, in a person's words.

Validation is strict (text is no number, 1 is no boolean) and goes through JSON, where strict mode
still takes a list for a tuple and text for a path.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flexlab.core.errors import FlexLabError
from flexlab.core.near import did_you_mean, near
from flexlab.core.text import clean_line
from flexlab.core.yaml import Document, Flaw, KeyPath, report

M = TypeVar("M", bound=BaseModel)

_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "path_type": "a path",
}
_LISTED_KEYS_MAX = 12


class WrongAt(ValueError):
    """For a model's own validators: the value that is wrong stands below the model, at `path`."""

    def __init__(self, path: KeyPath, text: str) -> None:
        super().__init__(text)
        self.path = path


def validate(
    model: type[M],
    document: Document,
    error: type[FlexLabError],
    *,
    hint: str | None = None,
    context: Mapping[str, object] | None = None,
) -> M:
    """The model that the document describes. Raises `error` with all that is wrong in it."""
    value, flaws = judge(model, document, context)
    if value is None or flaws:
        raise error(report(document.name, flaws), hint)
    return value


def judge(
    model: type[M], document: Document, context: Mapping[str, object] | None = None
) -> tuple[M | None, list[Flaw]]:
    """As `validate`, for callers that collect: the model (None when it is wrong) and the flaws."""
    flaws = list(document.flaws)
    try:
        # Names of fields are ours; the file speaks in aliases.
        value = model.model_validate_json(
            json.dumps(document.data), strict=True, context=context, by_alias=True, by_name=False
        )
    except ValidationError as failure:
        return None, flaws + _flaws(model, document, failure)
    return value, flaws


def sentence(problem: ErrorDetails, written: str | None = None) -> str:
    """What is wrong with one value, without saying where. `written` is how it stands there."""
    kind, given, extra = problem["type"], problem["input"], problem.get("ctx", {})
    shown = clean_line(written) if written is not None else _shown(given)
    if kind == "string_type" and written is not None:
        return f'text is wanted; put it in quotes: "{shown}"'
    if kind in _WANTED:
        return f"{_WANTED[kind]} is wanted, not {shown}"
    if kind == "literal_error":
        return _not_one_of(str(given), shown, _literals(str(extra.get("expected", ""))))
    if kind == "union_tag_invalid":
        return _not_one_of(
            str(extra["tag"]), repr(extra["tag"]), _literals(str(extra["expected_tags"]))
        )
    if kind == "value_error":
        return problem["msg"].removeprefix("Value error, ")
    if kind == "too_short":
        return f"at least {extra.get('min_length', 1)} must be named"
    if kind == "string_too_short":
        return "must not be empty"
    message = problem["msg"].removeprefix("Input should be ")
    if message != problem["msg"]:
        return f"must be {message}, not {shown}"
    return message[:1].lower() + message[1:]


def known_keys(model: type[BaseModel]) -> list[str]:
    """The keys that a file may use."""
    return [field.alias or name for name, field in model.model_fields.items()]


def named(path: KeyPath, text: str) -> str:
    """What is wrong with a value, after the path of its key: `variants[1].name: ...`."""
    shown = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{clean_line(shown.lstrip('.'))}: {text}" if shown else text


def _flaws(model: type[BaseModel], document: Document, failure: ValidationError) -> list[Flaw]:
    flaws: list[Flaw] = []
    unknown: list[KeyPath] = []
    absent: list[tuple[KeyPath, str]] = []
    problems = failure.errors(include_url=False)
    for problem in problems:
        path, owner = _locate(model, document.data, problem["loc"])
        details = problem.get("ctx", {})
        if problem["type"] == "extra_forbidden":
            unknown.append(path)
            flaws.append(document.flaw(path, _unknown_key(path, owner), key=True))
        elif problem["type"] == "missing":
            absent.append((path, str(problem["loc"][-1])))
        elif problem["type"] == "union_tag_not_found":
            absent.append((path, str(details["discriminator"]).strip("'")))
        elif not _is_echo(problem, problems):
            path += getattr(details.get("error"), "path", ())
            text = sentence(problem, document.written.get(path))
            flaws.append(document.flaw(path, named(path, text)))
    for path, name in absent:
        # A key with a typing mistake is one problem, not an unknown and a missing one.
        if not any(at[:-1] == path and near(str(at[-1]), [name]) for at in unknown):
            flaws.append(document.flaw(path, named(path, f"key {name!r} is missing"), key=True))
    return flaws


def _is_echo(problem: ErrorDetails, problems: list[ErrorDetails]) -> bool:
    """pydantic calls a list too short when its items are merely wrong."""
    loc = problem["loc"]
    return problem["type"] == "too_short" and any(
        other["loc"][: len(loc)] == loc and len(other["loc"]) > len(loc) for other in problems
    )


def _unknown_key(path: KeyPath, owner: type[BaseModel] | None) -> str:
    key, known = str(path[-1]), known_keys(owner) if owner else []
    text = f"unknown key {clean_line(key)!r}"
    if suggestion := did_you_mean(key, known):
        return text + suggestion
    return f"{text}; valid are {', '.join(known)}" if len(known) <= _LISTED_KEYS_MAX else text


def _not_one_of(given: str, shown: str, valid: list[str]) -> str:
    suggestion = did_you_mean(given, valid)
    return f"{shown} is not one of {', '.join(valid)}{suggestion}"


def _literals(expected: str) -> list[str]:
    """Out of pydantic's `'a', 'b' or 'c'`."""
    return expected.replace("' or '", "', '").strip("'").split("', '")


def _shown(given: object) -> str:
    if isinstance(given, dict):
        return "a mapping"
    if isinstance(given, list | tuple):
        return "a list"
    return "nothing" if given is None else clean_line(repr(given))[:80]


def _locate(
    model: type[BaseModel], data: object, loc: tuple[int | str, ...]
) -> tuple[KeyPath, type[BaseModel] | None]:
    """The path in the document, and the model whose keys are valid at its last step.

    pydantic's `loc` also names what a document has no key for: the tag of a union's member, the
    type that was tried. Walking along the annotations tells these from keys.
    """
    annotation: object = model
    path: KeyPath = ()
    owner: type[BaseModel] | None = model
    for part in loc:
        members = _members(annotation)
        models = [one for one in members if isinstance(one, type) and issubclass(one, BaseModel)]
        if len(members) > 1 and (chosen := _member_of_tag(models, part)):
            annotation = owner = chosen
            continue
        if isinstance(data, dict) and isinstance(part, str):
            owner = models[0] if models else None
            annotation = _annotation_of(owner, part) if owner else _item(members)
            if part not in data:
                break
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data, annotation = data[part], _item(members)
        else:
            break
        path = (*path, part)
    return path, owner


def _members(annotation: object) -> list[object]:
    """The types that a value may have, without None and without annotations."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return [one for part in get_args(annotation) for one in _members(part)]
    return [] if annotation is type(None) else [annotation]


def _member_of_tag(models: list[type[BaseModel]], tag: int | str) -> type[BaseModel] | None:
    for model in models:
        for field in model.model_fields.values():
            if get_origin(field.annotation) is Literal and tag in get_args(field.annotation):
                return model
    return next((model for model in models if model.__name__ == tag), None)


def _annotation_of(model: type[BaseModel], key: str) -> object:
    for name, field in model.model_fields.items():
        if key == (field.alias or name):
            return field.annotation
    return None


def _item(members: list[object]) -> Any:
    """The type of a list's, tuple's or mapping's items; None where nothing is known of them."""
    for member in members:
        arguments = [one for one in get_args(member) if one is not Ellipsis]
        if arguments:
            return arguments[-1]
    return None
