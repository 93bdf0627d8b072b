"""Owners who wait share what there is: whoever got least goes next.

Start-time fair queueing. Each owner that waits has an account of the core-seconds it was given
while it waited; the one with the least is served next. Who begins to wait begins where the others
stand: nobody saves up while idle, and nobody who comes late is owed the past. With one owner only
there is nothing to choose, and it costs nothing.

(An owner's weight would divide what is put on its account; a group's account would be one more of
these above its members'.)
"""

from __future__ import annotations

from collections.abc import Iterable

OWNERS_MAX = 10_000


class Shares:
    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._waiting: dict[str, int] = {}
        self._floor = 0.0  # where who comes begins

    @property
    def contended(self) -> bool:
        """More than one owner waits."""
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
        """Just these wait now."""
        for owner in self._waiting.keys() - owners:
            self.leaves(owner, self._waiting[owner])
        for owner in owners - self._waiting.keys():
            self.waits(owner)

    def give(self, owner: str, core_seconds: float) -> None:
        """It was served; what it has been given counts from where all stood."""
        before = self._given.get(owner, self._floor)
        self._given[owner] = before + core_seconds
        self._floor = max(self._floor, min(self._given.values()))
        if owner not in self._waiting:
            del self._given[owner]

    def given(self, owner: str) -> float:
        return self._given.get(owner, self._floor)

    def next(self, owners: Iterable[str]) -> str:
        """Of these, the one that got least."""
        return min(owners, key=self.given)
