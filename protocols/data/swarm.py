"""Large files, in chunks from several peers at once; a peer that fetches a file serves it already.

Rules:
- A chunk is good if it has the digest of the chunk manifest, a file if its hash is its name. If a
  manifest leads to another file it was a lie: all of it is thrown away, and the peer that sent it
  is not asked again.
- A holder gives each chunk away once (if the file is only cached there: a few times). It sends
  later readers on to peers that have the chunk by now, or are about to: among many readers a chunk
  goes down a tree of readers, and the holder sends the file about once, however many want it.
- A reader that was sent on to a peer without the chunk (it died, it gave up) comes back, insists,
  and gets it: being sent on can make a chunk late, but never unavailable.
- A source that fails is left alone for a while that doubles; a source that has nothing is dropped.
  Chunks that have come stay, so a broken connection costs only the chunks that were on the way.
- Everything is bounded: chunks on the way, in all and from one source; sources; waiting readers.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from valence.protocols.data import chunk_manifest

from ..membership.members import Members
from ..wire.messages import Chunk, Contact, File, OpenBlob, OpenedBlob, ReadChunk
from ..wire.rpc import CallFailed, Refused, Rpc
from .cache import BlobError, Reservation
from .chunk_manifest import ChunkManifest, Chunks

AT_ONCE = 8  # chunks on the way, of one file
AT_SOURCE = 4
SOURCES_MAX = 24
SERVED_AT_ONCE = 16
SERVED_MAX = 256  # readers that wait for their turn, or for a chunk that is on its way here
WAIT_S = 8.0  # for such a chunk
CHUNK_S = 15.0
OPEN_S = 5.0
SHEET_BYTES_PER_S = 50e6  # at least, where the digests of all chunks are computed first
GIVEN_MAX = 16  # readers remembered for a chunk
CROWDS_MAX = 256
CROWD_S = 60.0  # after its last request a crowd has dispersed
COPIES_GIVE = 3
BACKOFF_S_MIN, BACKOFF_S_MAX = 0.2, 5.0
CORRUPT_MAX = 3
GONE = "the peer is gone"
STALL_S = 30.0
SEEK_S = 2.0  # between two looks into the catalog
LIES_MAX = 4


class PartialFile(Protocol):
    """A file that is being put together from its chunks."""

    async def write(self, index: int, data: bytes) -> None: ...
    async def read(self, index: int) -> bytes: ...
    async def hashed(self) -> bytes: ...
    async def keep(self, digest: bytes, hold: str, room: Reservation) -> None: ...
    def close(self) -> None: ...


class BlobStore(Protocol):
    """The blobs on this peer's disk."""

    def __contains__(self, digest: bytes) -> bool: ...
    def size(self, digest: bytes) -> int | None: ...
    async def manifest(self, digest: bytes) -> ChunkManifest: ...
    def know_manifest(self, digest: bytes, manifest: ChunkManifest) -> None: ...
    async def read(self, digest: bytes, offset: int, length: int) -> bytes: ...
    def part(self, size: int) -> PartialFile: ...


class Unavailable(BlobError):
    """No holder could give the file. `gone`: all of them are known not to have it."""

    status = 503

    def __init__(self, text: str, gone: bool = False) -> None:
        super().__init__(text)
        self.gone = gone


@dataclass(slots=True)
class _Source:
    contact: Contact
    have: Chunks | None = None  # None: not asked yet
    reader: bool = False  # it is fetching the file itself
    on_the_way: int = 0
    failures: int = 0
    corrupt: int = 0
    not_before: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class _Crowd:
    """The readers that asked for chunks of a file here."""

    readers: dict[int, list[bytes]] = field(default_factory=dict)  # of each chunk, the latest last
    times: Counter[int] = field(default_factory=Counter)  # each chunk was given away
    at: float = 0.0


class _Fetch:
    """A file on its way here."""

    def __init__(self, file: File, part: PartialFile) -> None:
        self.file = file
        self.part = part
        self.manifest: ChunkManifest | None = None
        self.teller = b""  # the peer that sent the manifest
        self.have = Chunks(chunk_manifest.count(file.size))
        self.under_way: set[int] = set()
        self.sources: dict[bytes, _Source] = {}
        self.dropped: dict[bytes, str] = {}  # useless sources, and why
        self.unreached = False  # a peer that did not answer may have it
        self.arrived = asyncio.Event()  # set by the next chunk, and then replaced


class Swarm:
    def __init__(self, rpc: Rpc, files: BlobStore, members: Members, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.on_corrupt: Callable[[File, int, bytes], None] = lambda file, index, peer: None
        self.is_copy: Callable[[bytes], bool] = lambda digest: False
        self._rpc = rpc
        self._files = files
        self._members = members
        self._rng = rng
        self._fetches: dict[bytes, _Fetch] = {}
        self._crowds: OrderedDict[bytes, _Crowd] = OrderedDict()
        self._serving = asyncio.Semaphore(SERVED_AT_ONCE)
        self._waiting = 0
        rpc.on(OpenBlob, self._open)
        rpc.on(ReadChunk, self._read_chunk)

    # ----------------------------------------------------------------- serving

    async def _open(self, sender: Contact, message: OpenBlob) -> OpenedBlob:
        digest = message.hash
        size = self._files.size(digest)
        if size is not None:
            manifest = (
                (await self._files.manifest(digest)).digests
                if chunk_manifest.count(size) > 1
                else b""
            )
            return OpenedBlob(size=size, sheet=manifest)
        fetch = self._fetches.get(digest)
        if fetch is not None and fetch.manifest is not None:
            return OpenedBlob(
                size=fetch.file.size, sheet=fetch.manifest.digests, have=fetch.have.to_bytes()
            )
        raise Refused("missing", "this peer does not hold that blob")

    async def _read_chunk(self, sender: Contact, message: ReadChunk) -> Chunk:
        digest, index = message.hash, message.index
        size = self._size(digest)
        if size is None:
            raise Refused("missing", "this peer does not hold that blob")
        if index >= max(1, chunk_manifest.count(size)):
            raise Refused("chunk", f"the blob has no chunk {index}")
        if digest in self._files:
            instead = () if message.insist else self._instead(digest, index, sender.id)
            if instead:
                self.counts["sent_on"] += 1
                return Chunk(data=b"", ask=instead)
            self._gave(digest, index, sender.id)  # readers that ask meanwhile are sent on, too
        data = await self._in_turn(digest, index, size)
        fetch = self._fetches.get(digest)
        have = fetch.have.to_bytes() if fetch is not None and digest not in self._files else b""
        if data is None:
            return Chunk(data=b"", have=have)
        self.counts["bytes_served"] += len(data)
        return Chunk(data=data, have=have)

    def _size(self, digest: bytes) -> int | None:
        """Of a blob that is here, or on its way here."""
        size, fetch = self._files.size(digest), self._fetches.get(digest)
        return fetch.file.size if size is None and fetch is not None else size

    async def _in_turn(self, digest: bytes, index: int, size: int) -> bytes | None:
        """A chunk, when this peer has a slot free for it. None: it is not here."""
        if self._waiting >= SERVED_MAX:
            raise Refused("busy", "this peer serves too many chunks; ask another one")
        self._waiting += 1
        try:
            async with self._serving:
                data = await self._chunk(digest, index, size)
            if data is None:  # not here, but perhaps soon
                data = await self._soon(digest, index, size)
            return data
        finally:
            self._waiting -= 1

    async def _chunk(self, digest: bytes, index: int, size: int) -> bytes | None:
        start, length = chunk_manifest.span(size, index)
        if digest in self._files:
            return await self._files.read(digest, start, length) if length else b""
        fetch = self._fetches.get(digest)
        if fetch is not None and index in fetch.have:
            return await fetch.part.read(index)
        return None

    async def _soon(self, digest: bytes, index: int, size: int) -> bytes | None:
        """A chunk that this peer is fetching itself. Those who wait here take up no slot."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    fetch = self._fetches.get(digest)
                    if digest in self._files or fetch is None:
                        return await self._chunk(digest, index, size)
                    if index in fetch.have:
                        return await fetch.part.read(index)
                    if index not in fetch.under_way:
                        return None  # not even asked for
                    await fetch.arrived.wait()
        except TimeoutError:
            return None

    def _instead(self, digest: bytes, index: int, reader: bytes) -> tuple[bytes, ...]:
        """Readers to ask instead, if the chunk was given away often enough."""
        crowd = self._crowds.get(digest)
        if crowd is None:
            return ()
        now = asyncio.get_running_loop().time()
        if now - crowd.at > CROWD_S:
            del self._crowds[digest]
            return ()
        crowd.at = now
        readers = crowd.readers.get(index, [])
        if reader in readers:
            return ()
        if crowd.times[index] < (COPIES_GIVE if self.is_copy(digest) else 1):
            return ()
        here = [peer for peer in readers if self._members.is_here(peer)]
        if not here:
            return ()
        instead = tuple(self._rng.sample(here, min(2, len(here))))
        self._note(crowd, index, reader)  # it will have the chunk soon
        return instead

    def _gave(self, digest: bytes, index: int, reader: bytes) -> None:
        crowd = self._crowds.get(digest)
        if crowd is None:
            crowd = self._crowds[digest] = _Crowd()
            if len(self._crowds) > CROWDS_MAX:
                self._crowds.popitem(last=False)
        self._crowds.move_to_end(digest)
        crowd.at = asyncio.get_running_loop().time()
        crowd.times[index] += 1
        self._note(crowd, index, reader)

    @staticmethod
    def _note(crowd: _Crowd, index: int, reader: bytes) -> None:
        readers = crowd.readers.setdefault(index, [])
        if reader not in readers:
            readers.append(reader)
            del readers[:-GIVEN_MAX]

    def forget(self, digest: bytes) -> None:
        """The file is not here any more."""
        self._crowds.pop(digest, None)

    # ----------------------------------------------------------------- fetching

    async def fetch(
        self,
        file: File,
        hold: str,
        room: Reservation,
        find: Callable[[bytes], Awaitable[list[bytes]]],
    ) -> None:
        """Returns when the file is here; else `BlobError`. `find` looks for more holders."""
        part = self._files.part(file.size)
        fetch = self._fetches[file.hash] = _Fetch(file, part)
        try:
            self._add(fetch, file.holders)
            for _ in range(LIES_MAX):
                await self._gather(fetch, find)
                if await part.hashed() == file.hash:
                    break
                self._blame(fetch)
            else:
                raise Unavailable(f"{file.name}: the bytes that peers sent do not have its hash")
            await part.keep(file.hash, hold, room)
            if fetch.manifest is not None:
                self._files.know_manifest(file.hash, fetch.manifest)
        finally:
            if self._fetches.get(file.hash) is fetch:
                del self._fetches[file.hash]
            fetch.arrived.set()
            part.close()

    def _blame(self, fetch: _Fetch) -> None:
        """Each chunk fits the manifest, but the whole file is wrong: so the manifest is wrong."""
        self.counts["corrupt_sheets"] += 1
        teller = fetch.teller or next(iter(fetch.sources), b"")
        self._drop(fetch, teller, "its chunk manifest is wrong")
        for source in list(fetch.sources.values()):
            source.have = None
        fetch.manifest, fetch.teller = None, b""
        fetch.have = Chunks(chunk_manifest.count(fetch.file.size))

    def _add(self, fetch: _Fetch, peers: Iterable[bytes], reader: bool = False) -> None:
        for peer in peers:
            contact = self._members.contact(peer)
            if peer in fetch.sources or peer in fetch.dropped or peer == self._rpc.me.id:
                continue
            if contact is None:
                fetch.unreached = True  # not known to be dead: it may be of another cluster
            elif not self._members.is_here(peer):
                fetch.dropped[peer] = GONE  # nobody waits for the dead
            elif len(fetch.sources) < SOURCES_MAX:
                fetch.sources[peer] = _Source(contact, reader=reader)

    def _drop(self, fetch: _Fetch, peer: bytes, why: str) -> None:
        if fetch.sources.pop(peer, None) is not None:
            fetch.dropped[peer] = why

    async def _gather(self, fetch: _Fetch, find: Callable[[bytes], Awaitable[list[bytes]]]) -> None:
        """Returns when all chunks are here; raises if none has come for long."""
        loop = asyncio.get_running_loop()
        work: set[asyncio.Task[None]] = set()
        order = list(range(fetch.have.count))
        self._rng.shuffle(order)  # others begin elsewhere: then there is something to exchange
        heard_at = loop.time()
        sought_at = -SEEK_S
        had = 0
        try:
            while not fetch.have.full:
                now = loop.time()
                if fetch.have.held > had:
                    had, heard_at = fetch.have.held, now
                order = _thinned(order, fetch.have)
                self._begin(fetch, order, work, now)
                if not work:
                    if now - sought_at >= SEEK_S:
                        sought_at = now
                        if await self._seek(fetch, find):
                            continue
                    if not fetch.sources or now - heard_at > STALL_S:
                        raise self._unavailable(fetch)
                    await self._pause(fetch)
                    continue
                done, work = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await _cancel(work)

    async def _seek(self, fetch: _Fetch, find: Callable[[bytes], Awaitable[list[bytes]]]) -> bool:
        """Looks for more sources in the catalog. True: one of them can be asked now."""
        self._add(fetch, await find(fetch.file.hash))
        now = asyncio.get_running_loop().time()
        return any(s.not_before <= now for s in fetch.sources.values())

    async def _pause(self, fetch: _Fetch) -> None:
        """Until one of its sources may be asked again, and for a second at most."""
        soonest = min(s.not_before for s in fetch.sources.values())
        wait_s = soonest - asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.02, min(1.0, wait_s)))

    def _unavailable(self, fetch: _Fetch) -> Unavailable:
        rows = [(p, s.reason or "no answer") for p, s in fetch.sources.items()]
        rows += list(fetch.dropped.items())
        text = "; ".join(f"{peer.hex()[:8]}: {why}" for peer, why in rows[:8])
        why = text or "no holder is known"
        gone = not fetch.sources and not fetch.unreached
        return Unavailable(f"{fetch.file.name}: no holder could give it ({why})", gone)

    def _begin(
        self, fetch: _Fetch, order: list[int], work: set[asyncio.Task[None]], now: float
    ) -> None:
        """Sends as many requests as may be on the way."""
        ready = [s for s in fetch.sources.values() if s.not_before <= now]
        if fetch.manifest is None and fetch.have.count > 1:
            self._ask_for_manifest(fetch, ready, work)
            return
        self._open_sources(fetch, ready, work)
        self._ask_for_chunks(fetch, [s for s in ready if s.have is not None], order, work)

    def _ask_for_manifest(
        self, fetch: _Fetch, ready: list[_Source], work: set[asyncio.Task[None]]
    ) -> None:
        unopened = [s for s in ready if not s.on_the_way]
        if unopened and not work:
            source = min(unopened, key=lambda s: (s.failures, s.reader, self._rng.random()))
            self._spawn(work, self._open_at(fetch, source))

    def _open_sources(
        self, fetch: _Fetch, ready: list[_Source], work: set[asyncio.Task[None]]
    ) -> None:
        """Asks new sources which chunks they have; a file of one chunk needs no question."""
        for source in ready:
            if source.have is None and not source.on_the_way and len(work) < AT_ONCE:
                if fetch.have.count > 1:
                    self._spawn(work, self._open_at(fetch, source))
                else:
                    source.have = Chunks.all(1)

    def _ask_for_chunks(
        self,
        fetch: _Fetch,
        ready: list[_Source],
        order: list[int],
        work: set[asyncio.Task[None]],
    ) -> None:
        for index in order:
            if len(work) >= AT_ONCE or all(s.on_the_way >= AT_SOURCE for s in ready):
                return
            if index in fetch.have or index in fetch.under_way:
                continue
            source = self._choose(ready, index)
            if source is not None:
                fetch.under_way.add(index)
                self._spawn(work, self._take(fetch, index, source))

    def _choose(self, ready: list[_Source], index: int) -> _Source | None:
        """Readers before holders, idle sources before busy ones."""
        best: _Source | None = None
        best_row: tuple[int, bool, float] | None = None
        for source in ready:
            if source.on_the_way >= AT_SOURCE or source.have is None or index not in source.have:
                continue
            row = (source.failures, not source.reader, source.on_the_way + self._rng.random())
            if best_row is None or row < best_row:
                best, best_row = source, row
        return best

    @staticmethod
    def _spawn(work: set[asyncio.Task[None]], request: Awaitable[None]) -> None:
        work.add(asyncio.ensure_future(request))

    async def _open_at(self, fetch: _Fetch, source: _Source) -> None:
        source.on_the_way += 1
        try:
            message = OpenBlob(hash=fetch.file.hash)
            limit_s = OPEN_S + fetch.file.size / SHEET_BYTES_PER_S
            answer = await self._rpc.call(source.contact, message, OpenedBlob, limit_s)
        except CallFailed as error:
            self._failed(fetch, source, error)
            return
        finally:
            source.on_the_way -= 1
        if answer.size != fetch.file.size:
            self._drop(
                fetch,
                source.contact.id,
                f"its file has {answer.size:,} bytes instead of {fetch.file.size:,}",
            )
            return
        count = fetch.have.count
        source.have = Chunks(count, answer.have) if answer.have else Chunks.all(count)
        source.reader = bool(answer.have)
        if fetch.manifest is None:
            try:
                fetch.manifest = ChunkManifest(fetch.file.size, answer.sheet)
                fetch.teller = source.contact.id
            except ValueError as error:
                self._drop(fetch, source.contact.id, str(error))

    async def _take(self, fetch: _Fetch, index: int, source: _Source) -> None:
        """One chunk: from this source, else from a reader that it names, else from it after all."""
        try:
            answer = await self._ask(fetch, index, source, insist=False)
            if answer is None or await self._is_data(fetch, index, source, answer):
                return
            reader = self._named(fetch, source, answer)
            if reader is None:
                return
            answer = await self._ask(fetch, index, reader, insist=False)
            if answer is None:
                self.counts["named_in_vain"] += 1
            elif await self._is_data(fetch, index, reader, answer):
                return
            else:
                self.counts["named_too_early"] += 1
            answer = await self._ask(fetch, index, source, insist=True)
            if answer is not None:
                await self._is_data(fetch, index, source, answer)
        finally:
            fetch.under_way.discard(index)

    async def _is_data(self, fetch: _Fetch, index: int, source: _Source, answer: Chunk) -> bool:
        """Takes the chunk; or, if the answer has none, the readers that it names."""
        if answer.data or not fetch.file.size:
            await self._came(fetch, index, source, answer.data)
            return True
        self._add(fetch, answer.ask, reader=True)
        return False

    def _named(self, fetch: _Fetch, source: _Source, answer: Chunk) -> _Source | None:
        """One of the readers that a source names for a chunk."""
        readers = [p for p in answer.ask if p != source.contact.id and p in fetch.sources]
        return fetch.sources[self._rng.choice(readers)] if readers else None

    async def _ask(self, fetch: _Fetch, index: int, source: _Source, insist: bool) -> Chunk | None:
        if not self._members.is_here(source.contact.id):
            self._drop(fetch, source.contact.id, GONE)
            return None
        source.on_the_way += 1
        try:
            message = ReadChunk(hash=fetch.file.hash, index=index, insist=insist)
            answer = await self._rpc.call(source.contact, message, Chunk, CHUNK_S)
        except CallFailed as error:
            self._failed(fetch, source, error)
            return None
        finally:
            source.on_the_way -= 1
        count = fetch.have.count
        if answer.have:
            source.have, source.reader = Chunks(count, answer.have), True
        elif answer.data and source.have is None:
            source.have = Chunks.all(count)
        if not answer.data and not answer.ask and fetch.file.size:
            # at best it is on its way there: leave this source alone for now
            source.not_before = asyncio.get_running_loop().time() + BACKOFF_S_MIN
        return answer

    async def _came(self, fetch: _Fetch, index: int, source: _Source, data: bytes) -> None:
        if fetch.manifest is not None and not fetch.manifest.fits(index, data):
            self.counts["corrupt"] += 1
            source.corrupt += 1
            self.on_corrupt(fetch.file, index, source.contact.id)
            if source.corrupt >= CORRUPT_MAX:
                self._drop(fetch, source.contact.id, "its chunks are corrupt")
            else:
                self._leave_alone(source, "its chunk was corrupt")
            return
        if len(data) != chunk_manifest.span(fetch.file.size, index)[1]:
            self.counts["corrupt"] += 1
            self._drop(fetch, source.contact.id, "its chunk has the wrong length")
            return
        if index in fetch.have:
            return
        source.failures = 0
        await fetch.part.write(index, data)
        fetch.have.add(index)
        self.counts["bytes_fetched"] += len(data)
        arrived, fetch.arrived = fetch.arrived, asyncio.Event()
        arrived.set()

    def _failed(self, fetch: _Fetch, source: _Source, error: CallFailed) -> None:
        peer = source.contact.id
        if isinstance(error, Refused) and error.code == "missing":
            self._drop(fetch, peer, str(error))
        elif not self._members.is_here(peer):
            self._drop(fetch, peer, GONE)
        else:
            fetch.unreached = True
            self._leave_alone(source, str(error))

    def _leave_alone(self, source: _Source, reason: str) -> None:
        wait_s = min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2**source.failures)
        source.failures += 1
        source.reason = reason
        source.not_before = asyncio.get_running_loop().time() + wait_s * self._rng.uniform(0.7, 1.3)
        self.counts["backed_off"] += 1


async def _cancel(work: set[asyncio.Task[None]]) -> None:
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)


def _thinned(order: list[int], have: Chunks) -> list[int]:
    """Without the chunks that are here, if those are most of them."""
    if len(order) <= 2 * (have.count - have.held) + 64:
        return order
    return [index for index in order if index not in have]
