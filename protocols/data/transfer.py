"""Transfers of files between peers: small files in batches, large ones in chunks from several
peers at once, and from their origin if no peer has them.

A blob has one transfer at a time, however many tasks wait for it, and its disk space is reserved
before the first byte. Holders are taken from the task's own list, then from the catalog: a holder
publishes a record for each file that is worth one, and withdraws it when the file goes.
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
#: tries with peers, some seconds in all; fewer if this peer does not know the holders
ORIGIN_AFTER, ORIGIN_AFTER_UNKNOWN = 4, 3
COPY_S_MIN, COPY_BYTES_PER_S = 5.0, 5 * 2**20
#: a smaller file is not worth a record: it is fetched from where it was made, or made again
RECORD_BYTES_MIN = 64 * 1024

#: fetches a file from its origin, e.g. a URL
FromOrigin = Callable[[File, str, Reservation], Awaitable[None]]


@dataclass(slots=True)
class TransferResult:
    """The outcome for the files that were asked for."""

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
        self.swarm.is_copy = lambda digest: not blobs.cache.holds(digest)
        self.swarm.on_corrupt = self._corrupt
        blobs.on_gone = self._gone
        rpc.on(ReadBlob, self._read_blob)
        rpc.on(ReadBlobs, self._read_blobs)
        rpc.on(CopyBlobs, self._copy_blobs)

    def _gone(self, digest: bytes) -> None:
        self.swarm.forget(digest)
        self.catalog.lost(digest)

    @staticmethod
    def _corrupt(file: File, index: int, peer: bytes) -> None:
        where = f"chunk {index} of {file.name} from {peer.hex()[:8]}"
        log.warning("%s is corrupt: fetching it again", where)

    async def run(self) -> None:
        await self.catalog.run()

    def held(self, digest: bytes) -> None:
        """This peer has a file: publish that, if it is worth a record."""
        if (self._blobs.size(digest) or 0) >= RECORD_BYTES_MIN:
            self.catalog.held(digest)

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
        for digest in message.hashes:
            size = self._blobs.size(digest)
            if size is not None and size <= SMALL_BYTES and total + size <= RANGE_BYTES:
                chosen.append(digest)
                total += size
        blobs = await self._blobs.read_many(chosen)
        self.counts["bytes_served"] += total
        return BlobsRead(blobs=tuple(blobs))

    async def _copy_blobs(self, sender: Contact, message: CopyBlobs) -> CopiedBlobs:
        if self.closed:
            raise Refused("leaving", "this peer is leaving")
        result = await self.fetch_all(message.files, message.hold)
        for file, error in result.errors:
            log.info("no replica of %s on this peer: %s", file.name, error)
        copied = [f.hash for f in message.files if f.hash in self._blobs]
        if message.hold:  # files that were only cached here, too: those could go at any time
            copied = [digest for digest in copied if self._blobs.hold(digest, message.hold)]
        if message.announce:
            for digest in copied:
                self.catalog.held(digest)
            await self.catalog.tell()
        return CopiedBlobs(hashes=tuple(copied))

    async def copy_to(
        self, peer: bytes, files: list[File], hold: str = "", announce: bool = False
    ) -> set[bytes]:
        """Has another peer copy these files; returns the digests of those that it holds now."""
        contact = self._members.contact(peer)
        if contact is None:
            return set()
        size = sum(file.size for file in files)
        limit_s = COPY_S_MIN + size / COPY_BYTES_PER_S
        try:
            message = CopyBlobs(files=tuple(files), hold=hold, announce=announce)
            answer = await self._rpc.call(contact, message, CopiedBlobs, limit_s)
        except CallFailed as error:
            log.info("no replica of %d files: %s", len(files), error)
            return set()
        return set(answer.hashes)

    # ----------------------------------------------------------------- fetching

    async def fetch(self, file: File, hold: str = "") -> None:
        """Returns when the blob is here; else `BlobError`."""
        for _, error in (await self.fetch_all([file], hold)).errors:
            raise error

    async def fetch_all(self, files: Iterable[File], hold: str = "") -> TransferResult:
        """Returns when the files are here, but for those with an error. Small files with a holder
        in common come together; those that did not come that way are fetched one by one."""
        wanted = {file.hash: file for file in files}
        result = TransferResult()
        moved: Counter[str] = Counter()
        with self._blobs.pinned(wanted):
            moved["local"] = sum(f.size for h, f in wanted.items() if h in self._blobs)
            missing = [file for digest, file in wanted.items() if digest not in self._blobs]
            if missing:
                await self._fetch_missing(missing, hold, result, moved)
            if hold:
                for digest in wanted:
                    self._blobs.hold(digest, hold)
        result.moved = Moved(moved["local"], moved["peer"], moved["origin"])
        return result

    async def _fetch_missing(
        self, files: list[File], hold: str, result: TransferResult, moved: Counter[str]
    ) -> None:
        """Adds the errors to `result`, and the bytes to `moved`, by where they came from."""
        before = {file.hash for file in files if file.hash in self._under_way}
        sources = await self._bring(files, hold)
        for file, source in zip(files, sources, strict=True):
            if isinstance(source, BaseException):
                result.errors.append((file, source))
            elif file.hash in before:
                moved["local"] += file.size  # it came for another task, and counts there
            else:
                moved[source] += file.size

    async def _bring(self, files: list[File], hold: str) -> list[str | BaseException]:
        """For each file its source, `peer` or `origin`, or an error."""
        new = [file for file in files if file.hash not in self._under_way]
        try:
            for file in new:
                self._blobs.cache.check(file.size)
            async with self._blobs.make_room(sum(file.size for file in new)) as room:
                self._start(new, hold, room)
        except BlobError as error:
            if any(f.hash not in self._under_way and f.hash not in self._blobs for f in new):
                return [error] * len(files)
        waits = [self._wait(file, hold) for file in files]
        return await asyncio.gather(*waits, return_exceptions=True)

    def _start(self, files: list[File], hold: str, room: Reservation) -> None:
        """Each transfer owns its share of the reservation: the task that asked for it may be gone
        before it ends."""
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

    def _note(self, digest: bytes, task: asyncio.Task[str]) -> None:
        self._under_way[digest] = task
        task.add_done_callback(partial(self._fetched, digest))

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

    def _fetched(self, digest: bytes, task: asyncio.Task[str]) -> None:
        if self._under_way.get(digest) is task:
            del self._under_way[digest]
        if not task.cancelled() and task.exception() is None:
            self.held(digest)

    def _batches(self, files: list[File]) -> tuple[list[tuple[bytes, list[File]]], list[File]]:
        """Small files that come together, each batch with its holder; and the other files."""
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
            else:
                batches += [(holder, batch) for batch in _cut(rows)]
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
        """From peers, else from its origin; returns which of the two."""
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
                        raise Unavailable(str(error)) from None  # not the fault of the task
                    raise
                return "origin"
        finally:
            self._blobs.cache.give_back(room)

    def _tries(self, file: File) -> int:
        """How often peers are tried before the origin, which would have to serve all readers if
        they turned to it at once. Holders that seem to be gone may be back in a moment, and a peer
        that has just joined hears of them in a moment; the holders of a task queue's file may be of
        another cluster, and can't be asked."""
        if any(map(self._members.is_here, file.holders)):
            return ORIGIN_AFTER
        unknown = any(self._members.get(peer) is None for peer in file.holders)
        return ORIGIN_AFTER_UNKNOWN if unknown and not file.url.startswith("queue:") else 1

    # ----------------------------------------------------------------- for users

    async def announce(self, digest: bytes) -> None:
        """Publishes in the catalog that this peer holds a file. Returns when that is done."""
        self.catalog.held(digest)
        await self.catalog.tell()

    async def find(self, digest: bytes) -> list[bytes]:
        """Holders, according to the catalog."""
        return await self.catalog.find(digest)

    async def size(self, digest: bytes, holders: list[bytes]) -> int | None:
        """A file's size according to a holder; the hash decides in the end."""
        for holder in holders:
            contact = self._members.contact(holder)
            if contact is None:
                continue
            try:
                message = ReadBlob(hash=digest, offset=0, length=1)
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
        self, holder: Contact, digest: bytes, start: int, end: int
    ) -> AsyncIterator[bytes]:
        """Ranges in order, with several requests ahead."""
        ahead: list[asyncio.Task[BlobPart]] = []
        position = start
        try:
            while position < end or ahead:
                while position < end and len(ahead) < RANGES_AT_ONCE:
                    length = min(RANGE_BYTES, end - position)
                    message = ReadBlob(hash=digest, offset=position, length=length)
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
        """For a user: from this disk, or passed through from a holder, else from the next."""
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
        why = "; ".join(reasons) or "no holder is known"
        raise Unavailable(f"{file.name}: no holder could give it ({why})")

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _split(room: Reservation, size: int) -> Reservation:
    """Moves so many bytes into a reservation of their own."""
    taken = min(size, room.size)
    room.size -= taken
    return Reservation(taken)


def _cut(files: list[File]) -> list[list[File]]:
    """Into batches that fit into one message."""
    largest = max(1, max(file.size for file in files))
    count = max(1, min(BATCH_BLOBS, RANGE_BYTES // largest))
    return [files[start : start + count] for start in range(0, len(files), count)]


def _checked(blobs: Iterable[tuple[bytes, bytes]], wanted: set[bytes]) -> list[tuple[bytes, bytes]]:
    """Those that were asked for and have the right hash."""
    return [(h, d) for h, d in blobs if h in wanted and hashlib.sha256(d).digest() == h]
