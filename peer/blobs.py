"""Files by the hash of their content, on this peer's disk, within a quota.

Rules:
- A blob appears whole or not at all: written beside, synced, then renamed to its name.
- What comes from outside is hashed while it is written, and kept only if the hash is right.
- The quota counts what is being written too: a write that would not fit is refused before it
  begins. Copies fetched from other peers make room, least recently used first; blobs that were
  made or uploaded here stay until their retention is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 20


class BlobError(Exception):
    """A blob could not be kept; `status` is what HTTP says for it."""

    status = 500


class QuotaFull(BlobError):
    status = 507


class TooLarge(BlobError):
    status = 413


class WrongHash(BlobError):
    status = 422


@dataclass(slots=True)
class _Blob:
    size: int
    copy: bool  # fetched from elsewhere: may go when room is needed
    pins: int = 0


@dataclass(slots=True)
class Room:
    """Bytes of the quota held for a write that is under way."""

    size: int


class Blobs:
    def __init__(self, directory: Path, quota_bytes: int, blob_bytes_max: int) -> None:
        self.quota_bytes = quota_bytes
        self.blob_bytes_max = blob_bytes_max
        self.directory = directory
        self._root = directory / "blobs"
        self._parts = directory / "parts"
        shutil.rmtree(self._parts, ignore_errors=True)  # what a crash left half-written
        self._parts.mkdir(mode=0o700, parents=True)
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._known: dict[bytes, _Blob] = {}
        for hash, blob in self._scan():
            known = self._known.get(hash)
            if known is not None:  # the same content came in twice at once: one file is enough
                self._place(hash, True).unlink(missing_ok=True)
                blob = known if not known.copy else blob
            self._known[hash] = _Blob(blob.size, blob.copy and known is None)
        self.used_bytes = sum(blob.size for blob in self._known.values())

    def _scan(self) -> Iterator[tuple[bytes, _Blob]]:
        for shelf in self._root.iterdir():
            for path in shelf.iterdir():
                with contextlib.suppress(ValueError):
                    copy = path.suffix == ".copy"
                    yield bytes.fromhex(path.name[:64]), _Blob(path.stat().st_size, copy)

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._known

    def __len__(self) -> int:
        return len(self._known)

    def size(self, hash: bytes) -> int | None:
        blob = self._known.get(hash)
        return blob.size if blob else None

    def path(self, hash: bytes) -> Path:
        blob = self._known[hash]
        self._known[hash] = self._known.pop(hash)  # most recently used last
        return self._place(hash, blob.copy)

    def _place(self, hash: bytes, copy: bool) -> Path:
        name = hash.hex()
        return self._root / name[:2] / (name + ".copy" if copy else name)

    @contextlib.contextmanager
    def pinned(self, hashes: list[bytes]) -> Iterator[None]:
        """While these are needed they are not evicted."""
        held = [self._known[h] for h in hashes if h in self._known]
        for blob in held:
            blob.pins += 1
        try:
            yield
        finally:
            for blob in held:
                blob.pins -= 1

    # ----------------------------------------------------------------- room

    def _reserve(self, size: int) -> None:
        if size > self.blob_bytes_max:
            raise TooLarge(f"{size:,} bytes; a file has at most {self.blob_bytes_max:,} here")
        if self.used_bytes + size > self.quota_bytes:
            self._evict(self.used_bytes + size - self.quota_bytes)
        if self.used_bytes + size > self.quota_bytes:
            raise QuotaFull(
                f"{size:,} bytes do not fit: {self.used_bytes:,} of the disk quota of "
                f"{self.quota_bytes:,} are used"
            )
        self.used_bytes += size

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[Room]:
        """Held while something is being written: what would not fit is refused before it begins."""
        self._reserve(size)
        held = Room(size)
        try:
            yield held
        finally:
            self.used_bytes -= held.size

    def _evict(self, wanted: int) -> None:
        for hash, blob in list(self._known.items()):
            if wanted <= 0:
                return
            if blob.copy and not blob.pins:
                wanted -= blob.size
                self.drop(hash)

    def drop(self, hash: bytes) -> None:
        blob = self._known.pop(hash, None)
        if blob is not None:
            self._place(hash, blob.copy).unlink(missing_ok=True)
            self.used_bytes -= blob.size

    def drop_older_than(self, at: float) -> int:
        """Retention: what nobody touched since then."""
        old = []
        for hash, blob in list(self._known.items()):
            with contextlib.suppress(OSError):
                if not blob.pins and self._place(hash, blob.copy).stat().st_mtime < at:
                    old.append(hash)
        for hash in old:
            self.drop(hash)
        return len(old)

    # ----------------------------------------------------------------- in

    def new_part(self) -> Path:
        return self._parts / secrets.token_hex(12)

    async def put(self, data: bytes, copy: bool = False) -> bytes:
        """Small content that is in memory already."""
        hash = hashlib.sha256(data).digest()
        if hash in self._known:
            return hash
        part = self.new_part()
        with self.room(len(data)) as room:
            try:
                await asyncio.to_thread(_write, part, data)
                await asyncio.to_thread(self._settle, part, hash, copy)
            except OSError as error:
                raise QuotaFull(f"the disk refused it: {error.strerror}") from None
            finally:
                part.unlink(missing_ok=True)
            self._keep(hash, len(data), copy, room)
        return hash

    async def put_many(self, found: list[tuple[bytes, bytes]]) -> None:
        """Copies of small blobs, each with its hash, which was checked."""
        rows = [(hash, data, self.new_part()) for hash, data in found if hash not in self._known]
        with self.room(sum(len(data) for _, data, _ in rows)) as room:
            try:
                await asyncio.to_thread(self._settle_many, rows)
            except OSError as error:
                raise QuotaFull(f"the disk refused it: {error.strerror}") from None
            for hash, data, _ in rows:
                self._keep(hash, len(data), True, room)

    def _settle_many(self, rows: list[tuple[bytes, bytes, Path]]) -> None:
        for hash, data, part in rows:
            try:
                _write(part, data)
                self._settle(part, hash, True)
            finally:
                part.unlink(missing_ok=True)

    async def receive(
        self, chunks: AsyncIterator[bytes], expected: bytes, announced: int | None
    ) -> int:
        """A stream from outside, whose hash must be right. Nothing is left of a bad one."""
        if announced is not None and announced > self.blob_bytes_max:
            raise TooLarge(f"{announced:,} bytes; at most {self.blob_bytes_max:,} are taken")
        size = 0
        part = self.new_part()
        digest = hashlib.sha256()
        with self.room(announced or 0) as room:
            try:
                with part.open("wb") as file:
                    async for chunk in chunks:
                        self.widen(room, size + len(chunk))
                        size += len(chunk)
                        digest.update(chunk)
                        await asyncio.to_thread(file.write, chunk)
                if digest.digest() != expected:
                    raise WrongHash(
                        f"the content's hash is sha256:{digest.hexdigest()}, not what was named"
                    )
                await asyncio.to_thread(self._settle, part, expected, False)
                self._keep(expected, size, False, room)
            except TimeoutError:
                raise  # it did not come: not the disk's fault
            except OSError as error:
                raise QuotaFull(f"the disk refused it: {error.strerror}") from None
            finally:
                part.unlink(missing_ok=True)
        return size

    def widen(self, room: Room, size: int) -> None:
        """What comes turns out larger than announced."""
        if size > self.blob_bytes_max:
            raise TooLarge(f"at most {self.blob_bytes_max:,} bytes are taken")
        if size > room.size:
            self._reserve(size - room.size)
            room.size = size

    async def adopt(
        self, path: Path, copy: bool = False, hashed: bytes | None = None, room: Room | None = None
    ) -> tuple[bytes, int]:
        """A file on this disk becomes a blob; the file is gone afterwards."""
        size = path.stat().st_size
        if room is None:
            with self.room(size) as own:
                return await self.adopt(path, copy, hashed, own)
        self.widen(room, size)
        try:
            hash = await asyncio.to_thread(hash_file, path) if hashed is None else hashed
            await asyncio.to_thread(self._settle, path, hash, copy)
        except OSError as error:
            raise BlobError(f"{path.name}: {error.strerror}") from None
        self._keep(hash, size, copy, room)
        return hash, size

    def _settle(self, part: Path, hash: bytes, copy: bool) -> None:
        place = self._place(hash, copy)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(part, os.O_RDONLY)
        try:
            os.fchmod(fd, 0o400)
            os.utime(fd)  # its age here counts, not the one its maker gave it
            os.fdatasync(fd)
        finally:
            os.close(fd)
        part.replace(place)

    def _keep(self, hash: bytes, size: int, copy: bool, room: Room) -> None:
        """The file is at its place: count it once, and as this peer's own if it ever was."""
        known = self._known.get(hash)
        if known is None:
            self._known[hash] = _Blob(size, copy)
            self.used_bytes += size
        elif known.copy != copy:
            self._place(hash, True).unlink(missing_ok=True)
            known.copy = False

    def touch(self, hash: bytes) -> None:
        """It is wanted again: its retention begins anew."""
        blob = self._known.get(hash)
        if blob is not None:
            with contextlib.suppress(OSError):
                os.utime(self._place(hash, blob.copy))

    # ----------------------------------------------------------------- out

    async def read(self, hash: bytes, offset: int, length: int) -> bytes:
        return await asyncio.to_thread(_read, self.path(hash), offset, length)

    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]:
        """Whole ones."""
        rows = [(hash, self.path(hash), self._known[hash].size) for hash in hashes]
        return await asyncio.to_thread(lambda: [(h, _read(p, 0, size)) for h, p, size in rows])

    async def chunks(self, hash: bytes, start: int, end: int) -> AsyncIterator[bytes]:
        while start < end:
            data = await self.read(hash, start, min(CHUNK_BYTES, end - start))
            if not data:
                raise BlobError("the file is shorter than it was")
            start += len(data)
            yield data


def hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def copy_file(source: Path, target: Path) -> None:
    """A copy of one's own: a task that writes to its input must not write to the blob."""
    with source.open("rb") as a, target.open("xb") as b:
        shutil.copyfileobj(a, b, CHUNK_BYTES)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _read(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)
