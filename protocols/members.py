"""Who is in the cluster, as this peer believes: alive, suspected, dead or left.

Of two beliefs about a peer the one with the higher (boot, incarnation, state) holds; so a rumour
can come late, twice or in any order. Only a peer itself raises its boot (by starting) and its
incarnation (by objecting to a rumour that it is not well).
"""

from __future__ import annotations

import hashlib
import itertools
import math
import operator
import random
import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import IntEnum
from functools import lru_cache

from .codec import Malformed, pack_member, read_member
from .config import Config
from .messages import Contact, Member


class State(IntEnum):
    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


FORGET_S = 60.0  # between two looks for what may be forgotten
#: The space of ids, in parts of which each has a digest. Two peers compare about as many as there
#: are members, so that those that differ have little in them.
PARTS = 1024
PARTS_MIN = 16
CROWD_MIN = 64
DRAWS_MAX = 50  # for a few that are here, of all that are known

Listener = Callable[[Member | None, Member], None]
Brief = tuple[bytes, int, int, int]  # id, boot, incarnation, state


def _rank(member: Member) -> tuple[int, ...]:
    return member[4:7]  # boot, incarnation, state


def _part(peer: bytes, count: int = PARTS) -> int:
    return (peer[0] << 8 | peer[1]) * count >> 16


@lru_cache(20_000)
def _mark(peer: bytes, boot: int, incarnation: int) -> int:
    """What digests are made of: only of those believed to be here, suspicion aside."""
    text = b"%b %d %d" % (peer, boot, incarnation)
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


def briefs(rumours: Iterable[bytes]) -> Iterable[Brief]:
    for packed in rumours:
        try:
            m = read_member(packed)
        except Malformed:
            continue
        yield m.contact.id, m.boot, m.incarnation, m.state


class Members:
    def __init__(self, me: Member, config: Config) -> None:
        self.me = me
        self.digest = 0
        self.malformed = 0
        self._parts = [0] * PARTS
        self._config = config
        self._known: dict[bytes, Member] = {me.contact.id: me}
        self._order = [me.contact.id]  # all of them, by their ids
        self._packed: dict[bytes, bytes] = {me.contact.id: pack_member(me)}
        self._since: dict[bytes, float] = {}
        self._gone: dict[bytes, None] = {}  # dead or left
        self._held = {self._packed[me.contact.id]}  # what is believed, as it travels
        self._told = 0  # messages that carried rumours
        self._news: dict[bytes, int] = {me.contact.id: 0}  # heard after how many of those
        self._listeners: list[Listener] = []
        self._here: list[Member] | None = None
        self._count = 1
        self._forget_at = 0.0
        self._note(me)

    def __len__(self) -> int:
        return len(self._known)

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def get(self, peer: bytes) -> Member | None:
        return self._known.get(peer)

    def contact(self, peer: bytes) -> Contact | None:
        member = self._known.get(peer)
        return member.contact if member else None

    def all(self) -> list[Member]:
        return list(self._known.values())

    def here(self) -> list[Member]:
        """Those one may give work to: alive or under suspicion only, this peer among them."""
        if self._here is None:
            self._here = [m for m in self._known.values() if m.state <= State.SUSPECT]
        return self._here

    @property
    def count(self) -> int:
        """How many of those there are."""
        return self._count

    def is_here(self, peer: bytes) -> bool:
        member = self._known.get(peer)
        return member is not None and member.state <= State.SUSPECT

    def is_alive(self, peer: bytes) -> bool:
        """Here, and not doubted."""
        member = self._known.get(peer)
        return member is not None and member.state == State.ALIVE

    def since(self, peer: bytes) -> float:
        return self._since.get(peer, 0.0)

    def hear(self, rumours: Collection[bytes], now: float) -> None:
        # who comes anew learns of everybody: no news to anybody else, and would crowd out what is
        known = len(rumours) > max(CROWD_MIN, len(self._known) // 2)
        held = self._held
        for packed in [rumour for rumour in rumours if rumour not in held]:
            try:
                rumour = read_member(packed)
            except Malformed:
                self.malformed += 1
                continue
            mine = rumour.contact.id == self.me.contact.id  # an objection is news to all
            if self.apply(rumour, now, packed) and known and not mine:
                self._news.pop(rumour.contact.id, None)

    def apply(self, rumour: Member, now: float, packed: bytes = b"") -> bool:
        """Take a belief over if it is newer; True if it was."""
        peer = rumour.contact.id
        if peer == self.me.contact.id:
            return self._about_me(rumour)
        old = self._known.get(peer)
        if old is not None and rumour[4:7] <= old[4:7]:
            return False
        if old is None and (not rumour.http or not self._room()):
            return False
        if not rumour.http and old is not None:  # a brief rumour carries the state alone
            packed = b""
            rumour = old._replace(
                boot=rumour.boot, incarnation=rumour.incarnation, state=rumour.state
            )
        self._set(rumour, now, packed)
        for listener in self._listeners:
            listener(old, rumour)
        return True

    def _room(self) -> bool:
        """For one more; the peer that is dead for longest makes some."""
        if len(self._known) < self._config.members_max:
            return True
        oldest = next(iter(self._gone), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _about_me(self, rumour: Member) -> bool:
        if _rank(rumour) <= _rank(self.me) or self.me.state == State.LEFT:
            return False
        # object, or take over a higher number that an earlier start of mine reached
        self._update_me(incarnation=max(self.me.incarnation, rumour.incarnation) + 1)
        return True

    def describe(self, http: str) -> None:
        """Where HTTP is served, known once the socket is open; before anybody was told."""
        self.me = self.me._replace(http=http)
        self._set(self.me, 0.0)

    def leave(self) -> None:
        self._update_me(state=int(State.LEFT), incarnation=self.me.incarnation + 1)

    def _update_me(self, **changes: int) -> None:
        self.me = self.me._replace(**changes)  # type: ignore[arg-type]
        self._set(self.me, self._since.get(self.me.contact.id, 0.0))

    def _set(self, member: Member, now: float, packed: bytes = b"") -> None:
        peer = member.contact.id
        old = self._known.get(peer)
        if old is not None:
            self._note(old)
            self._count -= old.state <= State.SUSPECT
        else:
            insort(self._order, peer)
        self._note(member)
        self._count += member.state <= State.SUSPECT
        self._known[peer] = member
        self._held.discard(self._packed.get(peer, b""))
        self._packed[peer] = packed = packed or pack_member(member)
        self._held.add(packed)
        self._since[peer] = now
        self._gone.pop(peer, None)
        if member.state >= State.DEAD:
            self._gone[peer] = None  # the latest last
        self._news.pop(peer, None)
        self._news[peer] = self._told  # the latest last
        self._here = None

    def _note(self, member: Member) -> None:
        """Into the digests; a second time: out of them."""
        if member.state <= State.SUSPECT:
            peer = member.contact.id
            mark = _mark(peer, member.boot, member.incarnation)
            self.digest ^= mark
            self._parts[_part(peer)] ^= mark & 0xFFFFFFFF

    def judge(self, peer: bytes, state: State, now: float) -> bool:
        """This peer's own verdict about another."""
        member = self._known.get(peer)
        if member is None or member.state >= state:
            return False
        return self.apply(member._replace(state=int(state)), now)

    def forget(self, now: float) -> None:
        """Peers dead or gone for a day; their return makes them known again."""
        if now < self._forget_at:
            return
        self._forget_at = now + FORGET_S
        limit = now - self._config.forget_dead_s
        for peer in [p for p in self._gone if self._since[p] < limit]:
            self._drop(peer)

    def _drop(self, peer: bytes) -> None:
        del self._order[bisect_left(self._order, peer)]
        self._held.discard(self._packed.pop(peer))
        del self._known[peer], self._since[peer], self._gone[peer]
        self._news.pop(peer, None)

    # ----------------------------------------------------------------- gossip

    def packed(self, peer: bytes) -> bytes | None:
        return self._packed.get(peer)

    def draw(self, rng: random.Random, count: int, without: Collection[bytes]) -> list[Member]:
        """So many of those who are here, at random; fewer if there are no more."""
        if len(self._order) < 4 * count + len(without):
            there = [m for m in self.here() if m.contact.id not in without]
            return rng.sample(there, min(count, len(there)))
        found: dict[bytes, Member] = {}
        for _ in range(DRAWS_MAX):
            peer = self._order[rng.randrange(len(self._order))]
            if peer not in without and self.is_here(peer):
                found[peer] = self._known[peer]
                if len(found) == count:
                    return list(found.values())
        # of all that are known hardly any is left
        there = [m for m in self.here() if m.contact.id not in without]
        return rng.sample(there, min(count, len(there)))

    def a_dead_one(self, chosen: Callable[[int], int]) -> Member | None:
        """Any of those that died; `chosen` draws a number below its argument."""
        for _ in range(min(8, len(self._gone))):
            peer = next(itertools.islice(self._gone, chosen(len(self._gone)), None))
            if self._known[peer].state == State.DEAD:
                return self._known[peer]
        return None

    def rumours(self, told: Collection[bytes] = ()) -> tuple[bytes, ...]:
        """What was heard last, to be passed on: each for a bounded number of messages, and less
        often if there is always something newer (who misses it is told by its digest). Not what
        the other has just `told` itself."""
        self._told += 1
        past = self._told - self._config.gossip_repeat * math.ceil(math.log2(len(self._known) + 1))
        while self._news and next(iter(self._news.values())) < past:
            del self._news[next(iter(self._news))]
        news: Iterable[bytes] = map(self._packed.__getitem__, reversed(self._news))
        if told:
            news = (packed for packed in news if packed not in told)
        return tuple(itertools.islice(news, self._config.gossip_per_message))

    # ----------------------------------------------------------------- comparing two views

    def digests(self, count: int = 0) -> bytes:
        """Of so many parts of the space (a power of two); 0: as many as there are members."""
        count = count or min(PARTS, max(PARTS_MIN, 1 << self._count.bit_length()))
        parts = self._parts
        while len(parts) > count:
            parts = list(map(operator.xor, parts[::2], parts[1::2]))
        return struct.pack(f">{count}I", *parts)

    def differing(
        self, digests: bytes, now: float
    ) -> tuple[tuple[int, ...], tuple[Brief, ...], tuple[bytes, ...]]:
        """Against another's digests: the parts that differ, who is in them in brief, and in full
        where the other knows nobody. ValueError: these are no digests."""
        count = len(digests) // 4
        if len(digests) % 4 or not 1 <= count <= PARTS or count & (count - 1):
            raise ValueError("not as many digests as there can be")
        theirs = struct.unpack(f">{count}I", digests)
        mine = struct.unpack(f">{count}I", self.digests(count))
        parts = {i: not theirs[i] for i in range(count) if theirs[i] != mine[i]}
        recent = now - self._config.news_s  # older losses are news to nobody
        brief: list[Brief] = []
        full: list[bytes] = []
        for peer, m in self._in(parts, count):
            if m.state > State.SUSPECT:
                if self._since[peer] > recent:
                    brief.append((peer, m.boot, m.incarnation, m.state))
            elif parts[_part(peer, count)]:
                full.append(self._packed[peer])
            else:
                brief.append((peer, m.boot, m.incarnation, m.state))
        return tuple(parts), tuple(brief), tuple(full)

    def _in(self, parts: Iterable[int], count: int) -> Iterator[tuple[bytes, Member]]:
        for part in parts:
            if part >= count:
                continue  # whoever says so: there is no such part
            at = bisect_left(self._order, (part * (2**16 // count)).to_bytes(2, "big"))
            for peer in itertools.islice(self._order, at, None):
                if _part(peer, count) != part:
                    break
                yield peer, self._known[peer]

    def compare(
        self, parts: Iterable[int], count: int, known: Iterable[Brief]
    ) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Against another's view of these parts: what it lacks, and whom this peer lacks."""
        theirs = {peer: (boot, incarnation, state) for peer, boot, incarnation, state in known}
        lacks = tuple(
            self._packed[p]
            for p, m in self._in(parts, count)
            if (_rank(m) > theirs[p] if p in theirs else m.state <= State.SUSPECT)
        )
        wanted = tuple(
            p for p, r in theirs.items() if p not in self._known or r > _rank(self._known[p])
        )
        return lacks, wanted
