"""The index of peers: a d-dimensional space in cells, where claims and tickets meet.

After seed 004, section 3.3: a ticket is a point (what a peer is), a claim a range (what a task
needs), each cell has a control point that is hashed to an owner on the overlay, and the owner of a
cell matches the claims and tickets that meet there.

The mapping, and why a claim always meets the tickets that match it:
- A ticket goes to the one cell of its peer, which follows from what the peer *is* (its capacity
  when idle, speed, arch, os). The capacity that is free now is in the ticket, and does not move it.
  A ticket is published often, so it costs one message; a claim stands for many units, and is posted
  once.
- A claim goes to every cell that has a peer which meets its needs, and to no other. Every peer
  knows all others (`members`), so these cells are computed, not guessed: empty cells, which are
  most of the f_min^d, cost nothing. If peer p meets needs c, then cell(p) is among cells(c), by the
  definition of cells(c). That is the whole proof.
- The paper does the reverse: its ranges go to cells along the diagonal hyperplane, its points to
  regions, each in several copies. Copies of a ticket would promise its capacity twice.
- A cell with too many peers for one owner is split into 2^k shards by its peers' ids. k follows
  from their number; near a step, where two peers may count differently, a ticket goes to both. So a
  claim, which goes to one k, meets it if the counts differ by less than NEAR.
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

#: a count within this share of a step between two numbers of shards counts as both
NEAR = 0.2
OWNERS_MAX = 4096

Coordinates = tuple[int, ...]


class Cell(NamedTuple):
    """A cell; or one `shard` of the 2^`depth` shards that it is split into."""

    coordinates: Coordinates
    depth: int = 0
    shard: int = 0

    @property
    def key(self) -> bytes:
        """The control point, hashed to an id on the overlay."""
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
    """How often a cell with so many peers is halved."""
    halvings = 0
    while count > peers_max:
        count /= 2
        halvings += 1
    return halvings


def shard(peer: bytes, depth: int) -> int:
    return int.from_bytes(hashlib.blake2b(peer, digest_size=4).digest(), "big") % (1 << depth)


class Reach(NamedTuple):
    """A cell that a claim goes to, and the units it has capacity for when all peers are idle."""

    cell: Cell
    slots: int
    peers: int


class Space:
    """The space as this peer sees it. Kept up to date as members come and go."""

    def __init__(self, members: Members, config: Config) -> None:
        self._members = members
        self._config = config
        self._own = config.of(TicketsConfig)
        self._far = far(config.overlay)
        # these are empty while they are not in use, so that changes of members cost nothing
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
        halvings = depth(self._count(place), self._own.cell_peers_max)
        return Cell(place, halvings, shard(member.contact.id, halvings))

    def members_of(self, key: bytes) -> list[Member]:
        """The members that should have a ticket in the cell with that key."""
        here = self._members.here()
        return [m for m in here if any(cell.key == key for cell in self.cells_of(m))]

    def reach(self, needs: Needs) -> list[Reach]:
        """The cells of a claim: the fastest first, of those the ones with the most capacity."""
        reaches = self._reaches.get(needs)
        if reaches is None:
            self._count(self._place(self._members.me))  # so that `_moved` hears of all changes
            rooms: dict[Cell, tuple[int, int]] = {}
            for member in self._members.here():
                if not unmet(member.capacity, member.traits, needs):
                    cell = self.cell_of(member)
                    room, peers = rooms.get(cell, (0, 0))
                    rooms[cell] = room + slots(member.capacity, needs.capacity), peers + 1
            reaches = [Reach(cell, room, peers) for cell, (room, peers) in rooms.items()]
            reaches.sort(key=lambda r: (-r.cell.coordinates[1], -r.slots, r.cell))
            if len(self._reaches) >= 1000:
                self._reaches.clear()
            self._reaches[needs] = reaches
        return reaches

    def owner(self, key: bytes) -> bytes:
        """The peer closest to a control point, of all that are alive, this one included."""
        owner = self._owners.get(key)
        if owner is None:
            alive = [m.contact.id for m in self._members.here() if m.state == State.ALIVE]
            alive = alive or [self._members.me.contact.id]
            if len(self._owners) >= OWNERS_MAX:
                self._owners.clear()
            owner = self._owners[key] = min(alive, key=lambda peer: self._far(peer, key))
        return owner


def _lives(member: Member) -> tuple[bool, Capacity, Traits]:
    """Whether a member has not left, and what its cell follows from."""
    return member.state <= State.SUSPECT, member.capacity, member.traits
