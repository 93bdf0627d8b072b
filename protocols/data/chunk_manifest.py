"""The chunks of a blob: how it is cut, and the manifest of their digests. Pure.

A blob's name is the hash of its bytes. Its *manifest* lists the digests of its chunks, as a holder
of the blob computed them; it is believed until the whole blob turns out to be another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

CHUNK_BYTES_MIN = 1 << 20
CHUNKS_MAX = 1 << 16
DIGEST_BYTES = 16
MANIFEST_BYTES_MAX = CHUNKS_MAX * DIGEST_BYTES


def chunk_bytes(size: int) -> int:
    """The length of a chunk, which is the same at every peer: a power of two, so large that a blob
    has at most `CHUNKS_MAX` of them."""
    length = CHUNK_BYTES_MIN
    while size > length * CHUNKS_MAX:
        length *= 2
    return length


def count(size: int) -> int:
    return -(-size // chunk_bytes(size))


def span(size: int, index: int) -> tuple[int, int]:
    """A chunk's offset and length."""
    step = chunk_bytes(size)
    start = index * step
    return start, max(0, min(step, size - start))


def digest(data: bytes | memoryview) -> bytes:
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


class ChunkManifest:
    """The digests of a blob's chunks, one after the other."""

    __slots__ = ("digests", "size")

    def __init__(self, size: int, digests: bytes) -> None:
        if len(digests) != DIGEST_BYTES * count(size):
            raise ValueError("a manifest has one digest for each chunk")
        self.size = size
        self.digests = digests

    @staticmethod
    def of(size: int, chunks: Iterable[bytes]) -> ChunkManifest:
        return ChunkManifest(size, b"".join(map(digest, chunks)))

    def fits(self, index: int, data: bytes) -> bool:
        at = index * DIGEST_BYTES
        return (
            len(data) == span(self.size, index)[1]
            and digest(data) == self.digests[at : at + DIGEST_BYTES]
        )


class Chunks:
    """A set of chunks of one blob."""

    __slots__ = ("_bits", "count", "held")

    def __init__(self, count: int, bits: bytes = b"") -> None:
        self.count = count
        length = -(-count // 8)
        self._bits = bytearray(bits[:length].ljust(length, b"\0"))
        if length and count % 8:
            self._bits[-1] &= (1 << count % 8) - 1
        self.held = int.from_bytes(self._bits).bit_count()

    @staticmethod
    def all(count: int) -> Chunks:
        return Chunks(count, b"\xff" * -(-count // 8))

    def __contains__(self, index: int) -> bool:
        return bool(self._bits[index >> 3] & (1 << (index & 7)))

    def add(self, index: int) -> None:
        if index not in self:
            self._bits[index >> 3] |= 1 << (index & 7)
            self.held += 1

    @property
    def full(self) -> bool:
        return self.held >= self.count

    def to_bytes(self) -> bytes:
        return bytes(self._bits)
