"""Fair shares of one peer among owners: those who were refused there take turns. Pure.

An owner may have many homes, and each knows only the units that wait there. The peer itself counts
too, so that an owner who submits at three peers does not get three times as much. While an owner
that was refused is still expected to ask again, another owner that holds more of this peer gets no
more. The refused owner's home is told when there is free capacity, and has a moment to ask; then
the peer stops waiting for it. With a single owner there is nothing to count or to hold back.
"""

from __future__ import annotations

import math

from ..wire.messages import Capacity
from .matching import slots

OWNERS_MAX = 1000


class Turns:
    def __init__(self, patience_s: float, answer_s: float) -> None:
        self._patience_s = patience_s  # how long a refused owner is expected to ask again
        self._answer_s = answer_s  # and once its home was told of free capacity
        self._wanting: dict[
            str, tuple[float, Capacity]
        ] = {}  # refused owners: until when, and their needs
        self._forget_at = math.inf  # no refused owner is to be forgotten earlier
        self._held: dict[str, int] = {}  # millicores of each owner that holds any

    def count(self, owner: str | None, millicores: int) -> None:
        """The owner holds so much more, or less."""
        if owner is None:
            return
        held = self._held.get(owner, 0) + millicores
        if held:
            self._held[owner] = held
        else:
            self._held.pop(owner, None)

    def held(self, owner: str | None) -> int:
        return 0 if owner is None else self._held.get(owner, 0)

    def most(self, owner: str | None, millicores: int, free: Capacity, now: float) -> int | None:
        """How many units of that size an owner may have now; None: as many as fit. Nothing is kept
        for an owner that could not use the free capacity."""
        if owner is None or not self._wanting:
            return None
        self.forget(now)
        others = (o for o, (_, needs) in self._wanting.items() if o != owner and slots(free, needs))
        least = min(map(self.held, others), default=None)
        if least is None:
            return None
        return max(0, (least - self.held(owner)) // max(1, millicores) + 1)

    def refused(self, owner: str | None, needs: Capacity, now: float) -> None:
        if owner is not None and (owner in self._wanting or len(self._wanting) < OWNERS_MAX):
            self._wanting[owner] = until, _ = now + self._patience_s, needs
            self._forget_at = min(self._forget_at, until)

    def served(self, owner: str | None) -> None:
        if owner is not None:
            self._wanting.pop(owner, None)

    def told(self, owner: str | None, now: float) -> None:
        if owner in self._wanting:
            until, needs = self._wanting[owner]
            until = min(until, now + self._answer_s)
            self._wanting[owner] = until, needs
            self._forget_at = min(self._forget_at, until)

    @property
    def contended(self) -> bool:
        return len(self._wanting) > 1

    def next_at(self) -> float:
        """When this peer next stops waiting for an owner."""
        return min((until for until, _ in self._wanting.values()), default=math.inf)

    def forget(self, now: float) -> None:
        if self._forget_at <= now:
            self._wanting = {o: row for o, row in self._wanting.items() if row[0] > now}
            self._forget_at = self.next_at()
