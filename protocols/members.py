"""Who is in the cluster, as this peer believes: alive, suspected, dead or left.

Of two beliefs about a peer the one with the higher (boot, incarnation, state) holds; so a rumour
can come late, twice or in any order. Only a peer itself raises its boot (by starting) and its
incarnation (by objecting to a rumour that it is not well).
"""

from __future__ import annotations

import hashlib
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
        self._rumours: dict[bytes, int] = {me.contact.id: 0}  # how often each was passed on
        self._listeners: list[Listener] = []
        self._here: list[Member] | None = None

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
        if old is None and (len(self._known) >= self._config.members_max or not rumour.http):
            return False
        if not rumour.http and old is not None:  # a brief rumour carries the state alone
            rumour = old._replace(
                boot=rumour.boot, incarnation=rumour.incarnation, state=rumour.state
            )
        self._set(rumour, now)
        for listener in self._listeners:
            listener(old, rumour)
        return True

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
        self._known[peer] = member
        self._since[peer] = now
        self._rumours[peer] = 0
        self._here = None

    def judge(self, peer: bytes, state: State, now: float) -> bool:
        """This peer's own verdict about another."""
        member = self._known.get(peer)
        if member is None or member.state >= state:
            return False
        return self.apply(member._replace(state=int(state)), now)

    def forget(self, now: float) -> None:
        """Peers dead or gone for a day; their return makes them known again."""
        for peer, member in list(self._known.items()):
            gone = member.state >= State.DEAD
            if gone and now - self._since[peer] > self._config.forget_dead_s:
                del self._known[peer], self._since[peer]
                self._rumours.pop(peer, None)

    # ----------------------------------------------------------------- gossip

    def rumours(self) -> tuple[Member, ...]:
        """The next few to pass on, those least passed on first; each a bounded number of times."""
        limit = self._config.gossip_repeat * math.ceil(math.log2(len(self._known) + 1))
        chosen = sorted(self._rumours, key=self._rumours.__getitem__)
        chosen = chosen[: self._config.gossip_per_message]
        for peer in chosen:
            self._rumours[peer] += 1
            if self._rumours[peer] >= limit:
                del self._rumours[peer]
        return tuple(self._known[peer] for peer in chosen if peer in self._known)

    def brief(self) -> tuple[tuple[bytes, int, int, int], ...]:
        return tuple((p, m.boot, m.incarnation, m.state) for p, m in self._known.items())

    def compare(
        self, known: Iterable[tuple[bytes, int, int, int]]
    ) -> tuple[tuple[Member, ...], tuple[bytes, ...]]:
        """Against another's brief list: what it lacks, and whom this peer lacks."""
        theirs = {peer: (boot, incarnation, state) for peer, boot, incarnation, state in known}
        lacks = tuple(m for p, m in self._known.items() if p not in theirs or _rank(m) > theirs[p])
        wanted = tuple(
            p for p, r in theirs.items() if p not in self._known or r > _rank(self._known[p])
        )
        return lacks, wanted
