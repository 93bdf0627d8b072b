"""One Kademlia lookup, as a small object: `next`, `answered`, `failed`. No network in it.

It ends when the `wanted` closest peers that are known and have not failed have all answered: a few
owners are enough, not twenty. A peer that failed is never returned, and never comes back through
another peer's answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..wire.messages import Contact
from .table import distance


class Lookup:
    def __init__(
        self, target: bytes, start: Iterable[Contact], wanted: int, width: int, calls_max: int
    ) -> None:
        self.target = target
        self._wanted = wanted
        self._width = width
        self._calls_left = calls_max
        self._known: dict[bytes, Contact] = {c.id: c for c in start}
        self._asked: set[bytes] = set()
        self._answered: set[bytes] = set()
        self._failed: set[bytes] = set()

    def next(self) -> list[Contact]:
        """The peers to ask now; empty while enough are being asked, or when it is over."""
        waiting = len(self._asked) - len(self._answered) - len(self._failed)
        room = min(self._width - waiting, self._calls_left)
        # only the closest matter: asking a peer further away cannot change the result
        fresh = [c for c in self._best() if c.id not in self._asked][: max(0, room)]
        self._asked.update(c.id for c in fresh)
        self._calls_left -= len(fresh)
        return fresh

    def answered(self, peer: bytes, contacts: Iterable[Contact]) -> None:
        self._answered.add(peer)
        for contact in contacts:
            if contact.id not in self._failed:
                self._known.setdefault(contact.id, contact)

    def failed(self, peer: bytes) -> None:
        self._failed.add(peer)
        self._known.pop(peer, None)

    @property
    def over(self) -> bool:
        best = self._best()
        if all(c.id in self._answered for c in best):
            return True
        waiting = len(self._asked) > len(self._answered) + len(self._failed)
        return self._calls_left <= 0 and not waiting

    def result(self) -> list[Contact]:
        return [c for c in self._best() if c.id in self._answered]

    def _best(self) -> list[Contact]:
        ranked = sorted(self._known.values(), key=lambda c: distance(c.id, self.target))
        return ranked[: self._wanted]
