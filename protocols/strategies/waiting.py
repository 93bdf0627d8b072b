"""Units that wait for room: in groups of equal needs and about equal run times.

Rules:
- Within a group the highest rank goes first; a second of waiting weighs as much as a second of work
  that hangs on a unit, so none starves.
- A unit whose run time becomes known while it waits changes its group.
- A unit comes out once, unless it is withdrawn.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..messages import AttemptKey, Needs
from ..strategy import Estimate, Unit

#: how far down a group a unit is looked for that suits a peer better
SUITED_DEPTH = 15

Reads = tuple[tuple[bytes, int], ...]
GroupKey = tuple[Needs, int | None, frozenset[bytes], Reads]


@dataclass(slots=True)
class Group:
    """Units with the same needs, highest rank first."""

    needs: Needs
    size: int | None  # its units take about 2**size seconds; None: nobody knows
    avoid: frozenset[bytes] = frozenset()  # peers they failed at, if groups are made by that, too
    reads: Reads = ()  # files they read, if groups are made by that, too
    heap: list[tuple[float, int, Unit]] = field(default_factory=list)
    left: int = 0
    oldest_at: float = 0.0
    reason: str = "about to be placed"
    refusals: list[float] = field(default_factory=list)

    @property
    def key(self) -> GroupKey:
        return self.needs, self.size, self.avoid, self.reads

    @property
    def top(self) -> Unit:
        return self.heap[0][2]


class Waiting:
    def __init__(
        self,
        estimate: Estimate,
        units_max: int,
        by_avoid: bool = False,
        by_reads: bool = False,
    ) -> None:
        self.groups: dict[GroupKey, Group] = {}
        self._units: dict[AttemptKey, Group] = {}
        self._estimate = estimate
        self._units_max = units_max
        self._by_avoid = by_avoid
        self._by_reads = by_reads
        self._order = 0

    def __len__(self) -> int:
        return len(self._units)

    def add(self, units: Iterable[Unit], now: float) -> list[Group]:
        """The groups that have grown."""
        grown: dict[GroupKey, Group] = {}
        for unit in units:
            if unit.key in self._units or len(self._units) >= self._units_max:
                continue
            self._order += 1
            group = self._put(unit, now - unit.rank, self._order, now)
            grown[group.key] = group
        return list(grown.values())

    def _put(self, unit: Unit, priority: float, order: int, since: float) -> Group:
        runtime_s = self._estimate(unit)
        size = None if runtime_s is None else round(math.log2(max(1e-4, runtime_s)))
        avoid = unit.avoid if self._by_avoid else frozenset()
        key = (unit.needs, size, avoid, unit.reads if self._by_reads else ())
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(*key, oldest_at=since)
        heapq.heappush(group.heap, (priority, order, unit))
        group.left += 1
        self._units[unit.key] = group
        return group

    def regroup(self) -> None:
        """Units whose run time has become known go where they belong."""
        for group in [g for g in self.groups.values() if g.size is None]:
            while group.heap:
                priority, order, unit = group.heap[0]
                if self._units.get(unit.key) is not group:
                    heapq.heappop(group.heap)  # withdrawn
                elif self._estimate(unit) is None:
                    break
                else:
                    heapq.heappop(group.heap)
                    group.left -= 1
                    self._put(unit, priority, order, group.oldest_at)
            self.forget_if_empty(group)

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            group = self._units.pop(key, None)
            if group is not None:
                group.left -= 1  # its entry in the heap is skipped when it comes up
                self._prune(group)
                self.forget_if_empty(group)

    def group_of(self, key: AttemptKey) -> Group | None:
        return self._units.get(key)

    def pop(self, group: Group, near: bytes = b"") -> Unit | None:
        """The next one; of the next few one whose inputs are at that peer, if there is any."""
        self._prune(group)
        if not group.heap:
            return None
        unit = group.heap[0][2]
        if near and near not in unit.near:
            few = group.heap[:SUITED_DEPTH]  # in a heap these are among the first, if not the first
            suited = (u for _, _, u in few if near in u.near and self._units.get(u.key) is group)
            unit = next(suited, unit)
        if unit is group.heap[0][2]:
            heapq.heappop(group.heap)
        del self._units[unit.key]  # one from further down is skipped when it comes up
        group.left -= 1
        self._prune(group)
        return unit

    def _prune(self, group: Group) -> None:
        while group.heap and self._units.get(group.heap[0][2].key) is not group:
            heapq.heappop(group.heap)

    def forget_if_empty(self, group: Group) -> None:
        # another group may have taken its place while offers were on their way
        if not group.left and self.groups.get(group.key) is group:
            del self.groups[group.key]
