"""A peer's blobs: why each is kept, and which may go when disk space is needed. Pure.

Rules:
- A blob is *held* for a workflow that made it here and still wants it, or because a user uploaded
  it (`OWN`). It is *pinned* while an attempt on this peer needs it. A blob that is neither is only
  cached: it goes when disk space is needed, least recently used first.
- So the last copy of a result that nobody has consumed stays: the peer that made it holds it until
  the workflow's home says that it is not wanted any more.
- Disk space is reserved before the first byte is written, and given back by whoever reserved it:
  all blobs and reservations together never exceed the quota.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

OWN = "own"  # held for no workflow, until its retention is over; own-X: uploaded by the user X
#: shares of the quota for one owner's uploads, and for those of all owners. The rest is for the
#: inputs and outputs of tasks.
UPLOADS_OF_ONE, UPLOADS_OF_ALL = 0.4, 0.7
UPLOADS_MAX = 100_000  # files, of one owner


def is_own(hold: str) -> bool:
    return hold == OWN or hold.startswith(OWN + "-")


class BlobError(Exception):
    """A blob could not be kept; `status` is the HTTP status for that."""

    status = 500


class QuotaFull(BlobError):
    status = 507


class NeverFits(QuotaFull):
    """Not even if everything else went."""


class TooLarge(BlobError):
    status = 413


class WrongHash(BlobError):
    status = 422


class Reservation:
    """Bytes of the quota, reserved for blobs that are on their way."""

    __slots__ = ("size",)

    def __init__(self, size: int = 0) -> None:
        self.size = size


class Cache:
    def __init__(self, quota_bytes: int, blob_bytes_max: int) -> None:
        self.quota_bytes = quota_bytes
        self.blob_bytes_max = blob_bytes_max
        self.on_evict: Callable[[bytes], None] = lambda digest: None
        self.counts: Counter[str] = Counter()
        self.used_bytes = 0  # by blobs and by reservations
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the most recently used last
        self._holds: dict[bytes, set[str]] = {}
        self._held_for: dict[str, set[bytes]] = {}
        self._held_bytes: Counter[str] = Counter()
        self._own_bytes = 0
        self._coming: Counter[str] = Counter()  # bytes of uploads on their way, by owner
        self._pins: Counter[bytes] = Counter()
        #: the first bytes of all digests, as the lists of tasks have them; the newest last
        self.prefixes: dict[bytes, int] = {}

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def size(self, digest: bytes) -> int | None:
        return self._sizes.get(digest)

    def used(self, digest: bytes) -> None:
        self._sizes.move_to_end(digest)

    # ----------------------------------------------------------------- blobs

    def add(self, digest: bytes, size: int, hold: str, room: Reservation | None = None) -> bool:
        """The blob is on the disk. False if it was there before; then `room` is left as it was."""
        new = digest not in self._sizes
        if new:
            self._sizes[digest] = size
            self.prefixes[digest[:8]] = self.prefixes.get(digest[:8], 0) + 1
            covered = min(size, room.size) if room is not None else 0
            if room is not None:
                room.size -= covered
            self.used_bytes += size - covered
        held = self._holds.setdefault(digest, set()) if hold else set()
        if hold and hold not in held:
            if is_own(hold) and not any(map(is_own, held)):
                self._own_bytes += self._sizes[digest]
            held.add(hold)
            self._held_for.setdefault(hold, set()).add(digest)
            self._held_bytes[hold] += self._sizes[digest]
        return new

    def remove(self, digest: bytes) -> None:
        for hold in self.holds(digest):
            self.release(digest, hold)
        self.used_bytes -= self._sizes.pop(digest)
        self.prefixes[digest[:8]] -= 1
        if not self.prefixes[digest[:8]]:
            del self.prefixes[digest[:8]]

    def holds(self, digest: bytes) -> frozenset[str]:
        return frozenset(self._holds.get(digest, ()))

    def held_for(self) -> dict[str, list[bytes]]:
        """The held blobs of each workflow, without those that users uploaded."""
        return {hold: list(held) for hold, held in self._held_for.items() if not is_own(hold)}

    def release(self, digest: bytes, hold: str) -> None:
        held = self._holds.get(digest)
        if held is None or hold not in held:
            return
        held.discard(hold)
        if not held:
            del self._holds[digest]
        if is_own(hold) and not any(map(is_own, held)):
            self._own_bytes -= self._sizes[digest]
        self._held_bytes[hold] -= self._sizes[digest]
        held_for = self._held_for[hold]
        held_for.discard(digest)
        if not held_for:
            del self._held_for[hold], self._held_bytes[hold]

    def pin(self, hashes: Iterable[bytes]) -> None:
        self._pins.update(hashes)

    def unpin(self, hashes: Iterable[bytes]) -> None:
        for digest in hashes:
            self._pins[digest] -= 1
            if self._pins[digest] <= 0:
                del self._pins[digest]

    def is_pinned(self, digest: bytes) -> bool:
        return digest in self._pins

    @contextmanager
    def pinned(self, hashes: Iterable[bytes]) -> Iterator[None]:
        """These blobs stay while they are needed, even those that are still on their way."""
        needed = list(hashes)
        self.pin(needed)
        try:
            yield
        finally:
            self.unpin(needed)

    # ----------------------------------------------------------------- disk space

    def free_bytes(self) -> int:
        """The bytes that could be reserved now, if all cached blobs went."""
        stays = sum(s for h, s in self._sizes.items() if h in self._holds or h in self._pins)
        blobs = sum(self._sizes.values())
        return self.quota_bytes - (self.used_bytes - blobs) - stays

    def own_bytes(self) -> int:
        """The bytes of uploads, which no workflow can release."""
        return self._own_bytes

    @contextmanager
    def uploading(self, hold: str, announced: int) -> Iterator[Callable[[int], None]]:
        """An upload counts from its first byte on, whatever its announced size, and together with
        others of the same owner. Call the function that is yielded with the bytes so far."""
        counted = 0

        def grow(count: int) -> None:
            nonlocal counted
            if count > counted:
                self.check_upload(hold, count - counted)
                self._coming[hold] += count - counted
                counted = count

        self.check_upload(hold, 0)
        grow(announced)
        try:
            yield grow
        finally:
            self._coming[hold] -= counted
            if not self._coming[hold]:
                del self._coming[hold]

    def check_upload(self, hold: str, size: int) -> None:
        """One owner's uploads leave space for other owners', and all uploads leave some for tasks.
        Else `QuotaFull`."""
        files = self._held_for.get(hold, ())
        used = self._held_bytes[hold] + self._coming[hold]
        of_all = self._own_bytes + self._coming.total()
        if len(files) >= UPLOADS_MAX:
            raise QuotaFull(
                f"you have {len(files):,} files on this peer, which is the limit; "
                "delete some (DELETE /v1/blobs/…)"
            )
        for limit, taken, whose in (
            (int(UPLOADS_OF_ONE * self.quota_bytes), used, "your uploads"),
            (int(UPLOADS_OF_ALL * self.quota_bytes), of_all, "all uploads"),
        ):
            if taken + size > limit:
                raise QuotaFull(
                    f"{size:,} bytes do not fit: {whose} may take {limit:,} bytes of this peer, "
                    f"and {taken:,} are used; delete some (DELETE /v1/blobs/…), or use another peer"
                )

    def check(self, size: int) -> None:
        """A file that would never fit is refused at once."""
        if size > self.blob_bytes_max:
            raise TooLarge(
                f"the file has {size:,} bytes, but this peer takes at most {self.blob_bytes_max:,}"
            )

    def take(self, size: int, room: Reservation) -> None:
        """Adds `size` bytes to a reservation, or raises `QuotaFull`."""
        missing = self.used_bytes + size - self.quota_bytes
        if missing > 0:
            self._evict(missing)
        if self.used_bytes + size > self.quota_bytes:
            raise QuotaFull(
                f"{size:,} bytes do not fit: {self.used_bytes:,} of the disk quota of "
                f"{self.quota_bytes:,} are used"
            )
        self.used_bytes += size
        room.size += size

    def give_back(self, room: Reservation) -> None:
        self.used_bytes -= room.size
        room.size = 0

    def _evict(self, wanted: int) -> None:
        going = []
        for digest, size in self._sizes.items():
            if wanted <= 0:
                break
            if digest not in self._holds and digest not in self._pins:
                wanted -= size
                going.append(digest)
        for digest in going:
            self.counts["evicted"] += 1
            self.counts["evicted_bytes"] += self._sizes[digest]
            self.remove(digest)
            self.on_evict(digest)
