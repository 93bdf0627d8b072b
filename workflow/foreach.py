"""`foreach`: one template → one task for each item, with the item in all its texts.

Only the exact words `{item}` (or `{name}` of a named list) are replaced: a shell's and awk's own
braces stay as they are. A text that is nothing but the placeholder becomes the item itself, so
that numbers reach calls as numbers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from .names import item_name
from .problems import Path, Problems
from .schema import TASKS_MAX

_VARIABLE = re.compile(r"[A-Za-z_]\w{0,50}")


def items(
    foreach: list[Any] | dict[str, Any] | int, path: Path, problems: Problems
) -> list[tuple[str, dict[str, Any]]]:
    """For each task of the template: what stands in its id's brackets, and its variables."""
    if isinstance(foreach, int):
        if isinstance(foreach, bool) or not 1 <= foreach <= TASKS_MAX:
            problems.add(path, f"a number of tasks lies between 1 and {TASKS_MAX:,}")
            return []
        return [(str(i), {"item": i}) for i in range(foreach)]
    if isinstance(foreach, list):
        return _listed(foreach, path, problems)
    return _combined(foreach, path, problems)


def _listed(found: list[Any], path: Path, problems: Problems) -> list[tuple[str, dict[str, Any]]]:
    if not found:
        problems.add(path, "an empty list makes no task")
    seen: dict[str, int] = {}
    made = []
    for index, item in enumerate(found):
        if not isinstance(item, str | int | float):
            problems.add((*path, index), "an item is a text or a number")
            continue
        name = item_name(item, index)
        if name in seen:
            problems.add((*path, index), f"the item {item!r} stands at {seen[name]} already")
            continue
        seen[name] = index
        made.append((name, {"item": item}))
    return made


def _combined(
    found: dict[str, Any], path: Path, problems: Problems
) -> list[tuple[str, dict[str, Any]]]:
    lists: list[list[tuple[str, Any]]] = []
    count = 1
    for variable, values in found.items():
        if not _VARIABLE.fullmatch(variable):
            problems.add((*path, variable), "a variable's name is made of letters, digits and '_'")
        if not isinstance(values, list):
            problems.add((*path, variable), "a named foreach has a list of items for each name")
            continue
        lists.append(
            [(name, vars_["item"]) for name, vars_ in _listed(values, (*path, variable), problems)]
        )
        count *= max(1, len(values))
    if not found:
        problems.add(path, "a named foreach has at least one name")
    if count > TASKS_MAX:
        problems.add(path, f"{count:,} combinations; at most {TASKS_MAX:,} tasks are read")
    if not found or count > TASKS_MAX or len(lists) != len(found):
        return []
    return [
        (
            ",".join(f"{k}={name}" for k, (name, _) in zip(found, row, strict=True)),
            {k: value for k, (_, value) in zip(found, row, strict=True)},
        )
        for row in itertools.product(*lists)
    ]


@lru_cache(100)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape("{" + v + "}") for v in names) if names else "(?!)")


class Substitution:
    """Replaces placeholders in every text of a value. `spend` is told how many characters were
    made, before there are many: a long item in many places is a short document and a huge task."""

    def __init__(
        self, variables: Mapping[str, Any], spend: Callable[[int], None] = lambda made: None
    ) -> None:
        self._variables = variables
        self._pattern = _pattern(tuple(variables))
        self._spend = spend

    def text(self, text: str) -> str:
        if "{" not in text:
            return text
        found = [str(self._variables[m[1:-1]]) for m in self._pattern.findall(text)]
        if not found:
            return text
        self._spend(len(text) + sum(map(len, found)))
        filled = iter(found)
        return self._pattern.sub(lambda m: next(filled), text)

    def texts(self, found: list[str]) -> tuple[str, ...]:
        return tuple(map(self.text, found))

    def value(self, value: Any) -> Any:
        if isinstance(value, str):
            if "{" not in value:
                return value
            if self._pattern.fullmatch(value):
                return self._variables[value[1:-1]]
            return self.text(value)
        if isinstance(value, list):
            return [self.value(v) for v in value]
        if isinstance(value, dict):
            return {k: self.value(v) for k, v in value.items()}
        return value


def references(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every `{result: …}` inside a call's arguments, with its place."""
    if isinstance(value, dict):
        if set(value) == {"result"}:
            yield (*path, "result"), value["result"]
        else:
            for key, child in value.items():
                yield from references(child, (*path, key))
    elif isinstance(value, list | tuple):
        for index, child in enumerate(value):
            yield from references(child, (*path, index))
