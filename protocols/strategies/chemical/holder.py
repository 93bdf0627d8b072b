"""The part of the layer at one ring node: a stretch of meta-molecules in their order. Pure.

Rules:
- There is one molecule for each peer; of two, the later version. Molecules expire, and are
  published again before that.
- A node holds a few (`rows_max`). If there are more, the last in their order move on to its
  successor, after a moment and together: so the order along the ring stays the same, and no node
  holds much more than others for long, whatever the values are.
- A question is given a part of a molecule, or all of it, and no other question sees that part: it
  is consumed. A rest whose place is still here stays. A resource that was asked for leases
  publishes its molecule again, unless the rest here is right by the same rule (`rest_of`); a
  resource that was given away and never asked does so before long, too.
- A home that finds too little leaves a wish: it is told of resources that appear, the oldest wish
  first.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass

from ...capacity.matching import slots
from ...config import Config
from ...wire.messages import Capacity, Needs
from ..shares import Shares
from .config import ChemicalConfig
from .messages import Meta
from .scale import order

USED_STEPS = 32
#: peers with a load below this have free capacity now
ROOM = 0.9
#: units that are tried where an unknown number may wait in the queue
QUEUED_TRY = 1000


WishKey = tuple[bytes, Needs, tuple[bytes, ...]]


@dataclass(slots=True)
class Wish:
    home: bytes
    needs: Needs
    count: int
    each: int
    queue: bool
    until: float
    avoid: tuple[bytes, ...] = ()
    owner: str = ""

    @property
    def key(self) -> WishKey:
        return self.home, self.needs, self.avoid


def room(meta: Meta, needs: Needs, count: int, queue: bool) -> int:
    """How many of these units a resource should have capacity for."""
    fitting = slots(meta.free, needs.capacity)
    if queue and meta.queues:
        fitting = max(fitting, QUEUED_TRY)
    return min(count, fitting)


def rest_of(meta: Meta, capacity: Capacity, needs: Needs, count: int) -> Meta | None:
    """The rest of a molecule without the capacity for so many units, if that is known. The node
    that holds it and the resource itself compute the same."""
    if count > slots(meta.free, needs.capacity):
        return None  # they may wait in its queue, for an unknown time
    pairs = zip(meta.free, needs.capacity, strict=True)
    free = Capacity(*(have - count * need for have, need in pairs))
    used = used_of(free, capacity)
    return meta._replace(free=free, order=order(ROOM * used, meta.peer)) if used < 1 else None


def used_of(free: Capacity, capacity: Capacity) -> float:
    """From 0, idle, to 1, when something has run out. In steps: less is not worth a message."""
    pairs = zip(free, capacity, strict=True)
    used = max((1 - have / most for have, most in pairs if most), default=0.0)
    return math.floor(used * USED_STEPS) / USED_STEPS


def alike(one: Capacity, other: Capacity, capacity: Capacity) -> bool:
    """The difference is not worth a message."""
    rows = zip(one, other, capacity, strict=True)
    return all(USED_STEPS * abs(a - b) <= most for a, b, most in rows)


class Stretch:
    def __init__(self, config: Config) -> None:
        self.wishes: dict[WishKey, Wish] = {}
        self.shares = Shares()  # of owners with wishes here
        self._config = config
        self._own = config.of(ChemicalConfig)
        self._rows: list[tuple[float, bytes]] = []
        self._metas: dict[bytes, Meta] = {}
        self._until: dict[bytes, float] = {}
        self._gone_on = (
            math.inf,
            -math.inf,
        )  # lowest order that moved to the successor; until when

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, meta: Meta, now: float) -> bool:
        """False: the version is not newer, or there are more molecules than there can be peers."""
        self.expire(now)
        old = self._metas.get(meta.peer)
        if old is not None and old.version >= meta.version:
            return False  # a part of the same version may have been given away
        if old is None and len(self._rows) >= self._config.members_max:
            return False
        self._drop(meta.peer)
        self._keep(meta, now + self._own.ttl_s)
        return True

    def _keep(self, meta: Meta, until: float) -> None:
        insort(self._rows, (meta.order, meta.peer))
        self._metas[meta.peer] = meta
        self._until[meta.peer] = until

    def give(self, meta: Meta, rest: Meta | None) -> None:
        """Give a molecule away, except a rest."""
        until = self._until[meta.peer]
        self._drop(meta.peer)
        if rest is not None:
            self._keep(rest, until)

    def surplus(self, now: float, most: float = math.inf) -> list[Meta]:
        """Take out the molecules that move to the successor; none from the order `most` on, where
        the ring closes and the order ends."""
        self.expire(now)
        spilled: list[Meta] = []
        while (end := bisect_left(self._rows, (most, b""))) > self._own.rows_max:
            last = self._rows[end - 1][1]
            spilled.append(self._metas[last])
            self._drop(last)
        if spilled:
            first = min(meta.order for meta in spilled)
            self._gone_on = (min(first, self.gone_on(now)), now + self._own.ttl_s)
        return spilled

    def gone_on(self, now: float) -> float:
        """From this order on, molecules may be at the successor."""
        first, until = self._gone_on
        return first if until > now else math.inf

    def take(self, peer: bytes, version: int) -> bool:
        """Drop a peer's molecule; False: it is not here, or is newer."""
        meta = self._metas.get(peer)
        if meta is None or meta.version > version:
            return False
        self._drop(peer)
        return True

    def _drop(self, peer: bytes) -> None:
        meta = self._metas.pop(peer, None)
        if meta is not None:
            del self._rows[bisect_left(self._rows, (meta.order, peer))], self._until[peer]

    def between(self, low: float, high: float, now: float) -> list[Meta]:
        """The molecules in this range, in their order."""
        self.expire(now)
        start = bisect_left(self._rows, (low, b""))
        end = bisect_left(self._rows, (high, b""))
        return [self._metas[peer] for _, peer in self._rows[start:end]]

    def wish(self, wish: Wish, now: float) -> None:
        for key in [key for key, old in self.wishes.items() if old.until <= now]:
            del self.wishes[key]
        if wish.key in self.wishes or len(self.wishes) < self._own.wishes_max:
            kept = self.wishes.setdefault(wish.key, wish)  # a repeated wish keeps its place
            kept.count, kept.each, kept.until = wish.count, wish.each, wish.until
            kept.owner = wish.owner

    def in_turn(self) -> list[tuple[WishKey, Wish]]:
        """The wishes: first those of the owner that got least, then the oldest."""
        rows = list(self.wishes.items())
        self.shares.only({wish.owner for _, wish in rows})
        if self.shares.contended:
            rows.sort(key=lambda row: self.shares.given(row[1].owner))
        return rows

    def expire(self, now: float) -> None:
        for peer in [peer for peer, until in self._until.items() if until <= now]:
            self._drop(peer)
