"""The tree of a broadcast: the id space is divided into eight regions, again and again. Pure.

A region is a range of peer ids. Its delegate gets the message and the rest of the region, and does
the same with it: no peer sends to more than eight others, nor hears from more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 8


class Region(NamedTuple):
    """The ids from `low` to `high`, both included, and the peers that are known there."""

    low: bytes
    high: bytes
    peers: tuple[bytes, ...]


def divide(low: bytes, high: bytes, peers: Sequence[bytes], width: int = WIDTH) -> list[Region]:
    """Parts with about as many known peers each, and without a gap: a peer that only a delegate
    knows is in one of them, too."""
    ordered = sorted(peer for peer in peers if low <= peer <= high)
    count = min(width, len(ordered))
    if not count:
        return []
    regions = []
    for part in range(count):
        some = ordered[len(ordered) * part // count : len(ordered) * (part + 1) // count]
        begin = low if part == 0 else some[0]
        following = len(ordered) * (part + 1) // count
        end = high if part == count - 1 else _before(ordered[following])
        regions.append(Region(begin, end, tuple(some)))
    return regions


def _before(peer_id: bytes) -> bytes:
    return (int.from_bytes(peer_id) - 1).to_bytes(len(peer_id))
