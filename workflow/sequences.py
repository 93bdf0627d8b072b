"""Sequences of dependent tasks, and the window of time in which each task must run.

After Celaya and Arronategui (2010), section IV, Fig. 2: the longest path of the graph goes out
first; then, again and again, the longest path of which only the first task has parents that went
out before, and only the last has such children. Sequences that do not depend on each other go out
together, in one *stage*; the number of stages is the *width* of a workflow.

The paper gives a sequence its window from the neighbours that are already allocated. That forgets
the tasks still to come: a sequence may be placed before a parent that is yet to be extracted could
have run, which then has no window at all. Here the window of every task is computed over the whole
graph before each stage: from its earliest start to its latest end, whoever is allocated by then.
(`paper_windows` is the paper's own rule, for comparison.)
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .plan import order


class Slot(NamedTuple):
    """When a task runs, in seconds."""

    start: float
    end: float


class Window(NamedTuple):
    """A task starts at `start` or later, and ends at `end` or earlier."""

    start: float
    end: float

    def fits(self, length: float) -> bool:
        return self.start + length <= self.end + 1e-9


@dataclass(frozen=True, slots=True)
class Graph:
    """Tasks with the seconds that each takes, in an order in which each comes after its parents."""

    lengths: Mapping[str, float]
    parents: Mapping[str, tuple[str, ...]]
    children: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, lengths: Mapping[str, float], parents: Mapping[str, Sequence[str]]) -> Graph:
        children: dict[str, list[str]] = {task: [] for task in lengths}
        for task, above in parents.items():
            for parent in dict.fromkeys(above):
                children[parent].append(task)
        return cls(
            {task: lengths[task] for task in order({t: parents[t] for t in lengths})},
            {task: tuple(dict.fromkeys(parents[task])) for task in lengths},
            {task: tuple(below) for task, below in children.items()},
        )

    def critical_path_s(self) -> float:
        """The longest path: no number of peers of speed 1 is faster."""
        return max((end for _, end in self._soonest().values()), default=0.0)

    def _soonest(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for task, length in self.lengths.items():
            start = max((slots[p].end for p in self.parents[task]), default=0.0)
            slots[task] = Slot(start, start + length)
        return slots


# --------------------------------------------------------------------------- decomposition


class _Extraction:
    """Extracts longest paths. `below`: of each task left, the longest path that starts there.

    An edge is usable while its child has no extracted parent and its parent no extracted child.
    Extraction only takes edges away, so `below` only falls: only what leads to a lost edge is
    computed again.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._index = {task: i for i, task in enumerate(graph.lengths)}
        self._left = set(graph.lengths)
        self._cut_above: set[str] = set()  # they have an extracted parent
        self._cut_below: set[str] = set()  # they have an extracted child
        self._below: dict[str, float] = {}
        for task in reversed(list(graph.lengths)):
            self._below[task] = self._longest(task)
        self._heap = [(-self._below[task], i, task) for task, i in self._index.items()]
        heapq.heapify(self._heap)

    def _next(self, task: str) -> list[str]:
        if task in self._cut_below:
            return []
        below = self._graph.children[task]
        return [c for c in below if c in self._left and c not in self._cut_above]

    def _longest(self, task: str) -> float:
        below = max((self._below[child] for child in self._next(task)), default=0.0)
        return self._graph.lengths[task] + below

    def pop(self) -> tuple[str, ...] | None:
        """The longest path that is left; None if nothing is."""
        while self._heap:
            below, _, task = heapq.heappop(self._heap)
            if task in self._left and -below == self._below[task]:
                path = self._path(task)
                self._extract(path)
                return path
        return None

    def _path(self, task: str) -> tuple[str, ...]:
        path = [task]
        while following := self._next(path[-1]):
            path.append(max(following, key=lambda t: (self._below[t], -self._index[t])))
        return tuple(path)

    def _extract(self, path: tuple[str, ...]) -> None:
        self._left.difference_update(path)
        changed: set[str] = set()
        for task in path:
            for parent in self._graph.parents[task]:
                if parent in self._left and parent not in self._cut_below:
                    self._cut_below.add(parent)
                    changed.add(parent)
            for child in self._graph.children[task]:
                if child in self._left and child not in self._cut_above:
                    self._cut_above.add(child)
                    changed.update(p for p in self._graph.parents[child] if p in self._left)
        self._lower(changed)

    def _lower(self, changed: Iterable[str]) -> None:
        """Computes `below` again where it may have fallen, the tasks furthest down first."""
        heap = [(-self._index[task], task) for task in changed]
        heapq.heapify(heap)
        queued = {task for _, task in heap}
        while heap:
            _, task = heapq.heappop(heap)
            queued.discard(task)
            below = self._longest(task)
            if below == self._below[task]:
                continue
            self._below[task] = below
            heapq.heappush(self._heap, (-below, self._index[task], task))
            for parent in self._graph.parents[task]:
                if parent in self._left and parent not in queued:
                    queued.add(parent)
                    heapq.heappush(heap, (-self._index[parent], parent))


def decompose(graph: Graph) -> list[tuple[str, ...]]:
    """All sequences, in the order in which they are extracted (Fig. 2)."""
    extraction = _Extraction(graph)
    sequences = []
    while (path := extraction.pop()) is not None:
        sequences.append(path)
    return sequences


def stages(
    graph: Graph, sequences: Sequence[tuple[str, ...]] | None = None
) -> list[list[tuple[str, ...]]]:
    """The sequences by stage: each waits for the earlier ones that it has an edge with."""
    sequences = decompose(graph) if sequences is None else sequences
    stage_of: dict[str, int] = {}
    result: list[list[tuple[str, ...]]] = []
    for sequence in sequences:
        near = (t for task in sequence for t in (*graph.parents[task], *graph.children[task]))
        stage = 1 + max((stage_of[task] for task in near if task in stage_of), default=-1)
        stage_of.update(dict.fromkeys(sequence, stage))
        if stage == len(result):
            result.append([])
        result[stage].append(sequence)
    return result


# --------------------------------------------------------------------------- windows


def windows(
    graph: Graph,
    slots: Mapping[str, Slot],
    now: float,
    deadline: float = math.inf,
    apart_s: float = 0.0,
) -> dict[str, Window]:
    """Of each task, its earliest start and its latest end, over the whole graph.

    Allocated tasks (`slots`) are where they are; all others take their length at speed 1, on as
    many peers as they like. `apart_s` passes between a task and the next.
    """
    starts: dict[str, float] = {}
    for task in graph.lengths:
        slot = slots.get(task)
        if slot is not None:
            starts[task] = slot.start
            continue
        above = (_end(graph, slots, starts, p) for p in graph.parents[task])
        starts[task] = max((end + apart_s for end in above), default=now)
    result: dict[str, Window] = {}
    for task in reversed(list(graph.lengths)):
        slot = slots.get(task)
        if slot is not None:
            result[task] = Window(slot.start, slot.end)
            continue
        below = (
            slots[c].start if c in slots else result[c].end - graph.lengths[c]
            for c in graph.children[task]
        )
        end = min((start - apart_s for start in below), default=deadline)
        result[task] = Window(max(now, starts[task]), min(deadline, end))
    return result


def _end(graph: Graph, slots: Mapping[str, Slot], starts: Mapping[str, float], task: str) -> float:
    slot = slots.get(task)
    return slot.end if slot is not None else starts[task] + graph.lengths[task]


def paper_windows(
    graph: Graph, sequence: Sequence[str], slots: Mapping[str, Slot], now: float, deadline: float
) -> Window:
    """The window of a whole sequence by the paper's rule: from the end of its allocated parents to
    the start of its allocated children."""
    above = [slots[p].end for p in graph.parents[sequence[0]] if p in slots]
    below = [slots[c].start for c in graph.children[sequence[-1]] if c in slots]
    return Window(max([now, *above]), min([deadline, *below]))
