"""Stores files by the hash of their content, on this peer's disk, within a quota.

Rules:
- A blob appears whole or not at all: it is written beside its place, synced, then renamed.
- Data from outside is hashed while it is written, and kept only if the hash is right.
- The workflows that need a blob are known again after a restart: each is a second name of the file,
  `<hash>.<workflow>`, made before the blob gets its own name. `protocols.data.cache` decides which
  blobs may be evicted.
- The quota also counts files that are being written. A write that would not fit is refused before
  it begins, after other parts were asked to release files (`on_pressure`).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from io import BufferedReader
from pathlib import Path

from valence.protocols.data.cache import (
    OWN,
    BlobError,
    Cache,
    NeverFits,
    QuotaFull,
    Reservation,
    TooLarge,
    WrongHash,
    is_own,
)
from valence.protocols.data.chunk_manifest import CHUNK_BYTES_MIN, ChunkManifest, count, span
from valence.workflow.replay import made_up

__all__ = [
    "OWN",
    "BlobError",
    "DiskBlobs",
    "NeverFits",
    "QuotaFull",
    "Reservation",
    "TooLarge",
    "WrongHash",
]

CHUNK_BYTES = CHUNK_BYTES_MIN
#: a hold is a part of a file's name; one that can't be counts as the user's own
_HOLD = re.compile(r"[A-Za-z0-9_-]{1,100}")
ROOM_S = 15.0  # how long a write waits for others to release files
MANIFESTS_BYTES_MAX = 8 << 20


class DiskBlobs:
    """The blobs of one peer: files in a directory, and the `Cache` that accounts for them."""

    def __init__(self, directory: Path, quota_bytes: int, blob_bytes_max: int) -> None:
        self.cache = Cache(quota_bytes, blob_bytes_max)
        self.cache.on_evict = self._evicted
        self.on_gone: Callable[[bytes], None] = lambda digest: None
        #: asks other parts to release files that are no longer needed
        self.on_pressure: Callable[[], Awaitable[None]] = _release_nothing
        self.room_s = ROOM_S
        self.directory = directory
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._manifests: OrderedDict[bytes, ChunkManifest] = OrderedDict()
        self._manifests_bytes = 0
        self._making: dict[bytes, asyncio.Future[ChunkManifest]] = {}
        self._root = directory / "blobs"
        self._parts = directory / "parts"
        shutil.rmtree(self._parts, ignore_errors=True)  # files that a crash left half-written
        self._parts.mkdir(mode=0o700, parents=True)
        self._root.mkdir(mode=0o700, exist_ok=True)
        for digest, size, holds in self._scan():
            for hold in holds or [""]:
                self.cache.add(digest, size, hold)

    def _scan(self) -> Iterator[tuple[bytes, int, list[str]]]:
        """All blobs on disk; the most recently used come last, as far as their times tell."""
        rows: dict[bytes, tuple[float, int, list[str]]] = {}
        for path in (path for directory in self._root.iterdir() for path in directory.iterdir()):
            with contextlib.suppress(ValueError):
                digest = bytes.fromhex(path.name[:64])
                status = path.stat()
                row = rows.setdefault(digest, (status.st_mtime, status.st_size, []))
                if len(path.name) > 64:
                    row[2].append(path.name[65:])
        for digest, (_, size, holds) in sorted(rows.items(), key=lambda row: row[1][0]):
            place = self._place(digest)
            if not place.exists():  # after a crash between the two names; the file is whole
                os.link(self._place(digest, holds[0]), place)
            yield digest, size, holds

    @property
    def quota_bytes(self) -> int:
        return self.cache.quota_bytes

    @property
    def blob_bytes_max(self) -> int:
        return self.cache.blob_bytes_max

    @property
    def used_bytes(self) -> int:
        return self.cache.used_bytes

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.cache

    def __len__(self) -> int:
        return len(self.cache)

    def size(self, digest: bytes) -> int | None:
        return self.cache.size(digest)

    def path(self, digest: bytes) -> Path:
        self.cache.used(digest)
        return self._place(digest)

    def _place(self, digest: bytes, hold: str = "") -> Path:
        name = digest.hex()
        return self._root / name[:2] / (f"{name}.{hold}" if hold else name)

    def pinned(self, hashes: Iterable[bytes]) -> contextlib.AbstractContextManager[None]:
        return self.cache.pinned(hashes)

    # ----------------------------------------------------------------- retention

    def hold(self, digest: bytes, hold: str) -> bool:
        """Keep a blob for this workflow from now on. False: it is not on this peer."""
        hold = _named(hold)
        if digest not in self.cache:
            return False
        if hold not in self.cache.holds(digest):
            with contextlib.suppress(FileExistsError):
                os.link(self._place(digest), self._place(digest, hold))
            self.cache.add(digest, self.cache.size(digest) or 0, hold)
        return True

    def delete(self, digest: bytes, hold: str | None) -> bool:
        """Delete an upload of this owner (None: of any owner). False: there is none."""
        uploads = [h for h in self.cache.holds(digest) if is_own(h) and hold in (None, h)]
        for upload in uploads:
            self.release(upload, [digest])
        if uploads and not self.cache.holds(digest) and not self.cache.is_pinned(digest):
            self.drop(digest)
        return bool(uploads)

    def release(self, hold: str, hashes: Iterable[bytes]) -> None:
        """This workflow no longer needs these blobs."""
        hold = _named(hold)
        for digest in hashes:
            if hold in self.cache.holds(digest):
                self.cache.release(digest, hold)
                self._place(digest, hold).unlink(missing_ok=True)
                self._freed.set()

    # ----------------------------------------------------------------- disk space

    @contextlib.asynccontextmanager
    async def make_room(self, size: int) -> AsyncIterator[Reservation]:
        """Disk space, reserved while a file is being written. If there is too little, other parts
        are asked to release files, and get some time for it.

        Only one write waits at a time, so that two never hold half of what each of them needs."""
        reserved = Reservation()
        limit = self.quota_bytes - self.cache.own_bytes()
        if size > limit:
            raise NeverFits(
                f"{size:,} bytes do not fit: at most {max(0, limit):,} bytes of this peer's disk "
                f"quota of {self.quota_bytes:,} can be freed"
            )
        try:
            try:
                if self._turn.locked() and size:
                    raise QuotaFull
                self.cache.take(size, reserved)
            except QuotaFull:
                await self._wait_for(size, reserved)
            yield reserved
        finally:
            self.cache.give_back(reserved)
            self._freed.set()

    async def _wait_for(self, size: int, reserved: Reservation) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.room_s
        try:
            async with asyncio.timeout_at(end):
                await self._turn.acquire()
        except TimeoutError:
            self.cache.take(size, reserved)
            return
        try:
            while True:
                self._freed.clear()
                with contextlib.suppress(QuotaFull):
                    self.cache.take(size, reserved)
                    return
                await self.on_pressure()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(1.0, max(0.0, end - loop.time()))):
                        await self._freed.wait()
                if loop.time() >= end:
                    self.cache.take(size, reserved)
                    return
        finally:
            self._turn.release()

    def widen(self, room: Reservation, size: int) -> None:
        """Reserve more, as the data turns out larger than announced."""
        self.cache.check(size)
        if size > room.size:
            self.cache.take(size - room.size, room)

    def _evicted(self, digest: bytes) -> None:
        self._place(digest).unlink(missing_ok=True)
        self._forget_manifest(digest)
        self.on_gone(digest)

    def drop(self, digest: bytes) -> None:
        if digest in self.cache:
            self._place(digest).unlink(missing_ok=True)
            for hold in self.cache.holds(digest):
                self._place(digest, hold).unlink(missing_ok=True)
            self.cache.remove(digest)
            self._forget_manifest(digest)
            self._freed.set()
            self.on_gone(digest)

    def drop_older_than(self, at: float) -> int:
        """Drop the blobs that were not used since this time, at the end of their retention."""
        old = []
        for digest in list(self.cache):
            with contextlib.suppress(OSError):
                touched_at = self._place(digest).stat().st_mtime
                if not self.cache.is_pinned(digest) and touched_at < at:
                    old.append(digest)
        for digest in old:
            self.drop(digest)
        return len(old)

    # ----------------------------------------------------------------- in

    def new_part(self) -> Path:
        return self._parts / secrets.token_hex(12)

    async def put(self, data: bytes, hold: str = OWN) -> bytes:
        """Store small content that is in memory already."""
        digest = hashlib.sha256(data).digest()
        if digest in self.cache:
            if hold:
                self.hold(digest, hold)
            return digest
        part = self.new_part()
        async with self.make_room(len(data)) as room:
            try:
                await asyncio.to_thread(_write, part, data)
                await asyncio.to_thread(self._settle, part)
                self._keep(part, digest, len(data), hold, room)
            except OSError as error:
                raise _not_written(error) from None
            finally:
                part.unlink(missing_ok=True)
        return digest

    async def make_up(self, name: str, size: int, hold: str) -> tuple[bytes, int]:
        part = self.new_part()
        async with self.make_room(size) as room:
            try:
                await asyncio.to_thread(_make_up, part, name, size)
                return await self.adopt(part, hold, room=room)
            finally:
                part.unlink(missing_ok=True)

    async def put_many(
        self, contents: list[tuple[bytes, bytes]], room: Reservation | None = None
    ) -> None:
        """Store small blobs from other peers, each with its hash, which was checked."""
        rows = [
            (digest, data, self.new_part()) for digest, data in contents if digest not in self.cache
        ]
        if room is None:
            async with self.make_room(sum(len(data) for _, data, _ in rows)) as own:
                await self._put_rows(rows, own)
        else:
            await self._put_rows(rows, room)

    async def _put_rows(self, rows: list[tuple[bytes, bytes, Path]], room: Reservation) -> None:
        try:
            await asyncio.to_thread(self._settle_many, rows)
            for digest, data, part in rows:
                self._keep(part, digest, len(data), "", room)
        except OSError as error:
            raise _not_written(error) from None
        finally:
            for _, _, part in rows:
                part.unlink(missing_ok=True)

    def _settle_many(self, rows: list[tuple[bytes, bytes, Path]]) -> None:
        for _, data, part in rows:
            _write(part, data)
            self._settle(part)

    async def receive(
        self, chunks: AsyncIterator[bytes], expected: bytes, announced: int | None, hold: str = OWN
    ) -> int:
        """Store a stream from outside, whose hash must be right; a wrong one leaves nothing."""
        self.cache.check(announced or 0)
        size = 0
        part = self.new_part()
        hasher = hashlib.sha256()
        async with self.make_room(announced or 0) as room:
            try:
                with part.open("wb") as file:
                    async for chunk in chunks:
                        self.widen(room, size + len(chunk))
                        size += len(chunk)
                        hasher.update(chunk)
                        await asyncio.to_thread(file.write, chunk)
                if hasher.digest() != expected:
                    raise WrongHash(
                        f"wrong hash: the content that arrived is sha256:{hasher.hexdigest()}, "
                        f"not sha256:{expected.hex()}"
                    )
                await asyncio.to_thread(self._settle, part)
                self._keep(part, expected, size, hold, room)
            except TimeoutError:
                raise  # the data did not arrive: not the disk's fault
            except OSError as error:
                raise _not_written(error) from None
            finally:
                part.unlink(missing_ok=True)
        return size

    async def adopt(
        self,
        path: Path,
        hold: str = OWN,
        hashed: bytes | None = None,
        room: Reservation | None = None,
    ) -> tuple[bytes, int]:
        """Make a file on this disk a blob; the file is gone afterwards."""
        size = path.lstat().st_size
        if room is None:
            self.cache.check(size)
            async with self.make_room(size) as own:
                return await self.adopt(path, hold, hashed, own)
        seized = path
        try:
            if hashed is None:  # a task's file, to which a process may still write
                seized = await asyncio.to_thread(self._seize, path)
                size = seized.lstat().st_size
            self.widen(room, size)
            digest = await asyncio.to_thread(hash_file, seized) if hashed is None else hashed
            await asyncio.to_thread(self._settle, seized)
            self._keep(seized, digest, size, hold, room)
        except OSError as error:
            raise BlobError(f"this peer can't store {path.name}: {_reason(error)}") from None
        finally:
            if seized is not path:
                seized.unlink(missing_ok=True)
        return digest, size

    def _seize(self, path: Path) -> Path:
        """A file that nobody else can change, as its content must stay what was hashed: the file
        itself if no process has it open for writing, which a lease on it proves; else a copy."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                os.fchown(fd, os.geteuid(), os.getegid())  # the task ran as another user
            os.fchmod(fd, 0o400)  # from here on no other user can open it for writing
            if os.fstat(fd).st_nlink == 1:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                return path
        except (OSError, AttributeError):  # it is open somewhere, or this system has no leases
            pass
        finally:
            os.close(fd)
        copy = self.new_part()
        try:
            copy_file(path, copy)
        except OSError:
            copy.unlink(missing_ok=True)
            raise
        path.unlink()
        return copy

    def _settle(self, part: Path) -> None:
        fd = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            os.fchmod(fd, 0o400)
            os.utime(fd)  # retention counts from now, not from the time that the task has set
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _keep(self, part: Path, digest: bytes, size: int, hold: str, room: Reservation) -> None:
        """Move a whole, synced file to its place and count it, in one step."""
        if hold:
            hold = _named(hold)
        if digest in self.cache:  # the same content arrived another way meanwhile
            if hold:
                self.hold(digest, hold)
            part.unlink(missing_ok=True)
            return
        place = self._place(digest)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if hold:
            with contextlib.suppress(FileExistsError):
                os.link(part, self._place(digest, hold))
        part.replace(place)
        self.cache.add(digest, size, hold, room)

    def touch(self, digest: bytes) -> None:
        """The blob is needed again: its retention starts anew."""
        if digest in self.cache:
            with contextlib.suppress(OSError):
                os.utime(self.path(digest))

    # ----------------------------------------------------------------- out

    async def read(self, digest: bytes, offset: int, length: int) -> bytes:
        return await asyncio.to_thread(_read, self.path(digest), offset, length)

    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]:
        """The whole contents of small blobs."""
        rows = [(digest, self.path(digest), self.cache.size(digest) or 0) for digest in hashes]
        return await asyncio.to_thread(lambda: [(h, _read(p, 0, size)) for h, p, size in rows])

    async def chunks(self, digest: bytes, start: int, end: int) -> AsyncIterator[bytes]:
        while start < end:
            data = await self.read(digest, start, min(CHUNK_BYTES, end - start))
            if not data:
                raise BlobError("the stored file is shorter than it should be")
            start += len(data)
            yield data

    async def manifest(self, digest: bytes) -> ChunkManifest:
        """The digests of a blob's chunks, computed when they are first asked for."""
        manifest = self._manifests.get(digest)
        if manifest is not None:
            self._manifests.move_to_end(digest)
            return manifest
        making = self._making.get(digest)  # once, however many ask
        if making is None:
            making = self._making[digest] = asyncio.ensure_future(self._make_manifest(digest))
            making.add_done_callback(lambda _: self._making.pop(digest, None))
        return await asyncio.shield(making)

    async def _make_manifest(self, digest: bytes) -> ChunkManifest:
        size = self.cache.size(digest) or 0
        with self.cache.pinned([digest]):
            manifest = await asyncio.to_thread(_manifest, self.path(digest), size)
        self.know_manifest(digest, manifest)
        return manifest

    def know_manifest(self, digest: bytes, manifest: ChunkManifest) -> None:
        if digest in self.cache and digest not in self._manifests:
            self._manifests[digest] = manifest
            self._manifests_bytes += len(manifest.digests)
            while self._manifests_bytes > MANIFESTS_BYTES_MAX and len(self._manifests) > 1:
                self._forget_manifest(next(iter(self._manifests)))

    def _forget_manifest(self, digest: bytes) -> None:
        manifest = self._manifests.pop(digest, None)
        self._manifests_bytes -= len(manifest.digests) if manifest is not None else 0

    # ----------------------------------------------------------------- in chunks

    def part(self, size: int) -> PartialBlob:
        return PartialBlob(self, self.new_part(), size)


class PartialBlob:
    """A blob that comes in chunks, in any order."""

    def __init__(self, blobs: DiskBlobs, path: Path, size: int) -> None:
        self._blobs = blobs
        self._path = path
        self._size = size
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    async def write(self, index: int, data: bytes) -> None:
        start, _ = span(self._size, index)
        try:
            written = await asyncio.to_thread(os.pwrite, self._fd, data, start)
        except OSError as error:
            raise _not_written(error) from None
        if written != len(data):
            raise QuotaFull("this peer's disk is full: only a part of a chunk was written")

    async def read(self, index: int) -> bytes:
        start, length = span(self._size, index)
        return await asyncio.to_thread(os.pread, self._fd, length, start)

    async def hashed(self) -> bytes:
        return await asyncio.to_thread(hash_file, self._path)

    async def keep(self, digest: bytes, hold: str, room: Reservation) -> None:
        await self._blobs.adopt(self._path, hold, digest, room)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._path.unlink(missing_ok=True)


async def _release_nothing() -> None:
    return None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _not_written(error: OSError) -> QuotaFull:
    return QuotaFull(f"this peer's disk can't store the file: {_reason(error)}")


def _named(hold: str) -> str:
    return hold if _HOLD.fullmatch(hold) else OWN


def open_plain(path: Path, names_max: int = 1) -> BufferedReader:
    """Open a file that a task may have made: a pipe could block, a device never end, a link lead
    anywhere. Raises `OSError` if it is not a plain file with at most so many names."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not _is_plain(os.fstat(fd), names_max):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a plain file", str(path))
    return os.fdopen(fd, "rb")


def is_plain(path: Path) -> bool:
    try:
        return _is_plain(path.lstat())
    except OSError:
        return False


def _is_plain(status: os.stat_result, names_max: int = 1) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_nlink <= names_max


def hash_file(path: Path) -> bytes:
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


def copy_file(source: Path, target: Path) -> None:
    """A separate copy: a task that writes to its input must not write to the blob."""
    with open_plain(source, names_max=2**31) as a, target.open("xb") as b:
        shutil.copyfileobj(a, b, CHUNK_BYTES)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _read(path: Path, offset: int, length: int) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, length, offset)
    finally:
        os.close(fd)


def _manifest(path: Path, size: int) -> ChunkManifest:
    with path.open("rb") as file:
        return ChunkManifest.of(size, (file.read(span(size, i)[1]) for i in range(count(size))))


def _make_up(path: Path, name: str, size: int) -> None:
    with path.open("wb") as file:
        for chunk in made_up(name, size):
            file.write(chunk)
