"""Availability summaries: how many holes of each sort a peer, or a branch of the tree, has.

After Celaya and Arronategui (2010), section V.B. A hole is a stretch of time in which a peer could
run something. It is counted in a *cell*: what fits into it (`Sort`), the reference points around it
(from `start` to `end`) and its length, rounded down. Cells that are equal are added up on the way
to the root.

Rules:
- A summary may hide a hole, and never invents one: every hole of a cell starts at `start` or later,
  ends at `end` or earlier, and is at least `length_s` long; what is sought is found only if it fits
  wherever such a hole may lie.
- A summary has at most so many cells; the rarest are hidden.
- A hole without an end is counted from the first reference point that lies in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...capacity.bookings import length_here
from ...wire.messages import Capacity, Needs, Traits
from .points import around

#: lengths are rounded down to these steps: two to an octave
STEPS_PER_OCTAVE = 2
#: speeds too: a peer is never called faster than it is
SPEED_STEPS = 4
#: a hole that has begun already
BEGUN = 0.0


class Sort(NamedTuple):
    """What fits into a hole. Numbers are rounded down, so that few sorts stand for many peers."""

    millicores: int
    memory_bytes: int
    gpus: int
    speed: float
    arch: str = ""
    os: str = ""
    site: str = ""
    labels: tuple[str, ...] = ()
    software: tuple[str, ...] = ()

    def meets(self, needs: Needs) -> bool:
        capacity = needs.capacity
        if capacity.millicores > self.millicores or capacity.gpus > self.gpus:
            return False
        if capacity.memory_bytes > self.memory_bytes:
            return False
        if needs.speed is not None and needs.speed > self.speed:
            return False
        traits = (needs.arch, self.arch), (needs.os, self.os), (needs.site, self.site)
        if any(wanted is not None and wanted != has for wanted, has in traits):
            return False
        has_labels = all(label in self.labels for label in needs.labels)
        return has_labels and all(name in self.software for name in needs.software)


class HoleCell(NamedTuple):
    sort: Sort
    start: float
    end: float
    length_s: float


class Sought(NamedTuple):
    """A task that seeks a hole. Times are tree time; its length is for a peer of speed 1."""

    needs: Needs
    length_s: float
    start: float
    end: float


Summary = Counter[HoleCell]
Hole = tuple[Sort, float, float]


def sort_of(capacity: Capacity, traits: Traits) -> Sort:
    return Sort(
        _power_below(capacity.millicores),
        _power_below(capacity.memory_bytes),
        capacity.gpus,
        _speed_below(traits.speed or 1.0),
        traits.arch,
        traits.os,
        traits.site,
        tuple(sorted(traits.labels)),
        tuple(sorted(traits.software)),
    )


def _power_below(number: int) -> int:
    """The number itself if it is small or a multiple of 1,000 that is; else a power of two."""
    if number <= 1000:
        return number
    unit = 1000 if number < 2**20 else 1
    return unit * (1 << ((number // unit).bit_length() - 1))


def _speed_below(speed: float) -> float:
    return float(2.0 ** (math.floor(math.log2(speed) * SPEED_STEPS + 1e-9) / SPEED_STEPS))


def length_below(seconds: float) -> float:
    steps = math.floor(math.log2(max(1e-3, seconds)) * STEPS_PER_OCTAVE + 1e-9)
    return float(2.0 ** (steps / STEPS_PER_OCTAVE))


def cell_of(hole: Hole, points: Sequence[float], now: float) -> HoleCell | None:
    """The cell of a hole; None: it is over, or too far away to be told of."""
    sort, start, end = hole
    if end == math.inf:
        begins = BEGUN if start <= now else next((p for p in points[1:] if p >= start), math.inf)
        return None if begins == math.inf else HoleCell(sort, begins, math.inf, math.inf)
    start = max(start, now)
    before, after = around(points, start, end)
    if after == math.inf or end <= start:
        return None
    return HoleCell(sort, before, after, length_below(end - start))


def summarised(holes: Iterable[Hole], points: Sequence[float], now: float) -> Summary:
    cells = (cell_of(hole, points, now) for hole in holes)
    return Counter(cell for cell in cells if cell is not None)


def bounded(summary: Summary, cells_max: int) -> Summary:
    """The same with the rarest cells hidden, if there are too many."""
    if len(summary) <= cells_max:
        return summary
    return Counter(dict(summary.most_common(cells_max)))


def end_in(cell: HoleCell, tasks: Sequence[Sought]) -> float:
    """When these tasks, one after the other, will have ended in any hole of that cell; infinite:
    they may not fit."""
    if not all(cell.sort.meets(task.needs) for task in tasks):
        return math.inf
    if cell.end == math.inf:
        return _end_between(cell.start, math.inf, cell.sort.speed, tasks)
    early = _end_between(cell.start, cell.start + cell.length_s, cell.sort.speed, tasks)
    late = _end_between(cell.end - cell.length_s, cell.end, cell.sort.speed, tasks)
    return max(early, late)


def _end_between(start: float, end: float, speed: float, tasks: Sequence[Sought]) -> float:
    at = start
    for task in tasks:
        at = max(at, task.start) + length_here(task.length_s, speed)
        if at > task.end or at > end:
            return math.inf
    return at
