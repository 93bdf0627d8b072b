"""The number of hops to a cell's owner, by the overlay's own lookups.

Every peer knows up to five thousand others (`members_max`); in a cluster of that size an owner is
one hop away, and there is no lookup. This measures larger clusters: a hop is one answer in the
chain of answers through which the owner became known. A peer's table is filled when it is first
asked, as it would be: with all of the nearest peers, and some of all others.
"""

from __future__ import annotations

import asyncio
import random
from bisect import bisect_left
from statistics import mean

from sim.loop import run_out
from sim.network import Network
from valence.protocols.config import LAN
from valence.protocols.overlay.kademlia import Overlay, Way
from valence.protocols.overlay.table import distance
from valence.protocols.wire.messages import Contact, FindPeers, FoundPeers
from valence.protocols.wire.rpc import Rpc

NEAREST = 32
OTHERS = 400


class _Node(Overlay):
    def __init__(self, ring: _Ring, contact: Contact) -> None:
        wire = ring.network.wire(contact)
        rpc = wire.rpc = Rpc(contact, wire, ring.rng, LAN)
        super().__init__(rpc, ring.rng, LAN)
        self._ring = ring
        self._filled = False
        self._depths: dict[bytes, int] = {}

    def fill(self) -> None:
        if not self._filled:
            self._filled = True
            for contact in self._ring.known_to(self._rpc.me):
                self.table.saw(contact)

    def _find_peers(self, sender: Contact, message: FindPeers) -> FoundPeers:
        self.fill()
        return super()._find_peers(sender, message)

    async def hops(self, key: bytes) -> tuple[int, bytes]:
        self.fill()
        self._depths = {c.id: 1 for c in self.table.contacts()}
        self._depths[self._rpc.me.id] = 0
        nearest = await self.find(key, 1)
        return self._depths[nearest[0].id], nearest[0].id

    def _take(self, lookup: Way, contact: Contact, task: asyncio.Task[FoundPeers]) -> None:
        if task.exception() is None:
            depth = self._depths[contact.id] + 1
            for other in task.result().contacts:
                self._depths[other.id] = min(depth, self._depths.get(other.id, depth))
        super()._take(lookup, contact, task)


class _Ring:
    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.network = Network(seed)
        ids = sorted(self.rng.randbytes(20) for _ in range(count))
        self.contacts = [
            Contact(peer_id, f"10.{n // 62500}.{n // 250 % 250}.{n % 250}", 7000)
            for n, peer_id in enumerate(ids)
        ]
        self._ids = ids
        self.nodes = [_Node(self, contact) for contact in self.contacts]

    def known_to(self, contact: Contact) -> list[Contact]:
        at = bisect_left(self._ids, contact.id)
        near = self.contacts[max(0, at - NEAREST) : at + NEAREST]
        return near + self.rng.sample(self.contacts, min(OTHERS, len(self.contacts)))


def hops(count: int, lookups: int = 300, seed: int = 1) -> tuple[float, float]:
    """The mean number of hops, and the fraction of lookups that reached the true owner."""

    async def run() -> tuple[float, float]:
        ring = _Ring(count, seed)
        walks = []
        for _ in range(lookups):
            key = ring.rng.randbytes(20)
            depth, owner = await ring.rng.choice(ring.nodes).hops(key)
            true = min(ring.contacts, key=lambda c: distance(c.id, key)).id
            walks.append((depth, owner == true))
        return mean(d for d, _ in walks), mean(right for _, right in walks)

    return run_out(run())
