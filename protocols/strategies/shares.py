"""Fair sharing among owners: of those that wait, the one that got least goes next.

This is start-time fair queueing. Each waiting owner has an account of the core-seconds it was given
while it waited; the owner with the least is served next. An owner that starts to wait starts level
with the others: an idle owner saves nothing up, and a late one is owed nothing for the past. With a
single owner there is nothing to choose, and no cost.

(To give an owner a weight, divide its core-seconds by it before they are added; to account for a
group of owners, put one more such account above those of its members.)
"""

from __future__ import annotations

from collections.abc import Iterable

OWNERS_MAX = 10_000


class Shares:
    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._floor = 0.0  # where the account of a new owner starts

    @property
    def contended(self) -> bool:
        """More than one owner is waiting."""
        return len(self._waiting) > 1

    @property
    def owners(self) -> int:
        return len(self._waiting)

    def waits(self, owner: str, count: int = 1) -> None:
        if owner not in self._waiting and len(self._waiting) < OWNERS_MAX:
            self._given[owner] = self._floor
        self._waiting[owner] = self._waiting.get(owner, 0) + count

    def leaves(self, owner: str, count: int = 1) -> None:
        left = self._waiting.get(owner, 0) - count
        if left > 0:
            self._waiting[owner] = left
        else:
            self._waiting.pop(owner, None)
            self._given.pop(owner, None)

    def only(self, owners: set[str]) -> None:
        """Exactly these owners are waiting now."""
        for owner in self._waiting.keys() - owners:
            self.leaves(owner, self._waiting[owner])
        for owner in owners - self._waiting.keys():
            self.waits(owner)

    def give(self, owner: str, core_seconds: float) -> None:
        """The owner was served: adds to its account, and raises the level at which others start."""
        before = self._given.get(owner, self._floor)
        self._given[owner] = before + core_seconds
        self._floor = max(self._floor, min(self._given.values()))
        if owner not in self._waiting:
            del self._given[owner]

    def given(self, owner: str) -> float:
        return self._given.get(owner, self._floor)

    def next(self, owners: Iterable[str]) -> str:
        """The one of these owners that got least."""
        return min(owners, key=self.given)
