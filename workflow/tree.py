"""Text → plain values with their lines. YAML's core schema and JSON, bounded and repeatable.

Rules:
- One pass over the parser's events with a stack of our own: nesting can't exhaust the C stack.
- YAML 1.2's core types only: `no`, `12:30` and `2024-01-01` are strings, as people mean them.
- Aliases are allowed and their expansion is counted: a "billion laughs" document is refused.
- Doubled keys, NUL and lone surrogates are problems with a place, never a surprise further on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import yaml

from .problems import DocumentError, DocumentProblem, Path, Problems, pointer

DOCUMENT_BYTES_MAX = 16 * 2**20
DEPTH_MAX = 40
LINES_CHARS_MAX = 32 * 2**20  # of all places whose line is remembered
NODES_MAX = 1_000_000

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT = re.compile(r"[-+]?[0-9]{1,40}")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]{1,5})?")
_BAD_TEXT = re.compile("[\x00\ud800-\udfff]")


def read(text: str | bytes, json_only: bool = False) -> tuple[Any, dict[str, int]]:
    """The document's value, and the line of each place in it (YAML only)."""
    size = len(text)
    if size > DOCUMENT_BYTES_MAX:
        raise _whole(f"{size:,} bytes; at most {DOCUMENT_BYTES_MAX:,} are read")
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise _whole(f"not UTF-8 text: byte {error.start} can't be read") from None
    if not text.strip():
        raise _whole("empty")
    if json_only or text.lstrip()[:1] == "{":
        try:
            return _read_json(text), {}
        except _NotJson as error:
            if json_only:
                raise _whole(f"not JSON: {error}") from None
    return _YamlReader().read(text)


def _whole(message: str, line: int | None = None) -> DocumentError:
    return DocumentError((DocumentProblem("", message, line),))


class _NotJson(ValueError):
    pass


def _read_json(text: str) -> Any:
    doubled: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(found)
        if len(value) != len(found):
            seen: set[str] = set()
            doubled.extend(k for k, _ in found if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return value

    def refuse(name: str) -> Any:
        raise _NotJson(f"{name} is not a number")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise _NotJson(f"{error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise _whole(f"nested deeper than {DEPTH_MAX}") from None
    except ValueError as error:  # a number of thousands of digits
        raise _NotJson(str(error)) from None
    problems = Problems()
    for key in doubled:
        problems.add((), f"the key {key!r} stands twice in one object")
    _check(value, problems)
    problems.check()
    return value


def _check(value: Any, problems: Problems) -> None:
    """Depth, count, and strings that no file system or process can take."""
    stack: list[tuple[Path, Any]] = [((), value)]
    nodes = 0
    while stack:
        path, node = stack.pop()
        nodes += 1
        if len(path) > DEPTH_MAX:
            raise _whole(f"nested deeper than {DEPTH_MAX}")
        if isinstance(node, dict):
            for key, child in node.items():
                if _BAD_TEXT.search(key):
                    problems.add(path, f"the key {key!r} has a character that can't be used")
                else:
                    stack.append(((*path, key), child))
        elif isinstance(node, list):
            stack.extend(((*path, i), child) for i, child in enumerate(node))
        elif isinstance(node, str) and _BAD_TEXT.search(node):
            problems.add(path, "the text has a NUL or half a surrogate pair in it")
        elif isinstance(node, float) and not math.isfinite(node):
            problems.add(path, "the number is too large")
    if nodes > NODES_MAX:
        raise _whole(f"{nodes:,} values; at most {NODES_MAX:,} are read")


def scalar(text: str, plain: bool) -> Any:
    if not plain:
        return text
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


class _Open:
    """A mapping or sequence whose end has not come yet."""

    def __init__(self, value: Any, path: Path, anchor: str | None, before: int) -> None:
        self.value = value
        self.path = path
        self.anchor = anchor
        self.nodes_before = before
        self.key: str | None = None
        self.doubled = False


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
            what = error.problem or error.context or "it can't be parsed"
            raise _whole(f"not YAML: {what}", mark.line + 1 if mark else None) from None
        except yaml.YAMLError as error:
            raise _whole(f"not YAML: {str(error).splitlines()[0]}") from None
        if len(self.roots) != 1:
            raise _whole(f"{len(self.roots)} YAML documents in one text; one is expected")
        _check(self.roots[0], self.problems)
        self.problems.check()
        return self.roots[0], self.lines

    def _event(self, event: Any) -> None:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.anchors:
                raise _whole(f"the alias *{event.anchor} names no anchor above it", line)
            value, nodes = self.anchors[event.anchor]
            self._count(nodes)
            self._put(value, line)
        elif isinstance(event, yaml.ScalarEvent):
            self._count(1)
            # implicit is (plain resolves by type, quoted resolves to text)
            plain = not event.style and event.tag is None and event.implicit[0]
            if event.tag not in (None, "!", "tag:yaml.org,2002:str"):
                self.problems.add(self._path(), f"the tag {event.tag} is not read", line)
            value = scalar(event.value, plain)
            if event.anchor:
                self.anchors[event.anchor] = (value, 1)
            self._put(value, line)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._count(1)
            if len(self.stack) >= DEPTH_MAX:
                raise _whole(f"nested deeper than {DEPTH_MAX}", line)
            mapping = isinstance(event, yaml.MappingStartEvent)
            if event.tag not in (None, "!"):
                self.problems.add(self._path(), f"the tag {event.tag} is not read", line)
            top = self.stack[-1] if self.stack else None
            if top and isinstance(top.value, dict) and top.key is None:
                raise _whole("a key is a text, not a list or a mapping", line)
            path = self._path()
            self._note(path, line)
            self.stack.append(_Open({} if mapping else [], path, event.anchor, self.nodes))
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            done = self.stack.pop()
            if done.anchor:
                self.anchors[done.anchor] = (done.value, self.nodes - done.nodes_before + 1)
            self._put(done.value, None)

    def _count(self, nodes: int) -> None:
        self.nodes += nodes
        if self.nodes > NODES_MAX:
            raise _whole(f"more than {NODES_MAX:,} values, aliases written out")

    def _note(self, path: Path, line: int) -> None:
        """Where a value is; long keys above many values must not become much more than the text."""
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
            if not top.doubled:
                top.value[top.key] = value
            top.key = None

    def _key(self, top: _Open, value: Any, line: int | None) -> None:
        if isinstance(value, dict | list):
            raise _whole("a key is a text, not a list or a mapping", line)
        key = value if isinstance(value, str) else _key_text(value)
        top.doubled = key in top.value
        if top.doubled:
            self.problems.add((*top.path, key), f"the key {key!r} stands twice", line)
        elif line:
            self._note((*top.path, key), line)
        top.key = key


_key_text: Callable[[Any], str] = lambda value: "null" if value is None else str(value).lower()  # noqa: E731
