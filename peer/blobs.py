"""Files by the hash of their content, on this peer's disk, within a quota.

Rules:
- A blob appears whole or not at all: written beside, synced, then renamed to its name.
- What comes from outside is hashed while it is written, and kept only if the hash is right.
- What a blob is held for is on the disk as a second name of it, `<hash>.<workflow>`, made before it
  gets its own: so that is known again after a restart. `protocols.data.cache` says what may go.
- The quota counts what is being written too: a write that would not fit is refused before it
  begins, after those who might let go of something were asked (`on_pressure`).
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
#: a hold is a part of a file's name; what can't be one counts as the user's own
_HOLD = re.compile(r"[A-Za-z0-9_-]{1,100}")
ROOM_S = 15.0  # how long something waits for others to let go
SHEETS_BYTES_MAX = 8 << 20


class DiskBlobs:
    def __init__(self, directory: Path, quota_bytes: int, blob_bytes_max: int) -> None:
        self.cache = Cache(quota_bytes, blob_bytes_max)
        self.cache.on_evict = self._evicted
        self.on_gone: Callable[[bytes], None] = lambda hash: None
        #: ask whoever may know of something that is not wanted any more
        self.on_pressure: Callable[[], Awaitable[None]] = _nobody
        self.room_s = ROOM_S
        self.directory = directory
        self._freed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._manifests: OrderedDict[bytes, ChunkManifest] = OrderedDict()
        self._manifests_bytes = 0
        self._making: dict[bytes, asyncio.Future[ChunkManifest]] = {}
        self._root = directory / "blobs"
        self._parts = directory / "parts"
        shutil.rmtree(self._parts, ignore_errors=True)  # what a crash left half-written
        self._parts.mkdir(mode=0o700, parents=True)
        self._root.mkdir(mode=0o700, exist_ok=True)
        for hash, size, holds in self._scan():
            for hold in holds or [""]:
                self.cache.add(hash, size, hold)

    def _scan(self) -> Iterator[tuple[bytes, int, list[str]]]:
        """The most recently used last, as far as their times tell."""
        found: dict[bytes, tuple[float, int, list[str]]] = {}
        for path in (path for directory in self._root.iterdir() for path in directory.iterdir()):
            with contextlib.suppress(ValueError):
                hash = bytes.fromhex(path.name[:64])
                status = path.stat()
                row = found.setdefault(hash, (status.st_mtime, status.st_size, []))
                if len(path.name) > 64:
                    row[2].append(path.name[65:])
        for hash, (_, size, holds) in sorted(found.items(), key=lambda row: row[1][0]):
            place = self._place(hash)
            if not place.exists():  # a crash between two names: this one is whole, too
                os.link(self._place(hash, holds[0]), place)
            yield hash, size, holds

    @property
    def quota_bytes(self) -> int:
        return self.cache.quota_bytes

    @property
    def blob_bytes_max(self) -> int:
        return self.cache.blob_bytes_max

    @property
    def used_bytes(self) -> int:
        return self.cache.used_bytes

    def __contains__(self, hash: bytes) -> bool:
        return hash in self.cache

    def __len__(self) -> int:
        return len(self.cache)

    def size(self, hash: bytes) -> int | None:
        return self.cache.size(hash)

    def path(self, hash: bytes) -> Path:
        self.cache.used(hash)
        return self._place(hash)

    def _place(self, hash: bytes, hold: str = "") -> Path:
        name = hash.hex()
        return self._root / name[:2] / (f"{name}.{hold}" if hold else name)

    def pinned(self, hashes: Iterable[bytes]) -> contextlib.AbstractContextManager[None]:
        return self.cache.pinned(hashes)

    # ----------------------------------------------------------------- what it is held for

    def hold(self, hash: bytes, hold: str) -> bool:
        """It is here, and is wanted for this workflow from now on. False: it is not here."""
        hold = _named(hold)
        if hash not in self.cache:
            return False
        if hold not in self.cache.holds(hash):
            with contextlib.suppress(FileExistsError):
                os.link(self._place(hash), self._place(hash, hold))
            self.cache.add(hash, self.cache.size(hash) or 0, hold)
        return True

    def delete(self, hash: bytes, hold: str | None) -> bool:
        """An upload of that owner (None: of any), by its owner. False: there is none here."""
        found = [h for h in self.cache.holds(hash) if is_own(h) and hold in (None, h)]
        for one in found:
            self.release(one, [hash])
        if found and not self.cache.holds(hash) and not self.cache.is_pinned(hash):
            self.drop(hash)
        return bool(found)

    def release(self, hold: str, hashes: Iterable[bytes]) -> None:
        """That workflow does not want them any more."""
        hold = _named(hold)
        for hash in hashes:
            if hold in self.cache.holds(hash):
                self.cache.release(hash, hold)
                self._place(hash, hold).unlink(missing_ok=True)
                self._freed.set()

    # ----------------------------------------------------------------- room

    @contextlib.asynccontextmanager
    async def make_room(self, size: int) -> AsyncIterator[Reservation]:
        """Held while something is being written; others are asked first what they can let go of,
        and given a while for it.

        One at a time waits, so that two never hold half of what each of them needs."""
        held = Reservation()
        most = self.quota_bytes - self.cache.own_bytes()
        if size > most:
            raise NeverFits(
                f"{size:,} bytes do not fit: of the disk quota of {self.quota_bytes:,} not more "
                f"than {max(0, most):,} can come free"
            )
        try:
            try:
                if self._turn.locked() and size:
                    raise QuotaFull
                self.cache.take(size, held)
            except QuotaFull:
                await self._wait_for(size, held)
            yield held
        finally:
            self.cache.give_back(held)
            self._freed.set()

    async def _wait_for(self, size: int, held: Reservation) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + self.room_s
        try:
            async with asyncio.timeout_at(end):
                await self._turn.acquire()
        except TimeoutError:
            self.cache.take(size, held)
            return
        try:
            while True:
                self._freed.clear()
                with contextlib.suppress(QuotaFull):
                    self.cache.take(size, held)
                    return
                await self.on_pressure()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(1.0, max(0.0, end - loop.time()))):
                        await self._freed.wait()
                if loop.time() >= end:
                    self.cache.take(size, held)
                    return
        finally:
            self._turn.release()

    def widen(self, room: Reservation, size: int) -> None:
        """What comes turns out larger than announced."""
        self.cache.check(size)
        if size > room.size:
            self.cache.take(size - room.size, room)

    def _evicted(self, hash: bytes) -> None:
        self._place(hash).unlink(missing_ok=True)
        self._forget_sheet(hash)
        self.on_gone(hash)

    def drop(self, hash: bytes) -> None:
        if hash in self.cache:
            self._place(hash).unlink(missing_ok=True)
            for hold in self.cache.holds(hash):
                self._place(hash, hold).unlink(missing_ok=True)
            self.cache.remove(hash)
            self._forget_sheet(hash)
            self._freed.set()
            self.on_gone(hash)

    def drop_older_than(self, at: float) -> int:
        """Retention: what nobody touched since then."""
        old = []
        for hash in list(self.cache):
            with contextlib.suppress(OSError):
                touched_at = self._place(hash).stat().st_mtime
                if not self.cache.is_pinned(hash) and touched_at < at:
                    old.append(hash)
        for hash in old:
            self.drop(hash)
        return len(old)

    # ----------------------------------------------------------------- in

    def new_part(self) -> Path:
        return self._parts / secrets.token_hex(12)

    async def put(self, data: bytes, hold: str = OWN) -> bytes:
        """Small content that is in memory already."""
        hash = hashlib.sha256(data).digest()
        if hash in self.cache:
            if hold:
                self.hold(hash, hold)
            return hash
        part = self.new_part()
        async with self.make_room(len(data)) as room:
            try:
                await asyncio.to_thread(_write, part, data)
                await asyncio.to_thread(self._settle, part)
                self._keep(part, hash, len(data), hold, room)
            except OSError as error:
                raise QuotaFull(f"the disk refused it: {error.strerror}") from None
            finally:
                part.unlink(missing_ok=True)
        return hash

    async def make_up(self, name: str, size: int, hold: str) -> tuple[bytes, int]:
        part = self.new_part()
        async with self.make_room(size) as room:
            try:
                await asyncio.to_thread(_make_up, part, name, size)
                return await self.adopt(part, hold, room=room)
            finally:
                part.unlink(missing_ok=True)

    async def put_many(
        self, found: list[tuple[bytes, bytes]], room: Reservation | None = None
    ) -> None:
        """Copies of small blobs, each with its hash, which was checked."""
        rows = [(hash, data, self.new_part()) for hash, data in found if hash not in self.cache]
        if room is None:
            async with self.make_room(sum(len(data) for _, data, _ in rows)) as own:
                await self._put_rows(rows, own)
        else:
            await self._put_rows(rows, room)

    async def _put_rows(self, rows: list[tuple[bytes, bytes, Path]], room: Reservation) -> None:
        try:
            await asyncio.to_thread(self._settle_many, rows)
            for hash, data, part in rows:
                self._keep(part, hash, len(data), "", room)
        except OSError as error:
            raise QuotaFull(f"the disk refused it: {error.strerror}") from None
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
        """A stream from outside, whose hash must be right. Nothing is left of a bad one."""
        self.cache.check(announced or 0)
        size = 0
        part = self.new_part()
        digest = hashlib.sha256()
        async with self.make_room(announced or 0) as room:
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
                await asyncio.to_thread(self._settle, part)
                self._keep(part, expected, size, hold, room)
            except TimeoutError:
                raise  # it did not come: not the disk's fault
            except OSError as error:
                raise QuotaFull(f"the disk refused it: {error.strerror}") from None
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
        """A file on this disk becomes a blob; the file is gone afterwards."""
        size = path.lstat().st_size
        if room is None:
            self.cache.check(size)
            async with self.make_room(size) as own:
                return await self.adopt(path, hold, hashed, own)
        mine = path
        try:
            if hashed is None:  # somebody else's, who may write to it to this day
                mine = await asyncio.to_thread(self._seize, path)
                size = mine.lstat().st_size
            self.widen(room, size)
            hash = await asyncio.to_thread(hash_file, mine) if hashed is None else hashed
            await asyncio.to_thread(self._settle, mine)
            self._keep(mine, hash, size, hold, room)
        except OSError as error:
            raise BlobError(f"{path.name}: {error.strerror}") from None
        finally:
            if mine is not path:
                mine.unlink(missing_ok=True)
        return hash, size

    def _seize(self, path: Path) -> Path:
        """So that nobody can change it any more: what it is hashed as it must stay. The file itself
        if no process has it open for writing, which a lease on it proves; else a copy."""
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_uid != os.geteuid():
                os.fchown(fd, os.geteuid(), os.getegid())  # its maker runs as somebody else
            os.fchmod(fd, 0o400)  # from here on nobody else can open it for writing
            alone = os.fstat(fd).st_nlink == 1
            if alone:
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
                fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
                return path
        except (OSError, AttributeError):  # it is open somewhere, or leases are not to be had here
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
            os.utime(fd)  # its age here counts, not the one its maker gave it
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def _keep(self, part: Path, hash: bytes, size: int, hold: str, room: Reservation) -> None:
        """The file is whole and synced: to its place, and counted once, in one step."""
        if hold:
            hold = _named(hold)
        if hash in self.cache:  # it came another way meanwhile
            if hold:
                self.hold(hash, hold)
            part.unlink(missing_ok=True)
            return
        place = self._place(hash)
        place.parent.mkdir(mode=0o700, exist_ok=True)
        if hold:
            with contextlib.suppress(FileExistsError):
                os.link(part, self._place(hash, hold))
        part.replace(place)
        self.cache.add(hash, size, hold, room)

    def touch(self, hash: bytes) -> None:
        """It is wanted again: its retention begins anew."""
        if hash in self.cache:
            with contextlib.suppress(OSError):
                os.utime(self.path(hash))

    # ----------------------------------------------------------------- out

    async def read(self, hash: bytes, offset: int, length: int) -> bytes:
        return await asyncio.to_thread(_read, self.path(hash), offset, length)

    async def read_many(self, hashes: list[bytes]) -> list[tuple[bytes, bytes]]:
        """Whole ones."""
        rows = [(hash, self.path(hash), self.cache.size(hash) or 0) for hash in hashes]
        return await asyncio.to_thread(lambda: [(h, _read(p, 0, size)) for h, p, size in rows])

    async def chunks(self, hash: bytes, start: int, end: int) -> AsyncIterator[bytes]:
        while start < end:
            data = await self.read(hash, start, min(CHUNK_BYTES, end - start))
            if not data:
                raise BlobError("the file is shorter than it was")
            start += len(data)
            yield data

    async def manifest(self, hash: bytes) -> ChunkManifest:
        """The digests of its chunks: computed when somebody first asks for them."""
        manifest = self._manifests.get(hash)
        if manifest is not None:
            self._manifests.move_to_end(hash)
            return manifest
        making = self._making.get(hash)  # once, however many ask
        if making is None:
            making = self._making[hash] = asyncio.ensure_future(self._make_sheet(hash))
            making.add_done_callback(lambda _: self._making.pop(hash, None))
        return await asyncio.shield(making)

    async def _make_sheet(self, hash: bytes) -> ChunkManifest:
        size = self.cache.size(hash) or 0
        with self.cache.pinned([hash]):
            manifest = await asyncio.to_thread(_manifest, self.path(hash), size)
        self.know_manifest(hash, manifest)
        return manifest

    def know_manifest(self, hash: bytes, manifest: ChunkManifest) -> None:
        if hash in self.cache and hash not in self._manifests:
            self._manifests[hash] = manifest
            self._manifests_bytes += len(manifest.digests)
            while self._manifests_bytes > SHEETS_BYTES_MAX and len(self._manifests) > 1:
                self._forget_sheet(next(iter(self._manifests)))

    def _forget_sheet(self, hash: bytes) -> None:
        manifest = self._manifests.pop(hash, None)
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
            raise QuotaFull(f"the disk refused it: {error.strerror}") from None
        if written != len(data):
            raise QuotaFull("the disk took only a part of it")

    async def read(self, index: int) -> bytes:
        start, length = span(self._size, index)
        return await asyncio.to_thread(os.pread, self._fd, length, start)

    async def hashed(self) -> bytes:
        return await asyncio.to_thread(hash_file, self._path)

    async def keep(self, hash: bytes, hold: str, room: Reservation) -> None:
        await self._blobs.adopt(self._path, hold, hash, room)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._path.unlink(missing_ok=True)


async def _nobody() -> None:
    return None


def _named(hold: str) -> str:
    return hold if _HOLD.fullmatch(hold) else OWN


def open_plain(path: Path, names_max: int = 1) -> BufferedReader:
    """To read a file that a task may have put there: a pipe would be waited for, a device read for
    ever, a link followed to anywhere. `OSError` if it is no plain file with so many names."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not _is_plain(os.fstat(fd), names_max):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
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
    """A copy of one's own: a task that writes to its input must not write to the blob."""
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
