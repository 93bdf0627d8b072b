"""The catalog: which peers hold a file, as records that each holder publishes for itself.

Records are hints: only a peer that gives the file does hold it. Changes within a moment are
published together; a record goes when its file does, and is valid only while its holder is here. A
peer that leaves hands on the records that it keeps for others (`Records.hand_on`).
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
        self._held: dict[bytes, bool] = {}  # to be published: True if it is here, False if it went
        self._told: set[bytes] = set()
        self._news = asyncio.Event()

    def held(self, digest: bytes) -> None:
        if digest not in self._told or self._held.get(digest) is False:
            self._held[digest] = True
            self._news.set()

    def lost(self, digest: bytes) -> None:
        if digest in self._told:
            self._held[digest] = False
            self._news.set()
        else:
            self._held.pop(digest, None)

    async def run(self) -> None:
        while True:
            await self._news.wait()
            await asyncio.sleep(TELL_S)
            await self.tell()

    async def tell(self) -> None:
        """Publishes the changes since the last time, in one message to each owner of their keys."""
        self._news.clear()
        changed, self._held = self._held, {}
        came = [digest for digest, here in changed.items() if here]
        went = [digest for digest, here in changed.items() if not here]
        self._told.update(came)
        self._told.difference_update(went)
        version = int(1000 * self._clock())
        if came:
            await self._records.publish({_key(digest): self._me for digest in came}, version)
        if went:
            await self._records.withdraw([_key(digest) for digest in went], version)

    async def find(self, digest: bytes) -> list[bytes]:
        records = await self._records.fetch(_key(digest))
        here = [r.owner for r in records if self._members.is_here(r.owner) and r.owner != self._me]
        return here[:FOUND_MAX]


def _key(digest: bytes) -> bytes:
    return key_of("blob", digest.hex())
