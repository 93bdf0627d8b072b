"""The interface of a strategy: it takes units, and returns a lease at some peer for each of them.

A strategy may be wrong, late or stale. Nothing is overbooked, because the peer itself grants the
lease; and nothing is lost, because a unit that was placed belongs to its caller again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..wire.messages import AttemptKey, Capacity, Contact, File, Needs

#: smaller files travel inside a task's own messages, so their location does not matter
READ_BYTES_MIN, READS_MAX = 16 * 1024, 16


def is_worth_reading(files: Iterable[File]) -> bool:
    return any(file.size >= READ_BYTES_MIN for file in files)


def reads_of(files: Iterable[File]) -> tuple[tuple[bytes, int], ...]:
    """The larger inputs of a task, the largest first."""
    large = {file.hash: file.size for file in files if file.size >= READ_BYTES_MIN}
    return tuple(sorted(large.items(), key=lambda row: (-row[1], row[0]))[:READS_MAX])


@dataclass(frozen=True, slots=True)
class Unit:
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


@dataclass(frozen=True, slots=True)
class Placed:
    unit: Unit
    peer: Contact
    lease: int
    placement: Placement


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
