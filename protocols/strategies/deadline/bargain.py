"""Plans a workflow stage by stage: which sequences to ask for next, and in which windows.

After Celaya and Arronategui (2010), section IV, with the windows of `workflow.sequences`. Pure: it
is asked for the sequences of a stage, and told which slots they got.

Two ways, one after the other:
- *Backward*: the paper's sequences, the critical path first, each task in the window that the
  deadline leaves it. Tasks that follow each other share a peer, and few stages are needed.
- *Forward*: the tasks whose parents have slots, level by level, each as early as possible. It asks
  for more stages, never leaves a task without a window, and says how early the workflow can end.
  Chains stay together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from valence.workflow.sequences import Graph, Slot, Window, decompose, stages, windows

from ...capacity.bookings import length_here
from ..base import BookedSlot, PlanRequest

BACKWARD, FORWARD = "backward", "forward"


@dataclass(frozen=True, slots=True)
class WantedSequence:
    """Tasks that one peer is to run one after the other."""

    tasks: tuple[str, ...]
    windows: tuple[Window, ...]


class Bargain:
    def __init__(self, request: PlanRequest, apart_s: float, sequence_max: int = 500) -> None:
        self.request = request
        self.way = BACKWARD if request.deadline_at < math.inf else FORWARD
        self.slots: dict[str, BookedSlot] = {}
        self.stages = 0
        self._apart_s = apart_s
        self._sequence_max = sequence_max
        graph = request.graph
        # an idle peer of speed 1 would book a task for so long
        lengths = {task: length_here(s, 1.0) for task, s in graph.lengths.items()}
        self._graph = Graph(lengths, graph.parents, graph.children)
        self._left = [task for task in graph.lengths if task not in request.slots]
        self._stages: list[list[tuple[str, ...]]] | None = None

    # ----------------------------------------------------------------- the plan so far

    @property
    def is_complete(self) -> bool:
        return len(self.slots) == len(self._left)

    @property
    def ends_at(self) -> float:
        ends = [slot.end_at for slot in self.slots.values()]
        return max([*ends, *(slot.end for slot in self.request.slots.values())], default=0.0)

    @property
    def is_in_time(self) -> bool:
        return self.is_complete and self.ends_at <= self.request.deadline_at - self.request.spare_s

    def turn_forward(self) -> list[BookedSlot]:
        """Begins again; returns the slots to release."""
        self.way = FORWARD
        released, self.slots = list(self.slots.values()), {}
        return released

    # ----------------------------------------------------------------- a stage

    def wanted(self, now: float) -> list[WantedSequence]:
        """The sequences of the next stage, the longest first; empty if a window is too short, or
        nothing is left."""
        self.stages += 1
        if self.way == BACKWARD:
            return self._backward(now)
        return self._forward(now)

    def took(self, wanted: WantedSequence, slots: Sequence[BookedSlot]) -> None:
        self.slots.update(zip(wanted.tasks, slots, strict=True))

    def _taken(self) -> dict[str, Slot]:
        own = {task: Slot(slot.start_at, slot.end_at) for task, slot in self.slots.items()}
        return {**self.request.slots, **own}

    def _backward(self, now: float) -> list[WantedSequence]:
        if self._stages is None:
            among = _among(self._graph, self._left)
            self._stages = list(reversed(stages(among, self._cut(decompose(among)))))
        if not self._stages:
            return []
        deadline = self.request.deadline_at
        spans = windows(self._graph, self._taken(), now, deadline, self._apart_s)
        spare_s = self.request.spare_s
        listed = []
        for sequence in self._stages.pop():
            rows = tuple(Window(spans[t].start, spans[t].end - spare_s) for t in sequence)
            if not all(w.fits(self._graph.lengths[t]) for t, w in zip(sequence, rows, strict=True)):
                return []
            listed.append(WantedSequence(sequence, rows))
        return listed

    def _forward(self, now: float) -> list[WantedSequence]:
        taken = self._taken()
        listed: list[WantedSequence] = []
        for task in self._left:
            if task in self.slots or not self._is_next(task, taken):
                continue
            above = [taken[p].end + self._apart_s for p in self._graph.parents[task]]
            line = max([now, *above])
            chain = self._chain(task)
            listed.append(WantedSequence(chain, tuple(Window(line, math.inf) for _ in chain)))
        return sorted(listed, key=lambda wanted: -self._length(wanted.tasks))

    def _is_next(self, task: str, taken: dict[str, Slot]) -> bool:
        return all(parent in taken for parent in self._graph.parents[task])

    def _chain(self, task: str) -> tuple[str, ...]:
        """The task, and those that wait for nothing else and for which nothing else waits."""
        chain = [task]
        while True:
            children = self._graph.children[chain[-1]]
            if len(children) != 1 or len(self._graph.parents[children[0]]) != 1:
                return tuple(chain)
            if children[0] in self.request.slots or len(chain) == self._sequence_max:
                return tuple(chain)
            chain.append(children[0])

    def _cut(self, sequences: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Long sequences in parts that a message can carry."""
        most = self._sequence_max
        return [s[at : at + most] for s in sequences for at in range(0, len(s), most)]

    def _length(self, tasks: Iterable[str]) -> float:
        return sum(self._graph.lengths[task] for task in tasks)

    # ----------------------------------------------------------------- the result

    def shortest_s(self, speed: float) -> float:
        """How long the critical path takes on a peer of that speed."""
        graph = self.request.graph
        lengths = {task: length_here(s, speed) for task, s in graph.lengths.items()}
        return Graph(lengths, graph.parents, graph.children).critical_path_s()


def _among(graph: Graph, tasks: Iterable[str]) -> Graph:
    """The part of a graph that consists of these tasks."""
    kept = set(tasks)
    return Graph(
        {task: length for task, length in graph.lengths.items() if task in kept},
        {t: tuple(p for p in graph.parents[t] if p in kept) for t in graph.lengths if t in kept},
        {t: tuple(c for c in graph.children[t] if c in kept) for t in graph.lengths if t in kept},
    )
