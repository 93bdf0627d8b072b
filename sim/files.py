"""Files and attempts of simulated peers: contents in memory, work that takes virtual time.

Every run of a task makes other contents, as real programs may, so that results that were mixed up
are noticed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

from valence.protocols.data.cache import OWN, BlobError, Cache, QuotaFull, Reservation
from valence.protocols.data.chunk_manifest import ChunkManifest, count, span
from valence.protocols.data.transfer import Transfer, Unavailable
from valence.protocols.wire.messages import File, Moved, Value, Work
from valence.workflow.replay import made_up

from .disk import Platter


class SimBlobs:
    """`peer.blobs.Blobs`, as far as the parts of a peer use it."""

    def __init__(self, platter: Platter, quota_bytes: int = 2**40) -> None:
        self.on_gone: Callable[[bytes], None] = lambda digest: None
        self.on_pressure: Callable[[], Awaitable[None]] = _nobody
        self.cache = Cache(quota_bytes, 2**40)
        self.cache.on_evict = self._evicted
        self._held = platter.blobs
        self._holds = platter.holds
        self._manifests: dict[bytes, ChunkManifest] = {}
        for digest, data in self._held.items():
            for hold in self._holds.get(digest) or ("",):
                self.cache.add(digest, len(data), hold)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._held

    @property
    def blob_bytes_max(self) -> int:
        return self.cache.blob_bytes_max

    def size(self, digest: bytes) -> int | None:
        return len(self._held[digest]) if digest in self._held else None

    def _evicted(self, digest: bytes) -> None:
        del self._held[digest]
        self._manifests.pop(digest, None)
        self.on_gone(digest)

    def hold(self, digest: bytes, hold: str) -> bool:
        if digest not in self._held:
            return False
        self._holds.setdefault(digest, set()).add(hold)
        self.cache.add(digest, len(self._held[digest]), hold)
        return True

    def release(self, hold: str, hashes: Iterable[bytes]) -> None:
        for digest in hashes:
            self._holds.get(digest, set()).discard(hold)
            self.cache.release(digest, hold)

    @contextlib.asynccontextmanager
    async def make_room(self, size: int) -> AsyncIterator[Reservation]:
        room = Reservation()
        try:
            try:
                self.cache.take(size, room)
            except QuotaFull:
                await self.on_pressure()
                self.cache.take(size, room)
            yield room
        finally:
            self.cache.give_back(room)

    async def put(self, data: bytes, hold: str = OWN) -> bytes:
        digest = hashlib.sha256(data).digest()
        await asyncio.sleep(0.001)
        if digest not in self._held:
            async with self.make_room(len(data)) as room:
                self.keep(digest, data, hold, room)
        elif hold:
            self.hold(digest, hold)
        return digest

    def keep(self, digest: bytes, data: bytes, hold: str, room: Reservation) -> None:
        if digest not in self._held:
            self._held[digest] = data
            self.cache.add(digest, len(data), "", room)
        if hold:
            self.hold(digest, hold)

    async def put_many(
        self, blobs: list[tuple[bytes, bytes]], room: Reservation | None = None
    ) -> None:
        await asyncio.sleep(0.001)
        for digest, data in blobs:
            self.keep(digest, data, "", room or Reservation())

    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]:
        return [(digest, self._held[digest]) for digest in hashes]

    async def read(self, digest: bytes, offset: int, length: int) -> bytes:
        self.cache.used(digest)
        return self._held[digest][offset : offset + length]

    async def chunks(self, digest: bytes, start: int, end: int) -> AsyncIterator[bytes]:
        yield self._held[digest][start:end]

    async def make_up(self, name: str, size: int, hold: str) -> tuple[bytes, int]:
        return await self.put(b"".join(made_up(name, size)), hold), size

    def touch(self, digest: bytes) -> None:
        pass

    def pinned(self, hashes: Iterable[bytes]) -> contextlib.AbstractContextManager[None]:
        return self.cache.pinned(hashes)

    async def manifest(self, digest: bytes) -> ChunkManifest:
        data = self._held[digest]
        if digest not in self._manifests:
            size = len(data)
            spans = [span(size, i) for i in range(count(size))]
            self._manifests[digest] = ChunkManifest.of(size, (data[at : at + n] for at, n in spans))
        return self._manifests[digest]

    def know_manifest(self, digest: bytes, manifest: ChunkManifest) -> None:
        pass

    def part(self, size: int) -> SimPart:
        return SimPart(self, size)


class SimPart:
    def __init__(self, blobs: SimBlobs, size: int) -> None:
        self._blobs = blobs
        self._data = bytearray(size)

    async def write(self, index: int, data: bytes) -> None:
        await asyncio.sleep(0)
        start, length = span(len(self._data), index)
        self._data[start : start + length] = data

    async def read(self, index: int) -> bytes:
        start, length = span(len(self._data), index)
        return bytes(self._data[start : start + length])

    async def hashed(self) -> bytes:
        return hashlib.sha256(self._data).digest()

    async def keep(self, digest: bytes, hold: str, room: Reservation) -> None:
        await asyncio.sleep(0.001)
        self._blobs.keep(digest, bytes(self._data), hold, room)

    def close(self) -> None:
        pass


async def _nobody() -> None:
    return None


class SimProcesses:
    """No processes: a simulated attempt needs none."""

    losses = 0

    def idle_worker(self, owner: str) -> None:
        return None

    def give_back(self, worker: Any) -> None:
        raise AssertionError("no worker was given away")

    discard = give_back


class SimAttempt:
    plain = False

    def __init__(self, workshop: SimLauncher, work: Work) -> None:
        self.work = work
        self._workshop = workshop

    async def run(self) -> dict[str, Any]:
        shop, work = self._workshop, self.work
        with shop.blobs.pinned([file.hash for file in work.inputs]):
            try:
                return await self._run()
            except BlobError as error:
                return {"kind": "returned", "reason": str(error)[:2000]}

    async def _run(self) -> dict[str, Any]:
        shop, work = self._workshop, self.work
        fetched = await shop.transfer.fetch_all(work.inputs)
        for _, error in fetched.errors:
            gone = [f.hash for f, e in fetched.errors if isinstance(e, Unavailable) and e.gone]
            return {"kind": "returned", "reason": str(error)[:2000], "missing": tuple(gone)}
        shop.on_begin(work)
        shop.running += 1
        shop.millicores += work.needs.capacity.millicores
        try:
            await asyncio.sleep(self._seconds())
        finally:
            shop.running -= 1
            shop.millicores -= work.needs.capacity.millicores
        shop.on_end(work)
        if shop.rng.random() < shop.failing:
            return {"kind": "failed", "reason": "it failed, by chance", "exit_code": 1}
        outputs = []
        for name in work.outputs:
            size = 20_000 if "large" in name else 40
            data = f"{work.key} {work.epoch} {shop.rng.random()}".encode().ljust(size, b".")
            digest = await shop.blobs.put(data, work.key.workflow)
            outputs.append(File(name=name, hash=digest, size=len(data)))
        outcome: dict[str, Any] = {"kind": "ok", "exit_code": 0, "outputs": tuple(outputs)}
        outcome["moved"] = fetched.moved
        if work.call is not None:
            outcome["value"] = Value("json", b"%d" % shop.rng.randint(0, 10**9))
        return outcome

    def _seconds(self) -> float:
        command = self.work.command or ("", "0.1")
        share = self._workshop.rng.random()
        if not self._workshop.overruns:
            return float(command[1]) * (0.5 + share)
        is_over = share > 1.0 - self._workshop.overruns
        return float(command[1]) * (3.0 if is_over else 0.5 + share / 2)

    def request(self, place: str) -> dict[str, Any]:
        raise AssertionError("it needs no worker")

    def short(self, answer: dict[str, Any]) -> None:
        return None

    async def take(self, answer: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("no worker has answered")

    async def too_much(self, pid: int) -> tuple[str, str]:
        return "", ""

    def too_much_on_disk(self) -> tuple[str, str]:
        return "", ""


class SimLauncher:
    """Runs attempts, and tells of their beginnings and ends."""

    pid = 0

    def __init__(self, blobs: SimBlobs, transfer: Transfer, rng: random.Random) -> None:
        self.processes = SimProcesses()
        self.blobs = blobs
        self.transfer = transfer
        self.rng = rng
        self.running = 0
        self.millicores = 0  # of what runs
        self.failing = 0.0
        self.overruns = 0.0  # the share of tasks that take three times as long as was said
        self.on_begin: Callable[[Work], None] = lambda work: None
        self.on_end: Callable[[Work], None] = lambda work: None

    async def fetch(self, work: Work) -> Moved:
        return (await self.transfer.fetch_all(work.inputs)).moved

    def attempt(self, work: Work) -> SimAttempt:
        return SimAttempt(self, work)

    def clear(self) -> None:
        pass
