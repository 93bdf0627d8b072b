"""The problems of a document, collected and raised together, each with its place.

A place is a JSON pointer (RFC 6901) into the document, such as `/tasks/count/inputs/0`. In YAML it
comes with the line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Path = tuple[str | int, ...]

#: more problems than this help nobody: the rest are only counted
PROBLEMS_MAX = 100
TEXT_CHARS_MAX = 2000  # of a place, and of a message


@dataclass(frozen=True, slots=True)
class DocumentProblem:
    place: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = self.place or "the document"
        return f"{where}{f' (line {self.line})' if self.line else ''}: {self.message}"


class DocumentError(ValueError):
    """A document is invalid: all of its problems."""

    def __init__(self, problems: tuple[DocumentProblem, ...]) -> None:
        self.problems = problems
        super().__init__("; ".join(map(str, problems[:3])))


def pointer(path: Path) -> str:
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[: TEXT_CHARS_MAX - 1]}…"


class Problems:
    """Collects problems; `check()` raises them together."""

    def __init__(self, lines: Mapping[str, int] | None = None) -> None:
        self._lines = lines or {}
        self._problems: list[DocumentProblem] = []
        self._more = 0
        self._seen: set[tuple[str, str]] = set()

    def add(self, path: Path, message: str, line: int | None = None) -> None:
        place, message = _short(pointer(path)), _short(message)
        once = (place, message.partition(" (in ")[0])  # once for all tasks of a `foreach`
        if once in self._seen:
            return
        if len(self._problems) >= PROBLEMS_MAX:
            self._more += 1
            return
        self._seen.add(once)
        self._problems.append(DocumentProblem(place, message, line or self._line(path)))

    def _line(self, path: Path) -> int | None:
        # the nearest enclosing place whose line is known: a missing key has none of its own
        for end in range(len(path), -1, -1):
            line = self._lines.get(pointer(path[:end]))
            if line is not None:
                return line
        return None

    def __len__(self) -> int:
        return len(self._problems)

    def check(self) -> None:
        if not self._problems:
            return
        problems = list(self._problems)
        if self._more:
            problems.append(DocumentProblem("", f"and {self._more} more problems"))
        raise DocumentError(tuple(problems))
