"""Units that wait for room: in groups of equal needs and about equal run times.

Rules:
- Owners share: of those who wait in a group, the one that got least so far comes next (`shares`).
- Of one owner the unit that is due first goes first: by its deadline, or a fixed time after it
  came, less the seconds of work that hang on it. So without deadlines the highest rank goes first,
  and a second of waiting weighs as much as a second of work: none starves.
- A unit whose run time becomes known while it waits changes its group.
- A unit comes out once, unless it is withdrawn. None is turned away: how many there may be is said
  where workflows are accepted (`tasks_max`), before anything is written.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..capacity.admission import NO_DEADLINE_S
from ..wire.messages import AttemptKey, Needs
from .base import Estimate, Unit
from .shares import Shares

#: how far down a group a unit is looked for that suits a peer better
SUITED_DEPTH = 15

Row = tuple[float, int, Unit]
Reads = tuple[tuple[bytes, int], ...]
GroupKey = tuple[Needs, int | None, frozenset[bytes], Reads]


@dataclass(slots=True)
class Group:
    """Units with the same needs: of each owner, those that are due first."""

    shares: Shares
    needs: Needs
    size: int | None  # its units take about 2**size seconds; None: nobody knows
    avoid: frozenset[bytes] = frozenset()  # peers they failed at, if groups are made by that, too
    reads: Reads = ()  # files they read, if groups are made by that, too
    heaps: dict[str, list[Row]] = field(default_factory=dict)  # by owner
    left: int = 0
    oldest_at: float = 0.0
    reason: str = "about to be placed"
    refusals: list[float] = field(default_factory=list)

    @property
    def key(self) -> GroupKey:
        return self.needs, self.size, self.avoid, self.reads

    @property
    def heap(self) -> list[Row]:
        """Of the owner that is next."""
        if len(self.heaps) == 1:
            return next(iter(self.heaps.values()))
        return self.heaps[self.shares.next(self.heaps)] if self.heaps else []

    @property
    def top(self) -> Unit:
        return self.heap[0][2]

    @property
    def order(self) -> tuple[float, float, float]:
        """Groups too: that of the owner who got least, then what is due, then who waited."""
        top = self.top
        due_at = math.inf if top.deadline_at is None else top.deadline_at
        return self.shares.given(top.owner), due_at, self.oldest_at

    def units(self, most: int) -> list[Unit]:
        """Some of the next ones."""
        return [unit for _, _, unit in self.heap[:most]]


class Waiting:
    def __init__(
        self,
        estimate: Estimate,
        by_avoid: bool = False,
        by_reads: bool = False,
    ) -> None:
        self.groups: dict[GroupKey, Group] = {}
        self.shares = Shares()
        self._units: dict[AttemptKey, tuple[Group, str]] = {}  # and whose it is
        self._estimate = estimate
        self._by_avoid = by_avoid
        self._by_reads = by_reads
        self._order = 0

    def __len__(self) -> int:
        return len(self._units)

    def add(self, units: Iterable[Unit], now: float) -> list[Group]:
        """The groups that have grown."""
        grown: dict[GroupKey, Group] = {}
        for unit in units:
            if unit.key in self._units:
                continue
            self._order += 1
            due_at = now + NO_DEADLINE_S if unit.deadline_at is None else unit.deadline_at
            group = self._put(unit, due_at - unit.rank, self._order, now)
            grown[group.key] = group
        return list(grown.values())

    def _put(self, unit: Unit, priority: float, order: int, since: float) -> Group:
        runtime_s = self._estimate(unit)
        size = None if runtime_s is None else round(math.log2(max(1e-4, runtime_s)))
        avoid = unit.avoid if self._by_avoid else frozenset()
        key = (unit.needs, size, avoid, unit.reads if self._by_reads else ())
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(self.shares, *key, oldest_at=since)
        heapq.heappush(group.heaps.setdefault(unit.owner, []), (priority, order, unit))
        self.shares.waits(unit.owner)
        group.left += 1
        self._units[unit.key] = group, unit.owner
        return group

    def regroup(self) -> None:
        """Units whose run time has become known go where they belong."""
        for group in [g for g in self.groups.values() if g.size is None]:
            for owner, heap in list(group.heaps.items()):
                while heap:
                    priority, order, unit = heap[0]
                    if self.group_of(unit.key) is not group:
                        heapq.heappop(heap)  # withdrawn
                    elif self._estimate(unit) is None:
                        break
                    else:
                        heapq.heappop(heap)
                        group.left -= 1
                        self._put(unit, priority, order, group.oldest_at)
                        self.shares.leaves(owner)
                if not heap:
                    group.heaps.pop(owner, None)
            self.forget_if_empty(group)

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            group, owner = self._units.pop(key, (None, ""))
            if group is not None:
                group.left -= 1  # its entry in the heap is skipped when it comes up
                self.shares.leaves(owner)
                self._prune(group)
                self.forget_if_empty(group)

    def reason(self, key: AttemptKey) -> str | None:
        """In words, what keeps a unit; and that others wait as well."""
        group = self.group_of(key)
        if group is None:
            return None
        if not self.shares.contended:
            return group.reason
        return f"{group.reason}; {self.shares.owners} owners wait here and share the slots evenly"

    @property
    def may_queue(self) -> bool:
        """Who knows how long its units take may have them wait at a peer. Not while others wait
        here who do not know that yet: all room would be gone before they get any."""
        return not self.shares.contended or all(g.size is not None for g in self.groups.values())

    def group_of(self, key: AttemptKey) -> Group | None:
        return self._units.get(key, (None, ""))[0]

    def pop(self, group: Group, near: bytes = b"") -> Unit | None:
        """The next one; of the next few one whose inputs are at that peer, if there is any."""
        heap = group.heap  # (pruned since the last one came out)
        if not heap:
            return None
        unit = heap[0][2]
        if near and near not in unit.near:
            few = heap[:SUITED_DEPTH]  # in a heap these are among the first, if not the first
            suited = (u for _, _, u in few if near in u.near and self.group_of(u.key) is group)
            unit = next(suited, unit)
        if unit is heap[0][2]:
            heapq.heappop(heap)
        del self._units[unit.key]  # one from further down is skipped when it comes up
        group.left -= 1
        if self.shares.contended:
            cores = max(1, unit.needs.capacity.millicores) / 1000
            self.shares.give(unit.owner, cores * (self._estimate(unit) or 1.0))
        self.shares.leaves(unit.owner)
        self._prune(group)
        return unit

    def _prune(self, group: Group) -> None:
        empty = []
        for owner, heap in group.heaps.items():
            while heap and self.group_of(heap[0][2].key) is not group:
                heapq.heappop(heap)
            if not heap:
                empty.append(owner)
        for owner in empty:
            del group.heaps[owner]

    def forget_if_empty(self, group: Group) -> None:
        # another group may have taken its place while offers were on their way
        if not group.left and self.groups.get(group.key) is group:
            del self.groups[group.key]
