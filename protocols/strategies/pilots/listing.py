"""The list of runnable tasks of a site, and its copies, which are updated by differences. Pure.

A version is a number of changes. A copy that is not too far behind gets the changes since its
version; any other copy gets the whole list.
"""

from __future__ import annotations

from collections.abc import Iterable

from .messages import Line

CHANGES_MAX = 20_000


class List:
    """The list of a master."""

    def __init__(self, first: int = 0) -> None:
        self.version = first
        self.lines: dict[int, Line] = {}
        self._changes: list[int] = []  # numbers of lines that came or went, one for each version
        self._first = first  # the version before the first change that is kept

    def put(self, line: Line) -> None:
        self.lines[line.number] = line
        self._changed(line.number)

    def drop(self, number: int) -> None:
        if self.lines.pop(number, None) is not None:
            self._changed(number)

    def _changed(self, number: int) -> None:
        self.version += 1
        self._changes.append(number)
        if len(self._changes) > CHANGES_MAX:
            cut = CHANGES_MAX // 2
            self._changes = self._changes[cut:]
            self._first += cut

    def since(self, version: int) -> tuple[int, tuple[Line, ...], tuple[int, ...]]:
        """The version that these changes are based on, the lines that came, and the numbers of
        those that went. Base 0: the whole list."""
        if version < self._first or version > self.version:
            return 0, tuple(self.lines.values()), ()
        changed = dict.fromkeys(self._changes[version - self._first :])
        came = tuple(self.lines[n] for n in changed if n in self.lines)
        return version, came, tuple(n for n in changed if n not in self.lines)


class Copy:
    """A pilot's copy of one master's list."""

    def __init__(self) -> None:
        self.version = 0
        self.lines: dict[int, Line] = {}
        self.heard_at: dict[int, float] = {}  # when a line came: its wait is counted from then on

    def follow(
        self, base: int, version: int, came: Iterable[Line], went: Iterable[int], now: float
    ) -> bool:
        """False if this copy is older than the base of these changes. Changes may arrive twice, or
        late."""
        if base > self.version:
            return False
        if version < self.version and base:
            return True
        if not base:
            self.lines.clear()
            self.heard_at.clear()
        for number in went:
            self.lines.pop(number, None)
            self.heard_at.pop(number, None)
        for line in came:
            self.lines[line.number] = line
            self.heard_at[line.number] = now
        self.version = version
        return True
