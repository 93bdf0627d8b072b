"""The mapping of values to the ring, which keeps order and spreads equal or skewed values. Pure.

A value (0 to 1, in steps) and a hash of its peer make one number, its *order*: smaller values come
first, equal ones in an order of their own. A *scale* is a list of increasing orders that divide the
molecules into equal parts; each part gets an equal share of the ring. So half of the peers lie on
half of the ring even if all have the same value, and the walk from one value to the next is the
same as if all values were different.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from ...overlay.chord import SIZE
from .messages import Scale

STEPS = 1000
TOP = STEPS + 1.0
PARTS = 32
#: if a value is spread over this many nodes, a question may start at any of them
WIDE = 3
#: share of a part that orders below the lowest in the sample get of the ring
BEFORE = 1 / 8
#: share of a part between two values that belongs to the lower one
OF_ONE = 0.9
#: the scale before anything is known: two fifths for idle peers, two fifths for full ones
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
    """The place on the ring, from 0 to below 1; it never decreases with the order."""
    points, order = scale.points, min(order, TOP - 1e-6)
    part = bisect_right(points, order)
    if not part:
        inside = order / points[0] if points else order / TOP
        return BEFORE * min(max(inside, 0.0), 0.999999) / (BEFORE + len(points))
    if part < len(points):
        inside = _inside(points[part - 1], points[part], order)
    else:  # above all points: the distribution is not known
        inside = (order - points[-1]) / (TOP - points[-1])
    inside = min(inside, 0.999999)
    return (BEFORE + part - 1 + inside) / (BEFORE + len(points))


def _inside(low: float, high: float, order: float) -> float:
    """The position of an order between the lower end of a part (0) and the upper end (1). Between
    two values there is nothing but ties: so the lower value gets nearly all of the part."""
    end = min(high, int(low) + 1.0)
    if order <= end or end >= high:
        return (order - low) / (end - low) * (1.0 if end >= high else OF_ONE)
    return OF_ONE + (1 - OF_ONE) * (order - end) / (high - end)


def _order_inside(low: float, high: float, inside: float) -> float:
    end = min(high, int(low) + 1.0)
    if end >= high:
        return low + (high - low) * inside
    if inside <= OF_ONE:
        return low + (end - low) * inside / OF_ONE
    return end + (high - end) * (inside - OF_ONE) / (1 - OF_ONE)


def key(start: bytes, scale: Scale, order: float) -> bytes:
    """The place as an id; `start`: where the ring of this kind begins."""
    at = (int.from_bytes(start, "big") + int(place(scale, order) * SIZE)) % SIZE
    return at.to_bytes(len(start), "big")


def order_at(scale: Scale, place: float) -> float:
    """The inverse of `place`: the lowest order that does not lie before that place."""
    points, at = scale.points, place * (BEFORE + len(scale.points)) - BEFORE
    if at < 0 or not points:
        return (1 + at / BEFORE) * (points[0] if points else TOP)
    part = min(len(points) - 1, int(at))
    inside = min(1.0, at - part)
    if part + 1 == len(points):
        return points[-1] + (TOP - points[-1]) * inside
    return _order_inside(points[part], points[part + 1], inside)


def fit(version: int, sample: Iterable[float]) -> Scale | None:
    """A scale for the population of this sample; None if the sample is too small. Molecules of one
    value are spread evenly, as their ties are: only their number must be estimated."""
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
    points.append(max(counts) + 1.0)  # a part above the largest value: molecules will be there soon
    return Scale(version, tuple(points))


@lru_cache(maxsize=64)
def wide(scale: Scale, nodes: int) -> tuple[int, ...]:
    """Values that are so frequent that they are spread over several of these nodes."""
    values = {0, *(int(point) for point in scale.points if point < STEPS)}
    frequent = (v for v in values if (place(scale, v + 1) - place(scale, v)) * nodes >= WIDE)
    return tuple(sorted(frequent))


def stretch_from(scale: Scale, order: float, nodes: int) -> tuple[float, bool]:
    """The end of the stretch that starts at an order, in which all molecules have one value, or all
    have different ones; and whether it is one value."""
    values = wide(scale, nodes)
    at = bisect_right(values, order)
    if at and order < values[at - 1] + 1:
        return values[at - 1] + 1.0, True
    return float(values[at]) if at < len(values) else float(STEPS), False


def skew(scale: Scale, sample: Iterable[float]) -> float:
    """The share of the sample that lies in the fullest eighth of the ring, times eight."""
    counts = [0] * 8
    for order in sample:
        counts[int(place(scale, order) * 8)] += 1
    return 8 * max(counts) / max(1, sum(counts))
