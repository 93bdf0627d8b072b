"""What a decision asks its home to do: frozen, in order, and all that a decision does beside
changing its run.

Entries first: whatever else follows may lead to the next decision, and the journal must have the
entries in the order in which the run was changed by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..strategies.base import Placed, Unit
from ..wire.entries import Journaled
from ..wire.messages import AttemptKey


class Effect(Protocol):
    """One of those below."""


@dataclass(frozen=True, slots=True)
class Append:
    """To the journal. `then` is looked at when a majority has the entry."""

    said: Journaled
    at: float
    soon: bool = False  # nobody waits for it: it may share the sync of what follows
    then: WhenCommitted | None = None


@dataclass(frozen=True, slots=True)
class Place:
    """Units that are ready: room is to be found for them."""

    units: tuple[Unit, ...]
    gangs: tuple[Unit, ...] = ()


@dataclass(frozen=True, slots=True)
class PlaceRest:
    """Tasks that are looked at when others had their turn: these are too many at once."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Start:
    """Units that have a lease each: their peers are told, when the entry before counts."""

    placed: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Room is not wanted any more."""

    keys: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class AbortAttempts:
    """Attempts at a peer that are of no use any more."""

    peer: bytes
    keys: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True)
class Retry:
    """A task waits for so long before it is placed again."""

    task: str
    wait_s: float


@dataclass(frozen=True, slots=True)
class BringInputs:
    """Inputs that are not there yet."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Results that are made, to where the document wants them."""


@dataclass(frozen=True, slots=True)
class KeepTwice:
    """Files of these tasks need a second holder."""

    tasks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Observe:
    """How long a task took, of one whose document says how long it takes."""

    said_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class Count:
    """For the metrics."""

    name: str
    by: int = 1


@dataclass(frozen=True, slots=True)
class Conclude:
    """The workflow is over, in this state."""

    state: str


# --------------------------------------------------------------------------- when an entry counts


class WhenCommitted(Protocol):
    """What a decision wants to look at again when its entry counts; one of those below."""


@dataclass(frozen=True, slots=True)
class ResultsCount:
    """What hangs on these results may begin."""

    said: Journaled
    won: tuple[tuple[str, int], ...]  # task, attempt
    rivals: frozenset[str]  # tasks of which other attempts may be under way


@dataclass(frozen=True, slots=True)
class InputsCount:
    said: Journaled


@dataclass(frozen=True, slots=True)
class CancelCounts:
    aborts: tuple[AbortAttempts, ...]
