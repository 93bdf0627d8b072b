"""`foreach` makes one task of a template for each item, with the item in all of its texts.

Only the exact placeholders `{item}` (or `{name}` of a named list) are replaced: the braces of a
shell or of awk stay as they are. A text that is nothing but the placeholder becomes the item
itself, so that numbers reach calls as numbers.
"""

from __future__ import annotations

import itertools
import math
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
    """For each task of the template: the text in the brackets of its id, and its variables."""
    if isinstance(foreach, int):
        if isinstance(foreach, bool) or not 1 <= foreach <= TASKS_MAX:
            problems.add(path, f"must be between 1 and {TASKS_MAX:,} tasks")
            return []
        return [(str(i), {"item": i}) for i in range(foreach)]
    if isinstance(foreach, list):
        return _listed(foreach, path, problems)
    return _combined(foreach, path, problems)


def _listed(values: list[Any], path: Path, problems: Problems) -> list[tuple[str, dict[str, Any]]]:
    if not values:
        problems.add(path, "an empty list makes no task")
    seen: dict[str, int] = {}
    made = []
    for index, item in enumerate(values):
        if not isinstance(item, str | int | float):
            problems.add((*path, index), "an item must be text or a number")
            continue
        name = item_name(item, index)
        if name in seen:
            problems.add((*path, index), f"duplicate item {item!r}: it is already at {seen[name]}")
            continue
        seen[name] = index
        made.append((name, {"item": item}))
    return made


def _combined(
    named: dict[str, Any], path: Path, problems: Problems
) -> list[tuple[str, dict[str, Any]]]:
    """Every combination of the named lists."""
    if not named:
        problems.add(path, "a named foreach must have at least one name")
        return []
    lists = [_named(variable, values, path, problems) for variable, values in named.items()]
    count = math.prod(max(1, len(v)) for v in named.values() if isinstance(v, list))
    if count > TASKS_MAX:
        problems.add(path, f"too many combinations: {count:,}; the limit is {TASKS_MAX:,} tasks")
        return []
    if not all(isinstance(values, list) for values in named.values()):
        return []
    return [_combination(named, row) for row in itertools.product(*lists)]


def _combination(
    named: dict[str, Any], row: tuple[tuple[str, Any], ...]
) -> tuple[str, dict[str, Any]]:
    return (
        ",".join(f"{k}={name}" for k, (name, _) in zip(named, row, strict=True)),
        {k: value for k, (_, value) in zip(named, row, strict=True)},
    )


def _named(variable: str, values: Any, path: Path, problems: Problems) -> list[tuple[str, Any]]:
    """The items of one named list, each with its name in ids."""
    place = (*path, variable)
    if not _VARIABLE.fullmatch(variable):
        problems.add(place, "a variable's name must consist of letters, digits and '_'")
    if not isinstance(values, list):
        problems.add(place, "a named foreach must have a list of items for each name")
        return []
    return [(name, variables["item"]) for name, variables in _listed(values, place, problems)]


@lru_cache(100)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape("{" + v + "}") for v in names) if names else "(?!)")


class Substitution:
    """Replaces placeholders in every text of a value. `spend` is called with the number of
    characters before they are made: a long item in many places is a short document and a huge
    task."""

    def __init__(
        self, variables: Mapping[str, Any], spend: Callable[[int], None] = lambda made: None
    ) -> None:
        self._variables = variables
        self._pattern = _pattern(tuple(variables))
        self._spend = spend

    def text(self, text: str) -> str:
        if "{" not in text:
            return text
        values = [str(self._variables[m[1:-1]]) for m in self._pattern.findall(text)]
        if not values:
            return text
        self._spend(len(text) + sum(map(len, values)))
        remaining = iter(values)
        return self._pattern.sub(lambda m: next(remaining), text)

    def texts(self, texts: list[str]) -> tuple[str, ...]:
        return tuple(map(self.text, texts)) if texts else ()

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
