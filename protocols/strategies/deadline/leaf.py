"""A peer at the leaves of the tree: it tells its branch which holes its calendar has.

Pure, like `branch`. Of a peer with several cores it counts the holes for one core, two, four and so
on, each with its share of the memory.

An update is sent when the summary has changed, at most every `update_gap_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from ...capacity.bookings import Bookings
from ...wire.messages import Capacity, Traits
from .config import DeadlineConfig
from .summary import Hole, Summary, sort_of, summarised

Points = Callable[[float], Sequence[float]]


class Leaf:
    __slots__ = (
        "_behind_s",
        "_bookings",
        "_config",
        "_is_changed",
        "_next_at",
        "_points",
        "_seq",
        "_sizes",
        "_told",
    )

    def __init__(
        self,
        bookings: Bookings,
        traits: Traits,
        config: DeadlineConfig,
        points: Points,
        behind_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`behind_s`: tree time, less the time of the bookings."""
        self._bookings = bookings
        self._config = config
        self._points = points
        self._behind_s = behind_s
        self._sizes = [(size, sort_of(size, traits)) for size in _sizes(bookings.calendar.capacity)]
        self._told: Summary | None = None
        self._next_at = -math.inf
        self._is_changed = True
        self._seq = 0

    def changed(self) -> None:
        """A booking was made, moved or released."""
        self._is_changed = True

    def holes(self, now: float) -> Iterator[Hole]:
        behind_s = self._behind_s()
        for size, sort in self._sizes:
            for start, end in self._bookings.calendar.holes(size, now - behind_s):
                yield sort, start + behind_s, end + behind_s

    def summary(self, now: float) -> Summary:
        return summarised(self.holes(now), self._points(now), now)

    def update_at(self) -> float:
        """When its branch is to hear of what has changed; infinite: of nothing."""
        return self._next_at if self._is_changed else math.inf

    def update(self, now: float) -> tuple[int, Summary] | None:
        """The update that is due: its number and the summary."""
        if not self._is_changed or now < self._next_at:
            return None
        self._is_changed = False
        cells = self.summary(now)
        if cells == self._told:
            return None
        self._next_at = now + self._config.update_gap_s
        return self._tell(cells)

    def again(self, now: float) -> tuple[int, Summary]:
        """For a branch that may not know it."""
        return self._tell(self.summary(now))

    def _tell(self, cells: Summary) -> tuple[int, Summary]:
        self._told = cells
        self._seq += 1
        return self._seq, cells


def _sizes(capacity: Capacity) -> Iterator[Capacity]:
    """One core, two, four and so on, with their shares of the rest."""
    cores = max(1, capacity.millicores // 1000)
    size = 1
    while size <= cores:
        yield Capacity(
            min(capacity.millicores, 1000 * size), capacity.memory_bytes * size // cores, 0,
            capacity.gpus * size // cores,
        )  # fmt: skip
        size *= 2
