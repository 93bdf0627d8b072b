"""Records: small replicated values under a key, each with an owner, a version and an expiry.

Rules:
- Under one key every owner has a record of its own: a write never replaces another owner's record.
- The highest version of an owner's record wins; an equal version can only extend its life. So a
  stale copy never replaces a newer one, however late it arrives.
- A record lives as long as its owner republishes it. The wire carries its remaining life.
- The peers closest to a key keep its records. A peer that joins among them is handed the records;
  one that leaves hands them on.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Sized
from dataclasses import dataclass

from .config import Config
from .overlay.kademlia import Overlay
from .wire.messages import (
    Contact,
    FetchedRecords,
    FetchRecords,
    Record,
    StoredRecords,
    StoreRecords,
)
from .wire.rpc import CallFailed, Rpc

BATCH_RECORDS = 200


def key_of(kind: str, name: str) -> bytes:
    return hashlib.blake2b(f"{kind}:{name}".encode(), digest_size=20).digest()


@dataclass(slots=True)
class _StoredRecord:
    version: int
    expires_at: float
    value: bytes


class RecordStore:
    """The records that this peer keeps for others. Pure."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._keys: dict[bytes, dict[bytes, _StoredRecord]] = {}
        self.count = 0

    def put(self, record: Record, now: float) -> bool:
        """Store a record, unless a newer one is here; False if a limit refuses it."""
        owners = self._keys.get(record.key, {})
        old = owners.get(record.owner)
        expires_at = now + min(record.ttl_s, self._config.record_ttl_s)
        if old is not None:
            if (record.version, expires_at) > (old.version, old.expires_at):
                owners[record.owner] = _StoredRecord(record.version, expires_at, record.value)
            return True
        if not self._fits(record, owners, now):
            return False
        self._keys[record.key] = owners
        owners[record.owner] = _StoredRecord(record.version, expires_at, record.value)
        self.count += 1
        return True

    def _fits(self, record: Record, owners: Sized, now: float) -> bool:
        config = self._config
        if self.count >= config.records_max:
            self.expire(now)
        return (
            self.count < config.records_max
            and len(owners) < config.owners_per_key_max
            and len(record.value) <= config.record_bytes_max
        )

    def get(self, key: bytes, now: float) -> list[Record]:
        return [
            Record(key=key, owner=owner, version=k.version, ttl_s=k.expires_at - now, value=k.value)
            for owner, k in self._keys.get(key, {}).items()
            if k.expires_at > now
        ]

    def kept_keys(self) -> list[bytes]:
        return list(self._keys)

    def expire(self, now: float) -> None:
        for key, owners in list(self._keys.items()):
            for owner, kept in list(owners.items()):
                if kept.expires_at <= now:
                    del owners[owner]
                    self.count -= 1
            if not owners:
                del self._keys[key]


class Records:
    """The service: publishes this peer's own records, fetches others', and hands records over."""

    def __init__(self, rpc: Rpc, overlay: Overlay, rng: random.Random, config: Config) -> None:
        self.store = RecordStore(config)
        self._rpc = rpc
        self._overlay = overlay
        self._rng = rng
        self._config = config
        self._published: dict[bytes, tuple[int, bytes]] = {}
        self._newcomers: dict[bytes, Contact] = {}
        self._joined = asyncio.Event()
        rpc.on(StoreRecords, self._store_records)
        rpc.on(FetchRecords, self._fetch_records)

    async def publish(self, values: dict[bytes, bytes], version: int) -> None:
        """Publish these, and republish them until `withdraw`, or until many newer ones follow."""
        for key, value in values.items():
            self._published.pop(key, None)  # so that the newest is last
            self._published[key] = (version, value)
        while len(self._published) > self._config.published_max:
            del self._published[next(iter(self._published))]
        await self._send(list(values))

    async def withdraw(self, keys: list[bytes], version: int) -> None:
        """Replace records by empty ones of a higher version, which expire."""
        for key in keys:
            self._published[key] = (version, b"")
        await self._send(keys)
        for key in keys:
            self._published.pop(key, None)

    async def fetch(self, key: bytes) -> list[Record]:
        """Every owner's newest record under the key, as the closest peers have it."""
        peers = await self._overlay.find(key)
        newest: dict[bytes, Record] = {}
        message = FetchRecords(keys=(key,))
        answers = await asyncio.gather(
            *(self._rpc.call(p, message, FetchedRecords, 1.0) for p in peers),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, FetchedRecords):
                for record in answer.records:
                    old = newest.get(record.owner)
                    if record.key == key and (old is None or record.version > old.version):
                        newest[record.owner] = record
        return [record for record in newest.values() if record.value]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._config.republish_s * (0.75 + 0.5 * self._rng.random()))
            self.store.expire(self._now())
            await self._send(list(self._published))

    def joined(self, newcomer: Contact) -> None:
        """A peer has joined: see `hand_over`."""
        if self.store.count and len(self._newcomers) < self._config.members_max:
            self._newcomers[newcomer.id] = newcomer
            self._joined.set()

    async def hand_over(self) -> None:
        """Give each newcomer the records of the keys that it is now among the closest to.

        Runs for ever."""
        while True:
            await self._joined.wait()
            await asyncio.sleep(self._config.hand_over_s)  # a peer seldom joins alone
            self._joined.clear()
            newcomers, self._newcomers = self._newcomers, {}
            table, count, now = self._overlay.table, self._config.lookup_wanted, self._now()
            keys = self.store.kept_keys()
            work = []
            for peer, newcomer in newcomers.items():
                near = [key for key in keys if table.is_among_closest(peer, key, count)]
                records = [record for key in near for record in self.store.get(key, now)]
                if records:
                    work.append(self._store_at(newcomer, records))
            await asyncio.gather(*work)

    async def hand_on(self) -> None:
        """Before this peer leaves: give every record it keeps to the peers closest without it."""
        now = self._now()
        batches: dict[bytes, tuple[Contact, list[Record]]] = {}
        for key in self.store.kept_keys():
            records = self.store.get(key, now)
            for contact in self._overlay.table.closest(key, self._config.lookup_wanted):
                batches.setdefault(contact.id, (contact, []))[1].extend(records)
        await asyncio.gather(*(self._store_at(c, records) for c, records in batches.values()))

    async def _send(self, keys: list[bytes]) -> None:
        batches: dict[bytes, tuple[Contact, list[Record]]] = {}
        for key in keys:
            if key not in self._published:
                continue
            version, value = self._published[key]
            record = Record(
                key=key,
                owner=self._rpc.me.id,
                version=version,
                ttl_s=self._config.record_ttl_s,
                value=value,
            )
            for contact in await self._overlay.find(key):
                batches.setdefault(contact.id, (contact, []))[1].append(record)
        await asyncio.gather(*(self._store_at(c, records) for c, records in batches.values()))

    async def _store_at(self, contact: Contact, records: list[Record]) -> None:
        for start in range(0, len(records), BATCH_RECORDS):
            message = StoreRecords(records=tuple(records[start : start + BATCH_RECORDS]))
            try:
                await self._rpc.call(contact, message, StoredRecords)
            except CallFailed:
                return  # two other holders have them, and they are republished

    def _store_records(self, sender: Contact, message: StoreRecords) -> StoredRecords:
        now = self._now()
        return StoredRecords(refused=sum(not self.store.put(r, now) for r in message.records))

    def _fetch_records(self, sender: Contact, message: FetchRecords) -> FetchedRecords:
        now = self._now()
        return FetchedRecords(
            records=tuple(r for k in message.keys for r in self.store.get(k, now))
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
