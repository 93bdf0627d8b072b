"""Whose turn it is at a peer's door: owners who were refused there hold equal parts of it. Pure.

An owner's homes may be many, and each knows only of the units that wait with it; so that whoever
submits at three peers does not get three times as much, the door counts, too. While an owner that
was refused is still expected to ask, another one that holds more of this peer gets no more. Its
home is told when there is room, and has a moment to ask: if it does not, it is waited for no
longer. With one owner only there is nothing to count, and nothing is held back.
"""

from __future__ import annotations

import math
from collections import Counter

from ..wire.messages import Capacity
from .matching import slots

OWNERS_MAX = 1000


class Turns:
    def __init__(self, patience_s: float, answer_s: float) -> None:
        self._patience_s = patience_s  # how long one that was refused is expected to ask again
        self._answer_s = answer_s  # and once its home was told that there is room
        self._wanting: dict[str, tuple[float, Capacity]] = {}  # until when, and what
        self._held: Counter[str] = Counter()  # thousandths of cores

    def count(self, owner: str | None, millicores: int) -> None:
        """It holds so much more, or less."""
        if owner is not None:
            self._held[owner] += millicores
            if not self._held[owner]:
                del self._held[owner]

    def held(self, owner: str | None) -> int:
        return 0 if owner is None else self._held[owner]

    def most(self, owner: str | None, millicores: int, free: Capacity, now: float) -> int | None:
        """How many units of that size it may have now; None: as many as there is room for. Nothing
        is kept for who could not use what is free."""
        if owner is None or not self._wanting:
            return None
        self.forget(now)
        others = (o for o, (_, needs) in self._wanting.items() if o != owner and slots(free, needs))
        least = min((self._held[o] for o in others), default=None)
        if least is None:
            return None
        return max(0, (least - self._held[owner]) // max(1, millicores) + 1)

    def refused(self, owner: str | None, needs: Capacity, now: float) -> None:
        if owner is not None and (owner in self._wanting or len(self._wanting) < OWNERS_MAX):
            self._wanting[owner] = now + self._patience_s, needs

    def served(self, owner: str | None) -> None:
        if owner is not None:
            self._wanting.pop(owner, None)

    def told(self, owner: str | None, now: float) -> None:
        if owner in self._wanting:
            until, needs = self._wanting[owner]
            self._wanting[owner] = min(until, now + self._answer_s), needs

    @property
    def contended(self) -> bool:
        return len(self._wanting) > 1

    def next_at(self) -> float:
        """When somebody is waited for no longer."""
        return min((until for until, _ in self._wanting.values()), default=math.inf)

    def forget(self, now: float) -> None:
        if self.next_at() <= now:
            self._wanting = {o: row for o, row in self._wanting.items() if row[0] > now}
