"""The promise of one workflow: its slots, how it stands, and why it was broken. Pure.

It is a part of `run.Run`, and changed like it: by journal entries, and by notes of what this home
alone knows. `troubles` are what has cost time, with the seconds that each has cost: a promise that
is broken is so for what has cost most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from valence.workflow.sequences import Graph, Slot, windows

from ..capacity.bookings import length_here
from ..wire.entries import BookedTask

#: how a promise stands
MADE, KEPT, BROKEN = "made", "kept", "broken"
#: causes of a broken promise
PEER_LOST, OVERRUN, FAILED, DATA_LATE, CANCELLED = (
    "peer-lost", "overrun", "failed", "data-late", "cancelled",
)  # fmt: skip
#: between the end of a task and the start of the next
APART_S = 0.1
#: what a lost peer costs beside the work that is lost: until it is noticed, and work goes on
DETECTION_S = 6.0
TROUBLES_MAX = 20
TROUBLE_S_MIN = 0.1
#: a task that has taken longer than it said is taken to need so much longer, as a share of that
OVERRUN_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Trouble:
    cause: str
    why: str
    cost_s: float


@dataclass(slots=True)
class WorkflowPromise:
    deadline_at: float
    survives: int
    slots: dict[str, BookedTask] = field(default_factory=dict)  # of tasks that need theirs still
    lengths: dict[str, float] = field(default_factory=dict)  # seconds that tasks were said to take
    state: str = MADE
    cause: str = ""
    why: str = ""
    ends_at: float = 0.0  # as foreseen
    risk: str = ""  # why it will be late, as things are
    troubles: list[Trouble] = field(default_factory=list)
    rebooked: int = 0  # tasks
    late_s: float = 0.0  # how much later than its slot some task has ended
    confirmed: bool = False  # its peers have its slots on their disks; not journaled

    @property
    def is_open(self) -> bool:
        return self.state == MADE

    def book(self, rows: tuple[BookedTask, ...]) -> None:
        self.slots.update({row.task: row for row in rows})
        self.lengths.update({row.task: row.length_s for row in rows})
        self.confirmed = False

    def trouble(self, cause: str, why: str, cost_s: float) -> None:
        if self.is_open and cost_s > TROUBLE_S_MIN:
            self.troubles.append(Trouble(cause, why, max(0.0, cost_s)))
            self.troubles.sort(key=lambda trouble: -trouble.cost_s)
            del self.troubles[TROUBLES_MAX:]

    def worst(self, ongoing: Trouble | None = None) -> Trouble:
        """What has cost most time. `ongoing`: what costs time just now."""
        known = [*self.troubles[:1], *([ongoing] if ongoing is not None else [])]
        if known:
            return max(known, key=lambda trouble: trouble.cost_s)
        return Trouble(DATA_LATE, "its tasks got their data or their turn too late", 0.0)


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """What is left of a workflow: a graph, and the slots of what runs or is booked."""

    graph: Graph  # lengths on a peer of speed 1, as estimated
    slots: Mapping[str, Slot]
    running: frozenset[str]

    def ends(self, now: float, apart_s: float) -> dict[str, float]:
        """When each task will have ended, as foreseen now: not before its slot ends, nor before
        what it waits for."""
        ends: dict[str, float] = {}
        for task, length_s in self.graph.lengths.items():
            above = [ends[p] + apart_s for p in self.graph.parents[task] if p in ends]
            slot = self.slots.get(task)
            if slot is None:
                ends[task] = max([now, *above]) + length_here(length_s, 1.0)
            elif task in self.running:
                ends[task] = slot.end
            else:
                start = max([now, slot.start, *above])
                ends[task] = start + (slot.end - slot.start)
        return ends


def due_of(
    graph: Graph, slots: Mapping[str, Slot], deadline_at: float, apart_s: float
) -> dict[str, float]:
    """Of each slot's task, when it must have ended: before its children's slots, or at the
    deadline. Its peer may move it until then, and no other peer needs to hear of that."""
    due = {}
    for task, slot in slots.items():
        below = [slots[c].start - apart_s for c in graph.children[task] if c in slots]
        due[task] = max(slot.end, min(below, default=max(slot.end, deadline_at)))
    return due


def survives(
    graph: Graph, slots: Mapping[str, Slot], now: float, deadline_at: float, apart_s: float
) -> bool:
    """Whether any one peer may die, and everything that it had begun is done again in time: each
    task ends early enough for the longest task and the time until a death is noticed."""
    lengths = {task: length_here(s, 1.0) for task, s in graph.lengths.items()}
    padded = Graph(lengths, graph.parents, graph.children)
    longest_s = max([slot.end - slot.start for slot in slots.values()], default=0.0)
    latest = windows(padded, {}, now, deadline_at, apart_s)
    need_s = longest_s + DETECTION_S
    return all(latest[task].end - slot.end >= need_s for task, slot in slots.items())


def spare_for_one_s(graph: Graph) -> float:
    """So much earlier everything must end so that one peer may die."""
    return max((length_here(s, 1.0) for s in graph.lengths.values()), default=0.0) + DETECTION_S
