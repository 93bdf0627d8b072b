"""The shape of the tree: which branch a peer belongs to, and which peer hosts a branch. Pure.

Nobody is elected: the tree is a function of the peers that are there, so any two peers with the
same view of the members see the same tree. Two views that differ for a moment do no harm: summaries
are hints, and only leases count.

- Peers stand in one order: by site, address and id. What is close in it is close in the network.
- A peer's id gives it a height; one in sixteen is at least one high, one in 256 at least two. A
  peer of height k or more heads a branch of level k, which reaches up to the next such peer. (It is
  a skip list, read as a tree.) The first peer of all heads a branch of every level.
- The k-th peer of a branch of level k hosts it: the branches of one head have several hosts.
- A peer that joins, leaves or dies moves only the branches beside it.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterable

from ...wire.messages import Member

LEVELS_MAX = 8


def height(peer: bytes) -> int:
    """How many of the first hexadecimal digits of the hash of its id are zero."""
    digits = hashlib.sha256(b"height" + peer).hexdigest()
    return min(LEVELS_MAX, len(digits) - len(digits.lstrip("0")))


class Shape:
    def __init__(self, members: Iterable[Member]) -> None:
        rows = sorted((m.traits.site, m.contact.host, m.contact.id) for m in members)
        self.order = [peer for _, _, peer in rows]
        self._place = {peer: place for place, peer in enumerate(self.order)}
        heights = [height(peer) for peer in self.order]
        #: of each level, the places of the heads of its branches
        self._heads: list[list[int]] = [list(range(len(self.order)))]
        while len(self._heads[-1]) > 1:
            level = len(self._heads)
            tall = [n for n in self._heads[-1] if n == 0 or heights[n] >= level]
            self._heads.append(tall)
        if len(self._heads) == 1:
            self._heads.append(self._heads[0])

    @property
    def levels(self) -> int:
        """The level of the root."""
        return len(self._heads) - 1

    def __contains__(self, peer: bytes) -> bool:
        return peer in self._place

    def branch(self, level: int, peer: bytes) -> bytes:
        """The head of the branch of that level to which a peer belongs."""
        heads = self._heads[min(level, self.levels)]
        return self.order[heads[bisect.bisect_right(heads, self._place[peer]) - 1]]

    def host(self, level: int, head: bytes) -> bytes:
        """The peer that hosts a branch; a peer is its own leaf's host."""
        if level == 0:
            return head
        first = self._place[head]
        heads = self._heads[min(level, self.levels)]
        after = bisect.bisect_right(heads, first)
        end = heads[after] if after < len(heads) else len(self.order)
        return self.order[min(first + level, end - 1)]
