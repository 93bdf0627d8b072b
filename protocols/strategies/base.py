"""The interface of a strategy: it takes units, and returns a lease at some peer for each of them.

A strategy may be wrong, late or stale. Nothing is overbooked, because the peer itself grants the
lease; and nothing is lost, because a unit that was placed belongs to its caller again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from valence.workflow.sequences import Graph, Slot

from ..wire.messages import AttemptKey, Capacity, Contact, File, Needs

#: smaller files travel inside a task's own messages, so their location does not matter
READ_BYTES_MIN, READS_MAX = 16 * 1024, 16


def is_worth_reading(files: Iterable[File]) -> bool:
    return any(file.size >= READ_BYTES_MIN for file in files)


def reads_of(files: Iterable[File]) -> tuple[tuple[bytes, int], ...]:
    """The larger inputs of a task, the largest first."""
    large = {file.hash: file.size for file in files if file.size >= READ_BYTES_MIN}
    return tuple(sorted(large.items(), key=lambda row: (-row[1], row[0]))[:READS_MAX])


class Unit(NamedTuple):
    """The smallest thing that is placed: one task, or a whole gang."""

    key: AttemptKey
    needs: Needs
    rank: float = 0.0  # seconds of work that depend on it: the highest rank goes first
    runtime_s: float | None = None  # as stated in its document; an `Estimate` knows better
    deadline_at: float | None = None  # on this peer's monotonic clock
    avoid: frozenset[bytes] = frozenset()  # peers it failed at: used only if there is no other
    near: frozenset[bytes] = frozenset()  # peers that hold most of its inputs
    reads: tuple[tuple[bytes, int], ...] = ()  # its larger inputs: hash and bytes
    ranked_by: str = ""  # the expression by which pilots rank it; empty: the default one
    owner: str = ""  # waiting owners share the capacity
    gang: tuple[AttemptKey, ...] = ()  # all tasks of a gang, by rank, the first one included
    booked: tuple[bytes, int] | None = None  # the peer and lease that it was promised


@dataclass(slots=True)
class Placement:
    """Why a unit was placed where it was: kept with the attempt, shown by `why`."""

    strategy: str
    asked: list[tuple[bytes, int, str]] = field(default_factory=list)  # peer, granted, refusal
    matching: int | None = None  # peers that could meet its needs; None: not counted
    known: int = 0
    why: str = ""
    sought_s: float | None = None  # from the question to the answer

    def to_row(self) -> dict[str, object]:
        took = {} if self.sought_s is None else {"sought_s": round(self.sought_s, 6)}
        return {
            **took,
            "strategy": self.strategy,
            "known": self.known,
            "matching": self.matching,
            "asked": [
                {"peer": peer.hex(), "offered": granted, "refusal": refusal}
                for peer, granted, refusal in self.asked
            ],
            "why": self.why,
        }


class Placed(NamedTuple):
    unit: Unit
    peer: Contact
    lease: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class BookedSlot:
    """Capacity that a peer keeps for a task. Times are of the event loop's clock."""

    peer: Contact
    lease: int
    start_at: float
    end_at: float


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A workflow, or the rest of one, that wants a slot for each task."""

    workflow: str
    owner: str
    graph: Graph  # of the tasks that are not done; lengths on a peer of speed 1, as estimated
    needs: Mapping[str, Needs]
    slots: Mapping[str, Slot]  # tasks that run, or have a slot and keep it
    deadline_at: float  # on the event loop's clock; infinite: as early as possible
    spare_s: float = 0.0  # each task must end so much earlier than it has to
    avoid: Mapping[str, frozenset[bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    slots: Mapping[str, BookedSlot]
    ends_at: float
    asked: int = 0  # messages to peers


@dataclass(frozen=True, slots=True)
class NoPlan:
    why: str
    earliest: Plan | None = None  # the plan that ends first, whose slots are held


class Planner(Protocol):
    """Books a slot for every task of a workflow, or for none."""

    async def plan(self, request: PlanRequest) -> Plan | NoPlan: ...

    async def confirm(
        self, workflow: str, epoch: int, slots: Mapping[str, BookedSlot], due: Mapping[str, float]
    ) -> tuple[list[str], bool]:
        """Makes promises of them, or affirms them. Returns the tasks that have lost theirs, and
        whether all peers have answered."""

    async def settle(self) -> None:
        """Waits until what was just released can be found again."""

    def renew(self, workflow: str, slots: Iterable[BookedSlot]) -> None:
        """Keeps them for a while longer without a promise."""

    def release(self, slots: Iterable[BookedSlot]) -> None: ...


OnPlaced = Callable[[list[Placed]], None]
#: seconds a unit will take, as known now; more may be known than when the unit was added
Estimate = Callable[[Unit], float | None]


class Strategy(Protocol):
    name: str

    def add(self, units: Iterable[Unit]) -> None:
        """Place these units: each is passed to `on_placed` once, unless it is withdrawn."""

    def withdraw(self, keys: Iterable[AttemptKey]) -> None: ...

    def waiting_for(self, key: AttemptKey) -> str | None:
        """Why this unit is still waiting, in words; None if it is not waiting here."""

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        """A peer has announced that it has free capacity."""

    async def run(self) -> None: ...
