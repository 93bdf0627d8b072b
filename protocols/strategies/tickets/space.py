"""The index: a d-dimensional space of peers, in cells; and where a claim and a ticket meet.

After seed 004, section 3.3: a ticket is a point (what a peer is), a claim a range (what a task
needs), each cell has a control point that is hashed to an owner on the overlay, and whoever owns a
cell matches what meets there.

The mapping, and why what matches always meets:
- A ticket goes to the one cell its peer lies in, by what the peer *is* (its capacity when idle,
  speed, arch, os). What it has free at the moment is said in the ticket, and moves it nowhere: it
  is published often, so it costs one message; a claim stands for many units, and is posted once.
- A claim goes to every cell that a peer which meets its needs lies in, and to no other. Every peer
  knows all others (`members`), so these are computed, not guessed: cells that nobody lives in, most
  of the f_min^d, cost nothing. If peer p meets needs c, then cell(p) is among cells(c), by the
  definition of cells(c). That is all of the proof.
- The paper cuts the other way: its ranges go to cells along the diagonal hyperplane, its points to
  regions, each in several copies. Copies of a ticket are room promised twice.
- A cell with more peers than one owner should see to is dealt out to 2^k shards by its peers' ids.
  k follows from how many there are; near a step, where two peers may count differently, a ticket
  goes to both. So a claim, which goes to one k, meets it if the counts differ by less than NEAR.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from ...capacity.matching import slots, unmet
from ...config import Config
from ...membership.members import Members, State
from ...overlay.overlays import far
from ...wire.messages import Capacity, Member, Needs, Traits
from .config import TicketsConfig

#: counts within this share of a step between two numbers of shards are taken for both
NEAR = 0.2
OWNERS_MAX = 4096

Coordinates = tuple[int, ...]


class Cell(NamedTuple):
    """`depth`, `shard`: of its 2^depth shards this one."""

    coordinates: Coordinates
    depth: int = 0
    shard: int = 0

    @property
    def key(self) -> bytes:
        """The control point, hashed to the overlay."""
        return _hashed(self)

    def __str__(self) -> str:
        place = "-".join(map(str, self.coordinates))
        return f"{place}/{self.shard}" if self.depth else place


@lru_cache(10_000)
def _hashed(cell: Cell) -> bytes:
    text = f"cell {cell.coordinates} {cell.depth} {cell.shard}"
    return hashlib.blake2b(text.encode(), digest_size=20).digest()


@lru_cache(10_000)
def _word(text: str, divisions: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % divisions


def coordinates(capacity: Capacity, traits: Traits, own: TicketsConfig) -> Coordinates:
    return (
        bisect_right(own.cell_cores, capacity.millicores / 1000),
        bisect_right(own.cell_speeds, traits.speed),
        bisect_right(own.cell_memory_gib, capacity.memory_bytes / 2**30),
        _word(traits.arch, own.cell_words),
        _word(traits.os, own.cell_words),
    )


def depth(count: float, peers_max: int) -> int:
    """How often a cell of so many peers is halved."""
    found = 0
    while count > peers_max:
        count /= 2
        found += 1
    return found


def shard(peer: bytes, depth: int) -> int:
    return int.from_bytes(hashlib.blake2b(peer, digest_size=4).digest(), "big") % (1 << depth)


class Reach(NamedTuple):
    """A cell that a claim goes to: the room there when all of it is free."""

    cell: Cell
    slots: int
    peers: int


class Space:
    """As this peer sees it. Kept up to date as members come and go."""

    def __init__(self, members: Members, config: Config) -> None:
        self._members = members
        self._config = config
        self._own = config.of(TicketsConfig)
        self._far = far(config.overlay)
        # These are empty while nobody wants to know: then changes cost nothing
        self._counts: Counter[Coordinates] = Counter()
        self._reaches: dict[Needs, list[Reach]] = {}
        self._owners: dict[bytes, bytes] = {}
        members.listen(self._moved, at_stake=self._counts)
        members.listen(self._reigns, at_stake=self._owners)

    def _place(self, member: Member) -> Coordinates:
        return coordinates(member.capacity, member.traits, self._own)

    def _count(self, place: Coordinates) -> int:
        if not self._counts:
            self._counts.update(map(self._place, self._members.here()))
        return self._counts[place]

    def _moved(self, old: Member | None, new: Member) -> None:
        if old is None or _lives(old) != _lives(new):
            self._counts.clear()
            self._reaches.clear()

    def _reigns(self, old: Member | None, new: Member) -> None:
        peer = new.contact.id
        for key, owner in list(self._owners.items()):
            if new.state != State.ALIVE and owner == peer:
                del self._owners[key]
            elif new.state == State.ALIVE and self._far(peer, key) < self._far(owner, key):
                self._owners[key] = peer

    def cells_of(self, member: Member) -> list[Cell]:
        """Where a peer's ticket goes: one cell, or two near a step between two depths."""
        place = self._place(member)
        count, most = self._count(place), self._own.cell_peers_max
        depths = {depth(count * (1 - NEAR), most), depth(count * (1 + NEAR), most)}
        return [Cell(place, d, shard(member.contact.id, d)) for d in sorted(depths)]

    def cell_of(self, member: Member) -> Cell:
        """Where a claim would look for it."""
        place = self._place(member)
        found = depth(self._count(place), self._own.cell_peers_max)
        return Cell(place, found, shard(member.contact.id, found))

    def members_of(self, key: bytes) -> list[Member]:
        """Who should have a ticket in the cell with that key."""
        here = self._members.here()
        return [m for m in here if any(cell.key == key for cell in self.cells_of(m))]

    def reach(self, needs: Needs) -> list[Reach]:
        """The cells of a claim: the fast ones first, of those the ones with the most room."""
        found = self._reaches.get(needs)
        if found is None:
            self._count(self._place(self._members.me))  # what is known of nobody changes, too
            rooms: dict[Cell, tuple[int, int]] = {}
            for member in self._members.here():
                if not unmet(member.capacity, member.traits, needs):
                    cell = self.cell_of(member)
                    room, peers = rooms.get(cell, (0, 0))
                    rooms[cell] = room + slots(member.capacity, needs.capacity), peers + 1
            found = [Reach(cell, room, peers) for cell, (room, peers) in rooms.items()]
            found.sort(key=lambda r: (-r.cell.coordinates[1], -r.slots, r.cell))
            if len(self._reaches) >= 1000:
                self._reaches.clear()
            self._reaches[needs] = found
        return found

    def owner(self, key: bytes) -> bytes:
        """The peer closest to a control point: alive, this one among them."""
        found = self._owners.get(key)
        if found is None:
            alive = [m.contact.id for m in self._members.here() if m.state == State.ALIVE]
            alive = alive or [self._members.me.contact.id]
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            found = self._owners[key] = min(alive, key=lambda peer: self._far(peer, key))
        return found


def _lives(member: Member) -> tuple[bool, Capacity, Traits]:
    """Whether it is here, and where."""
    return member.state <= State.SUSPECT, member.capacity, member.traits
