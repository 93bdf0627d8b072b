"""Where on the ring a value lies: order is kept, and equal or skewed values are spread. Pure.

A value (0 to 1, in steps) and a hash of the peer that has it make one number, its *order*: smaller
values first, equal ones in an order of their own. A *scale* is a list of orders, from the least on,
that divide what there is into equal parts; each part has as much of the ring as any other. So half
of all peers with the same value lie on half of the ring, and the walk from one value to the next is
what it would be if all values were different.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from ...messages import Scale
from ...overlay.chord import SIZE

STEPS = 1000
TOP = STEPS + 1.0
PARTS = 32
#: nodes that those of one value lie on, for it not to matter with which of them one begins
WIDE = 3
#: what is less than any that was seen has as much of the ring as this share of a part
BEFORE = 1 / 8
#: until anything is known: what is idle has two fifths of the ring, what is full two fifths
FIRST = Scale(0, (*(i / 13 for i in range(14)), *(1 + i * 999 / 6 for i in range(1, 6)),
                  *(STEPS + i / 13 for i in range(13))))  # fmt: skip


def tie(peer: bytes) -> float:
    digest = hashlib.blake2b(peer, digest_size=4, person=b"tie").digest()
    return int.from_bytes(digest, "big") / 2**32


def order(value: float, peer: bytes) -> float:
    return min(STEPS, max(0, round(value * STEPS))) + tie(peer)


def value_of(order: float) -> float:
    return int(order) / STEPS


def place(scale: Scale, order: float) -> float:
    """Of the ring, from 0 to below 1; never less for a larger order."""
    points = scale.points
    part = bisect_right(points, order)
    low = points[part - 1] if part else 0.0
    high = points[part] if part < len(points) else TOP
    inside = (order - low) / (high - low) if high > low else 0.0
    inside = min(max(inside, 0.0), 0.999999)
    return (BEFORE * inside if not part else BEFORE + part - 1 + inside) / (BEFORE + len(points))


def key(start: bytes, scale: Scale, order: float) -> bytes:
    """The place as an id; `start`: where the ring begins for this kind of value."""
    at = (int.from_bytes(start, "big") + int(place(scale, order) * SIZE)) % SIZE
    return at.to_bytes(len(start), "big")


def order_at(scale: Scale, place: float) -> float:
    """The other way round: the least order that does not lie before that place."""
    points, at = scale.points, place * (BEFORE + len(scale.points)) - BEFORE
    if at < 0 or not points:
        return (1 + at / BEFORE) * (points[0] if points else TOP)
    part = min(len(points) - 1, int(at))
    high = points[part + 1] if part + 1 < len(points) else TOP
    return points[part] + (high - points[part]) * (at - part)


def fit(version: int, sample: Iterable[float]) -> Scale | None:
    """A scale for what these are a sample of; None: too few to say anything. Those of one value are
    spread evenly, as ties are: how many have it is all that must be guessed."""
    counts = Counter(int(min(STEPS, max(0.0, order))) for order in sample)
    total = sum(counts.values())
    if total < 4:
        return None
    parts = min(PARTS, total // 2)
    points: list[float] = []
    before = 0
    for value in sorted(counts):
        have = counts[value]
        while len(points) < parts and len(points) * total < (before + have) * parts:
            points.append(value + (len(points) * total / parts - before) / have)
        before += have
    return Scale(version, tuple(points))


@lru_cache(maxsize=64)
def wide(scale: Scale, nodes: int) -> tuple[int, ...]:
    """Values which so many have that they lie on several of so many nodes."""
    values = {0, *(int(point) for point in scale.points if point < STEPS)}
    found = (v for v in values if (place(scale, v + 1) - place(scale, v)) * nodes >= WIDE)
    return tuple(sorted(found))


def stretch_from(scale: Scale, order: float, nodes: int) -> tuple[float, bool]:
    """From an order on to which one the others are either all of one value, or of different ones;
    and which of the two."""
    values = wide(scale, nodes)
    at = bisect_right(values, order)
    if at and order < values[at - 1] + 1:
        return values[at - 1] + 1.0, True
    return float(values[at]) if at < len(values) else float(STEPS), False


def skew(scale: Scale, sample: Iterable[float]) -> float:
    """How much of the sample lies in the fullest eighth of the ring, times eight."""
    counts = [0] * 8
    for found in sample:
        counts[int(place(scale, found) * 8)] += 1
    return 8 * max(counts) / max(1, sum(counts))
