"""Who is in the cluster, as this peer believes: alive, suspected, dead or left.

Of two beliefs about a peer the one with the higher (boot, incarnation, state) holds; so a rumour
can come late, twice or in any order. Only a peer itself raises its boot (by starting) and its
incarnation (by objecting to a rumour that it is not well).
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable
from enum import IntEnum

from .config import Config
from .messages import Contact, Member


class State(IntEnum):
    ALIVE = 0
    SUSPECT = 1
    DEAD = 2
    LEFT = 3


FORGET_S = 60.0  # between two looks for what may be forgotten

Listener = Callable[[Member | None, Member], None]


def _rank(member: Member) -> tuple[int, int, int]:
    return member.boot, member.incarnation, member.state


def _mark(member: Member) -> int:
    """What two peers' digests are made of: only those believed to be here, suspicion aside."""
    if member.state in (State.DEAD, State.LEFT):
        return 0
    text = b"%b %d %d" % (member.contact.id, member.boot, member.incarnation)
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")


class Members:
    def __init__(self, me: Member, config: Config) -> None:
        self.me = me
        self.digest = _mark(me)
        self._config = config
        self._known: dict[bytes, Member] = {me.contact.id: me}
        self._since: dict[bytes, float] = {}
        self._gone: dict[bytes, None] = {}  # dead or left
        # what is passed on, by how often it was: few are looked at however many there are
        self._rumours: list[dict[bytes, None]] = [{me.contact.id: None}]
        self._passed: dict[bytes, int] = {me.contact.id: 0}
        self._listeners: list[Listener] = []
        self._here: list[Member] | None = None
        self._count = 1
        self._forget_at = 0.0

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

    def apply(self, rumour: Member, now: float) -> bool:
        """Take a belief over if it is newer; True if it was."""
        peer = rumour.contact.id
        if peer == self.me.contact.id:
            return self._about_me(rumour)
        old = self._known.get(peer)
        if old is not None and _rank(rumour) <= _rank(old):
            return False
        if old is None and (not rumour.http or not self._room()):
            return False
        if not rumour.http and old is not None:  # a brief rumour carries the state alone
            rumour = old._replace(
                boot=rumour.boot, incarnation=rumour.incarnation, state=rumour.state
            )
        self._set(rumour, now)
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

    def _set(self, member: Member, now: float) -> None:
        peer = member.contact.id
        old = self._known.get(peer)
        self.digest ^= (_mark(old) if old else 0) ^ _mark(member)
        self._count += member.state <= State.SUSPECT
        self._count -= old is not None and old.state <= State.SUSPECT
        self._known[peer] = member
        self._since[peer] = now
        self._gone.pop(peer, None)
        if member.state >= State.DEAD:
            self._gone[peer] = None  # the latest last
        self._unsay(peer)
        self._rumours[0][peer] = None
        self._passed[peer] = 0
        self._here = None

    def _unsay(self, peer: bytes) -> None:
        passed = self._passed.pop(peer, None)
        if passed is not None:
            del self._rumours[passed][peer]

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
        del self._known[peer], self._since[peer], self._gone[peer]
        self._unsay(peer)

    # ----------------------------------------------------------------- gossip

    def rumours(self) -> tuple[Member, ...]:
        """The next few to pass on, those least passed on first; each a bounded number of times."""
        limit = self._config.gossip_repeat * math.ceil(math.log2(len(self._known) + 1))
        chosen: list[bytes] = []
        for level in self._rumours:
            chosen += itertools.islice(level, self._config.gossip_per_message - len(chosen))
        for peer in chosen:
            passed = self._passed[peer] + 1
            self._unsay(peer)
            if passed < limit:
                if passed == len(self._rumours):
                    self._rumours.append({})
                self._rumours[passed][peer] = None
                self._passed[peer] = passed
        return tuple(self._known[peer] for peer in chosen)

    def brief(self, now: float) -> tuple[tuple[bytes, int, int, int], ...]:
        """All who are here, and who went lately: older losses are news to nobody."""
        recent = now - self._config.news_s
        return tuple(
            (p, m.boot, m.incarnation, m.state)
            for p, m in self._known.items()
            if m.state <= State.SUSPECT or self._since[p] > recent
        )

    def compare(
        self, known: Iterable[tuple[bytes, int, int, int]]
    ) -> tuple[tuple[Member, ...], tuple[bytes, ...]]:
        """Against another's brief list: what it lacks, and whom this peer lacks."""
        theirs = {peer: (boot, incarnation, state) for peer, boot, incarnation, state in known}
        lacks = tuple(
            m
            for p, m in self._known.items()
            if (_rank(m) > theirs[p] if p in theirs else m.state <= State.SUSPECT)
        )
        wanted = tuple(
            p for p, r in theirs.items() if p not in self._known or r > _rank(self._known[p])
        )
        return lacks, wanted
