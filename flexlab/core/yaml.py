"""YAML as people read it: the 1.2 core schema, strict, with a position for everything.

PyYAML reads YAML 1.1, where OFF is false, 1:30 is 90 and 0755 is 493. Here only true and false
(and True, TRUE, ...) are booleans, dates and times of day stay text, a key may stand once, keys
are text, and merge keys, foreign tags and further documents are refused. What is wrong is
collected (`Document.flaws`), so that one run reports everything; only where nothing can be read
at all does `load` raise.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from flexlab.core.errors import FlexLabError
from flexlab.core.text import clean_line

KeyPath = tuple[str | int, ...]

MAX_FILE_BYTES = 1024 * 1024
MAX_NODES = 50_000
"""After aliases are followed: nine short lines can otherwise ask for 10**9 values."""
MAX_DEPTH = 50

_CORE = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
# YAML 1.2.2, section 10.3.2. The last item is what a plain scalar may begin with.
_PLAIN = (
    ("null", re.compile(r"^(?:null|Null|NULL|~|)$"), ["n", "N", "~", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(rf"^(?:{_INT.pattern})$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?(?:\.inf|\.Inf|\.INF)|\.nan|\.NaN|\.NAN)$"
        ),
        list("-+.0123456789"),
    ),
)
# What libyaml (or PyYAML's own parser) says, by its beginning -> what to do about it.
_MENDS = {
    "mapping values are not allowed": (
        "a second `: ` in one value; put the value in quotes, or the key on a line of its own"
    ),
    "could not find expected ':'": "a key without `:` behind it",
    "did not find expected key": "neither a key nor the end of the block; check the indentation",
    "found undefined alias": "an alias (*name) without its anchor (&name) before it",
    "but found another document": "a second document; one file holds one",
    "did not find expected ','": "a missing comma, or a bracket that is not closed",
    "expected ',' or": "a missing comma, or a bracket that is not closed",
    "found unexpected end of stream": "the file ends inside quotes",
    "exceeded maximum nesting depth": "nested too deeply",
}


@dataclass(frozen=True, slots=True, order=True)
class Flaw:
    """One thing that is wrong, and where; line and column count from 1, in characters."""

    line: int
    column: int
    text: str


@dataclass(slots=True)
class Document:
    """What a file says (`data`: dict, list, str, int, float, bool, None), and where."""

    name: str
    """How the file is called in messages."""
    data: Any = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)
    keys: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    values: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    written: dict[KeyPath, str] = field(default_factory=dict)
    """How the scalars that are not text were written: `11.0`, `0x10`, `TRUE`."""

    def position(self, path: KeyPath, *, key: bool = False) -> tuple[int, int]:
        """Line and column of a value (or of its key); of what it would stand in if it is absent."""
        if key and path in self.keys:
            return self.keys[path]
        while path and path not in self.values:
            path = path[:-1]
        return self.values.get(path, (1, 1))

    def where(self, path: KeyPath = ()) -> str:
        """`file:line` of a key, for reasons and lists."""
        return f"{self.name}:{self.position(path, key=True)[0]}"

    def flaw(self, path: KeyPath, text: str, *, key: bool = False) -> Flaw:
        """Something wrong at this place."""
        return Flaw(*self.position(path, key=key), text)


def load(source: Path | str, error: type[FlexLabError], *, name: str | None = None) -> Document:
    """Read a file (a Path) or a text (a str). An empty one is an empty mapping.

    Raises `error`, with file:line:column, when it cannot be read or is no YAML at all.
    """
    shown = name or (str(source) if isinstance(source, Path) else "<text>")
    text = _read(source, shown, error) if isinstance(source, Path) else source
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as failure:
        raise error(report(shown, [_syntax_flaw(failure, text)])) from failure
    except RecursionError:
        # Only PyYAML's own parser gets here; libyaml has a bound of its own.
        raise error(report(shown, [Flaw(1, 1, "nested too deeply")])) from None
    document = Document(shown)
    if root is not None:
        builder = _Builder(document)
        try:
            document.data = builder.build(root, (), 0)
        except _TooMuch as stop:
            raise error(report(shown, [*document.flaws, stop.flaw])) from None
    return document


def dump(data: Any) -> str:
    """Text that `load` reads as the same data, and a reader of YAML 1.1 too."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def report(name: str, flaws: Iterable[Flaw]) -> str:
    """One line per flaw, `file:line:column: what`, in the order of the file."""
    ordered = sorted(set(flaws))
    return "\n".join(f"{name}:{flaw.line}:{flaw.column}: {flaw.text}" for flaw in ordered)


def _read(path: Path, shown: str, error: type[FlexLabError]) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as failure:
        raise error(f"{shown}: cannot be read: {failure.strerror or failure}") from failure
    if len(content) > MAX_FILE_BYTES:
        raise error(
            f"{shown}: more than {MAX_FILE_BYTES // 1024} KiB; this is no recipe or setting"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        before = content[: failure.start]
        line, column = before.count(b"\n") + 1, failure.start - before.rfind(b"\n")
        raise error(f"{shown}:{line}:{column}: not UTF-8; save the file as UTF-8") from failure


def _syntax_flaw(failure: yaml.YAMLError, text: str) -> Flaw:
    mark = getattr(failure, "problem_mark", None) or getattr(failure, "context_mark", None)
    if mark is None:
        # A ReaderError knows the offset of a character that YAML allows nowhere.
        before = text[: getattr(failure, "position", 0) or 0]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        return Flaw(line, column, "a control character; write it as an escape in double quotes")
    line, column = mark.line + 1, mark.column + 1
    lines = text.splitlines()
    here = lines[mark.line] if mark.line < len(lines) else ""
    if (
        "\t" in here[: len(here) - len(here.lstrip())]
        or here[mark.column : mark.column + 1] == "\t"
    ):
        return Flaw(line, here.index("\t") + 1, "a tab; YAML is indented with spaces only")
    problem = str(getattr(failure, "problem", None) or failure)
    for known, mend in _MENDS.items():
        if problem.startswith(known):
            return Flaw(line, column, mend)
    return Flaw(line, column, clean_line(problem))


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's scanner and parser (libyaml's where it is built in), YAML 1.2's plain scalars."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


class _Dumper(yaml.SafeDumper):
    """Quotes what either version of YAML would take for something else than text."""


for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(_CORE + _tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_CORE + _tag, _pattern, _first)


class _TooMuch(Exception):
    def __init__(self, flaw: Flaw) -> None:
        self.flaw = flaw


class _Builder:
    """Plain data out of nodes; what is wrong goes to the document's flaws."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._nodes = 0
        self._open: set[int] = set()

    def build(self, node: yaml.Node, path: KeyPath, depth: int) -> Any:
        line, column = _place(node)
        self._document.values[path] = (line, column)
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise _TooMuch(Flaw(line, column, "too much: aliases that multiply, or deep nesting"))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._flaw(node, "an alias inside its own anchor")
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                return self._sequence(node, path, depth)
            return self._mapping(node, path, depth)
        finally:
            self._open.discard(id(node))

    def _sequence(self, node: yaml.SequenceNode, path: KeyPath, depth: int) -> list[Any]:
        self._judge_tag(node, "seq")
        return [self.build(item, (*path, at), depth + 1) for at, item in enumerate(node.value)]

    def _mapping(self, node: yaml.Node, path: KeyPath, depth: int) -> dict[str, Any]:
        self._judge_tag(node, "map")
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key is None:
                continue
            if key in result:
                first = self._document.keys[(*path, key)][0]
                self._flaw(key_node, f"key {key!r} stands twice; the first is on line {first}")
                continue
            self._document.keys[(*path, key)] = _place(key_node)
            result[key] = self.build(value_node, (*path, key), depth + 1)
        return result

    def _key(self, node: yaml.Node) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            self._flaw(node, "a key must be text, not a list or a mapping")
        elif node.value == "<<" and not node.style:
            self._flaw(node, "merge keys (<<) are not part of YAML 1.2; write the keys out")
        elif node.tag != _CORE + "str":
            self._flaw(node, f'a key must be text; put it in quotes: "{clean_line(node.value)}"')
        else:
            return str(node.value)
        return None

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        kind = node.tag.removeprefix(_CORE)
        text: str = node.value
        if kind == "str":
            return text
        pattern = next((known[1] for known in _PLAIN if known[0] == kind), None)
        if pattern is None or not pattern.match(text):
            self._judge_tag(node, "str")
            return text
        self._document.written[path] = text
        if kind == "null":
            return None
        if kind == "bool":
            return text.lower() == "true"
        return self._number(node, kind, text)

    def _number(self, node: yaml.ScalarNode, kind: str, text: str) -> int | float:
        if kind == "float":
            # Python writes the same without the dot.
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        try:
            return int(text, base)
        except ValueError:
            # Python refuses decimal numbers of more than 4300 digits.
            self._flaw(node, "a number with too many digits")
            return 0

    def _judge_tag(self, node: yaml.Node, wanted: str) -> None:
        if node.tag != _CORE + wanted:
            shown = "!!" + node.tag.removeprefix(_CORE) if _CORE in node.tag else node.tag
            self._flaw(node, f"the tag {clean_line(shown)} is not understood here; leave it out")

    def _flaw(self, node: yaml.Node, text: str) -> None:
        self._document.flaws.append(Flaw(*_place(node), text))


def _place(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
