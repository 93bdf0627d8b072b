"""What a strategy is: it takes units, and gives back where each may run, as leases come.

A strategy can be wrong, late or stale: the lease was granted by the peer itself, so nothing is
over-booked; and a unit it has placed is its caller's again, so nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from ..wire.messages import AttemptKey, Capacity, Contact, File, Needs

#: smaller files travel with a task's own messages: where they are is no reason to run there
READ_BYTES_MIN, READS_MAX = 16 * 1024, 16


def is_worth_reading(files: Iterable[File]) -> bool:
    return any(file.size >= READ_BYTES_MIN for file in files)


def reads_of(files: Iterable[File]) -> tuple[tuple[bytes, int], ...]:
    """Of a task's inputs the larger ones, the largest first."""
    large = {file.hash: file.size for file in files if file.size >= READ_BYTES_MIN}
    return tuple(sorted(large.items(), key=lambda row: (-row[1], row[0]))[:READS_MAX])


@dataclass(frozen=True, slots=True)
class Unit:
    """What is placed at once."""

    key: AttemptKey
    needs: Needs
    rank: float = 0.0  # seconds of work that hang on it: higher goes first
    runtime_s: float | None = None  # as its document says; an `Estimate` knows better
    deadline_at: float | None = None  # on this peer's monotonic clock
    avoid: frozenset[bytes] = frozenset()  # peers it failed at: only if there is no other
    near: frozenset[bytes] = frozenset()  # peers that hold most of its inputs
    reads: tuple[tuple[bytes, int], ...] = ()  # its larger inputs: hash and bytes
    ranked_by: str = ""  # how pilots rank it; empty: as always
    owner: str = ""  # who waits shares with others who do
    gang: tuple[AttemptKey, ...] = ()  # what runs at several peers at once, by rank; its first too


@dataclass(slots=True)
class Placement:
    """Why a unit went where it went: kept with the attempt, shown by `why`."""

    strategy: str
    asked: list[tuple[bytes, int, str]] = field(default_factory=list)  # peer, granted, refusal
    matching: int | None = None  # peers that could meet its needs; None: nobody looked
    known: int = 0
    why: str = ""
    sought_s: float | None = None  # from the question to its answer

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
#: seconds a unit will take, as known by now: better than when it was added
Estimate = Callable[[Unit], float | None]


class Strategy(Protocol):
    name: str

    def add(self, units: Iterable[Unit]) -> None:
        """Place these; each comes out of `on_placed` once, unless it is withdrawn."""

    def withdraw(self, keys: Iterable[AttemptKey]) -> None: ...

    def waiting_for(self, key: AttemptKey) -> str | None:
        """In words, what keeps this unit; None if it is not here."""

    def vacancy(self, peer: bytes, free: Capacity) -> None:
        """A peer has said that it has room."""

    async def run(self) -> None: ...
