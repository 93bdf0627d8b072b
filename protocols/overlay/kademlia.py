"""The overlay's service: keeps the routing table up to date, and finds the peers closest to a key.

A lookup never waits for its slowest peer: a peer that does not answer is passed over after a soft
timeout, and another is asked. Members known to be dead or gone leave the table at once.

Every message is a sign of life, and lookups are rare: contacts are sorted into the table only when
it is read, each once, however often it was seen since.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from ..config import Config
from ..wire.messages import Ack, Contact, FindPeers, FoundPeers, Ping
from ..wire.rpc import CallFailed, Rpc
from .lookup import Lookup
from .table import Table, distance

UNSORTED_MAX = 1024
CHECKS_MAX = 16


class Routes(Protocol):
    """The contacts that a peer knows: `table.Table`, or another overlay's."""

    def touch(self, contact: Contact) -> bool: ...
    def saw(self, contact: Contact) -> Contact | None: ...
    def missed(self, peer: bytes) -> None: ...
    def remove(self, peer: bytes) -> None: ...
    def contacts(self) -> list[Contact]: ...
    def closest(
        self, target: bytes, count: int, without: Collection[bytes] = ()
    ) -> list[Contact]: ...
    def is_among_closest(self, peer: bytes, target: bytes, count: int) -> bool: ...


class Way(Protocol):
    """One lookup: `lookup.Lookup`, or another overlay's."""

    @property
    def over(self) -> bool: ...
    def next(self) -> list[Contact]: ...
    def answered(self, peer: bytes, contacts: Iterable[Contact]) -> None: ...
    def failed(self, peer: bytes) -> None: ...
    def result(self) -> list[Contact]: ...


class Overlay:
    #: the distance of a peer from a key: the closest peers are its owners
    far: Callable[[bytes, bytes], int] = staticmethod(distance)

    def __init__(self, rpc: Rpc, rng: random.Random, config: Config) -> None:
        self._unsorted: dict[bytes, Contact | None] = {}  # the latest last; None: the peer is gone
        # the failure detector's view: a peer that it takes for alive is not pinged from here, too
        self.is_alive: Callable[[bytes], bool] = lambda peer: False
        self._rpc = rpc
        self._rng = rng
        self._config = config
        self._table = self._make_table()
        self._checks: set[asyncio.Task[None]] = set()
        self._checking: set[bytes] = set()
        rpc.on(FindPeers, self._find_peers)

    def _make_table(self) -> Routes:
        return Table(self._rpc.me.id, self._config.bucket_size)

    def _make_lookup(self, target: bytes, count: int) -> Way:
        config = self._config
        start = self.table.closest(target, max(config.lookup_width, count))
        return Lookup(target, start, count, config.lookup_width, config.lookup_calls_max)

    @property
    def table(self) -> Routes:
        """The table, up to date."""
        self._sort()
        return self._table

    def saw(self, contact: Contact) -> None:
        if contact.id in self._unsorted or not self._table.touch(contact):
            self._sort_later(contact.id, contact)

    def gone(self, peer: bytes) -> None:
        self._sort_later(peer, None)

    def _sort_later(self, peer: bytes, contact: Contact | None) -> None:
        self._unsorted.pop(peer, None)
        self._unsorted[peer] = contact
        if len(self._unsorted) >= UNSORTED_MAX:
            self._sort()

    def _sort(self) -> None:
        news, self._unsorted = self._unsorted, {}
        for peer, contact in news.items():
            if contact is None:
                self._table.remove(peer)
            else:
                self._sort_in(contact)

    def _sort_in(self, contact: Contact) -> None:
        doubtful = self._table.saw(contact)
        if doubtful is None or self.is_alive(doubtful.id):
            return
        if doubtful.id not in self._checking and len(self._checks) < CHECKS_MAX:
            self._checking.add(doubtful.id)
            task = asyncio.ensure_future(self._check(doubtful, contact))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, doubtful: Contact, newcomer: Contact) -> None:
        """Keep the oldest contact of a full bucket if it answers; else the newcomer replaces it."""
        try:
            limit_s = self._config.lookup_timeout_s
            await self._rpc.call(doubtful, Ping(digest=0), Ack, limit_s, probing=True)
            self.saw(doubtful)
        except CallFailed:
            self.table.remove(doubtful.id)
            self.table.saw(newcomer)
        finally:
            self._checking.discard(doubtful.id)

    async def find(self, target: bytes, wanted: int | None = None) -> list[Contact]:
        """The closest peers to a key, nearest first; this peer may be among them."""
        count = wanted or self._config.lookup_wanted
        config = self._config
        lookup = self._make_lookup(target, count)
        running: dict[asyncio.Task[FoundPeers], Contact] = {}
        try:
            while not lookup.over:
                for contact in lookup.next():
                    call = self._rpc.call(
                        contact, FindPeers(target=target), FoundPeers, config.lookup_timeout_s
                    )
                    running[asyncio.ensure_future(call)] = contact
                if not running:
                    break
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in [t for t in running if t in done]:  # in the order of asking
                    self._take(lookup, running.pop(task), task)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        closest = [*lookup.result(), self._rpc.me]
        closest.sort(key=lambda c: self.far(c.id, target))
        return closest[:count]

    def _take(self, lookup: Way, contact: Contact, task: asyncio.Task[FoundPeers]) -> None:
        try:
            answer = task.result()
        except CallFailed:
            self.table.missed(contact.id)
            lookup.failed(contact.id)
        else:
            self.saw(contact)
            lookup.answered(contact.id, (c for c in answer.contacts if c.id != self._rpc.me.id))

    def _find_peers(self, sender: Contact, message: FindPeers) -> FoundPeers:
        closest = self.table.closest(
            message.target, min(8, self._config.bucket_size), without=(sender.id,)
        )
        return FoundPeers(contacts=tuple(closest))

    async def refresh(self) -> None:
        """Look up this peer's own id, then random keys, to fill the buckets near and far.

        Runs for ever."""
        while True:
            await self.find(self._rpc.me.id)
            await self.find(self._rng.randbytes(20))
            await asyncio.sleep(self._config.refresh_s * (0.75 + 0.5 * self._rng.random()))
