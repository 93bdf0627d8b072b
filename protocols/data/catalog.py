"""The catalog: which peers hold a file, as records that each holder appends for itself.

Records are hints: who holds a file is who gives it. What changes within a moment is told together;
a record goes when its file does, and counts only while its holder is here. A peer that leaves
hands on the records it keeps for others (`Records.hand_on`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..membership.members import Members
from ..records import Records, key_of

TELL_S = 0.2
FOUND_MAX = 64


class Catalog:
    def __init__(
        self, me: bytes, members: Members, records: Records, clock: Callable[[], float]
    ) -> None:
        self._me = me
        self._members = members
        self._records = records
        self._clock = clock
        self._held: dict[bytes, bool] = {}  # what is to be told: it is here, or it went
        self._told: set[bytes] = set()
        self._news = asyncio.Event()

    def held(self, hash: bytes) -> None:
        if hash not in self._told or self._held.get(hash) is False:
            self._held[hash] = True
            self._news.set()

    def lost(self, hash: bytes) -> None:
        if hash in self._told:
            self._held[hash] = False
            self._news.set()
        else:
            self._held.pop(hash, None)

    async def run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(TELL_S)
            await self.tell()

    async def tell(self) -> None:
        """What has changed since the last time, in as few messages as there are owners of it."""
        self._news.clear()
        changed, self._held = self._held, {}
        came = [hash for hash, here in changed.items() if here]
        went = [hash for hash, here in changed.items() if not here]
        self._told.update(came)
        self._told.difference_update(went)
        version = int(1000 * self._clock())
        if came:
            await self._records.publish({_key(hash): self._me for hash in came}, version)
        if went:
            await self._records.withdraw([_key(hash) for hash in went], version)

    async def find(self, hash: bytes) -> list[bytes]:
        found = await self._records.fetch(_key(hash))
        here = [r.owner for r in found if self._members.is_here(r.owner) and r.owner != self._me]
        return here[:FOUND_MAX]


def _key(hash: bytes) -> bytes:
    return key_of("blob", hash.hex())
