"""Reads YAML (its core schema) or JSON into plain values, with the line of each value.

Rules:
- One pass over the parser's events with a stack of our own: nesting can't exhaust the C stack.
- YAML 1.2's core types only: `no`, `12:30` and `2024-01-01` are strings, as people mean them.
- Aliases are allowed and their expansion is counted: a "billion laughs" document is refused.
- Duplicate keys, NUL and lone surrogates are problems with a place, never a surprise later on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import yaml

from .problems import DocumentError, DocumentProblem, Path, Problems, pointer

DOCUMENT_BYTES_MAX = 16 * 2**20
DEPTH_MAX = 40
LINES_CHARS_MAX = 32 * 2**20  # total length of the places whose lines are remembered
NODES_MAX = 1_000_000
HARMLESS_CHARS_MAX = 4096
KEY_PROBLEM = "a key must be text, not a list or a mapping"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,5})?")
_CONSTANTS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_BAD_TEXT = re.compile("[\x00\ud800-\udfff]")


def read(text: str | bytes, json_only: bool = False) -> tuple[Any, dict[str, int]]:
    """The document's value, and the line of each place in it (YAML only)."""
    size = len(text)
    if size > DOCUMENT_BYTES_MAX:
        raise _whole(f"too large: {size:,} bytes; the limit is {DOCUMENT_BYTES_MAX:,}")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _whole(f"not UTF-8 text: byte {error.start} is invalid") from None
    if not text.strip():
        raise _whole("the document is empty")
    if json_only or text.lstrip()[:1] == "{":
        try:
            return _read_json(text), {}
        except _NotJson as error:
            if json_only:
                raise _whole(f"not valid JSON: {error}") from None
    return _YamlReader().read(text)


def _whole(message: str, line: int | None = None) -> DocumentError:
    return DocumentError((DocumentProblem("", message, line),))


class _NotJson(ValueError):
    pass


def _read_json(text: str) -> Any:
    duplicates: list[str] = []

    def mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) != len(pairs):
            seen: set[str] = set()
            duplicates.extend(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return value

    def refuse(name: str) -> Any:
        raise _NotJson(f"{name} is not a number")

    try:
        value = json.loads(text, object_pairs_hook=mapping, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise _NotJson(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _whole(f"nested deeper than {DEPTH_MAX} levels") from None
    except ValueError as error:  # a number of thousands of digits
        raise _NotJson(str(error)) from None
    problems = Problems()
    for key in duplicates:
        problems.add((), f"duplicate key {key!r} in one object")
    if not _is_harmless(text):
        _check(value, problems)
    problems.check()
    return value


#: a number without these is not too large
_EXPONENT = re.compile(r"\d([eE]|\d{299})")


def _is_harmless(text: str) -> bool:
    """True if this JSON is so short and simple that `_check` would find nothing in it: without
    escapes, JSON has no control characters."""
    return (
        len(text) <= HARMLESS_CHARS_MAX
        and text.isascii()
        and "\\" not in text
        and text.count("{") + text.count("[") <= DEPTH_MAX
        and _EXPONENT.search(text) is None
    )


def _check(value: Any, problems: Problems) -> None:
    """Depth, count, and strings that no file system or process can take."""
    stack: list[tuple[Path, Any]] = [((), value)]
    nodes = 0
    while stack:
        path, node = stack.pop()
        nodes += 1
        if len(path) > DEPTH_MAX:
            raise _whole(f"nested deeper than {DEPTH_MAX} levels")
        if isinstance(node, dict):
            stack.extend(_children(node, path, problems))
        elif isinstance(node, list):
            stack.extend(((*path, i), child) for i, child in enumerate(node))
        else:
            _check_scalar(node, path, problems)
    if nodes > NODES_MAX:
        raise _whole(f"too many values: {nodes:,}; the limit is {NODES_MAX:,}")


def _check_scalar(value: Any, path: Path, problems: Problems) -> None:
    if isinstance(value, str) and _BAD_TEXT.search(value):
        problems.add(path, "the text contains a NUL or half a surrogate pair")
    elif isinstance(value, float) and not math.isfinite(value):
        problems.add(path, "the number is too large")


def _children(
    mapping: dict[str, Any], path: Path, problems: Problems
) -> Iterator[tuple[Path, Any]]:
    for key, child in mapping.items():
        if _BAD_TEXT.search(key):
            problems.add(path, f"the key {key!r} contains a character that is not allowed")
        else:
            yield (*path, key), child


def scalar(text: str, plain: bool) -> Any:
    if not plain:
        return text
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Open:
    """A mapping or sequence whose end has not been read yet."""

    def __init__(self, value: Any, path: Path, anchor: str | None, before: int) -> None:
        self.value = value
        self.path = path
        self.anchor = anchor
        self.nodes_before = before
        self.key: str | None = None
        self.duplicate = False


class _YamlReader:
    def __init__(self) -> None:
        self.lines: dict[str, int] = {}
        self.lines_left = LINES_CHARS_MAX
        self.problems = Problems(self.lines)
        self.stack: list[_Open] = []
        self.anchors: dict[str, tuple[Any, int]] = {}
        self.nodes = 0
        self.roots: list[Any] = []

    def read(self, text: str) -> tuple[Any, dict[str, int]]:
        try:
            for event in yaml.parse(text, Loader=_Loader):
                self._event(event)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = error.problem or error.context or "it can't be parsed"
            raise _whole(f"not valid YAML: {reason}", mark.line + 1 if mark else None) from None
        except yaml.YAMLError as error:
            raise _whole(f"not valid YAML: {str(error).splitlines()[0]}") from None
        if len(self.roots) != 1:
            raise _whole(f"expected one YAML document, but there are {len(self.roots)}")
        _check(self.roots[0], self.problems)
        self.problems.check()
        return self.roots[0], self.lines

    def _event(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _whole(f"no anchor above defines the alias *{event.anchor}", line)
            value, nodes = self.anchors[event.anchor]
            self._count(nodes)
            self._put(value, line)
        elif isinstance(event, yaml.ScalarEvent):
            self._scalar(event, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._begin(event, line)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self.stack.pop()
            if done.anchor:
                self.anchors[done.anchor] = (done.value, self.nodes - done.nodes_before + 1)
            self._put(done.value, None)

    def _scalar(self, event: Any, line: int) -> None:
        self._count(1)
        # implicit is (plain resolves by type, quoted resolves to text)
        plain = not event.style and event.tag is None and event.implicit[0]
        if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
            self.problems.add(self._path(), f"the tag {event.tag} is not supported", line)
        value = scalar(event.value, plain)
        if event.anchor:
            self.anchors[event.anchor] = (value, 1)
        self._put(value, line)

    def _begin(self, event: Any, line: int) -> None:
        self._count(1)
        if len(self.stack) >= DEPTH_MAX:
            raise _whole(f"nested deeper than {DEPTH_MAX} levels", line)
        if event.tag not in (None, "!"):
            self.problems.add(self._path(), f"the tag {event.tag} is not supported", line)
        top = self.stack[-1] if self.stack else None
        if top and isinstance(top.value, dict) and top.key is None:
            raise _whole(KEY_PROBLEM, line)
        path = self._path()
        self._note(path, line)
        value: Any = {} if isinstance(event, yaml.MappingStartEvent) else []
        self.stack.append(_Open(value, path, event.anchor, self.nodes))

    def _count(self, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > NODES_MAX:
            raise _whole(f"more than {NODES_MAX:,} values with aliases expanded")

    def _note(self, path: Path, line: int) -> None:
        """Remembers a value's line, within a limit: long keys above many values could make the
        places much larger than the text."""
        if self.lines_left > 0:
            place = pointer(path)
            self.lines_left -= len(place)
            self.lines.setdefault(place, line)

    def _path(self) -> Path:
        if not self.stack:
            return ()
        top = self.stack[-1]
        if isinstance(top.value, list):
            return (*top.path, len(top.value))
        return (*top.path, top.key) if top.key is not None else top.path

    def _put(self, value: Any, line: int | None) -> None:
        if not self.stack:
            self.roots.append(value)
            return
        top = self.stack[-1]
        if isinstance(top.value, list):
            if line:
                self._note(self._path(), line)
            top.value.append(value)
        elif top.key is None:
            self._key(top, value, line)
        else:
            if not top.duplicate:
                top.value[top.key] = value
            top.key = None

    def _key(self, top: _Open, value: Any, line: int | None) -> None:
        if isinstance(value, dict | list):
            raise _whole(KEY_PROBLEM, line)
        key = value if isinstance(value, str) else _key_text(value)
        top.duplicate = key in top.value
        if top.duplicate:
            self.problems.add((*top.path, key), f"duplicate key {key!r}", line)
        elif line:
            self._note((*top.path, key), line)
        top.key = key


_key_text: Callable[[Any], str] = lambda value: "null" if value is None else str(value).lower()  # noqa: E731
