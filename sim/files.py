"""Files and attempts of simulated peers: contents in memory, work that takes virtual time.

Every run of a task makes other contents, as real programs may: two results that were mixed up can
be told apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

from peer.blobs import BlobError
from peer.transfer import Transfer
from protocols.messages import Contact, File, Value, Work

from .disk import Platter


class SimBlobs:
    """`peer.blobs.Blobs`, as far as the parts of a peer use it."""

    def __init__(self, platter: Platter) -> None:
        self._held = platter.blobs
        self.blob_bytes_max = 2**40

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._held

    def size(self, hash: bytes) -> int | None:
        return len(self._held[hash]) if hash in self._held else None

    async def put(self, data: bytes, copy: bool = False) -> bytes:
        hash = hashlib.sha256(data).digest()
        await asyncio.sleep(0.001)
        self._held[hash] = data
        return hash

    async def put_many(self, found: list[tuple[bytes, bytes]]) -> None:
        for _, data in found:
            await self.put(data, copy=True)

    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]:
        return [(hash, self._held[hash]) for hash in hashes]

    async def read(self, hash: bytes, offset: int, length: int) -> bytes:
        return self._held[hash][offset : offset + length]

    def touch(self, hash: bytes) -> None:
        pass

    @contextlib.contextmanager
    def pinned(self, hashes: list[bytes]) -> Iterator[None]:
        yield


class SimTransfer(Transfer):
    """The product's, but for the file that parts are gathered in."""

    async def _fetch_from(self, holder: Contact, file: File) -> None:
        parts = [data async for data in self.stream(holder, file.hash, 0, file.size)]
        data = b"".join(parts)
        if hashlib.sha256(data).digest() != file.hash:
            raise BlobError("its content is not what its name says")
        await self._blobs.put(data)


class SimProcesses:
    losses = 0

    def idle_worker(self) -> None:
        return None


class SimAttempt:
    plain = False

    def __init__(self, workshop: SimWorkshop, work: Work) -> None:
        self.work = work
        self._workshop = workshop

    async def run(self) -> dict[str, Any]:
        shop, work = self._workshop, self.work
        for _, error in await shop.transfer.fetch_all(work.inputs):
            return {"kind": "returned", "reason": str(error)[:2000]}
        shop.on_begin(work)
        shop.running += 1
        try:
            await asyncio.sleep(self._seconds())
        finally:
            shop.running -= 1
        shop.on_end(work)
        if shop.rng.random() < shop.failing:
            return {"kind": "failed", "reason": "it failed, by chance", "exit_code": 1}
        outputs = []
        for name in work.outputs:
            size = 20_000 if "large" in name else 40
            data = f"{work.key} {work.epoch} {shop.rng.random()}".encode().ljust(size, b".")
            hash = await shop.blobs.put(data)
            outputs.append(File(name=name, hash=hash, size=len(data)))
        found: dict[str, Any] = {"kind": "ok", "exit_code": 0, "outputs": tuple(outputs)}
        if work.call is not None:
            found["value"] = Value("json", b"%d" % shop.rng.randint(0, 10**9))
        return found

    def _seconds(self) -> float:
        command = self.work.command or ("", "0.1")
        return float(command[1]) * (0.5 + self._workshop.rng.random())

    def forget(self) -> None:
        pass


class SimWorkshop:
    """Where attempts run, and who looks on."""

    def __init__(self, blobs: SimBlobs, transfer: SimTransfer, rng: random.Random) -> None:
        self.processes = SimProcesses()
        self.blobs = blobs
        self.transfer = transfer
        self.rng = rng
        self.running = 0
        self.failing = 0.0
        self.on_begin: Callable[[Work], None] = lambda work: None
        self.on_end: Callable[[Work], None] = lambda work: None

    def attempt(self, work: Work) -> SimAttempt:
        return SimAttempt(self, work)

    def clear(self) -> None:
        pass
