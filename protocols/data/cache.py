"""Which blobs a peer has, what each is there for, and which may go when room is needed. Pure.

Rules:
- A blob is *held* for a workflow that made it here and still wants it, or because a user brought it
  (`OWN`). It is *pinned* while an attempt that is here needs it. Whatever is neither held nor
  pinned is a copy: it goes when room is needed, least recently used first.
- So the last copy of a result that nobody has consumed stays: its maker holds it until the
  workflow's home says that it is not wanted any more.
- Room is taken before the first byte is written, and given back by who took it: the sum of all
  blobs and of all room taken never exceeds the quota.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

OWN = "own"  # held by no workflow: until its retention is over; own-X: brought by the user X
#: of the quota: what one owner's uploads, and what those of all owners may take. The rest is for
#: what tasks read and make.
UPLOADS_OF_ONE, UPLOADS_OF_ALL = 0.4, 0.7
UPLOADS_MAX = 100_000  # files, of one owner


def is_own(hold: str) -> bool:
    return hold == OWN or hold.startswith(OWN + "-")


class BlobError(Exception):
    """A blob could not be kept; `status` is what HTTP says for it."""

    status = 500


class QuotaFull(BlobError):
    status = 507


class NeverFits(QuotaFull):
    """However long one waits."""


class TooLarge(BlobError):
    status = 413


class WrongHash(BlobError):
    status = 422


class Reservation:
    """Bytes of the quota that are taken for what is on its way."""

    __slots__ = ("size",)

    def __init__(self, size: int = 0) -> None:
        self.size = size


class Cache:
    def __init__(self, quota_bytes: int, blob_bytes_max: int) -> None:
        self.quota_bytes = quota_bytes
        self.blob_bytes_max = blob_bytes_max
        self.on_evict: Callable[[bytes], None] = lambda hash: None
        self.counts: Counter[str] = Counter()
        self.used_bytes = 0  # by blobs, and by room that is taken
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the most recently used last
        self._holds: dict[bytes, set[str]] = {}
        self._held_for: dict[str, set[bytes]] = {}
        self._held_bytes: Counter[str] = Counter()
        self._own_bytes = 0
        self._coming: Counter[str] = Counter()  # uploads that are on their way, by whose they are
        self._pins: Counter[bytes] = Counter()
        #: the beginnings of all names, as task lists have them; the latest to come last
        self.prefixes: dict[bytes, int] = {}

    def __contains__(self, hash: bytes) -> bool:
        return hash in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._sizes)

    def size(self, hash: bytes) -> int | None:
        return self._sizes.get(hash)

    def used(self, hash: bytes) -> None:
        self._sizes.move_to_end(hash)

    # ----------------------------------------------------------------- what is here

    def add(self, hash: bytes, size: int, hold: str, room: Reservation | None = None) -> bool:
        """It is on the disk. False if it was before; then its room is still its taker's."""
        new = hash not in self._sizes
        if new:
            self._sizes[hash] = size
            self.prefixes[hash[:8]] = self.prefixes.get(hash[:8], 0) + 1
            covered = min(size, room.size) if room is not None else 0
            if room is not None:
                room.size -= covered
            self.used_bytes += size - covered
        held = self._holds.setdefault(hash, set()) if hold else set()
        if hold and hold not in held:
            if is_own(hold) and not any(map(is_own, held)):
                self._own_bytes += self._sizes[hash]
            held.add(hold)
            self._held_for.setdefault(hold, set()).add(hash)
            self._held_bytes[hold] += self._sizes[hash]
        return new

    def remove(self, hash: bytes) -> None:
        for hold in self.holds(hash):
            self.release(hash, hold)
        self.used_bytes -= self._sizes.pop(hash)
        self.prefixes[hash[:8]] -= 1
        if not self.prefixes[hash[:8]]:
            del self.prefixes[hash[:8]]

    def holds(self, hash: bytes) -> frozenset[str]:
        return frozenset(self._holds.get(hash, ()))

    def held_for(self) -> dict[str, list[bytes]]:
        """By workflow. What users brought is not among it."""
        return {hold: list(found) for hold, found in self._held_for.items() if not is_own(hold)}

    def release(self, hash: bytes, hold: str) -> None:
        held = self._holds.get(hash)
        if held is None or hold not in held:
            return
        held.discard(hold)
        if not held:
            del self._holds[hash]
        if is_own(hold) and not any(map(is_own, held)):
            self._own_bytes -= self._sizes[hash]
        self._held_bytes[hold] -= self._sizes[hash]
        found = self._held_for[hold]
        found.discard(hash)
        if not found:
            del self._held_for[hold], self._held_bytes[hold]

    def pin(self, hashes: Iterable[bytes]) -> None:
        self._pins.update(hashes)

    def unpin(self, hashes: Iterable[bytes]) -> None:
        for hash in hashes:
            self._pins[hash] -= 1
            if self._pins[hash] <= 0:
                del self._pins[hash]

    def is_pinned(self, hash: bytes) -> bool:
        return hash in self._pins

    @contextmanager
    def pinned(self, hashes: Iterable[bytes]) -> Iterator[None]:
        """While these are needed they stay, also those that are still on their way."""
        found = list(hashes)
        self.pin(found)
        try:
            yield
        finally:
            self.unpin(found)

    # ----------------------------------------------------------------- room

    def free_bytes(self) -> int:
        """What could be taken now, if all copies went."""
        stays = sum(s for h, s in self._sizes.items() if h in self._holds or h in self._pins)
        blobs = sum(self._sizes.values())
        return self.quota_bytes - (self.used_bytes - blobs) - stays

    def own_bytes(self) -> int:
        """What stays, whoever lets go."""
        return self._own_bytes

    @contextmanager
    def uploading(self, hold: str, announced: int) -> Iterator[Callable[[int], None]]:
        """An upload counts from its first byte on, whatever was announced, and beside others of the
        same owner; what is yielded is told how many bytes have come by now."""
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
        """One owner's uploads leave room for others', and those of all for tasks."""
        mine = self._held_for.get(hold, ())
        used = self._held_bytes[hold] + self._coming[hold]
        of_all = self._own_bytes + self._coming.total()
        if len(mine) >= UPLOADS_MAX:
            raise QuotaFull(f"you have {len(mine):,} files here; delete some (DELETE /v1/blobs/…)")
        for limit, taken, whose in (
            (int(UPLOADS_OF_ONE * self.quota_bytes), used, "your uploads"),
            (int(UPLOADS_OF_ALL * self.quota_bytes), of_all, "all uploads"),
        ):
            if taken + size > limit:
                raise QuotaFull(
                    f"{size:,} bytes do not fit: {whose} may take {limit:,} bytes of this peer, "
                    f"{taken:,} are used; delete some (DELETE /v1/blobs/…), or use another peer"
                )

    def check(self, size: int) -> None:
        """What would never fit is refused at once."""
        if size > self.blob_bytes_max:
            raise TooLarge(f"{size:,} bytes; a file has at most {self.blob_bytes_max:,} here")

    def take(self, size: int, room: Reservation) -> None:
        """So much more room, or `QuotaFull`."""
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
        for hash, size in self._sizes.items():
            if wanted <= 0:
                break
            if hash not in self._holds and hash not in self._pins:
                wanted -= size
                going.append(hash)
        for hash in going:
            self.counts["evicted"] += 1
            self.counts["evicted_bytes"] += self._sizes[hash]
            self.remove(hash)
            self.on_evict(hash)
