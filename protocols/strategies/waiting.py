"""The units that wait for capacity, grouped by equal needs and similar run times.

Rules:
- Owners share: of those that wait in a group, the one that got least so far goes next (`shares`).
- Within one owner, the unit that is due first goes first. It is due at its deadline, or a fixed
  time after it was added, less the seconds of work that depend on it. So without deadlines the
  highest rank goes first, and a second of waiting weighs as much as a second of work: no unit
  starves.
- A unit whose run time becomes known while it waits moves to another group.
- A unit is taken out once, unless it is withdrawn. No unit is turned away: the limit (`tasks_max`)
  applies where workflows are accepted, before anything is written.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..capacity.admission import NO_DEADLINE_S
from ..wire.messages import AttemptKey, Contact, Needs
from .base import Estimate, Placed, Placement, Unit
from .shares import Shares

#: how far down a group to look for a unit that suits a peer better
SUITED_DEPTH = 15

Row = tuple[float, int, Unit]
Reads = tuple[tuple[bytes, int], ...]
GroupKey = tuple[Needs, int | None, frozenset[bytes], Reads]
_NOWHERE: tuple[None, str] = (None, "")


@dataclass(slots=True)
class Group:
    """Units with the same needs: a heap for each owner, the unit that is due first on top."""

    shares: Shares
    needs: Needs
    size: int | None  # each unit takes about 2**size seconds; None: not known
    avoid: frozenset[bytes] = frozenset()  # peers they failed at, if units are grouped by that too
    reads: Reads = ()  # files they read, if units are grouped by that too
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
        """The heap of the owner that is next."""
        if len(self.heaps) == 1:
            return next(iter(self.heaps.values()))
        return self.heaps[self.shares.next(self.heaps)] if self.heaps else []

    @property
    def top(self) -> Unit:
        return self.heap[0][2]

    @property
    def order(self) -> tuple[float, float, float]:
        """Sorts groups: by the owner that got least, then the deadline, then the longest wait."""
        top = self.top
        due_at = math.inf if top.deadline_at is None else top.deadline_at
        return self.shares.given(top.owner), due_at, self.oldest_at

    def units(self, most: int) -> list[Unit]:
        """Some of the next units."""
        return [unit for _, _, unit in self.heap[:most]]


def all_busy(count: int) -> str:
    """Says that none of these suitable peers has free capacity."""
    if count == 1:
        return "the only suitable peer is busy"
    if count == 2:
        return "both suitable peers are busy"
    return f"all {count} suitable peers are busy"


class Waiting:
    def __init__(
        self,
        estimate: Estimate,
        by_avoid: bool = False,
        by_reads: bool = False,
    ) -> None:
        self.groups: dict[GroupKey, Group] = {}
        self.shares = Shares()
        self._units: dict[AttemptKey, tuple[Group, str]] = {}  # the group and owner of each
        self._estimate = estimate
        self._by_avoid = by_avoid
        self._by_reads = by_reads
        self._order = 0

    def __len__(self) -> int:
        return len(self._units)

    def add(self, units: Iterable[Unit], now: float) -> list[Group]:
        """The groups that have grown."""
        grown: dict[int, Group] = {}
        for unit in units:
            if unit.key in self._units:
                continue
            self._order += 1
            due_at = now + NO_DEADLINE_S if unit.deadline_at is None else unit.deadline_at
            row = (due_at - unit.rank, self._order, unit)
            group = self._put(row, self._estimate(unit), now)
            grown[id(group)] = group
            self.shares.waits(unit.owner)
        return list(grown.values())

    def _put(self, row: Row, runtime_s: float | None, since: float) -> Group:
        unit = row[2]
        size = None if runtime_s is None else round(math.log2(max(1e-4, runtime_s)))
        avoid = unit.avoid if self._by_avoid else frozenset()
        key = (unit.needs, size, avoid, unit.reads if self._by_reads else ())
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = Group(self.shares, *key, oldest_at=since)
        heapq.heappush(group.heaps.setdefault(unit.owner, []), row)
        group.left += 1
        self._units[unit.key] = group, unit.owner
        return group

    def regroup(self) -> None:
        """Move units whose run time has become known to the group where they belong."""
        for group in [g for g in self.groups.values() if g.size is None]:
            for owner, heap in list(group.heaps.items()):
                heap.sort()  # it is still a heap
                done = 0
                for row in heap:
                    if self.group_of(row[2].key) is group:  # else it was withdrawn
                        runtime_s = self._estimate(row[2])
                        if runtime_s is None:
                            break
                        group.left -= 1
                        self._put(row, runtime_s, group.oldest_at)
                    done += 1
                del heap[:done]
                if not heap:
                    group.heaps.pop(owner, None)
            self.forget_if_empty(group)

    def withdraw(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            group, owner = self._units.pop(key, _NOWHERE)
            if group is not None:
                group.left -= 1  # its entry in the heap is skipped when it comes up
                self.shares.leaves(owner)
                self._prune(group)
                self.forget_if_empty(group)

    def reason(self, key: AttemptKey) -> str | None:
        """Why a unit waits, in words; and that other owners wait as well."""
        group = self.group_of(key)
        if group is None:
            return None
        if not self.shares.contended:
            return group.reason
        owners = self.shares.owners
        return f"{group.reason}; {owners} owners are waiting and share the slots evenly"

    @property
    def may_queue(self) -> bool:
        """Whether units of known run time may wait in a peer's queue. They may not while other
        owners wait here with units of unknown run time: the queues would take all capacity before
        those get any."""
        return not self.shares.contended or all(g.size is not None for g in self.groups.values())

    @property
    def has_unknown_runtimes(self) -> bool:
        return any(group.size is None for group in self.groups.values())

    def group_of(self, key: AttemptKey) -> Group | None:
        return self._units.get(key, _NOWHERE)[0]

    def pop(self, group: Group, near: bytes = b"") -> Unit | None:
        """The next unit; or one of the next few whose inputs are at that peer, if there is any."""
        heap = group.heap  # (pruned after every pop)
        if not heap:
            return None
        unit = heap[0][2]
        if near and near not in unit.near:
            few = heap[:SUITED_DEPTH]  # in a heap these are close to the first
            suited = (u for _, _, u in few if near in u.near and self.group_of(u.key) is group)
            unit = next(suited, unit)
        if unit is heap[0][2]:
            heapq.heappop(heap)
        del self._units[unit.key]  # the entry of one from further down is skipped later
        group.left -= 1
        if self.shares.contended:
            cores = max(1, unit.needs.capacity.millicores) / 1000
            self.shares.give(unit.owner, cores * (self._estimate(unit) or 1.0))
        self.shares.leaves(unit.owner)
        self._prune(group)
        return unit

    def use(
        self,
        group: Group | None,
        peer: Contact,
        leases: Iterable[int],
        record: Placement,
        near: bytes = b"",
    ) -> tuple[list[Placed], list[int]]:
        """A unit for each lease of a peer; and the leases that are left over, to be given back."""
        placed: list[Placed] = []
        unused: list[int] = []
        for lease in leases:
            unit = self.pop(group, near) if group is not None else None
            if unit is None:
                unused.append(lease)
            else:
                placed.append(Placed(unit, peer, lease, record))
        return placed, unused

    def _prune(self, group: Group) -> None:
        empty = []
        for owner, heap in group.heaps.items():
            while heap and self._units.get(heap[0][2].key, _NOWHERE)[0] is not group:
                heapq.heappop(heap)
            if not heap:
                empty.append(owner)
        for owner in empty:
            del group.heaps[owner]

    def forget_if_empty(self, group: Group) -> None:
        # another group may have taken its place while offers were in flight
        if not group.left and self.groups.get(group.key) is group:
            del self.groups[group.key]
