"""Files from other peers: small ones together, large ones in chunks from several at once, and from
where they came from if no peer has them.

One transfer a blob at a time, however many wait for it; what is to come gets its room before the
first byte. Holders come from the task's own list, then from the catalog's records, where every
holder of a file that is worth a record says so, and takes it back when the file goes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from ..membership.members import Members
from ..ports import Blobs
from ..records import Records
from ..wire.messages import (
    BlobPart,
    BlobsRead,
    Contact,
    CopiedBlobs,
    CopyBlobs,
    File,
    Moved,
    ReadBlob,
    ReadBlobs,
)
from ..wire.rpc import CallFailed, Refused, Rpc
from .cache import BlobError, Reservation
from .catalog import Catalog
from .swarm import Swarm, Unavailable

__all__ = ["Transfer", "TransferResult", "Unavailable"]

log = logging.getLogger("valence.transfer")

RANGE_BYTES = 512 * 1024
RANGES_AT_ONCE = 4
TRANSFERS_MAX = 16
SMALL_BYTES = 64 * 1024  # several of them share a message
BATCH_BLOBS = 256
#: tries with peers, some seconds in all; fewer where nobody here knows the holders
ORIGIN_AFTER, ORIGIN_AFTER_UNKNOWN = 4, 3
COPY_S_MIN, COPY_BYTES_PER_S = 5.0, 5 * 2**20
#: what is smaller is fetched from where it was made, or made again: not worth a record
RECORD_BYTES_MIN = 64 * 1024

#: brings a file in from where it came from
FromOrigin = Callable[[File, str, Reservation], Awaitable[None]]


@dataclass(slots=True)
class TransferResult:
    """What became of the files that were asked for."""

    errors: list[tuple[File, BaseException]] = field(default_factory=list)
    moved: Moved = field(default_factory=Moved)


class Transfer:
    def __init__(
        self,
        rpc: Rpc,
        blobs: Blobs,
        members: Members,
        records: Records,
        clock: Callable[[], float],
        rng: random.Random,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.closed = False  # this peer is leaving
        self.catalog = Catalog(rpc.me.id, members, records, clock)
        self.swarm = Swarm(rpc, blobs, members, rng)
        self.from_origin: FromOrigin | None = None
        self._rpc = rpc
        self._rng = rng
        self._blobs = blobs
        self._members = members
        self._under_way: dict[bytes, asyncio.Task[str]] = {}
        self._slots = asyncio.Semaphore(TRANSFERS_MAX)
        self.swarm.is_copy = lambda hash: not blobs.cache.holds(hash)
        self.swarm.on_corrupt = self._corrupt
        blobs.on_gone = self._gone
        rpc.on(ReadBlob, self._read_blob)
        rpc.on(ReadBlobs, self._read_blobs)
        rpc.on(CopyBlobs, self._copy_blobs)

    def _gone(self, hash: bytes) -> None:
        self.swarm.forget(hash)
        self.catalog.lost(hash)

    @staticmethod
    def _corrupt(file: File, index: int, peer: bytes) -> None:
        where = f"chunk {index} of {file.name} from {peer.hex()[:8]}"
        log.warning("%s is not what it should be: it is fetched again", where)

    async def run(self) -> None:
        await self.catalog.run()

    def held(self, hash: bytes) -> None:
        """A file is here: others may want to know."""
        if (self._blobs.size(hash) or 0) >= RECORD_BYTES_MIN:
            self.catalog.held(hash)

    # ----------------------------------------------------------------- serving

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
        if self.closed:
            raise Refused("leaving", "this peer is leaving")
        found = await self.fetch_all(message.files, message.hold)
        for file, error in found.errors:
            log.info("no second copy of %s here: %s", file.name, error)
        here = [f.hash for f in message.files if f.hash in self._blobs]
        if message.hold:  # also what was here before, as a copy that could go at any time
            here = [hash for hash in here if self._blobs.hold(hash, message.hold)]
        if message.announce:
            for hash in here:
                self.catalog.held(hash)
            await self.catalog.tell()
        return CopiedBlobs(hashes=tuple(here))

    async def copy_to(
        self, peer: bytes, files: list[File], hold: str = "", announce: bool = False
    ) -> set[bytes]:
        """Of those, the ones that this peer holds too by now."""
        contact = self._members.contact(peer)
        if contact is None:
            return set()
        size = sum(file.size for file in files)
        limit_s = COPY_S_MIN + size / COPY_BYTES_PER_S
        try:
            message = CopyBlobs(files=tuple(files), hold=hold, announce=announce)
            answer = await self._rpc.call(contact, message, CopiedBlobs, limit_s)
        except CallFailed as error:
            log.info("no second copy of %d files: %s", len(files), error)
            return set()
        return set(answer.hashes)

    # ----------------------------------------------------------------- fetching

    async def fetch(self, file: File, hold: str = "") -> None:
        """After this the blob is here; or `BlobError`."""
        for _, error in (await self.fetch_all([file], hold)).errors:
            raise error

    async def fetch_all(self, files: Iterable[File], hold: str = "") -> TransferResult:
        """After this they are here, but for those with an error. Small ones that have a holder in
        common come together; whatever did not come that way is fetched by itself."""
        wanted = {file.hash: file for file in files}
        found = TransferResult()
        with self._blobs.pinned(wanted):
            local = sum(f.size for h, f in wanted.items() if h in self._blobs)
            peer = origin = 0
            left = [file for hash, file in wanted.items() if hash not in self._blobs]
            if left:
                before = {file.hash for file in left if file.hash in self._under_way}
                results = await self._bring(left, hold)
                for file, result in zip(left, results, strict=True):
                    if isinstance(result, BaseException):
                        found.errors.append((file, result))
                    elif file.hash in before:
                        local += file.size  # it came for another task, and counts there
                    elif result == "origin":
                        origin += file.size
                    else:
                        peer += file.size
            if hold:
                for hash in wanted:
                    self._blobs.hold(hash, hold)
        found.moved = Moved(local, peer, origin)
        return found

    async def _bring(self, files: list[File], hold: str) -> list[str | BaseException]:
        new = [file for file in files if file.hash not in self._under_way]
        try:
            for file in new:
                self._blobs.cache.check(file.size)
            async with self._blobs.make_room(sum(file.size for file in new)) as room:
                self._start(new, hold, room)
        except BlobError as error:
            for file in new:
                if file.hash not in self._under_way and file.hash not in self._blobs:
                    return [error for _ in files]
        waits = [self._wait(file, hold) for file in files]
        return await asyncio.gather(*waits, return_exceptions=True)

    def _start(self, files: list[File], hold: str, room: Reservation) -> None:
        """Each transfer has its room to itself: who asked for it may be gone before it ends."""
        batches, alone = self._batches(files)
        for holder, rows in batches:
            own = _split(room, sum(file.size for file in rows))
            batch = asyncio.ensure_future(self._fetch_batch(holder, rows, own))
            for file in rows:
                task = asyncio.ensure_future(self._after_batch(batch, file, hold))
                self._note(file.hash, task)
        for file in alone:
            own = _split(room, file.size)
            self._note(file.hash, asyncio.ensure_future(self._fetch(file, hold, own)))

    def _note(self, hash: bytes, task: asyncio.Task[str]) -> None:
        self._under_way[hash] = task
        task.add_done_callback(partial(self._fetched, hash))

    async def _wait(self, file: File, hold: str) -> str:
        task = self._under_way.get(file.hash)
        if task is not None:
            return await asyncio.shield(task)
        if file.hash in self._blobs:
            return "peer"
        async with self._blobs.make_room(file.size) as room:
            if file.hash not in self._under_way and file.hash not in self._blobs:
                self._start([file], hold, room)
        return await self._wait(file, hold)

    def _fetched(self, hash: bytes, task: asyncio.Task[str]) -> None:
        if self._under_way.get(hash) is task:
            del self._under_way[hash]
        if not task.cancelled() and task.exception() is None:
            self.held(hash)

    def _batches(self, files: list[File]) -> tuple[list[tuple[bytes, list[File]]], list[File]]:
        by_holder: dict[bytes, list[File]] = {}
        alone = []
        for file in files:
            alive = [p for p in file.holders if self._members.is_alive(p) and p != self._rpc.me.id]
            if file.size <= SMALL_BYTES and alive:
                holder = max(alive, key=lambda p: len(by_holder.get(p, ())))
                by_holder.setdefault(holder, []).append(file)
            else:
                alone.append(file)
        batches = []
        for holder, rows in by_holder.items():
            if len(rows) == 1:
                alone += rows
                continue
            count = max(1, min(BATCH_BLOBS, RANGE_BYTES // max(1, max(f.size for f in rows))))
            for start in range(0, len(rows), count):
                batches.append((holder, rows[start : start + count]))
        return batches, alone

    async def _fetch_batch(self, holder: bytes, files: list[File], room: Reservation) -> None:
        contact = self._members.contact(holder)
        wanted = {file.hash for file in files}
        try:
            if contact is None:
                return
            async with self._slots:
                message = ReadBlobs(hashes=tuple(wanted))
                answer = await self._rpc.call(contact, message, BlobsRead)
                rows = _checked(answer.blobs, wanted)
                await self._blobs.put_many(rows, room)
        except (CallFailed, BlobError) as error:
            log.debug("%d files from %s: %s", len(files), holder.hex()[:8], error)
            return
        finally:
            self._blobs.cache.give_back(room)
        self.counts["corrupt"] += len(answer.blobs) - len(rows)
        self.counts["bytes_fetched"] += sum(len(data) for _, data in rows)

    async def _after_batch(self, batch: asyncio.Task[None], file: File, hold: str) -> str:
        await asyncio.shield(batch)
        if file.hash in self._blobs:
            return "peer"
        async with self._blobs.make_room(file.size) as room:
            return await self._fetch(file, hold, _split(room, file.size))

    async def _fetch(self, file: File, hold: str, room: Reservation) -> str:
        """From peers; else from where it came from. Says which."""
        try:
            async with self._slots:
                tries = self._tries(file)
                for attempt in range(tries):
                    try:
                        await self.swarm.fetch(file, hold, room, self.catalog.find)
                        return "peer"
                    except Unavailable as error:
                        if not file.url or self.from_origin is None:
                            raise
                        log.info("%s, try %d of %d: %s", file.name, attempt + 1, tries, error)
                    if attempt < tries - 1:
                        await asyncio.sleep(2**attempt * self._rng.uniform(0.5, 1.5))
                assert self.from_origin is not None
                try:
                    await self.from_origin(file, hold, room)
                except BlobError as error:
                    if getattr(error, "passing", False) or file.url.startswith("queue:"):
                        raise Unavailable(str(error)) from None  # not its reader's fault
                    raise
                return "origin"
        finally:
            self._blobs.cache.give_back(room)

    def _tries(self, file: File) -> int:
        """With peers, before its origin is asked: where all readers turn to that at once, it serves
        them all. Holders that are only thought to be gone may be back in a moment, and a peer that
        has just joined hears of them in a moment; those of a queue's file may be of another
        cluster, and can't be asked."""
        if any(map(self._members.is_here, file.holders)):
            return ORIGIN_AFTER
        unknown = any(self._members.get(peer) is None for peer in file.holders)
        return ORIGIN_AFTER_UNKNOWN if unknown and not file.url.startswith("queue:") else 1

    # ----------------------------------------------------------------- for users

    async def announce(self, hash: bytes) -> None:
        """To the catalog: this peer holds it. Returns when that is known."""
        self.catalog.held(hash)
        await self.catalog.tell()

    async def find(self, hash: bytes) -> list[bytes]:
        """Holders by the catalog."""
        return await self.catalog.find(hash)

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


def _split(room: Reservation, size: int) -> Reservation:
    """So much of it, as a room of its own."""
    taken = min(size, room.size)
    room.size -= taken
    return Reservation(taken)


def _checked(found: Iterable[tuple[bytes, bytes]], wanted: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Those that were asked for, and are what their names say."""
    return [(h, d) for h, d in found if h in wanted and hashlib.sha256(d).digest() == h]
