"""Chord, in the place of Kademlia: a ring over the same ids, messages and calls.

A key belongs to the peers that follow it on the circle of ids. A peer knows the peers that follow
it (its successors), those before it (its predecessors), and for each doubling distance the first
peers from there on (its fingers). A lookup goes on to the known peer closest before the key, which
is at least half of the way each time, until the key's own predecessor has named its successors.

Stabilisation: a peer asks its first successor for the peers between them, and now and then looks up
the start of a finger. Members known to be dead leave at once, as in Kademlia.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable

from ..wire.messages import ID_BYTES, Contact, FindPeers, FoundPeers
from ..wire.rpc import CallFailed
from .kademlia import Overlay, Routes, Way
from .table import STRIKES_MAX

SIZE = 1 << 8 * ID_BYTES
NEAR = 8  # successors, and predecessors
FINGERS = 2  # for each doubling distance
SLACK = 32  # contacts beyond those that stay, before the rest is pruned
PRECEDING = 3  # of the contacts in an answer; the others follow the key


def clockwise(start: bytes, end: bytes) -> int:
    """The distance from one id to the other, in the direction of rising ids."""
    return (int.from_bytes(end, "big") - int.from_bytes(start, "big")) % SIZE


class Circle:
    """The peers that a peer knows on the ring: what `table.Table` is for Kademlia."""

    def __init__(self, me: bytes) -> None:
        self._me = int.from_bytes(me, "big")
        self._contacts: dict[int, Contact] = {}  # by their clockwise distance from this peer
        self._ways: list[int] = []  # the distances, sorted
        self._limit = 2 * NEAR + SLACK
        self._strikes: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._contacts)

    def __contains__(self, peer: bytes) -> bool:
        return self._way(peer) in self._contacts

    def _way(self, peer: bytes) -> int:
        return (int.from_bytes(peer, "big") - self._me) % SIZE

    def contacts(self) -> list[Contact]:
        return [self._contacts[way] for way in self._ways]

    def successors(self) -> list[Contact]:
        return [self._contacts[way] for way in self._ways[:NEAR]]

    def touch(self, contact: Contact) -> bool:
        if self._contacts.get(self._way(contact.id)) != contact:
            return False
        if self._strikes:
            self._strikes.pop(contact.id, None)
        return True

    def saw(self, contact: Contact) -> None:
        """A sign of life."""
        way = self._way(contact.id)
        if not way or not contact.port:
            return
        if way not in self._contacts:
            insort(self._ways, way)
        self._contacts[way] = contact
        self._strikes.pop(contact.id, None)
        if len(self._ways) > self._limit:
            self._prune()

    def _prune(self) -> None:
        """Keep the nearest on both sides, and the fingers."""
        ways = self._ways
        kept = {*ways[:NEAR], *ways[-NEAR:]}
        taken = [0] * (8 * ID_BYTES)
        for way in ways:
            doubling = way.bit_length() - 1
            if taken[doubling] < FINGERS:
                taken[doubling] += 1
                kept.add(way)
        self._ways = sorted(kept)
        self._contacts = {way: self._contacts[way] for way in self._ways}
        self._limit = len(kept) + SLACK

    def missed(self, peer: bytes) -> None:
        """A call that got no answer."""
        if peer in self:
            self._strikes[peer] = self._strikes.get(peer, 0) + 1
            if self._strikes[peer] >= STRIKES_MAX:
                self.remove(peer)

    def remove(self, peer: bytes) -> None:
        self._strikes.pop(peer, None)
        way = self._way(peer)
        if self._contacts.pop(way, None) is not None:
            del self._ways[bisect_left(self._ways, way)]

    def closest(self, target: bytes, count: int, without: Collection[bytes] = ()) -> list[Contact]:
        """The peers that follow the target, the nearest first."""
        return self._nearest(self._way(target), 1, count, without)

    def preceding(
        self, target: bytes, count: int, without: Collection[bytes] = ()
    ) -> list[Contact]:
        """The peers before the target, the nearest first; one exactly at it follows it."""
        return self._nearest((self._way(target) - 1) % SIZE, -1, count, without)

    def _nearest(
        self, start: int, sign: int, count: int, without: Collection[bytes]
    ) -> list[Contact]:
        near = heapq.nsmallest(
            count + len(without), [sign * (way - start) % SIZE for way in self._ways]
        )
        contacts = [self._contacts[(start + sign * far) % SIZE] for far in near]
        return [contact for contact in contacts if contact.id not in without][:count]

    def is_among_closest(self, peer: bytes, target: bytes, count: int) -> bool:
        if peer not in self:
            return False
        start = self._way(target)
        limit = (self._way(peer) - start) % SIZE
        return sum((way - start) % SIZE < limit for way in self._ways) < count


class RingLookup:
    """One lookup, like `lookup.Lookup`: `next`, `answered`, `failed`; no network in it.

    It first moves on to the key's predecessor. When that has answered, the peers that follow the
    key are asked: this shows that they are alive, and they know each other. The lookup ends when
    the first `wanted` of them have answered."""

    def __init__(
        self, target: bytes, start: Iterable[Contact], wanted: int, width: int, calls_max: int
    ) -> None:
        self.target = target
        self._wanted = wanted
        self._width = width
        self._calls_left = calls_max
        self._before: list[tuple[int, Contact]] = []  # the nearest first
        self._after: list[tuple[int, Contact]] = []
        self._known: set[bytes] = set()
        self._asked: set[bytes] = set()
        self._answered: set[bytes] = set()
        self._failed: set[bytes] = set()
        self._learn(start)

    def _learn(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            if contact.id in self._failed or contact.id in self._known:
                continue
            self._known.add(contact.id)
            way = clockwise(self.target, contact.id)
            insort(self._after, (way, contact))
            if way:
                insort(self._before, (SIZE - way, contact))

    def next(self) -> list[Contact]:
        waiting = len(self._asked) - len(self._answered) - len(self._failed)
        room = max(0, min(self._width - waiting, self._calls_left))
        wanted = self._closing() if self._arrived() else [c for _, c in self._before[: self._width]]
        fresh = [c for c in wanted if c.id not in self._asked][:room]
        self._asked.update(c.id for c in fresh)
        self._calls_left -= len(fresh)
        return fresh

    def _arrived(self) -> bool:
        """Whether the key's predecessor has answered, as far as it is known."""
        return not self._before or self._before[0][1].id in self._answered

    def _closing(self) -> list[Contact]:
        """The owners of the key, as far as they are known."""
        return [contact for _, contact in self._after[: self._wanted]]

    def answered(self, peer: bytes, contacts: Iterable[Contact]) -> None:
        self._answered.add(peer)
        self._learn(contacts)

    def failed(self, peer: bytes) -> None:
        self._failed.add(peer)
        self._before = [row for row in self._before if row[1].id != peer]
        self._after = [row for row in self._after if row[1].id != peer]

    @property
    def over(self) -> bool:
        if self._arrived() and all(c.id in self._answered for c in self._closing()):
            return True
        waiting = len(self._asked) > len(self._answered) + len(self._failed)
        return self._calls_left <= 0 and not waiting

    def result(self) -> list[Contact]:
        return [c for c in self._closing() if c.id in self._answered]


def follows(peer: bytes, key: bytes) -> int:
    """How far a peer is behind a key: the first that follow it are its owners."""
    return clockwise(key, peer)


class Ring(Overlay):
    far = staticmethod(follows)

    def _make_table(self) -> Routes:
        self._circle = Circle(self._rpc.me.id)
        return self._circle

    @property
    def circle(self) -> Circle:
        self._sort()
        return self._circle

    def _make_lookup(self, target: bytes, count: int) -> Way:
        table = self.circle
        width = self._config.lookup_width
        start = [*table.preceding(target, width), *table.closest(target, count)]
        return RingLookup(target, start, count, width, self._config.lookup_calls_max)

    def _find_peers(self, sender: Contact, message: FindPeers) -> FoundPeers:
        table = self.circle
        without = (sender.id,)
        before = table.preceding(message.target, PRECEDING, without)
        after = table.closest(message.target, NEAR - PRECEDING, without)
        return FoundPeers(contacts=tuple(dict.fromkeys((*before, *after))))

    async def refresh(self) -> None:
        """Fill the ring near and far, and keep it up to date. Runs for ever."""
        bits = 8 * ID_BYTES
        while True:
            await self.find(self._rpc.me.id)
            distance = 1 << self._rng.randrange(bits - bits // 8, bits)
            start = (int.from_bytes(self._rpc.me.id, "big") + distance) % SIZE
            await self.find(start.to_bytes(ID_BYTES, "big"))
            end = self._now() + self._config.refresh_s * (0.75 + 0.5 * self._rng.random())
            while self._now() < end:
                await asyncio.sleep(self._config.stabilise_s * (0.75 + 0.5 * self._rng.random()))
                await self._stabilise()

    async def _stabilise(self) -> None:
        """Ask the first successor for the peers between it and this one, and for its successors."""
        table = self.circle
        for successor in table.successors()[:1]:
            ask = FindPeers(target=self._rpc.me.id)
            try:
                limit_s = self._config.lookup_timeout_s
                answer = await self._rpc.call(successor, ask, FoundPeers, limit_s)
            except CallFailed:
                self.table.missed(successor.id)
                return
            for contact in answer.contacts:
                if contact.id != self._rpc.me.id and contact.id not in table:
                    await self._greet(contact)

    async def _greet(self, contact: Contact) -> None:
        """Take in a contact if it answers."""
        ask = FindPeers(target=self._rpc.me.id)
        try:
            await self._rpc.call(contact, ask, FoundPeers, self._config.lookup_timeout_s)
        except CallFailed:
            return
        self.saw(contact)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
