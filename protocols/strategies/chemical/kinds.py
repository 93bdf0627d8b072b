"""Kinds of peers: all peers, and those that meet needs which few peers can meet.

A question with several criteria ("at least 64 GiB, a GPU, the least loaded first") is a walk in the
order of one criterion, over only those peers that meet the others. Every peer knows the capacity of
each when idle, so all agree on the members of a kind: these form a ring of their own, and hold its
molecules. A kind exists as long as it is asked for.
"""

from __future__ import annotations

import hashlib
import math

import msgpack

from ...capacity.matching import unmet
from ...config import Config
from ...membership.members import Members
from ...overlay.chord import SIZE, clockwise
from ...wire.messages import Capacity, Member, Needs
from .holder import Stretch
from .messages import Meta, Scale
from .scale import key, order_at

ALL = Needs()
#: a kind of its own is worthwhile if at most one of this many peers belongs to it
RARE = 4


def rounded(needs: Needs) -> Needs:
    """The common part of these needs and similar ones: amounts rounded down to powers of two."""
    capacity = Capacity(*(1 << n.bit_length() - 1 if n else 0 for n in needs.capacity))
    return needs._replace(capacity=capacity)


def kind_of(needs: Needs, here: list[Member]) -> Needs:
    kind = rounded(needs)
    count = sum(not unmet(m.capacity, m.traits, kind) for m in here)
    return kind if 0 < RARE * count <= len(here) else ALL


class ResourceKind:
    def __init__(self, needs: Needs, members: Members, config: Config) -> None:
        self.needs = needs
        #: where its ring begins
        self.start = hashlib.blake2b(msgpack.packb(needs), digest_size=20, person=b"kind").digest()
        self.stretch = Stretch(config)  # those of its molecules that this peer holds
        self.at: dict[bytes, Meta] = {}  # holder → this peer's own molecule there; one entry
        self.said_at = -math.inf
        self.said = math.inf  # its order at that time
        self.until = -math.inf  # when its use ends
        self.asked_until = -math.inf  # until then the speaker knows of it
        self._members = members
        self._here: list[Member] | None = None
        self._ring: list[bytes] = []

    def includes(self, member: Member) -> bool:
        return self.needs == ALL or not unmet(member.capacity, member.traits, self.needs)

    @property
    def count(self) -> int:
        ring = self._among()
        return self._members.count if ring is None else len(ring)

    def following(self, key: bytes, after: bool = False) -> bytes:
        return self._members.following(key, after, self._among())

    def holder(self, scale: Scale, order: float) -> bytes:
        return self.following(key(self.start, scale, order))

    def far(self, peer: bytes) -> float:
        """The share of the ring that lies before a peer."""
        return clockwise(self.start, peer) / SIZE

    def seam(self, scale: Scale, peer: bytes) -> float:
        """The order from which on a peer holds the last stretch: where the ring closes, one node
        holds both the first stretch and the last. Infinite for all other nodes."""
        return order_at(scale, self.far(peer)) if self.following(self.start) == peer else math.inf

    def _among(self) -> list[bytes] | None:
        if self.needs == ALL:
            return None
        here = self._members.here()
        if here is not self._here:  # a member came or went
            self._here = here
            self._ring = sorted(m.contact.id for m in here if self.includes(m))
        return self._ring
