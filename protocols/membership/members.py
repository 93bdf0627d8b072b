"""The members of the cluster, as this peer believes: alive, suspected, dead or left.

Of two beliefs about a peer, the one with the higher (boot, incarnation, state) wins; so a rumour
may come late, twice or in any order. Only a peer itself raises its boot (by starting) and its
incarnation (by objecting to a rumour that it is not well).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import random
import struct
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from ..config import Config
from ..wire.codec import Malformed, pack_member, read_member
from ..wire.messages import ID_BYTES, Contact, Member


class State(IntEnum):
    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


FORGET_S = 60.0  # between two searches for members that may be forgotten
#: The id space is cut into parts, each with a digest. Two peers compare about as many parts as
#: there are members, so that few members are in the parts that differ.
PARTS = 1024
PARTS_MIN = 16
CROWD_MIN = 64  # with more rumours at once, this is a new peer's first view of the cluster
DRAWS_MAX = 50  # tries to draw a few members that are here from all that are known
BELIEFS_READ_MAX = 20_000
LAST = b"\xff" * ID_BYTES

Listener = Callable[[Member | None, Member], None]
Brief = tuple[bytes, int, int, int]  # id, boot, incarnation, state


def _part(peer: bytes, count: int = PARTS) -> int:
    return (peer[0] << 8 | peer[1]) * count >> 16


class Belief(NamedTuple):
    """A member as a rumour tells of it, with everything derived from that once and for all."""

    peer: bytes
    rank: tuple[int, ...]  # boot, incarnation, state
    member: Member
    packed: bytes
    mark: int  # digests are the XOR of these; 0 for a member that is gone; suspicion has no effect


@lru_cache(BELIEFS_READ_MAX)
def believe(packed: bytes) -> Belief:
    """Read a rumour. The same one comes again and again: it is read once, and is one object."""
    member = read_member(packed)
    peer, mark = member.contact.id, 0
    if member.state <= State.SUSPECT:
        text = b"%b %d %d" % (peer, member.boot, member.incarnation)
        mark = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    return Belief(peer, member[4:7], member, packed, mark)


def briefs(rumours: Iterable[bytes]) -> Iterable[Brief]:
    """The rumours that can be read, in brief."""
    for packed in rumours:
        try:
            belief = believe(packed)
        except Malformed:
            continue
        boot, incarnation, state = belief.rank
        yield belief.peer, boot, incarnation, state


class Members:
    def __init__(self, me: Member, config: Config) -> None:
        self.me = me
        self.digest = 0
        self.malformed = 0
        self._parts = [0] * PARTS
        self._config = config
        self._known: dict[bytes, Belief] = {}
        self._order: list[bytes] = []  # all of them; in the order of their ids once sorted
        self._sorted = True
        self._gone: dict[bytes, float] = {}  # dead or left → since when; the latest last
        self._told = 0  # messages that carried rumours
        self._news: dict[bytes, int] = {}  # rumour → how many of those had been sent by then
        self.fresh: dict[bytes, None] = {}  # seen here first, not yet passed on: see liveness
        self.speaker = me.contact.id  # the lowest id of all that are alive
        self._listeners: list[tuple[object, Listener]] = []
        self._here: list[Member] | None = None
        self._count = 0
        self._forget_at = 0.0
        self._set(believe(pack_member(me)), 0.0)

    def __len__(self) -> int:
        return len(self._known)

    def listen(self, listener: Listener, at_stake: object = True) -> None:
        """Be told of every change; or only while the container `at_stake` is not empty, because
        most parts of most peers have nothing to do with most other peers."""
        self._listeners.append((at_stake, listener))

    def get(self, peer: bytes) -> Member | None:
        belief = self._known.get(peer)
        return belief.member if belief else None

    def contact(self, peer: bytes) -> Contact | None:
        belief = self._known.get(peer)
        return belief.member.contact if belief else None

    def all(self) -> list[Member]:
        return [belief.member for belief in self._known.values()]

    def here(self) -> list[Member]:
        """The members that may get work: alive or only suspected, this peer among them."""
        if self._here is None:
            self._here = [b.member for p, b in self._known.items() if p not in self._gone]
        return self._here

    @property
    def count(self) -> int:
        """How many members are here."""
        return self._count

    def is_here(self, peer: bytes) -> bool:
        return peer in self._known and peer not in self._gone

    def is_alive(self, peer: bytes) -> bool:
        """Whether it is here, and not suspected."""
        belief = self._known.get(peer)
        return belief is not None and belief.member.state == State.ALIVE

    def hear(self, rumours: Collection[bytes], now: float, news: bool = True) -> None:
        """Take over the rumours that are newer than what is known; as `news`, pass them on."""
        # a new peer learns of everybody: that is news to nobody else, and would crowd out real news
        crowd = len(rumours) > max(CROWD_MIN, len(self._known) // 2)
        if crowd:
            rumours = self._adopt(rumours, now)
        believed = self._known.get
        for rumour in self._readable(rumours):
            if believed(rumour.peer) is rumour:
                continue
            about_me = rumour.peer == self.me.contact.id  # an objection is news to all
            if self._take(rumour, now) and (crowd or not news) and not about_me:
                self._news.pop(rumour.packed, None)

    def _readable(self, rumours: Iterable[bytes]) -> Iterator[Belief]:
        for packed in rumours:
            try:
                yield believe(packed)
            except Malformed:
                self.malformed += 1

    def _adopt(self, rumours: Collection[bytes], now: float) -> list[bytes]:
        """Add all unknown members at once; returns the rumours about the others."""
        left: list[bytes] = []
        new: dict[bytes, Belief] = {}
        free = self._config.members_max - len(self._known)
        for belief in self._readable(rumours):
            unknown = belief.peer not in self._known and belief.peer not in new
            if unknown and belief.member.http and len(new) < free:
                new[belief.peer] = belief
            else:
                left.append(belief.packed)
        self._add(new, now)
        for at_stake, listener in self._listeners:
            for belief in new.values() if at_stake else ():
                listener(None, belief.member)
        return left

    def _add(self, new: dict[bytes, Belief], now: float) -> None:
        for belief in new.values():
            self._mark(belief.peer, belief.mark)
            if belief.member.state > State.SUSPECT:
                self._gone[belief.peer] = now
        self._count += sum(b.member.state <= State.SUSPECT for b in new.values())
        alive = (peer for peer, b in new.items() if b.member.state == State.ALIVE)
        self.speaker = min(self.speaker, min(alive, default=self.speaker))
        self._known.update(new)
        self._order.extend(new)
        self._sorted = False
        self._here = None

    def _mark(self, peer: bytes, changed: int) -> None:
        self.digest ^= changed
        self._parts[_part(peer)] ^= changed & 0xFFFFFFFF

    def apply(self, rumour: Member, now: float) -> bool:
        """Take a belief over if it is newer; True if it was. This peer is the first to know it."""
        return self._take(believe(pack_member(rumour)), now, fresh=True)

    def _take(self, rumour: Belief, now: float, fresh: bool = False) -> bool:
        peer = rumour.peer
        if peer == self.me.contact.id:
            return self._about_me(rumour.member)
        old = self._known.get(peer)
        if old is None:
            if not rumour.member.http or not self._make_place():
                return False
        elif rumour.rank <= old.rank:
            return False
        elif not rumour.member.http:  # a brief rumour carries the state alone
            boot, incarnation, state = rumour.rank
            new = old.member._replace(boot=boot, incarnation=incarnation, state=state)
            rumour = believe(pack_member(new))
        self._set(rumour, now)
        if fresh or self.speaker == self.me.contact.id:
            self._to_tell(rumour)
        self._tell_listeners(old.member if old is not None else None, rumour.member)
        return True

    def _tell_listeners(self, old: Member | None, new: Member) -> None:
        for at_stake, listener in self._listeners:
            if at_stake:
                listener(old, new)

    def _to_tell(self, belief: Belief) -> None:
        self.fresh[belief.packed] = None
        if len(self.fresh) > self._config.members_max:
            del self.fresh[next(iter(self.fresh))]  # differing digests will make up for it

    def _make_place(self) -> bool:
        """Whether there is a place for one more; if need be, the longest dead is forgotten."""
        if len(self._known) < self._config.members_max:
            return True
        oldest = next(iter(self._gone), None)
        if oldest is not None:
            self._drop([oldest])
        return oldest is not None

    def _about_me(self, rumour: Member) -> bool:
        if rumour[4:7] <= self.me[4:7] or self.me.state == State.LEFT:
            return False
        # object, or go on from a higher number that an earlier start of this peer has reached
        self._update_me(incarnation=max(self.me.incarnation, rumour.incarnation) + 1)
        return True

    def describe(self, http: str) -> None:
        """Set the address of HTTP, known once the socket is open; before anybody was told."""
        self.me = self.me._replace(http=http)
        self._set(believe(pack_member(self.me)), 0.0)

    def leave(self) -> None:
        self._update_me(state=int(State.LEFT), incarnation=self.me.incarnation + 1)

    def _update_me(self, **changes: int) -> None:
        self.me = self.me._replace(**changes)  # type: ignore[arg-type]
        belief = believe(pack_member(self.me))
        self._set(belief, 0.0)
        self._to_tell(belief)

    def _set(self, belief: Belief, now: float) -> None:
        peer = belief.peer
        old = self._known.get(peer)
        if old is None:
            insort(self._order, peer) if self._sorted else self._order.append(peer)
        else:
            self._news.pop(old.packed, None)
            if peer in self._gone:
                del self._gone[peer]
            else:
                self._count -= 1
        changed = belief.mark if old is None else old.mark ^ belief.mark
        if changed:
            self._mark(peer, changed)
        if belief.member.state <= State.SUSPECT:
            self._count += 1
        else:
            self._gone[peer] = now
        self._known[peer] = belief
        self._news[belief.packed] = self._told  # the latest last
        self._here = None
        self._update_speaker(belief)

    def _update_speaker(self, belief: Belief) -> None:
        peer = belief.peer
        if belief.member.state == State.ALIVE:
            self.speaker = min(self.speaker, peer)
        elif peer == self.speaker:
            alive = (p for p, b in self._known.items() if b.member.state == State.ALIVE)
            self.speaker = min(alive, default=self.me.contact.id)

    def judge(self, peer: bytes, state: State, now: float, fresh: bool = True) -> bool:
        """This peer's own verdict about another."""
        member = self.get(peer)
        if member is None or member.state >= state:
            return False
        return self._take(believe(pack_member(member._replace(state=int(state)))), now, fresh)

    def forget(self, now: float) -> None:
        """Forget peers that died or left a day ago; if one returns, it is known again."""
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_S
        limit = now - self._config.forget_dead_s
        old = itertools.takewhile(lambda row: row[1] < limit, self._gone.items())
        self._drop([peer for peer, _ in old])

    def _drop(self, peers: list[bytes]) -> None:
        for peer in peers:
            del self._gone[peer]
            self._news.pop(self._known.pop(peer).packed, None)
        if peers:
            self._order = [peer for peer in self._order if peer in self._known]

    # ----------------------------------------------------------------- gossip

    def packed(self, peer: bytes) -> bytes | None:
        belief = self._known.get(peer)
        return belief.packed if belief else None

    def draw(self, rng: random.Random, count: int, without: Collection[bytes]) -> list[Member]:
        """This many members that are here, at random; fewer if there are no more."""
        if len(self._order) < 4 * count + len(without):
            return self._sample(rng, count, without)
        drawn: dict[bytes, Member] = {}
        for _ in range(DRAWS_MAX):
            peer = self._order[rng.randrange(len(self._order))]
            if peer not in without and self.is_here(peer):
                drawn[peer] = self._known[peer].member
                if len(drawn) == count:
                    return list(drawn.values())
        return self._sample(rng, count, without)  # hardly any of the known members is left

    def _sample(self, rng: random.Random, count: int, without: Collection[bytes]) -> list[Member]:
        candidates = [m for m in self.here() if m.contact.id not in without]
        return rng.sample(candidates, min(count, len(candidates)))

    def a_dead_one(self, chosen: Callable[[int], int]) -> Member | None:
        """Any member that died; `chosen` draws a number below its argument."""
        for _ in range(min(8, len(self._gone))):
            peer = next(itertools.islice(self._gone, chosen(len(self._gone)), None))
            member = self._known[peer].member
            if member.state == State.DEAD:
                return member
        return None

    def rumours(self, most: int, told: Collection[bytes] = ()) -> tuple[bytes, ...]:
        """The latest news to pass on, at `most` so many; not what the receiver has just `told`.

        A rumour is passed on in a bounded number of messages, and in fewer if there is always
        something newer: a peer that misses it learns of it because its digest differs."""
        self._told += 1
        past = self._told - self._config.gossip_repeat * math.ceil(math.log2(len(self._known) + 1))
        while self._news and next(iter(self._news.values())) < past:
            del self._news[next(iter(self._news))]
        news: Iterable[bytes] = reversed(self._news)
        if told:
            news = (packed for packed in news if packed not in told)
        return tuple(itertools.islice(news, most))

    def take_fresh(self, most: int) -> tuple[bytes, ...]:
        taken = tuple(itertools.islice(self.fresh, most))
        for packed in taken:
            del self.fresh[packed]
        return taken

    def between(self, start: bytes, end: bytes) -> list[bytes]:
        """The members alive from after `start` to before `end`, in the order of their ids."""
        order = self._in_order()
        peers = order[bisect_right(order, start) : bisect_left(order, end)]
        return [peer for peer in peers if self.is_alive(peer)]

    def following(self, key: bytes, after: bool = False, among: list[bytes] | None = None) -> bytes:
        """The first member alive on the ring at a key, or (`after`) behind it; if there is none,
        this peer. Of all members, or of some in the order of their ids."""
        order = self._in_order() if among is None else among
        start = bisect_right(order, key) if after else bisect_left(order, key)
        for step in range(len(order)):
            peer = order[(start + step) % len(order)]
            if self.is_alive(peer):
                return peer
        return self.me.contact.id

    # ----------------------------------------------------------------- comparing two views

    def digests(self, count: int = 0) -> bytes:
        """The digests of `count` parts (a power of two); 0: about as many as there are members."""
        count = count or min(PARTS, max(PARTS_MIN, 1 << self._count.bit_length()))
        parts = self._parts
        while len(parts) > count:
            parts = list(map(operator.xor, parts[::2], parts[1::2]))
        return struct.pack(f">{count}I", *parts)

    def differing(
        self, digests: bytes, now: float
    ) -> tuple[tuple[int, ...], tuple[Brief, ...], tuple[bytes, ...]]:
        """Compared with another's digests: the parts that differ, and their members; in brief, or
        in full where the other knows nobody. ValueError: these are no digests."""
        parts, count = self._differing_parts(digests)
        recent = now - self._config.news_s  # older losses are news to nobody
        brief: list[Brief] = []
        full: list[bytes] = []
        for belief in self._members_of(parts, count):
            peer, (boot, incarnation, state) = belief.peer, belief.rank
            since = self._gone.get(peer)
            if since is None and parts[_part(peer, count)]:
                full.append(belief.packed)
            elif since is None or since > recent:
                brief.append((peer, boot, incarnation, state))
        return tuple(parts), tuple(brief), tuple(full)

    def _differing_parts(self, digests: bytes) -> tuple[dict[int, bool], int]:
        """The parts that differ → whether the other knows nobody there; and how many parts."""
        count = len(digests) // 4
        if len(digests) % 4 or not 1 <= count <= PARTS or count & (count - 1):
            raise ValueError(f"{len(digests)} bytes are not the digests of a power of two of parts")
        theirs = struct.unpack(f">{count}I", digests)
        own = struct.unpack(f">{count}I", self.digests(count))
        return {i: not theirs[i] for i in range(count) if theirs[i] != own[i]}, count

    def _in_order(self) -> list[bytes]:
        if not self._sorted:
            self._order.sort()
            self._sorted = True
        return self._order

    def _members_of(self, parts: Iterable[int], count: int) -> Iterator[Belief]:
        self._in_order()
        for part in parts:
            if part >= count:
                continue  # the other named a part that does not exist
            width = 2**16 // count
            start = bisect_left(self._order, (part * width).to_bytes(2, "big"))
            last = (part + 1) * width - 1
            end = bisect_right(self._order, last.to_bytes(2, "big") + LAST)
            for peer in self._order[start:end]:
                yield self._known[peer]

    def compare(
        self, parts: Iterable[int], count: int, known: Iterable[Brief]
    ) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Compared with another's view of these parts: what it lacks, and what this peer lacks."""
        theirs = {peer: (boot, incarnation, state) for peer, boot, incarnation, state in known}
        lacks = tuple(
            belief.packed
            for belief in self._members_of(parts, count)
            if (
                belief.rank > theirs[belief.peer]
                if belief.peer in theirs
                else belief.peer not in self._gone
            )
        )
        known_here = self._known
        wanted = tuple(
            peer
            for peer, rank in theirs.items()
            if peer not in known_here or rank > known_here[peer].rank
        )
        return lacks, wanted
