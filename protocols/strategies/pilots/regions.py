"""Who passes a broadcast on to whom: the space is divided into eight regions, again and again.
Pure.

A region is a stretch of the peers' ids. Its delegate gets the message and what is left of the
region, and does the same with it: nobody sends to more than eight, nor hears from more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

WIDTH = 8


class Region(NamedTuple):
    """`low` to `high`, both included, and who is known to be in it."""

    low: bytes
    high: bytes
    peers: tuple[bytes, ...]


def divide(low: bytes, high: bytes, peers: Sequence[bytes], width: int = WIDTH) -> list[Region]:
    """Into about equal parts of those that are known, without a gap: who is not known here, but to
    the delegate, is in one of them."""
    ordered = sorted(peer for peer in peers if low <= peer <= high)
    count = min(width, len(ordered))
    if not count:
        return []
    found = []
    for part in range(count):
        some = ordered[len(ordered) * part // count : len(ordered) * (part + 1) // count]
        begin = low if part == 0 else some[0]
        following = len(ordered) * (part + 1) // count
        end = high if part == count - 1 else _before(ordered[following])
        found.append(Region(begin, end, tuple(some)))
    return found


def _before(id: bytes) -> bytes:
    return (int.from_bytes(id) - 1).to_bytes(len(id))
