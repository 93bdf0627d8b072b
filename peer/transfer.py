"""Files from other peers: in ranges, from any holder, kept only if the hash is right.

One transfer a blob at a time, however many wait for it. A holder that fails or lies is passed over
and the next one asked; holders come from the task's own list, then from the catalog's records.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from functools import partial

from protocols.members import Members
from protocols.messages import (
    BlobPart,
    BlobsRead,
    Contact,
    CopiedBlobs,
    CopyBlobs,
    File,
    ReadBlob,
    ReadBlobs,
)
from protocols.records import Records, key_of
from protocols.rpc import CallFailed, Refused, Rpc

from .blobs import BlobError, Blobs, hash_file

log = logging.getLogger("valence.transfer")

RANGE_BYTES = 512 * 1024
RANGES_AT_ONCE = 4
TRANSFERS_MAX = 16
SMALL_BYTES = 64 * 1024  # several of them share a message
BATCH_BLOBS = 256
COPY_S_MIN, COPY_BYTES_PER_S = 5.0, 5 * 2**20


class Unavailable(BlobError):
    """No holder could give it."""

    status = 503


class Transfer:
    def __init__(self, rpc: Rpc, blobs: Blobs, members: Members, records: Records) -> None:
        self.counts: Counter[str] = Counter()
        self._rpc = rpc
        self._blobs = blobs
        self._members = members
        self._records = records
        self._under_way: dict[bytes, asyncio.Task[None]] = {}
        self._slots = asyncio.Semaphore(TRANSFERS_MAX)
        rpc.on(ReadBlob, self._read_blob)
        rpc.on(ReadBlobs, self._read_blobs)
        rpc.on(CopyBlobs, self._copy_blobs)

    async def _read_blob(self, sender: Contact, message: ReadBlob) -> BlobPart:
        size = self._blobs.size(message.hash)
        if size is None:
            raise Refused("missing", "this peer does not hold that blob")
        if message.offset >= size:
            return BlobPart(size=size, data=b"")
        data = await self._blobs.read(message.hash, message.offset, message.length)
        self.counts["bytes_served"] += len(data)
        return BlobPart(size=size, data=data)

    async def _read_blobs(self, sender: Contact, message: ReadBlobs) -> BlobsRead:
        chosen: list[bytes] = []
        total = 0
        for hash in message.hashes:
            size = self._blobs.size(hash)
            if size is not None and size <= SMALL_BYTES and total + size <= RANGE_BYTES:
                chosen.append(hash)
                total += size
        found = await self._blobs.read_many(chosen)
        self.counts["bytes_served"] += total
        return BlobsRead(blobs=tuple(found))

    async def _copy_blobs(self, sender: Contact, message: CopyBlobs) -> CopiedBlobs:
        for file, error in await self.fetch_all(message.files):
            log.info("no second copy of %s here: %s", file.name, error)
        return CopiedBlobs(hashes=tuple(f.hash for f in message.files if f.hash in self._blobs))

    async def copy_to(self, peer: bytes, files: list[File]) -> set[bytes]:
        """Of those, the ones that this peer holds too by now."""
        contact = self._members.contact(peer)
        if contact is None:
            return set()
        size = sum(file.size for file in files)
        limit_s = COPY_S_MIN + size / COPY_BYTES_PER_S
        try:
            message = CopyBlobs(files=tuple(files))
            answer = await self._rpc.call(contact, message, CopiedBlobs, limit_s)
        except CallFailed as error:
            log.info("no second copy of %d files: %s", len(files), error)
            return set()
        return set(answer.hashes)

    async def fetch(self, file: File) -> None:
        """After this the blob is here; or `BlobError`."""
        while file.hash not in self._blobs:
            task = self._under_way.get(file.hash)
            if task is None:
                task = asyncio.ensure_future(self._fetch(file))
                self._under_way[file.hash] = task
                task.add_done_callback(partial(self._fetched, file.hash))
            await asyncio.shield(task)

    def _fetched(self, hash: bytes, task: asyncio.Task[None]) -> None:
        self._under_way.pop(hash, None)
        if not task.cancelled():
            task.exception()  # who waited for it may have been ended: then nobody hears of it

    async def fetch_all(self, files: Iterable[File]) -> list[tuple[File, BaseException]]:
        """After this they are here, but for those that are returned. Small ones that have a holder
        in common come together; whatever did not come that way is fetched by itself."""
        missing = [file for file in files if file.hash not in self._blobs]
        batches: dict[bytes, list[File]] = {}
        for file in missing:
            alive = [p for p in file.holders if self._members.is_alive(p) and p != self._rpc.me.id]
            if file.size <= SMALL_BYTES and alive and file.hash not in self._under_way:
                holder = max(alive, key=lambda p: len(batches.get(p, ())))
                batches.setdefault(holder, []).append(file)
        calls = []
        for holder, rows in batches.items():
            count = max(1, min(BATCH_BLOBS, RANGE_BYTES // max(1, max(f.size for f in rows))))
            for start in range(0, len(rows) if len(rows) > 1 else 0, count):
                calls.append(self._fetch_batch(holder, rows[start : start + count]))
        await asyncio.gather(*calls)
        left = [file for file in missing if file.hash not in self._blobs]
        results = await asyncio.gather(*map(self.fetch, left), return_exceptions=True)
        return [(f, e) for f, e in zip(left, results, strict=True) if e is not None]

    async def _fetch_batch(self, holder: bytes, files: list[File]) -> None:
        contact = self._members.contact(holder)
        if contact is None:
            return
        wanted = {file.hash for file in files}
        message = ReadBlobs(hashes=tuple(wanted))
        try:
            async with self._slots:
                answer = await self._rpc.call(contact, message, BlobsRead)
                rows = _checked(answer.blobs, wanted)
                await self._blobs.put_many(rows)
        except (CallFailed, BlobError) as error:
            log.debug("%d files from %s: %s", len(files), holder.hex()[:8], error)
            return
        self.counts["corrupt"] += len(answer.blobs) - len(rows)
        self.counts["bytes_fetched"] += sum(len(data) for _, data in rows)

    async def announce(self, hash: bytes, version: int) -> None:
        """To the catalog: this peer holds it."""
        await self._records.publish({key_of("blob", hash.hex()): self._rpc.me.id}, version)

    async def find(self, hash: bytes) -> list[bytes]:
        """Holders by the catalog."""
        found = await self._records.fetch(key_of("blob", hash.hex()))
        return [r.owner for r in found if self._members.is_here(r.owner)]

    async def size(self, hash: bytes, holders: list[bytes]) -> int | None:
        """As a holder says; the hash is what is believed in the end."""
        for holder in holders:
            contact = self._members.contact(holder)
            if contact is None:
                continue
            try:
                message = ReadBlob(hash=hash, offset=0, length=1)
                return (await self._rpc.call(contact, message, BlobPart)).size
            except CallFailed:
                continue
        return None

    async def _holders(self, file: File) -> AsyncIterator[Contact]:
        tried: set[bytes] = {self._rpc.me.id}
        for source in (file.holders, None):
            holders = list(await self.find(file.hash)) if source is None else list(source)
            # those believed here first; one believed dead may still be the last hope
            holders.sort(key=lambda p: not self._members.is_here(p))
            for holder in holders:
                contact = self._members.contact(holder)
                if contact is not None and holder not in tried:
                    tried.add(holder)
                    yield contact

    async def _fetch(self, file: File) -> None:
        reasons = []
        async with self._slots:
            async for holder in self._holders(file):
                try:
                    await self._fetch_from(holder, file)
                except CallFailed as error:
                    reasons.append(f"{holder.id.hex()[:8]}: {error}")
                except BlobError as error:
                    self.counts["corrupt"] += 1
                    reasons.append(f"{holder.id.hex()[:8]}: {error}")
                    if error.status in (507, 413):
                        raise
                else:
                    return
        why = "; ".join(reasons) or "nobody is known to hold it"
        raise Unavailable(f"{file.name}: no holder could give it ({why})")

    async def _fetch_from(self, holder: Contact, file: File) -> None:
        part = self._blobs.new_part()
        with self._blobs.room(file.size) as room:
            try:
                with part.open("wb") as out:
                    async for data in self.stream(holder, file.hash, 0, file.size):
                        await asyncio.to_thread(out.write, data)
                found = await asyncio.to_thread(hash_file, part)
                if found != file.hash:
                    raise BlobError("its content is not what its name says")
                await self._blobs.adopt(part, copy=True, hashed=found, room=room)
                self.counts["bytes_fetched"] += file.size
            finally:
                part.unlink(missing_ok=True)

    async def stream(
        self, holder: Contact, hash: bytes, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """Ranges in order, several asked for ahead."""
        ahead: list[asyncio.Task[BlobPart]] = []
        position = start
        try:
            while position < end or ahead:
                while position < end and len(ahead) < RANGES_AT_ONCE:
                    length = min(RANGE_BYTES, end - position)
                    message = ReadBlob(hash=hash, offset=position, length=length)
                    call = self._rpc.call(holder, message, BlobPart, 20.0)
                    ahead.append(asyncio.ensure_future(call))
                    position += length
                answer = await ahead.pop(0)
                if not answer.data:
                    raise Refused("short", "the holder's file is shorter than announced")
                yield answer.data
        finally:
            for task in ahead:
                task.cancel()
            await asyncio.gather(*ahead, return_exceptions=True)

    async def read(self, file: File, start: int, end: int) -> AsyncIterator[bytes]:
        """For a user: from this disk, or passed through from a holder, the next where one fails."""
        if file.hash in self._blobs:
            with self._blobs.pinned([file.hash]):
                async for data in self._blobs.chunks(file.hash, start, end):
                    yield data
            return
        reasons = []
        async for holder in self._holders(file):
            try:
                async for data in self.stream(holder, file.hash, start, end):
                    start += len(data)
                    yield data
                return
            except CallFailed as error:
                reasons.append(str(error))
        why = "; ".join(reasons) or "nobody is known to hold it"
        raise Unavailable(f"{file.name}: no holder could give it ({why})")

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _checked(found: Iterable[tuple[bytes, bytes]], wanted: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Those that were asked for, and are what their names say."""
    return [(h, d) for h, d in found if h in wanted and hashlib.sha256(d).digest() == h]
